"""Geometry of the page's charts: paths in a square of 1000 by 1000, and ticks in per cent.

The page stretches the square and sets the text beside it, so that letters keep their size on a phone.  Between grid
points a curve is drawn on its safe side: a lower bound at the value of the next point, an upper bound at that
of the last.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from curvcert.reporting.data import Breakdown, Curve, Curves, Histogram

Point = tuple[float, float]

SIDE = 1000


@dataclass(frozen=True)
class Tick:
    """A tick: its place from the left or from below in per cent, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve as an SVG path; of two, that of the higher layer is drawn on top."""

    name: str
    title: str
    side: str
    path: str
    layer: int


@dataclass(frozen=True)
class AccuracyChart:
    """Curves of one range, the gap between the best of each side, and the axes."""

    name: str
    lines: tuple[Line, ...]
    gap: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram."""

    x: float
    width: float
    y: float
    height: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """A histogram's bars and axes; `total` counts what is drawn."""

    name: str
    title: str
    bars: tuple[Bar, ...]
    total: int
    infinite: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Rung:
    """One value on a logarithmic ladder: its bar's width in per cent, and how many times the value found it is."""

    title: str
    value: float
    width: float
    ratio: float | None
    found: bool


def accuracy_chart(curves: Curves, total: int) -> AccuracyChart:
    """Draw curves of counts out of a total."""
    lines = tuple(
        Line(
            curve.name,
            curve.title,
            curve.side,
            _path(_steps(curve, curves.epsilons[: _seen(curve, curves)], total, curves.epsilons[-1])),
            layer=0 if curve.side == "at most" else 1 if curve.name == "radius" else 2,
        )
        for curve in curves.curves
    )
    ends = curves.epsilons, total, curves.epsilons[-1]
    above, below = _steps(curves.falsified, *ends), _steps(curves.certified, *ends)
    gap = _path([*above, *reversed(below)]) + "Z"
    percent = tuple(Tick(k, f"{k}%") for k in range(0, 101, 20))
    return AccuracyChart(curves.name, lines, gap, axis_ticks(curves.epsilons[-1]), percent)


def bar_chart(histogram: Histogram) -> BarChart:
    """Draw a histogram; its vertical axis ends at a round number."""
    top = _round_top(max(histogram.counts))
    right = histogram.edges[-1]
    spans = list(zip(pairwise(histogram.edges), histogram.counts, strict=True))
    bars = []
    for k, ((low, high), count) in enumerate(spans):
        height = SIDE * count / top
        closing = "]" if k == len(spans) - 1 else ")"
        text = f"[{low:.4g}, {high:.4g}{closing}: {count}"
        bars.append(Bar(SIDE * low / right, SIDE * (high - low) / right, SIDE - height, height, text))
    rows = tuple((f"{low:.4g} to {high:.4g}", count) for (low, high), count in spans if count)
    parts = 4 if top % 4 == 0 else 2 if top % 2 == 0 else 1
    y_ticks = tuple(Tick(100 * k / parts, f"{top * k // parts}") for k in range(parts + 1))
    total = sum(histogram.counts)
    return BarChart(
        histogram.name, histogram.title, tuple(bars), total, histogram.infinite, axis_ticks(right), y_ticks, rows
    )


def axis_ticks(top: float) -> tuple[Tick, ...]:
    """Return ticks at round numbers from 0 to the top, about five of them.

    >>> [tick.text for tick in axis_ticks(0.1)]
    ['0', '0.02', '0.04', '0.06', '0.08', '0.1']
    """
    step = next(
        step
        for exponent in (math.floor(math.log10(top)) - 1, math.floor(math.log10(top)))
        for step in (float(f"{m}e{exponent}") for m in ("1", "2", "2.5", "5"))
        if top / step <= 6.001
    )
    count = math.floor(top / step + 1e-9)
    return tuple(Tick(100 * k * step / top, f"{k * step:.6g}") for k in range(count + 1))


def ladder(bounds: tuple[Breakdown, ...], found: float | None) -> tuple[Rung, ...]:
    """Return bounds beside the value that a search found, smallest first, on a logarithmic scale."""
    values = [("found by the search", found)] if found is not None else []
    values += [(bound.method, bound.value) for bound in bounds]
    finite = [value for _, value in values if 0 < value < math.inf]
    low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
    span = math.log(high / low) or 1.0
    ordered = sorted(values, key=lambda entry: entry[1])

    def rung(title: str, value: float) -> Rung:
        place = math.log(value / low) / span if 0 < value < math.inf else float(value > 0)
        ratio = value / found if found and title != "found by the search" else None
        return Rung(title, value, 12 + 88 * place, ratio, title == "found by the search")

    return tuple(rung(*entry) for entry in ordered)


def _seen(curve: Curve, curves: Curves) -> int:
    """Return how many points of a curve say something: an upper one ends where witnesses, or the search, ended."""
    count, attack = len(curves.epsilons), curves.curve("attack")
    if curve.side == "at least" or attack is None:
        return count
    if curve.name == "search":
        return 1 + max((k for k in range(count) if curve.counts[k] < attack.counts[k]), default=0)
    return 1 + max((k for k in range(1, count) if curve.counts[k] < curve.counts[k - 1]), default=count - 1)


def _steps(curve: Curve, epsilons: tuple[float, ...], total: int, end: float) -> list[Point]:
    """Return the corners of the staircase that is never on the wrong side of the curve; `end` is the axis's."""
    right = end or 1.0
    places = [
        (SIDE * eps / right, SIDE * (1 - count / total)) for eps, count in zip(epsilons, curve.counts, strict=False)
    ]
    corners = [places[0]]
    for (x0, y0), (x1, y1) in pairwise(places):
        if y0 != y1:
            corners += [(x0, y0), (x0, y1)] if curve.side == "at least" else [(x1, y0), (x1, y1)]
    return [*corners, places[-1]]


def _path(points: list[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _round_top(count: int) -> int:
    """Return a round number that is not below the count, and at least 4."""
    step: int = 10 ** (len(str(max(count, 1))) - 1)
    candidates = (m * step for m in (1, 2, 4, 6, 8, 10, 12))
    return max(4, next(candidate for candidate in candidates if candidate >= count))
