"""One output folder, one run, by processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from curvcert import folder_lock
from curvcert.errors import CannotWrite
from curvcert.folder_lock import LOCK, locked
from tests.cli.running import environment, run_process

HOLD = """
import sys
from curvcert.folder_lock import locked
with locked(sys.argv[1], "curvcert certify"):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_by_another(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that holds the folder until its input ends."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_the_second_process_is_told_of_the_first(tmp_path: Path) -> None:
    holder = held_by_another(tmp_path)
    told = rf"is being written into by process {holder.pid} \(curvcert certify\) since .* UTC\. Wait for its end"
    with pytest.raises(CannotWrite, match=told), locked(tmp_path, "another"):
        pass
    holder.communicate("")
    with locked(tmp_path, "another"):
        pass
    assert (tmp_path / LOCK).read_bytes() == b""


def test_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    holder = held_by_another(tmp_path)
    holder.kill()
    holder.communicate()
    with locked(tmp_path, "another"):
        pass


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(CannotWrite), locked(tmp_path, "a run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(folder_lock, "_lock", none)
    with pytest.warns(UserWarning, match="cannot be locked"), locked(tmp_path, "a run"):
        pass


@pytest.mark.slow
def test_a_second_certification_in_a_folder_ends_with_status_5(tmp_path: Path) -> None:
    holder = held_by_another(tmp_path / "out")
    words = ("certify", "curvcert.data:load_demo_network", "digits", "--samples", 1, "--out", "out", "--quiet")
    ran = run_process(*words, folder=tmp_path)
    holder.communicate("")
    assert ran.status == 5
    assert ran.err.startswith(f"CannotWrite: out is being written into by process {holder.pid} (curvcert certify)")
    assert ran.err.count("\n") == 1
