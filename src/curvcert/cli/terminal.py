"""What reaches a terminal: only characters that show, and quietly nothing more once its reader has gone."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast, final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment


def visible(text: str) -> str:
    r"""Return a text in which every character shows: what a file calls its parts cannot steer a terminal.

    Controls, invisible and unpaired characters are written out, as Python does; lines and tabs stay.

    >>> visible("name\x1b[2J of a\tlayer\n")
    'name\\x1b[2J of a\tlayer\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@final
class Visible:
    """Something for a rich console, with the same care for each piece of it; its styles and colours stay."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@final
class _Outlet:
    """A stream that swallows what is written after its reader has closed it: `curvcert ... | head` ends like others.

    The work goes on, so that files are written and the exit status tells what came of it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._open_end():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._open_end():
            self._stream.flush()

    @contextmanager
    def _open_end(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What the stream still holds would fail again, in the end at the interpreter's own last flush.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if error.errno != errno.EPIPE:
                raise


@contextmanager
def outlets() -> Iterator[None]:
    """Let standard output and standard error be closed by their readers, and hold any character."""
    before = sys.stdout, sys.stderr
    for stream in before:
        with suppress(AttributeError):  # a stream that a caller has put there may know no encoding
            cast(Any, stream).reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, _Outlet(stream)) for stream in before)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before
