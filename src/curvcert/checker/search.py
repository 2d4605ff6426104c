"""Counterexamples: points that show a claim to be false, with the rounding of their evaluation counted.

A search proves nothing where it finds nothing; what it finds tells a false claim from one that is only not reached.
"""

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.evaluation import Backed, backward, forward
from curvcert.checker.facts import Facts
from curvcert.checker.outward import ROOT_TINY, Array, U, gamma, lengths

_STEPS = 12
_PAIRS = 8
_FARTHEST = 1e6
_INSIDE = 1 - 2.0**-40
"""The share of a radius that is tried; whether a rounded point lies within the radius is looked at."""
_STEP = 2.0**-7


def misclassified_within(
    facts: Facts, x: Array, label: int, r: Array, p: float, sides: tuple[Array, Array] | None = None
) -> int | None:
    """Search balls for points where class i reaches the label, for those i with r[i] > 0; return the first found.

    From the gradient at a point the next is that of the ball which is farthest along it, and the nearest to that inside
    the sides of a box, where the ball is cut with one.
    """
    eye = np.eye(facts.model.classes)
    for i in np.flatnonzero(r > 0)[:_PAIRS]:
        reach, point = min(float(r[i]), _FARTHEST) * _INSIDE, x
        for _ in range(_STEPS):
            passed = forward(facts.model, point)
            outputs = passed.outputs
            doubt = outputs.error[i] + outputs.error[label] + facts.deviations[label, i]
            gap = outputs.value[i] - outputs.value[label]
            within = float(lengths(point - x, p, 0)) * (1 + 4 * U) <= r[i]
            if within and gap - doubt > gamma(8) * abs(gap):
                return int(i)
            g = backward(facts.model, passed, eye[[i]] - eye[[label]]).gradients[0][0]
            if not np.isfinite(g).all() or not g.any():
                break
            point = x + reach * _farthest(g, p)
            point = point if sides is None else np.clip(point, sides[0].reshape(-1), sides[1].reshape(-1))
    return None


def _farthest(g: Array, p: float) -> Array:
    """Return the vector of p-norm 1 or a little less that is farthest along g."""
    if p == 2:
        return np.asarray(g / (float(lengths(g, 2, 0)) * (1 + 1e-14)))
    if p == np.inf:
        return np.sign(g)
    return np.where(np.arange(len(g)) == np.abs(g).argmax(), np.sign(g), 0.0)


def steeper_than(backed: Backed, dual: float, L: Array) -> NDArray[np.bool_]:
    """Return which differences of classes have a gradient at the sample that is longer than a constant claims."""
    n = backed.gradients[0].shape[1]
    found = lengths(backed.gradients[0], dual, 1) * (1 - 2 * gamma(n + 8)) - 2 * ROOT_TINY
    spread = np.sqrt(n) if dual == 1 else 1.0
    longer: NDArray[np.bool_] = found - spread * (1 + 1e-12) * backed.drift[0] > L
    return longer


def bends_more_than(facts: Facts, x: Array, backed: Backed, label: int, i: int, K: float) -> bool:
    """Whether the gradient of f_i - f_label grows faster near a sample, along the way to it, than a constant claims.

    The constants that a radius needs are about one side alone, the largest eigenvalue of the second derivative: what
    bends the other way contradicts none of them.
    """
    row = np.eye(facts.model.classes)[[i]] - np.eye(facts.model.classes)[[label]]
    g, drift = backed.gradients[0][i], float(backed.drift[0][i])
    d = g if g.any() else np.ones_like(g)
    for _ in range(_STEPS):
        way = d / max(float(lengths(d, 2, 0)), 1e-300)
        point = x + _STEP * way
        there = backward(facts.model, forward(facts.model, point), row)
        change, moved = there.gradients[0][0] - g, point - x
        size, reach = float(lengths(change, 2, 0)), float(lengths(moved, 2, 0))
        off = drift + float(there.drift[0][0]) + gamma(8) * float(lengths(g, 2, 0)) + gamma(2 * len(d) + 16) * size
        if float(change @ moved) - off * reach > K * reach * reach * (1 + gamma(16)):
            return True
        # The power method, shifted so that it ends at the largest eigenvalue and not at the least.
        d = change + size * way
        if not d.any():
            return False
    return False
