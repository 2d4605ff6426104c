"""The look that every picture here shares: one figure, named colours, lines and histograms from a record's numbers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREY, GREEN, PURPLE = "#2166ac", "#b35806", "#777777", "#1b7837", "#762a83"


def panels(count: int, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels beside each other.

    >>> len(panels(2)[1])
    2
    """
    figure = Figure(figsize=(max(width * count, 5.6), height), layout="constrained")
    axes = [figure.add_subplot(1, count, k + 1) for k in range(count)]
    for axis in axes:
        axis.grid(alpha=0.25)
    return figure, axes


def bars(axis: Axes, counted: Mapping[str, Any], colour: str, label: str | None = None, alpha: float = 0.75) -> None:
    """Draw a histogram from its edges and counts."""
    edges, counts = counted["edges"], counted["counts"]
    axis.stairs(counts, edges, fill=True, color=colour, alpha=alpha, label=label)


def finish(figure: Figure, axes: Iterable[Axes], path: Path) -> None:
    """Put the legends in, and write the picture."""
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
