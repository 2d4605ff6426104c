"""The page: `ReportData` to one HTML file that asks nothing of the network."""

import base64
import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined, Template
from markupsafe import Markup

from curvcert.errors import InvalidInput
from curvcert.reporting.charts import accuracy_chart, bar_chart, ladder
from curvcert.reporting.data import Exhibit, ReportData, Samples
from curvcert.reporting.decimals import (
    ceil_to,
    decimals_for,
    floor_to,
    percent_ceil,
    percent_floor,
    significant_ceil,
    significant_floor,
)

CAP = 8 * 2**20
"""The most bytes that a page may have."""

MOST_ROWS = 20_000
MOST_CLASSES = 200
MOST_TEXT = 4_000
MOST_NAME = 80
MOST_CONCLUSIONS = 4

FILES = ("report.html", "report.css", "report.js", "axes.html", "compare.html")

_CERTIFIED = ("radius", "lipschitz_radius", "curvature_radius", "local_radius")
_FOUND = ("attack_radius", "search_radius")
_HEADINGS = {
    "radius": "Certified",
    "lipschitz_radius": "Lipschitz",
    "curvature_radius": "Curvature",
    "local_radius": "Shell",
    "attack_radius": "Witness",
    "search_radius": "Search",
    "margin": "Margin",
}


def render(data: ReportData, cap: int = CAP) -> str:
    """Return the page as text, at most `cap` bytes in UTF-8; the table of samples is shortened to fit.

    Raises:
        InvalidInput: if the page is too large even without its table.

    >>> from torch import nn, zeros
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> from curvcert.reporting import report_data
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), zeros(1, 2))
    >>> page = render(report_data(certify(net, zeros(4, 2)), title="Four points"))
    >>> page.startswith("<!doctype html>"), "Four points" in page, "http://" in page
    (True, True, False)
    """
    rows = min(len(data.samples), MOST_ROWS)
    while True:
        text = _render_with(data, rows, cap)
        size = len(text.encode())
        if size <= cap:
            return text
        if rows == 0:
            raise InvalidInput(f"The page takes {size} bytes, more than {cap}, without its table. Allow a larger cap.")
        rows //= 2


