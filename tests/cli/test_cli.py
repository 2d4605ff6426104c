import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import curvcert
from curvcert import cli
from curvcert.certificates import certify
from curvcert.cli.subcommands import SUBCOMMANDS
from curvcert.training import loop

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"curvcert {curvcert.__version__}\n"


def test_help_lists_the_subcommands() -> None:
    output = runner.invoke(cli.app, ["--help"]).output
    for name in ("demo", "bound", "certify", "check", "verify", "train"):
        assert name in output


def test_every_help_teaches_by_example() -> None:
    for name in ("bound", "certify", "check", "verify", "train"):
        result = runner.invoke(cli.app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0
        assert result.output.count(f"curvcert {name} ") >= 3
        for option in ("--json", "--quiet"):
            assert option in result.output


def test_an_unknown_subcommand_is_refused() -> None:
    assert runner.invoke(cli.app, ["nonsense"]).exit_code == 2


def test_training_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))  # the quickest
    changes = ("--set", "loss=standard", "--set", "epochs=1", "--set", "batch_size=256", "--set", "epsilons=1/4")
    words = ["train", "--recipe", "digits", "--samples", "2", *changes, "--json", "--quiet", "--out", str(tmp_path)]
    result = runner.invoke(cli.app, words)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["model"] == str(tmp_path / "model.safetensors")
    assert [row["eps"] for row in found["at"]] == [0.25]


@pytest.mark.slow
def test_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "curvcert", "--version"], capture_output=True, text=True)
    assert result.stdout == f"curvcert {curvcert.__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_fits_80_columns_and_groups_many_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(character.isascii() or character in "╭╮╰╯│─…" for character in shown)  # no word turned into a picture
    groups = ("What is proven", "The model", "The data", "The search", "How it runs", "What comes out")
    assert name != "certify" or all(group in shown for group in groups)


def test_the_tab_key_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("_CURVCERT_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["curvcert"])
    for words, found in (("curvcert ce", "certify"), ("curvcert certify --norm", "--normalise")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            cli.app(prog_name="curvcert")
        assert capsys.readouterr().out.split() == [found]
