import subprocess
import sys

import pytest
from typer.testing import CliRunner

import curvcert
from curvcert import cli
from curvcert.errors import InvalidInput

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"curvcert {curvcert.__version__}\n"


def test_help_lists_the_subcommands() -> None:
    assert "demo" in runner.invoke(cli.app, ["--help"]).output


def test_an_unknown_subcommand_is_refused() -> None:
    assert runner.invoke(cli.app, ["nonsense"]).exit_code == 2


def test_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "curvcert", "--version"], capture_output=True, text=True)
    assert result.stdout == f"curvcert {curvcert.__version__}\n"


def test_our_own_errors_end_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail() -> None:
        raise InvalidInput("p must be [at least] 1.")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "InvalidInput: p must be [at least] 1.\n"
