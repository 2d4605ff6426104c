"""The pages do what they say: Python blocks and `curvcert` lines run as they are written, other lines are parsed.

The blocks and the lines of a page run in the page's order, in one process and in one folder.  Capitals such as MODEL
and DATA stand for files that are there.  What is not run stands in `NOT_RUN` or `KINDS_NOT_RUN`, with the reason; its
options are parsed, so that a wrong one is found even there.
"""

import contextlib
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from curvcert import cli
from curvcert.bounds.lipschitz import lipschitz
from curvcert.cli.options import BUDGET_VARIABLE
from curvcert.data import load_digits
from curvcert.errors import InvalidInput
from curvcert.falsifier import falsify_bound, save_counterexample
from curvcert.nn import architecture
from curvcert.training import load_recipe, save_model
from tests.command_lines import Line, UsageError, commands, parse
from tests.falsifier.tight import neuron, shortened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")))

DOWNLOAD = "downloads a data set"
NOT_RUN = {
    "curvcert certify net.onnx cifar10 --box 0 1 --eps 36/255,72/255 --out out": DOWNLOAD,
    "curvcert certify net.onnx cifar10 --box 0 1 --eps 36/255,72/255 --out out --resume": DOWNLOAD,
    "curvcert train --recipe mnist-6f --set certificate=line --data-folder DIR --out runs/line": DOWNLOAD,
    "for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 curvcert certify net.onnx mnist --out out & done; wait": DOWNLOAD,
}
"""Lines that start curvcert and are not run."""
KINDS_NOT_RUN = {
    "make": "sets up an environment, or runs all tests",
    "pip": "changes the environment",
    "python -m benchmarks": "measures for minutes or hours, on a GPU too, and replaces a record",
    "torchrun": "starts processes, many of them on GPUs: tests/training/test_distributed.py does",
}
"""Kinds of lines that are not run, whatever their options."""
REFUTES = "curvcert audit --replay counterexamples/lipschitz-0.safetensors"
"""The line that ends with exit status 1, as its page says: the file refutes its claim."""

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4,}(\S(?:.*\\\n)*.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
STARTS = ("curvcert", "for", "make", "pip", "python", "python3", "torchrun")


@dataclass(frozen=True)
class Python:
    """A Python block, and what the page says that it prints."""

    code: str
    printed: str | None


def parts(text: str) -> list[Python | Line]:
    """Return what a page asks a reader to run, in order."""
    found: list[tuple[int, Python | Line]] = []
    blocks = list(FENCE.finditer(text))
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        _, language, content = block.groups()
        if language == "python":
            follows = after is not None and after[2] == "text" and not text[block.end() : after.start()].strip()
            found.append((block.start(), Python(content, after[3] if follows else None)))
        elif language == "console" and "$ " in content:
            shown = re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]
            found += [(block.start(), Line(first, tuple(rest))) for first, *rest in map(str.splitlines, shown)]
        else:
            assert language in ("", "console", "text"), f"a block of an unknown language: {language}"
            found += [(block.start(), Line(line)) for line in content.splitlines() if language != "text"]
    prose = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    for code in (*INDENTED.finditer(prose), *SPAN.finditer(prose)):
        line = re.sub(r"\s*\\?\n\s*", " ", code[1])
        if line.split()[0] in STARTS:
            found.append((code.start(), Line(line)))
    return [part for _, part in sorted(found, key=lambda each: each[0])]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a page is followed: with the files that its capitals stand for, and small budgets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(BUDGET_VARIABLE, "0.0001")
    monkeypatch.setenv("COLUMNS", "120")
    # A page that makes itself a folder goes on in it on the command line.
    mkdtemp = tempfile.mkdtemp

    def made(*given: Any, **named: Any) -> str:
        return mkdtemp(*given, **named) if given or named else str(tmp_path)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def provide(words: list[str]) -> list[str]:
    """Return the words with files in the place of capitals, and make those files."""
    name = {"train": "digits"}.get(words[0], "NAME")
    certificate = "certified/certificate.safetensors"
    stand_for = {"MODEL": "model.safetensors", "DATA": "data.npz", "DIR": "certified", "NAME": name}
    stand_for |= dict.fromkeys(("CERTIFICATE", "FILE", "A", "B"), certificate) | {"SPEC": "spec.vnnlib"}
    words = [stand_for.get(word, word) for word in words]
    for word in set(words) & MAKERS.keys():
        if not Path(word).exists():
            MAKERS[word](Path(word))
    return words


def make_model(path: Path) -> None:
    recipe = load_recipe("digits")
    save_model(path, architecture(recipe.architecture, recipe.activation), recipe)


def make_data(path: Path) -> None:
    digits = load_digits("test")
    np.savez(path, x=digits.as_float64()[:4].numpy(), y=digits.labels[:4].numpy())


