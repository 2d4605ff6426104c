"""A sign of life on a terminal and in a notebook, for work whose length is not known before."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def is_watched(console: Console) -> bool:
    """Whether somebody sees a line that changes: on a terminal, or in a notebook with ipywidgets to draw it."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


@contextmanager
def sign_of_life(text: str, shown: bool | None = None) -> Iterator[None]:
    """Show on standard error what goes on, and for how long it has; by default on a terminal or in a notebook.

    >>> with sign_of_life("thinking", shown=False):
    ...     print(6 * 7)
    42
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not (is_watched(console) if shown is None else shown)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task(text, total=None)
        yield
