"""`curvcert demo`: the table, the report, and what to try next."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from curvcert.cli import app
from curvcert.cli.demo import EPSILONS


@pytest.mark.slow
def test_certifies_prints_the_table_and_names_the_report_last(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    arguments = ["demo", "--out", str(out), "--samples", "12"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    headings = ("by Lipschitz", "by curvature", "by shells", "certified", "not broken by PGD")
    for text in (*headings, "What to try next"):
        assert text in result.output
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert len(rows) == 1 + len(EPSILONS)
    assert result.output.splitlines()[-1].endswith(str((out / "report.html").resolve()))
    assert "The embedded MNIST network" in (out / "report.html").read_text(encoding="utf-8")


def test_too_many_samples_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--samples", "501"])
    assert result.exit_code == 2
