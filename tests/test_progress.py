"""The sign of life: on a terminal, or where it is asked for, and gone afterwards."""

import pytest

from curvcert.progress import sign_of_life


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


def test_an_error_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), sign_of_life("dividing", True):
        _ = 1 / 0
