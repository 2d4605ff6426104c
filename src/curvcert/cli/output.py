"""Where the words of a command go: results to standard output, progress and notices to standard error."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from curvcert.cli.terminal import Visible, visible
from curvcert.progress import is_watched, sign_of_life


@final
@dataclass(frozen=True)
class Output:
    """How a command talks: to a person, to a machine (one JSON object and nothing else), or hardly at all."""

    json: bool = False
    quiet: bool = False

    def show(self, *content: RenderableType) -> None:
        """Print to a person, unless they asked for quiet or a machine is reading."""
        if not self.json and not self.quiet:
            console = Console(markup=False, highlight=False, emoji=False)
            for item in content:
                console.print(Visible(item), soft_wrap=isinstance(item, str))

    def answer(self, short: str, content: Mapping[str, Any]) -> None:
        """Print the result: one JSON object for a machine, the short form for who asked for quiet."""
        if self.json:
            print(json.dumps(plain(content), allow_nan=False))
        elif self.quiet and short:
            print(visible(short))

    def notice(self, text: str) -> None:
        """Tell something beside the result, on standard error."""
        if not self.quiet:
            print(visible(text), file=sys.stderr)

    def progress(self) -> Progress:
        """Return a bar with the time left; it shows nothing unless somebody watches."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, console=console, transient=True, disable=self.quiet or not is_watched(console))

    def working(self, text: str) -> AbstractContextManager[None]:
        """Show that work of unknown length goes on; again where somebody watches."""
        return sign_of_life(text, shown=False if self.quiet else None)


def assumed(lines: Sequence[str]) -> list[str]:
    """Return what a result rests on without proof, to be shown beside it.

    >>> assumed(["the moon is round"])
    ['Assumed, not proven: the moon is round']
    """
    return [f"Assumed, not proven: {line}" for line in lines]


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: infinity as "inf", null for NaN, tensors and paths as lists and strings.

    >>> plain({"radius": (0.5, math.inf, math.nan)})
    {'radius': [0.5, 'inf', None]}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | str):
        return value
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)
