"""`curvcert train`: its help, a run, and one line for whatever a person gets wrong."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from curvcert import cli
from curvcert.certificates import certify
from curvcert.training import load_model, loop

SMALL = (
    "--recipe",
    "digits",
    "--samples",
    "2",
    "--set",
    "loss=standard",
    "--set",
    "epochs=1",
    "--set",
    "batch_size=256",
)


def failure(monkeypatch: pytest.MonkeyPatch, capsys, *words: str) -> str:
    """Run the command line as a person does, and return the one line that it ends with."""
    monkeypatch.setattr(sys, "argv", ["curvcert", "train", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    return error


def test_help() -> None:
    result = CliRunner().invoke(cli.app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for text in ("--recipe", "--out", "--set", "--resume", "--device", "--tensorboard", "digits", "model.safetensors"):
        assert text in result.output
    assert "train" in CliRunner().invoke(cli.app, ["--help"]).output


def test_a_run_ends_with_a_table_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))  # the quickest
    arguments = ["train", *SMALL, "--out", str(tmp_path / "run"), "--set", "epsilons=0.05,1/4"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("Certified accuracy on 2 test", "0.0500", "0.2500", "certified", "model.safetensors"):
        assert text in result.output
    load_model(tmp_path / "run" / "model.safetensors")
    assert list(json.loads((tmp_path / "run" / "result.json").read_text())["certified"]) == ["0.05", "0.25"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "epoch=3"), "InvalidInput: A recipe has no field 'epoch'. Its fields are data, architecture"),
        (("--set", "epochs=many"), "InvalidInput: epochs needs a whole number, got 'many'."),
        (("--set", "epochs"), "InvalidInput: --set expects FIELD=VALUE, such as --set epochs=10, got 'epochs'."),
        (("--set", "=3"), "InvalidInput: --set expects FIELD=VALUE"),
        (("--set", "loss=hinge"), "InvalidInput: loss is one of standard, curvature"),
        (("--set", "architecture=7F"), "InvalidInput: Unknown architecture '7F'."),
        (("--set", "batch_size=100000"), "InvalidInput: The batch size is from 1 to the number of images"),
        (("--device", "nonsense"), "InvalidInput: Cannot compute on 'nonsense'"),
        (("--recipe", "digit"), "InvalidInput: No recipe is called 'digit'. There are"),
        (("--recipe", "none.toml"), "InvalidInput: No recipe file none.toml."),
        (("--resume-from", "none"), "InvalidInput: The checkpoint none cannot be used"),
    ],
)
def test_what_a_person_gets_wrong(monkeypatch, capsys, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    assert failure(monkeypatch, capsys, *SMALL, "--out", str(tmp_path / "run"), *words).startswith(message)


def test_a_folder_that_cannot_be_written(monkeypatch, capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        error = failure(monkeypatch, capsys, *SMALL, "--out", str(folder))
        assert error.startswith(f"InvalidInput: Cannot write into {folder}")


def test_a_folder_that_holds_a_run(monkeypatch, capsys, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000000001").mkdir(parents=True)
    assert "already holds a run" in failure(monkeypatch, capsys, *SMALL, "--out", str(tmp_path))


def test_needed_options(tmp_path: Path) -> None:
    for words in (["--recipe", "digits"], ["--out", str(tmp_path)]):
        result = CliRunner().invoke(cli.app, ["train", *words])
        assert result.exit_code == 2
