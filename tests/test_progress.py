"""The sign of life: on a terminal, or where it is asked for, and gone afterwards."""

import pytest
from rich.console import Console

from curvcert.progress import is_watched, sign_of_life


@pytest.mark.parametrize(
    ("terminal", "shown", "seen"), [(True, None, True), (True, False, False), (False, None, False)]
)
def test_where_it_shows(
    terminal: bool, shown: bool | None, seen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with sign_of_life("bounding", shown):
        pass
    told = capsys.readouterr()
    assert (told.out, "bounding" in told.err) == ("", seen)


@pytest.mark.parametrize(("widgets", "seen"), [(True, True), (False, False)])
def test_a_notebook_shows_it_where_it_can(widgets: bool, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvcert.progress.find_spec", lambda name: object() if widgets else None)
    assert is_watched(Console(force_jupyter=True, force_terminal=False)) == seen


def test_an_error_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), sign_of_life("dividing", True):
        _ = 1 / 0