def make_spec(path: Path) -> None:
    lines = [f"(declare-const X_{k} Real)(assert (<= X_{k} 0.5))(assert (>= X_{k} 0.5))" for k in range(64)]
    lines += [f"(declare-const Y_{k} Real)" for k in range(10)]
    path.write_text("\n".join([*lines, "(assert (>= Y_0 1e6))"]))


def make_recipe(path: Path) -> None:
    path.write_text('data = "digits"\narchitecture = "digits"\nloss = "standard"\nepochs = 9\nepsilons = [0.1]\n')


def make_counterexample(path: Path) -> None:
    path.parent.mkdir()
    network = neuron()
    (example,) = falsify_bound(shortened(lipschitz(network)), network, "lipschitz").counterexamples
    save_counterexample(example, path)


MAKERS = {
    "model.safetensors": make_model,
    "data.npz": make_data,
    "spec.vnnlib": make_spec,
    "mine.toml": make_recipe,
    "counterexamples/lipschitz-0.safetensors": make_counterexample,
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, folder: Path) -> None:
    names: dict[str, object] = {"__name__": page}
    for part in parts((ROOT / page).read_text(encoding="utf-8")):
        where = f"{page}:\n{part}"
        if isinstance(part, Python):
            if '"results"' in part.code and not Path("results").exists():
                Path("results").symlink_to(ROOT / "results")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(part.code, page, "exec"), names)
            assert part.printed is None or printed.getvalue() == part.printed, where
        elif part.kind in KINDS_NOT_RUN or part.text in NOT_RUN:
            parse(part)
        else:
            assert part.kind == "curvcert", f"neither run nor in NOT_RUN: {where}"
            run(part, where)


def run(line: Line, where: str) -> None:
    """Run a line in this process; what the page shows must be what it prints, line by line and in order."""
    words = line.words[1:]
    if len(words) <= 1:  # a command is named, nothing more
        assert not words or words[0] in {*commands(), "--install-completion"}, where
        return
    printed, told = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
        torch.random.fork_rng(devices=[]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(provide(words))
    status = ended.value.code or 0
    assert status == (line.text == REFUTES), f"{where}\nended with {status}:\n{printed.getvalue()}{told.getvalue()}"
    lines = iter(printed.getvalue().splitlines())
    for shown in line.shown:
        assert shown.strip() == "..." or shown.rstrip() in map(str.rstrip, lines), f"{where}\ndoes not print {shown!r}"


def test_what_is_not_run_is_on_a_page() -> None:
    lines = [part for page in PAGES for part in parts((ROOT / page).read_text()) if isinstance(part, Line)]
    assert {line.text for line in lines} >= NOT_RUN.keys()
    assert {line.kind for line in lines} >= KINDS_NOT_RUN.keys()
    assert REFUTES in {line.text for line in lines}


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_examples_of_the_help_are_parsed(name: str) -> None:
    lines = re.findall(r"^ +((?:curvcert|torchrun) \S.*)$", commands()[name].help, re.MULTILINE)
    assert lines
    for line in lines:
        parse(Line(line))


@pytest.mark.parametrize(
    "text",
    [
        "curvcert audit --minuets 1",
        "for rank in 0 1; do RANK=$rank curvcert certify net.onnx mnist --uot out & done; wait",
        "make figure",
        "make test PYHTON=python3.13",
        "pip install 'curvcert[onxn]'",
        "python -m benchmarks.audit --network 20 --seeds 1",
        "python -m benchmarks.concept_pictures --quick",
        "python -m benchmarks.concepts",
        "python -m benchmarks reproduce table2",
        "python -m benchmarks reproduce table1 --rows 7F",
        "python -m benchmarks reproduce tanh-anchor --dveice cuda",
        "python -m benchmarks reprodce tanh-anchor",
        "torchrun --nprocs 4 -m curvcert train --recipe digits --out runs/four",
        "torchrun --nproc-per-node 4 -m curvcert train --recipe digits --uot runs/four",
    ],
)
def test_a_wrong_option_is_found(text: str) -> None:
    with pytest.raises((AssertionError, ImportError, InvalidInput, KeyError, SystemExit, UsageError)):
        parse(Line(text))


def test_a_page_is_read_in_order() -> None:
    page = "`make demo`\n\n    curvcert audit   # all\n\n```python\nprint(1)\n```\n```text\n1\n```\n" + (
        "```console\n$ curvcert bound net\nL 1\n```\n\nand `python -m\n  benchmarks.audit`, not `curvcert.audit`\n"
    )
    assert parts(page) == [
        Line("make demo"),
        Line("curvcert audit   # all"),
        Python("print(1)\n", "1\n"),
        Line("curvcert bound net", ("L 1",)),
        Line("python -m benchmarks.audit"),
    ]
