"""`curvcert reproduce`: its help, a run, a picture drawn again, and one line for whatever a person gets wrong."""

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from curvcert.cli.reproduce import reproduce_command
from curvcert.errors import InvalidInput
from curvcert.experiments import EXPERIMENTS

app = typer.Typer()
app.command("reproduce")(reproduce_command)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})


def test_help_and_list() -> None:
    text = run("--help").output
    for word in ("--quick", "--rows", "--epochs", "--results", "--redraw", "--device", "--data-folder", "table1"):
        assert word in text
    listed = run("list").output
    assert all(name in listed for name in EXPERIMENTS)


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
    assert "Choose another folder" in str(done.exception)
