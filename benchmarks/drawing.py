"""The look that every picture here shares: one figure, named colours, lines and histograms from a record's numbers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from curvcert.picture_files import write_figure

BLUE, ORANGE, GREY, GREEN, PURPLE, BLACK = "#2166ac", "#b35806", "#777777", "#1b7837", "#762a83", "#222222"


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


def grid(
    rows: int, columns: int, size: tuple[float, float], sharex: bool = False, sharey: bool = False
) -> tuple[Figure, NDArray[Any]]:
    """Return a figure with rows of panels, that share their scales if `sharex` or `sharey` says so.

    >>> grid(2, 3, (10, 5.6), sharey=True)[1].shape
    (2, 3)
    """
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)


def bars(axis: Axes, counted: Mapping[str, Any], colour: str, label: str | None = None) -> None:
    """Draw a histogram from its edges and counts: an outline, lightly filled, so that several may overlap."""
    edges, counts = counted["edges"], counted["counts"]
    axis.stairs(counts, edges, fill=True, color=colour, alpha=0.2)
    axis.stairs(counts, edges, color=colour, lw=1.4, label=label)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int = 4, size: float = 8) -> None:
    """Put one legend for all panels below them, each label once."""
    named = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False, fontsize=size
    )


def finish(figure: Figure, axes: Iterable[Axes], path: Path) -> None:
    """Put the legends in, and write the picture."""
    for axis in axes:
        if axis.get_legend_handles_labels()[0] and not figure.legends:
            axis.legend(frameon=False, fontsize=8)
    write_figure(figure, path)
