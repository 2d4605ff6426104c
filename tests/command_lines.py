"""Lines for a shell, read as the programs would that they start: an option or a command that is gone is found."""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import typer
from torch.distributed.run import get_args_parser as torchrun_parser

from benchmarks import command_line, harness
from benchmarks.reproduce.command import chosen_experiment
from curvcert import cli

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Line:
    """A line for a shell, and the lines that the page shows below it."""

    text: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """What a shell makes of the line, as far as a pipe; `python -m curvcert` is `curvcert`."""
        words = shlex.split(self.text, comments=True)
        words = words[: words.index("|")] if "|" in words else words
        return ["curvcert", *words[3:]] if words[1:3] == ["-m", "curvcert"] else words

    @property
    def kind(self) -> str:
        """The program that it starts."""
        words = self.words
        if words[0] in ("python", "python3"):
            return "python -m benchmarks" if words[2].split(".")[0] == "benchmarks" else words[2]
        return words[0]


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return the subcommands of curvcert."""
    return {name: command.loaded for name, command in typer.main.get_command(cli.app).commands.items()}


def parse(line: Line) -> None:
    """Read the options of a line as the program would that it starts; fail if it would refuse them."""
    PARSERS[line.kind](line.words)


def parse_curvcert(words: list[str]) -> None:
    commands()[words[1]].make_context(words[1], words[2:])


def parse_loop(words: list[str]) -> None:
    parse_curvcert(words[words.index("curvcert") : words.index("&")])


def parse_torchrun(words: list[str]) -> None:
    told = torchrun_parser().parse_args(words[1:])
    assert told.module and told.training_script == "curvcert"
    parse_curvcert(["curvcert", *told.training_script_args])


def parse_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        name, sign, _ = word.partition("=")
        assert re.search(rf"\$[({{]{name}[)}}]" if sign else rf"^{name}:", makefile, re.MULTILINE), word


def parse_pip(words: list[str]) -> None:
    command, *given = words[words.index("pip") + 1 :]
    assert command == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in given:
        if wanted := re.fullmatch(r"curvcert\[([\w,]+)\]", word):
            assert set(wanted[1].split(",")) <= extras.keys(), word
        else:
            assert word == "-c" or (ROOT / word).exists(), word


class Parsed(Exception):
    """Raised instead of going on: the options of a benchmark are right."""


def parse_benchmarks(words: list[str]) -> None:
    """Read the options of an experiment or of a benchmark; NAME stands for any experiment."""
    if words[2] == "benchmarks":
        parse_experiment(words[3:])
    else:
        parse_benchmark(words)


def parse_experiment(words: list[str]) -> None:
    if words == ["--help"] or not words:
        return
    command = typer.main.get_command(command_line.app).commands[words[0]]
    given = command.make_context(words[0], ["tanh-anchor" if word == "NAME" else word for word in words[1:]]).params
    if words[0] == "reproduce":
        chosen_experiment(given["name"], tuple(given["rows"] or ()), given["quick"])


def parse_benchmark(words: list[str]) -> None:
    module: ModuleType = importlib.import_module(words[2])
    if not hasattr(module, "argparse"):
        assert not words[3:] and callable(module.main), words
        return
    read = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: list[str]) -> argparse.Namespace:
        read(self, *given)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", words[2:])
        patch.setattr(harness, "RESULTS", Path("no-such-folder"))
        with pytest.raises(Parsed):
            module.main()


# typer may hold a click of its own: this is the class that its errors of usage derive from.
UsageError = typer.BadParameter.__base__
PARSERS = {
    "curvcert": parse_curvcert,
    "for": parse_loop,
    "make": parse_make,
    "pip": parse_pip,
    "python -m benchmarks": parse_benchmarks,
    "torchrun": parse_torchrun,
}
