"""Signs of life of processes that share a folder and nothing else: files whose content changes while they live."""

import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import final

from curvcert.whole_files import write_whole

BEAT = 1.0
"""Seconds between two signs of life."""

_ENDED = "ended"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.alive"


def forget(folder: Path) -> None:
    """Remove all signs of life, such as those of an earlier run."""
    for path in folder.glob("rank-*.alive"):
        path.unlink(missing_ok=True)


@final
class Heart:
    """While it is entered, this process shows that it lives; afterwards, that it has ended.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     watch = Watch(Path(root), rank=1, lost_after=30)
    ...     with Heart(Path(root), rank=1):
    ...         watch.alive(), watch.gone()
    ...     watch.gone()
    (True, False)
    True
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._name = _path(folder, rank), uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Heart":
        self._show("0")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show(_ENDED)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            self._show(str(count))

    def _show(self, text: str) -> None:
        # A sign that cannot be written is one that is not seen: then the others do this process's work as well.
        with suppress(OSError):
            write_whole(self._path, f"{self._name} {text}", flush=False)


@final
class Watch:
    """What one process knows of another's life, by changes that it sees itself: no two clocks are compared."""

    def __init__(self, folder: Path, rank: int, lost_after: float) -> None:
        self._path, self._lost_after = _path(folder, rank), lost_after
        self._last, self._since, self._changed = self._read(), time.monotonic(), False

    def _read(self) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return self._path.read_text(encoding="utf-8")
        return ""

    def _look(self) -> None:
        now = self._read()
        if now and now != self._last:
            self._last, self._since, self._changed = now, time.monotonic(), True

    def alive(self) -> bool:
        """Whether a sign of life has come since the watch began."""
        self._look()
        return self._changed and not self._last.endswith(_ENDED)

    def gone(self) -> bool:
        """Whether the process said that it ended, or has shown no sign of life for too long."""
        self._look()
        return self._last.endswith(_ENDED) or time.monotonic() - self._since > self._lost_after
