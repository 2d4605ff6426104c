"""`python -m benchmarks`: its help, a run, a picture drawn again, and one line for whatever a person gets wrong."""

import importlib
import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.command_line import app, benchmarks
from benchmarks.reproduce import EXPERIMENTS
from curvcert.errors import InvalidInput


def run(*words: object) -> Result:
    return CliRunner().invoke(
        app, ["reproduce", *(str(word) for word in words)], env={"COLUMNS": "200", "TERM": "dumb"}
    )


def test_the_help_lists_everything_there_is_to_run() -> None:
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert all(f"  python -m benchmarks reproduce {name}\n" in told for name in EXPERIMENTS)
    assert "python -m benchmarks.audit\n        A large audit: " in told
    assert "benchmarks.harness" not in told
    for command in benchmarks():
        assert callable(importlib.import_module(command.split()[-1]).main)


def test_every_help_teaches_by_example() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        assert f"python -m benchmarks {name}" in command.help


def test_help() -> None:
    text = run("--help").output
    for word in ("--quick", "--rows", "--epochs", "--results", "--redraw", "--device", "--data-folder", "table1"):
        assert word in text


def test_a_run_and_its_picture_again(tmp_path: Path) -> None:
    done = run("tanh-anchor", "--quick", "--out", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["record"] == str(tmp_path / "tanh-anchor.json")
    (tmp_path / "tanh-anchor.png").unlink()
    assert run("tanh-anchor", "--out", tmp_path, "--redraw").exit_code == 0
    assert (tmp_path / "tanh-anchor.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table2",), "No experiment is called 'table2'. There are table1"),
        (("tanh-anchor", "--rows", "6F"), "--rows chooses rows of table1"),
        (("table1", "--quick", "--rows", "6F"), "names no row"),
        (("tanh-anchor", "--redraw"), "has no record of tanh-anchor"),
        (("tanh-anchor", "--device", "nonsense"), "Cannot compute on 'nonsense'"),
        (("tanh-anchor", "--quick", "--results", "results"), "not kept among the results"),
    ],
)
def test_what_a_person_gets_wrong(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = run(*words, "--out", tmp_path)
    assert isinstance(done.exception, InvalidInput)
    assert message in str(done.exception)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run("tanh-anchor", "--quick", "--out", tmp_path / "file" / "out")
    assert "Choose another name" in str(done.exception)
