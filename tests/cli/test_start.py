"""The command line answers at once: torch is loaded with what needs it, and not before."""

import subprocess
import sys
import time
import typing

import pytest
import typer

import curvcert
from curvcert import cli
from curvcert.cli.subcommands import SUBCOMMANDS
from tests.cli.running import environment

HEAVY = {"torch", "numpy", "scipy", "matplotlib", "onnx", "jinja2"}


def loaded_by(code: str) -> set[str]:
    """Return which of the large packages some code loads."""
    code = f"{code}\nimport sys; print(*{HEAVY}.intersection(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


RUN = "from contextlib import suppress\nfrom curvcert import cli\nwith suppress(SystemExit):\n    cli.main({})"


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["certfy"], ["--bogus"]])
def test_what_names_no_command_loads_nothing(words: list[str]) -> None:
    assert loaded_by(RUN.format(words)) == set()


@pytest.mark.slow
def test_the_package_loads_what_is_asked_for() -> None:
    assert loaded_by("import curvcert; curvcert.__version__; dir(curvcert)") == set()
    assert "torch" in loaded_by("import curvcert; curvcert.certify")
    assert "torch" in loaded_by(RUN.format(["bound", "--help"]))


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_is_told_by_the_first_line_of_its_help(name: str) -> None:
    found = typer.main.get_command(cli.app).commands[name]
    assert found.short_help == SUBCOMMANDS[name]
    assert found.loaded.help.split("\n\n")[0].replace("\n", " ").startswith(SUBCOMMANDS[name])


def test_every_name_of_the_package_is_there_and_shown() -> None:
    assert dir(curvcert) == sorted(curvcert.__all__)
    for name in curvcert.__all__:
        assert getattr(curvcert, name) is not None
    assert curvcert.activations.ACTIVATIONS
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = curvcert.nonsense
    assert not hasattr(curvcert, "__wrapped__")


def test_a_part_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(curvcert), "certify", raising=False)
    monkeypatch.setitem(sys.modules, "curvcert.certificates", None)
    with pytest.raises(ImportError, match=r"curvcert\.certificates"):
        _ = curvcert.certify


def test_type_checkers_know_the_same_names() -> None:
    """What stands under TYPE_CHECKING is what is loaded at run time."""
    with open(curvcert.__file__, encoding="utf-8") as file:
        source = file.read().replace("if TYPE_CHECKING:", "if True:", 1).replace("if not TYPE_CHECKING:", "if False:")
    names: dict[str, typing.Any] = {"__name__": "curvcert"}
    exec(compile(source, curvcert.__file__, "exec"), names)
    for name in curvcert.__all__:
        assert names[name] is getattr(curvcert, name), name


@pytest.mark.slow
def test_help_takes_hardly_more_than_the_library_that_writes_it() -> None:
    def least(*words: str) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], env=environment(), capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    assert least("-m", "curvcert", "--help") < 3 * least("-c", "import typer, rich")
    assert least("-m", "curvcert", "--version") < 3 * least("-c", "import typer, rich")
    assert least("-c", "import curvcert") < 1.5 * least("-c", "import torch")
