r"""Which radii the checker's own constants prove, and its bounds over balls and along lines.

With the gradient's norm at most :math:`\min(g + Kt, L)` at distance t, a radius r is proven if for some q in [0, r]

.. math:: g q + K q^2 / 2 + L (r - q) < m,

m the margin; q near :math:`(L - g)/K` is the best, and any q gives a proof.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.evaluation import Backed, Passed
from curvcert.checker.facts import Facts
from curvcert.checker.lines import by_lines
from curvcert.checker.outward import Array, U, up
from curvcert.checker.shells import Pairs, centres, spent

_EFFORTS = ((24, False, np.inf), (12, True, 1.5), (48, True, 1.05))
"""Shells, whether every norm is taken anew in each of them, and how near the margin a pair must be to be worth it."""


@dataclass(frozen=True, eq=False)
class Point:
    """The checker's own view of one sample: margins, gradient norms, and which classes are not the label."""

    passed: Passed
    backed: Backed | None
    label: int
    m: Array
    g: Array
    others: NDArray[np.bool_]


def used_up(r: Array, g: Array, K: Array, L: Array) -> Array:
    """Bound what a margin loses within r, see the module's docstring; infinite K or L count as missing."""
    q = np.where(np.isfinite(K), np.clip((L - g) / np.where(K > 0, K, np.inf), 0.0, r), 0.0)
    q = np.where(np.isfinite(L) & (K > 0), q, np.where(np.isfinite(K), r, 0.0))
    rising = np.where(q > 0, g * q + 0.5 * np.where(np.isfinite(K), K, 0.0) * q * q, 0.0)
    flat = np.where(r - q > 0, L * (r - q) + 4 * U * np.where(np.isfinite(L), L, 0.0) * r, 0.0)
    return up(rising + flat, 8)


def proven_by_constants(point: Point, r: Array, K: Array, L: Array) -> NDArray[np.bool_]:
    """Return which classes the constants prove to stay below the label up to r; the label itself is one of them."""
    proven = ~point.others
    rest = point.others
    proven[rest] = used_up(r[rest], point.g[rest], K[rest], L[rest]) < point.m[rest]
    return proven


def proven_by_balls(
    facts: Facts, point: Point, r: Array, constants: tuple[Array, Array], kinds: tuple[str, ...]
) -> NDArray[np.bool_]:
    """Return which pairs are proven up to r, by shells or by lines, in the order given; 0 stands for a proven one."""
    assert point.backed is not None
    open_, before = r > 0, dict.fromkeys(kinds, -1)
    for kind in kinds:
        # Some pair may keep shells from looking at the others: again if, and only if, a line has proven it.
        if not open_.any() or np.isinf(r[open_]).any() or before[kind] == open_.sum():
            continue
        before[kind] = int(open_.sum())
        rest = np.where(open_, r, 0.0)
        if kind == "line":
            open_ &= ~by_lines(facts, point.passed, point.backed, point.label, rest)
        else:
            open_ &= ~_by_shells(facts, point, rest, *constants)
    return ~open_


def _by_shells(facts: Facts, point: Point, r: Array, K: Array, L: Array) -> NDArray[np.bool_]:
    """Return which pairs are proven up to r > 0 by bounds over balls, the cheap ones first."""
    if not r.any():
        return np.zeros(len(r), bool)
    assert point.backed is not None
    at = centres(facts, point.passed, point.backed)
    lost = np.where(r > 0, np.inf, 0.0)
    for shells, exact, within in _EFFORTS:
        index = np.flatnonzero((lost >= point.m) & (lost <= within * point.m))
        if len(index) < int((lost >= point.m).sum()):
            break  # a pair that is far from proven spoils the sample, whatever the others do
        pairs = Pairs(index, point.g[index], K[index], L[index])
        if len(index):
            lost[index] = spent(facts, at, r[index], pairs, shells, exact)
    return (r > 0) & (lost < point.m)
