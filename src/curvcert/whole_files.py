"""The one place that writes files: each whole or not at all, under its own name and through no link.

A file is written under a name that nobody can guess, flushed to the disk, and only then moved to its place in one
step.  A reader meets the old content or the new, a process that dies leaves the old one, and a link that stands in
the file's place is replaced, never followed.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from curvcert.errors import CannotWrite, InvalidInput


def write_whole(path: Path | str, content: bytes | str, flush: bool = True) -> Path:
    """Write a file, text as UTF-8, making its folder if need be; return its path.

    `flush=False` leaves to the system when the content reaches the disk: for what need not outlive a power cut.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "new" / "file.txt", "all of it").read_text()
    'all of it'

    Raises:
        CannotWrite: if the disk is full, or the folder may not be written to.
        InvalidInput: if something else is in the way.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    make_folder(path.parent)
    # Not by mkstemp, whose files nobody else may read: such a file is there to be handed on.
    partial = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}")
    with refusals(path):
        try:
            with partial.open("xb") as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if flush:
            flush_folder(path.parent)
    return path


def make_folder(path: Path | str) -> Path:
    """Make a folder and those above it, as far as they are missing; return its path.

    Raises:
        CannotWrite, InvalidInput: as `write_whole`.
    """
    path = Path(path)
    with refusals(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def require_no_link(path: Path) -> None:
    """Raise if a folder of ours is a link: what is written into it would land elsewhere."""
    if path.is_symlink():
        raise InvalidInput(f"Cannot write into {path}: it is a link to another folder. Remove the link.")


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Name what kept a path from being written."""
    try:
        yield
    except CannotWrite:
        raise
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidInput(f"Cannot write into {path}: {error.strerror}. Choose another name.") from error
    except OSError as error:
        reason = (error.strerror or str(error)).rstrip(".")
        linked = error.errno == errno.ELOOP
        remedy = "A link stands where a file of ours goes: remove it" if linked else "Free some space"
        raise CannotWrite(f"Cannot write into {path}: {reason}. {remedy}, or choose another folder.") from error


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name != "posix":  # other systems flush a name with the file itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_text(path: Path, text: str) -> None:
    """Add text to the end of a file of ours, which may not be a link."""
    with refusals(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)