def safe_json(value: Any) -> Markup:
    r"""Return JSON that no HTML parser reads as markup, to stand in a script element of a data type.

    >>> print(safe_json({"name": "</script><b>"}))
    {"name":"\u003c/script\u003e\u003cb\u003e"}
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _render_with(data: ReportData, rows: int, cap: int) -> str:
    """Render twice: the page states its own size, rounded up with room for the digits."""
    context = _context(data, rows) | {"cap_mb": f"{cap / 2**20:g}"}
    template = template_of("report.html")
    size = len(template.render(context, size_kb=0).encode()) + 16
    return template.render(context, size_kb=f"{math.ceil(size / 1024):,}")


def template_of(name: str) -> Template:
    """Return one of the templates."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    folder = resources.files("curvcert.reporting") / "templates"
    files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
    environment = Environment(
        loader=DictLoader(files), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = files["report.js"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # The style sheet and the script are the package's own files; everything else is escaped.
    environment.globals |= {"style": Markup(files["report.css"]), "script": Markup(script), "script_digest": digest}
    environment.filters |= {
        "clip": _clip,
        "eps": lambda value: f"{value:.6g}",
        "sig_floor": significant_floor,
        "sig_ceil": significant_ceil,
        "percent_floor": percent_floor,
        "percent_ceil": percent_ceil,
    }
    return environment


def _context(data: ReportData, rows: int) -> dict[str, Any]:
    decimals = decimals_for(data.samples.radius)
    total = len(data.samples)
    looseness = data.looseness
    return {
        "data": data,
        "total": total,
        "certified": lambda value: _fixed(floor_to(value, decimals), decimals),
        "found": lambda value: _fixed(ceil_to(value, decimals), decimals),
        "class_name": lambda label: "unknown" if label is None else _clip(data.classes[label], MOST_NAME),
        "headline": _headline(data, decimals),
        "conclusions": _conclusions(data),
        "charts": [accuracy_chart(curves, total) for curves in data.ranges],
        "histograms": [bar_chart(histogram) for histogram in data.histograms],
        "per_class": data.per_class[:MOST_CLASSES],
        "ladders": None
        if looseness is None
        else {
            "K": ladder(looseness.of("K"), looseness.hessian_found),
            "L": ladder(looseness.of("L"), looseness.slope_found),
        },
        "columns": _columns(data.samples),
        "headings": _HEADINGS,
        "rows": rows,
        "payload": safe_json(_payload(data, rows, decimals)),
        "notes": [_clip(note, MOST_TEXT) for note in data.notes[:50]],
        "assumes": [_clip(line, MOST_TEXT) for line in data.assumes[:50]],
    }


def _headline(data: ReportData, decimals: int) -> list[tuple[str, str, str]]:
    """Return the figures at the top: name, value, and a line that explains it."""
    total, correct = len(data.samples), data.correct
    radii = sorted(r for r, ok in zip(data.samples.radius, data.samples.correct, strict=True) if ok)
    middle = _fixed(floor_to(radii[(correct - 1) // 2], decimals), decimals) if radii else "n/a"
    k = min(range(len(data.epsilons)), key=lambda k: abs(2 * data.at_epsilons.certified.counts[k] - correct))
    low, high = data.at_epsilons.certified.counts[k], data.at_epsilons.falsified.counts[k]
    eps = f"{data.epsilons[k]:.4g}"
    witnesses = sum(
        math.isfinite(r) and ok for r, ok in zip(data.samples.attack_radius, data.samples.correct, strict=True)
    )
    searched = sum(
        math.isfinite(r) and ok for r, ok in zip(data.samples.search_radius, data.samples.correct, strict=True)
    )
    return [
        ("Samples", f"{total:,}", f"in {data.norm}, {len(data.classes)} classes"),
        ("Correct", percent_floor(correct, total), f"{correct:,} of {total:,}"),
        ("Median radius", middle, "certified, correct samples"),
        (f"Certified at {eps}", percent_floor(low, total), f"{low:,} of {total:,}, proven"),
        (f"Not known at {eps}", percent_ceil(high - low, total), f"{high - low:,} neither proven nor broken"),
        ("Broken points", f"{witnesses:,}", f"witnesses; a search broke {searched:,}" if searched else "witnesses"),
    ]


def _conclusions(data: ReportData) -> list[str]:
    """Say what is proven at the perturbations that were asked for, the first of them."""
    total, counts = len(data.samples), data.at_epsilons.certified.counts
    where = f"in {data.norm}" + (f", inside the box {data.box}" if data.inside_box else "")
    return [
        f"At least {percent_floor(count, total)} of {total:,} samples keep the right class at every point within "
        f"{eps:.6g} {where}{_in_pixels(eps, data)}."
        for eps, count in zip(data.epsilons[:MOST_CONCLUSIONS], counts, strict=False)
    ]


def _in_pixels(eps: float, data: ReportData) -> str:
    """Say how far a radius moves the values of pixels, of which white is 255: one alone, and all at once.

    >>> from types import SimpleNamespace
    >>> _in_pixels(36 / 255, SimpleNamespace(entries=100, p=2.0))
    ', which is one pixel value by up to 36 of 255, or all 100 by up to 3.6 each'
    >>> _in_pixels(8 / 255, SimpleNamespace(entries=100, p=math.inf))
    ', which is all 100 pixel values by up to 8 of 255 each'
    """
    if data.entries is None:
        return ""
    n = data.entries
    each = _levels(eps * n ** (-1 / data.p))
    if math.isinf(data.p):
        return f", which is all {n:,} pixel values by up to {each} of 255 each"
    return f", which is one pixel value by up to {_levels(eps)} of 255, or all {n:,} by up to {each} each"


def _levels(share: float) -> str:
    """Return a share of the range in steps of 1/255, rounded down but for the rounding of the share itself."""
    return f"{min(255.0, math.floor(share * 255 * 100 * (1 + 1e-9)) / 100):g}"


def _columns(samples: Samples) -> list[str]:
    """Return the columns of numbers that hold something."""
    always = ("radius", "attack_radius", "margin")

    def holds(name: str) -> bool:
        values = zip(getattr(samples, name), samples.correct, strict=True)
        if name == "search_radius":
            return any(ok and math.isfinite(value) for value, ok in values)
        return any(ok and not math.isnan(value) for value, ok in values)

    return [name for name in _HEADINGS if name in always or holds(name)]


def _payload(data: ReportData, rows: int, decimals: int) -> dict[str, Any]:
    """Return what the page's script reads: columns of numbers, rounded to the safe side."""
    samples, columns = data.samples, _columns(data.samples)
    methods = sorted(set(samples.method))
    place = {name: k for k, name in enumerate(methods)}
    return {
        "total": len(samples),
        "decimals": decimals,
        "classes": [_clip(name, MOST_NAME) for name in data.classes],
        "methods": [_clip(name, MOST_NAME) for name in methods],
        "columns": columns,
        "label": samples.label[:rows],
        "predicted": samples.predicted[:rows],
        "correct": [int(ok) for ok in samples.correct[:rows]],
        "method": [place[name] for name in samples.method[:rows]],
        "radii": {name: _rounded("radius", values[:rows], decimals) for name, values in samples.radii.items()},
        "exhibits": {one.index: _pictured(one, decimals) for one in data.gallery.first if one.index < rows},
        "runner_up": samples.runner_up[:rows],
        "numbers": {name: _rounded(name, getattr(samples, name)[:rows], decimals) for name in columns},
        "certified_to": _certified_to(data)[:rows],
        "broken_from": _broken_from(data)[:rows],
        "ranges": [
            {"epsilons": curves.epsilons, "counts": {curve.name: curve.counts for curve in curves.curves}}
            for curves in data.ranges
        ],
        "sides": {curve.name: curve.side for curve in data.ranges[0].curves},
    }


def _pictured(one: Exhibit, decimals: int) -> dict[str, Any]:
    """Return what the page shows of a sample that is chosen."""
    return {
        "picture": one.picture,
        "broken": one.broken_picture,
        "step": one.step_picture,
        "times": None if one.amplification is None else f"{one.amplification:,.1f}",
        "distance": None if one.distance is None else _number(ceil_to(one.distance, decimals)),
        "class": one.broken_class,
        "source": one.source,
    }


def _certified_to(data: ReportData) -> list[int]:
    """Return at how many of the chosen perturbations, which ascend, each sample is certified: exactly."""
    pairs = zip(data.samples.radius, data.samples.correct, strict=True)
    return [bisect_right(data.epsilons, radius) if ok else 0 for radius, ok in pairs]


def _broken_from(data: ReportData) -> list[int]:
    """Return the first of the chosen perturbations within which each sample is known to break."""
    samples = data.samples
    known = zip(samples.attack_radius, samples.search_radius, samples.correct, strict=True)
    return [bisect_left(data.epsilons, min(attack, search)) if ok else 0 for attack, search, ok in known]


def _rounded(name: str, values: Sequence[float], decimals: int) -> list[float | str | None]:
    towards = ceil_to if name in _FOUND else floor_to
    return [_number(towards(value, decimals)) for value in values]


def _number(value: float) -> float | str | None:
    """Return a JSON value: infinity as "inf", NaN as null, whole numbers without their point."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return int(value) if value == int(value) else value


def _fixed(value: float, decimals: int) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:.{decimals}f}" if math.isfinite(value) else "∞" if value > 0 else "-∞"


def _clip(text: str, most: int = MOST_TEXT) -> str:
    """Return the text, cut where it is longer than a page should carry."""
    return text if len(text) <= most else text[: most - 1] + "…"
