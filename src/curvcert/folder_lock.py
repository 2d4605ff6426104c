"""One output folder, one run: a lock that the system lets go of when its process ends, however it ends."""

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from curvcert.errors import CannotWrite
from curvcert.whole_files import make_folder, refusals

LOCK = ".curvcert-lock"
"""The file that is locked.  It stays in the folder, empty when nobody holds it: to remove it would let two runs in."""

_LONGEST = 300


@contextmanager
def locked(folder: Path | str, run: str) -> Iterator[None]:
    """Keep a folder, which is made if need be, for this process; `run` is what another one is told is going on.

    Where a file system has no locks, a warning says so, and the folder is used without one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out, locked(out, "the first run"):
    ...     try:
    ...         locked(out, "the second run").__enter__()
    ...     except CannotWrite as error:
    ...         print("(the first run)" in str(error))
    True

    Raises:
        CannotWrite: if another run holds the folder, or it may not be written to.
    """
    path = make_folder(folder) / LOCK
    with refusals(path.parent):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        _take(file, path.parent)
        with refusals(path.parent):
            file.truncate(0)
            file.write(f"process {os.getpid()} ({run[:_LONGEST]}) since {datetime.now(UTC):%H:%M} UTC".encode())
        try:
            yield
        finally:
            file.truncate(0)


def _take(file: FileIO, folder: Path) -> None:
    """Lock an open file, or raise and name who has."""
    try:
        _lock(file.fileno())
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK):
            holder = file.read(4 * _LONGEST).decode(errors="replace") or "another process"
            raise CannotWrite(
                f"{folder} is being written into by {holder}. Wait for its end, or choose another folder."
            ) from None
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): let no other run write into it.", stacklevel=4)


if sys.platform == "win32":

    def _lock(descriptor: int) -> None:
        raise OSError(errno.ENOSYS, "this system has no such locks")
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
