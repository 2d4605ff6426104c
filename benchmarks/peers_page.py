"""The tables of certified radii beside CROWN's, from `results/peers.json`, for the pages that show them."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.harness import ROOT, figures_of
from benchmarks.pages import table, with_parts
from benchmarks.peers import NAME, NORMS

COMPARE = ROOT / "docs" / "compare.md"
RELAXATIONS = ROOT / "docs" / "linear-and-quadratic.md"
EXACT = 0.999
"""Ratios from here on count as no less than CROWN's, whose radii are known to the precision of a bisection."""

Figures = Mapping[str, Any]


def radii_table() -> str:
    """Return the median radii over CROWN's, and as shares of the attack's, by network and norm."""

    def cell(figures: Figures) -> str:
        ratio = f"{figures['ours / CROWN']:.2f}" if "CROWN" in figures else "none"
        return f"{ratio} ({figures['ours / attack']:.2f})"

    return _by_norm(cell)


def time_table() -> str:
    """Return the processor's time that deciding CROWN's median radius takes, and finding the largest, over CROWN's."""

    def cell(figures: Figures) -> str:
        if "CROWN" not in figures:
            return f"none ({figures['ours_s']:.0f} s)"
        return f"{figures['deciding / CROWN_s']:.2f} ({figures['ours_s'] / figures['CROWN_s']:.2f})"

    return _by_norm(cell)


def winners_table() -> str:
    """Return how many samples' radii each certificate proved, by network and norm."""

    def cell(figures: Figures) -> str:
        return ", ".join(f"{name} {count}" for name, count in figures["proven by"].items())

    return _by_norm(cell)


def linear_table() -> str:
    """Return the median radius by the linear certificate alone over CROWN's, and that by all over the linear one's."""

    def cell(figures: Figures) -> str:
        linear = figures["linear alone"]
        ratio = f"{linear / figures['CROWN']:.2f}" if "CROWN" in figures else "none"
        return f"{ratio}, {figures['ours'] / linear:.2f}"

    return _by_norm(cell)


def alpha_table() -> str:
    """Return the median radii over those of alpha-CROWN, where it was run."""
    networks = figures_of(NAME)["networks"]
    lines = []
    for name, by_norm in networks.items():
        cells = {norm: each for norm, each in by_norm.items() if "alpha-CROWN" in each}
        if cells:
            ratios = {norm: f"{each['ours'] / each['alpha-CROWN']:.2f}" for norm, each in cells.items()}
            lines.append([name, *(ratios.get(norm, "") for norm in NORMS)])
    return table(("network", *NORMS), lines)


def summary() -> str:
    """Return wins and losses in a few sentences."""
    cells = [(name, norm, each) for name, norm, each in _cells() if "CROWN" in each]
    if not cells:
        return "Not yet measured."
    losses = [f"{name} in {norm} ({each['ours / CROWN']:.3f})" for name, norm, each in cells if _lost(each)]
    samples, below = (sum(each[key] for *_, each in cells) for key in ("samples", "below CROWN"))
    above = sum(each["above the attack"] for *_, each in _cells())
    deciding = [each["deciding / CROWN_s"] for *_, each in cells]
    told = f"Below: {', '.join(losses)}." if losses else "None is below."
    return (
        f"{len(cells) - len(losses)} of {len(cells)} medians are at least CROWN's. {told}\n"
        f"Of single radii, {below} of {samples:,} are below CROWN's, and {above} above the attack's.\n"
        f"Deciding CROWN's median radius takes {min(deciding):.2f} to {max(deciding):.1f} times the time of CROWN's "
        f"bisection, {statistics.median(deciding):.2f} times at the median."
    )


def _lost(figures: Figures) -> bool:
    return bool(figures["ours / CROWN"] < EXACT)


def _cells() -> Iterator[tuple[str, str, Figures]]:
    for name, by_norm in figures_of(NAME)["networks"].items():
        for norm, figures in by_norm.items():
            yield name, norm, figures


def _by_norm(cell: Callable[[Figures], str]) -> str:
    networks = figures_of(NAME)["networks"]
    lines = [[name, *(cell(each[norm]) if norm in each else "" for norm in NORMS)] for name, each in networks.items()]
    return table(("network", *NORMS), lines)


def compare_page() -> str:
    """Return the page on other tools with its radii written anew."""
    return with_parts(
        COMPARE, {"radii": radii_table, "radii in words": summary, "alpha": alpha_table, "radii in time": time_table}
    )


def relaxations_page() -> str:
    """Return the page on the linear and the quadratic certificate with its tables written anew."""
    return with_parts(RELAXATIONS, {"winners": winners_table, "linear": linear_table})
