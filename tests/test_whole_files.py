"""Files are written whole or not at all, and through no link."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from curvcert.errors import CannotWrite, InvalidInput
from curvcert.whole_files import append_text, make_folder, require_no_link, write_whole
from tests.cli.running import environment

TOO_LARGE = """
import resource, signal, sys
from curvcert.whole_files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(sys.argv[1], b"new" * 1000)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_disk_that_takes_no_more_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "report.html", "old")
    words = [sys.executable, "-c", TOO_LARGE, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout.startswith(f"CannotWrite: Cannot write into {path}: File too large. Free some space")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_dying_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = write_whole(tmp_path / "samples.csv", "old")

    def dying(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), dying)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["samples.csv"])


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    link = tmp_path / "out.csv"
    link.symlink_to(target)
    write_whole(link, "theirs")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("mine", "theirs", False)


def test_nothing_is_added_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(CannotWrite, match="symbolic links"):
        append_text(tmp_path / "metrics.jsonl", "theirs")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_of_ours_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="a link to another folder"):
        require_no_link(tmp_path / "parts")


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"Cannot write into .*file/out: Not a directory"):
        write_whole(tmp_path / "file" / "out" / "a.csv", "")
    with pytest.raises(InvalidInput, match=r"Cannot write into .*: Is a directory"):
        write_whole(make_folder(tmp_path / "folder"), "")

    def locked(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(CannotWrite, match="Permission denied"):
        write_whole(tmp_path / "a.csv", "")
