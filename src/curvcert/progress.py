"""A sign of life on a terminal and in a notebook, for work whose length is not known before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
        task = bar.add_task(text, total=None)
        with shown_by(lambda what: bar.update(task, description=f"{text}: {what}")):
            yield


_SHOW: ContextVar[Callable[[str], None] | None] = ContextVar("show", default=None)


@contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Give what `working_on` tells to a display, as long as this runs.

    >>> with shown_by(print):
    ...     working_on("layer 2")
    layer 2
    """
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


def working_on(what: str) -> None:
    """Tell the display, if there is one, which layer is at work."""
    show = _SHOW.get()
    if show is not None:
        show(what)


@contextmanager
def at_work(method: str) -> Iterator[None]:
    """Tell the display, if there is one, which method is at work, and then with every layer that it tells.

    >>> with shown_by(print), at_work("liplt"):
    ...     working_on("layer 2")
    liplt
    liplt, layer 2
    """
    show = _SHOW.get()
    if show is None:
        yield
        return
    show(method)
    with shown_by(lambda layer: show(f"{method}, {layer}")):
        yield
