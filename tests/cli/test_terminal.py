"""What reaches a terminal, and what happens when nobody reads."""

import subprocess
from pathlib import Path

import pytest
from rich.table import Table

from curvcert.cli.output import Output
from curvcert.cli.sample_table import as_text
from curvcert.cli.terminal import visible
from tests.cli.running import Runner, command, environment

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x00\udc80[/bold]\r"


def test_no_control_character_is_shown_raw(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    output = Output()
    output.show(HOSTILE, table)
    output.notice(HOSTILE)
    Output(quiet=True).answer(HOSTILE, {})
    Output(json=True).answer("", {"name": HOSTILE[:-8]})
    printed = "".join(capsys.readouterr())
    assert "[/bold]" in printed and r"\x1b" in printed
    assert all(c.isprintable() or c == "\n" for c in printed)


def test_what_shows_stays_as_it_is() -> None:
    text = "λ ≤ 1.5 │ résumé 数\n"
    assert visible(text) == text


def test_an_error_about_a_file_with_a_strange_name(run: Runner) -> None:
    status, _, error = run("bound", "a\x1b[2Jb.onnx")
    assert (status, error) == (2, r"InvalidInput: a\x1b[2Jb.onnx: no such file. Give the path of an ONNX file." "\n")


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+cmd", "'+cmd"),
        ("-cmd|' /C calc'!A0", "'-cmd|' /C calc'!A0"),
        ("\t=1", "'\t=1"),
        ("-1.5e3", "-1.5e3"),
        ("+7", "+7"),
        ("cat", "cat"),
        ("", ""),
    ],
)
def test_cells_that_a_spreadsheet_would_run(cell: str, written: str) -> None:
    assert as_text(cell) == written


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--help",), ("bound", "curvcert.data:load_demo_network", "--input-shape", "1,8,8")])
def test_a_closed_pipe_ends_quietly(tmp_path: Path, words: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        command(*words), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_takes_no_more_is_the_surroundings_fault(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        words = command("bound", "curvcert.data:load_demo_network", "--input-shape", "1,8,8")
        done = subprocess.run(words, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
    assert "No space left on device" in done.stderr
