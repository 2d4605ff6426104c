"""The page's figures as files: accuracy, radii and the breakdown, drawn from `ReportData`."""

from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvcert.picture_files import write_figure
from curvcert.reporting.data import Breakdown, Curves, Histogram, ReportData
from curvcert.reporting.decimals import significant_ceil

FORMATS = ("png", "svg")

# Okabe and Ito's colours, apart for every kind of colour vision.
_STYLES = {
    "radius": ("#0072B2", "-", 2.2),
    "lipschitz_radius": ("#E69F00", "--", 1.4),
    "curvature_radius": ("#009E73", ":", 1.6),
    "local_radius": ("#CC79A7", "-.", 1.4),
    "attack": ("#D55E00", "--", 1.4),
    "search": ("#D55E00", "-", 1.8),
}
_COLUMNS = {"radius": "#0072B2", "attack": "#E69F00", "search": "#D55E00"}


def draw_figures(data: ReportData, stem: Path) -> list[Path]:
    """Draw every figure that has data, as PNG and SVG, beside `stem`; return the paths written."""
    figures = {"accuracy": _accuracy(data), "radii": _radii(data), "layers": _layers(data)}
    written = []
    for name, figure in figures.items():
        if figure is None:
            continue
        for ending in FORMATS:
            path = stem.with_name(f"{stem.name}-{name}.{ending}")
            write_figure(figure, path)
            written.append(path)
    return written


def _accuracy(data: ReportData) -> Figure:
    figure = Figure(figsize=(6.4 * len(data.ranges), 4.6), layout="constrained")
    for axes, curves in zip(figure.subplots(1, len(data.ranges), squeeze=False)[0], data.ranges, strict=True):
        _draw_curves(axes, curves, len(data.samples))
        axes.set_xlabel(f"perturbation ε ({data.norm})")
        axes.set_ylabel("robust accuracy, %")
    lines, titles = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, titles, loc="outside lower center", ncols=4 if len(data.ranges) > 1 else 2, frameon=False)
    return figure


def _draw_curves(axes: Axes, curves: Curves, total: int) -> None:
    """Draw staircases on the safe side: a lower bound takes the next grid point's value, an upper bound the last's."""
    for curve in curves.curves:
        colour, style, width = _STYLES[curve.name]
        heights = [100 * count / total for count in curve.counts]
        where: Literal["pre", "post"] = "pre" if curve.side == "at least" else "post"
        axes.step(
            curves.epsilons, heights, where=where, color=colour, linestyle=style, linewidth=width, label=curve.title
        )
    low = [100 * count / total for count in curves.certified.counts]
    high = [100 * count / total for count in curves.falsified.counts]
    ends = np.repeat(curves.epsilons, 2)
    outline = (
        np.concatenate([ends[1:], ends[:-1][::-1]]),
        np.concatenate([np.repeat(high, 2)[:-1], np.repeat(low, 2)[1:][::-1]]),
    )
    axes.fill(*outline, color="#57626f", alpha=0.16, linewidth=0, label="not known")
    axes.set_xlim(0, curves.epsilons[-1])
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)


def _radii(data: ReportData) -> Figure | None:
    drawn = [histogram for histogram in data.histograms if sum(histogram.counts)]
    if not drawn:
        return None
    figure = Figure(figsize=(4.4 * len(drawn), 3.2), layout="constrained")
    for axes, histogram in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        _draw_columns(axes, histogram)
        axes.set_xlabel(f"distance ({data.norm})")
    return figure


def _draw_columns(axes: Axes, histogram: Histogram) -> None:
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=_COLUMNS[histogram.name])
    axes.set_xlim(0, histogram.edges[-1])
    axes.set_title(histogram.title, fontsize=10)
    axes.set_ylabel("samples")
    axes.grid(alpha=0.25, axis="y")


def _layers(data: ReportData) -> Figure | None:
    if data.looseness is None:
        return None
    best = [bounds[0] for bounds in (data.looseness.of("K"), data.looseness.of("L")) if bounds and bounds[0].layers]
    if not best:
        return None
    figure = Figure(figsize=(4.6 * len(best), 1.4 + 0.35 * max(len(b.layers) for b in best)), layout="constrained")
    for axes, bound in zip(figure.subplots(1, len(best), squeeze=False)[0], best, strict=True):
        _draw_layers(axes, bound)
    return figure


def _draw_layers(axes: Axes, bound: Breakdown) -> None:
    # A name is untrusted text: a dollar sign must not start a formula.
    names = [f"{row.layer} ({row.quantity})".replace("$", r"\$") for row in bound.layers]
    axes.barh(range(len(names)), [row.value for row in bound.layers], color="#0072B2", height=0.6)
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylabel("layer")
    axes.invert_yaxis()
    axes.set_title(f"{bound.constant} ≤ {significant_ceil(bound.value)} by {bound.method}", fontsize=10)
    axes.grid(alpha=0.25, axis="x")
