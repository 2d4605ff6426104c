"""A sign of life on a terminal, for work whose length is not known before."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def sign_of_life(text: str, shown: bool | None = None) -> Iterator[None]:
    """Show on standard error what goes on, and for how long it has; by default on a terminal.

    >>> with sign_of_life("thinking", shown=False):
    ...     print(6 * 7)
    42
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not (console.is_terminal if shown is None else shown)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task(text, total=None)
        yield
