r"""How far a class stays below the label along the gradient and across it, derived afresh: zones of the ball, in l2.

For any unit vector e every d of the ball is :math:`\alpha e + w` with w across e and
:math:`|w|^2 \le r^2 - \alpha^2`.  A zone is the part of the ball with :math:`\alpha` between two ends.  From a point c
within :math:`\delta` of :math:`x + a e`, where the difference F of two classes has the gradient h, x + d is
:math:`(\alpha - a) e + w` away, but for :math:`\delta`.  With a bound :math:`\kappa` on the change of h by distance

.. math:: F(x + d) \le F(c) + (h \cdot e) (\alpha - a) + |h - (h \cdot e) e| \sqrt{r^2 - \alpha^2}
          + \tfrac\kappa2 (r^2 + a^2 - 2 \alpha a) + |h| \delta + \tfrac\kappa2 \delta (4 r + \delta).

For any :math:`\beta` between -r and r, :math:`(r^2 - \alpha^2)(r^2 - \beta^2) \le (r^2 - \alpha\beta)^2`, so that the
root is at most :math:`(r^2 - \alpha\beta) / \sqrt{r^2 - \beta^2}`.  With that in its place all is linear in
:math:`\alpha`, and a zone's two ends are enough.  Any :math:`\beta` and any e are right; best are that where the bound
is largest, and that of the computed gradient at x.  :math:`\kappa` is the pair's global constant, or one over a ball
about c that holds the zone; constants anchored at x do not serve another point.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.evaluation import Backed, Passed, backward, forward, margins
from curvcert.checker.facts import Facts
from curvcert.checker.outward import ROOT_TINY, TINY, Array, U, gamma, lengths, raised
from curvcert.checker.shells import centres, gradient_change

_CLEAR = 1 - 2.0**-20
"""How far out, as a share of r, beta may lie: at the ends the quotient would be infinite."""

_EFFORTS = (8, 24)
"""How many zones a ball is cut into, the few first."""


@dataclass(frozen=True)
class Zone:
    """The part of the ball of radius r whose alpha lies between two ends, to be seen from the place `at` >= 0."""

    low: float
    high: float
    at: float
    r: float

    def peak(self, along: float, across: float) -> float:
        """Return the share of r at which along x alpha + across x sqrt(r^2 - alpha^2) is about largest in the zone."""
        length = float(np.hypot(along, across))
        share = along / length if 0 < length < np.inf else 0.0
        return min(max(share, self.low / self.r, -_CLEAR), self.high / self.r, _CLEAR)

    def width(self, alpha: float, share: float) -> float:
        """Bound how far what lies at alpha is from the line, linearly in alpha, with beta a share of r."""
        product = max(0.0, 1.0 - share * (alpha / self.r)) + 2 * gamma(12)
        return raised(self.r * (product / float(np.sqrt((1.0 - share) * (1.0 + share)))), 12) + ROOT_TINY

    def squared(self, alpha: float) -> float:
        """Bound the squared distance between the place and what lies at alpha."""
        r, a = self.r, self.at
        return max(0.0, r * r + a * a - 2 * alpha * a) + gamma(12) * (r + a) * (r + a) + TINY

    @property
    def reach(self) -> float:
        """The farthest that anything in the zone is from the place: what lies at the near end."""
        return raised(float(np.sqrt(self.squared(self.low))), 8)


@dataclass(frozen=True, eq=False)
class _Direction:
    """A computed vector v, and how far its length may be from 1: it stands for e = v / |v|."""

    v: Array
    off: float


@dataclass(frozen=True, eq=False)
class _Seen:
    """A pair at one point: bounds on F, on the slope along e, on the gradient across it and as a whole."""

    passed: Passed
    backed: Backed
    F: float
    slope: tuple[float, float]
    across: float
    size: float
    off: float

    def negative(self, zone: Zone, kappa: float) -> bool:
        """Whether F is proven to be negative all over a zone, with a bound on how fast its gradient changes."""
        rounding = self.size * self.off + 0.5 * kappa * self.off * (4 * zone.r + self.off)
        share = zone.peak(self.slope[1] - kappa * zone.at, self.across)
        for alpha, slope in zip((zone.low, zone.high), self.slope, strict=True):
            lost = raised(self.across * zone.width(alpha, share) + rounding, 12)
            along, bent = slope * (alpha - zone.at), raised(0.5 * kappa * zone.squared(alpha), 8)
            doubt = gamma(16) * (abs(self.F) + abs(along) + bent + lost) + ROOT_TINY
            if not self.F + along + bent + lost + doubt < 0:  # a NaN is no proof
                return False
        return True


def by_lines(facts: Facts, passed: Passed, backed: Backed, label: int, r: Array) -> NDArray[np.bool_]:
    """Tell which classes i are proven to stay below the label up to r[i] > 0; those with r = 0 are left out.

    `backed` has the gradients of f_i - f_label at the input, one row per class.
    """
    found = np.zeros(len(r), bool)
    for i in np.flatnonzero(r > 0):
        direction = _direction(backed.gradients[0][i])
        found[i] = any(_holds(facts, passed, direction, (label, int(i)), float(r[i]), count) for count in _EFFORTS)
    return found


def _direction(g: Array) -> _Direction:
    """Return a vector of nearly unit length along g; what its length is off by is computed afterwards."""
    v = g / np.abs(g).max()
    v = v / np.sqrt(v @ v)
    square, n = float(v @ v), len(v)
    # ||v| - 1| <= ||v|^2 - 1|
    return _Direction(v, raised(abs(square - 1.0) + gamma(n + 8) * (1.0 + square), 8))


def zones(r: float, count: int) -> Iterator[Zone]:
    """Yield zones that cover the ball, the farthest first: there most of what fails does.

    Each reaches equally far before and behind its place, but that about x, which holds all that lies behind it.

    >>> [(zone.low, zone.high, zone.at) for zone in zones(5.0, 3)]
    [(3.0, 5.0, 4.0), (1.0, 3.0, 2.0), (-5.0, 1.0, 0.0)]
    """
    ends = [r * ((2 * j + 1) / (2 * count - 1)) for j in range(count)]
    for low, high in zip(ends[-2::-1], ends[:0:-1], strict=True):
        yield Zone(low, high, 0.5 * (low + high), r)
    yield Zone(-r, ends[0], 0.0, r)


def _holds(facts: Facts, x: Passed, direction: _Direction, pair: tuple[int, int], r: float, count: int) -> bool:
    """Whether a pair is negative in every zone; the first that fails is the last that is looked at."""
    return all(_holds_in(facts, x, direction, pair, zone) for zone in zones(r, count))


def _holds_in(facts: Facts, x: Passed, direction: _Direction, pair: tuple[int, int], zone: Zone) -> bool:
    """Whether a pair is negative in a zone: by the global constant, or by a ball if without curvature it is."""
    seen, K = _seen(facts, x.values[0].value, direction, pair, zone.at), float(facts.K_above[pair])
    if seen.negative(zone, K):
        return True
    if facts.model.wide or not seen.negative(zone, 0.0):
        return False
    t, at = raised(zone.reach + seen.off), centres(facts, seen.passed, seen.backed)
    for exact in (False, True):
        linear = gradient_change(facts, at, t, np.zeros(1, np.intp), exact)[1]
        if seen.negative(zone, min(raised(float(linear[0]) / t), K)):
            return True
    return False


def _seen(facts: Facts, x: Array, direction: _Direction, pair: tuple[int, int], a: float) -> _Seen:
    """Evaluate a pair and its gradient at the computed point x + a v.

    The point is a |v - e| = a ||v| - 1| and the rounding of a product and a sum away from x + a e.  As v is along e,
    no multiple of v leaves less of a vector than what it has across e.
    """
    (label, other), v, n = pair, direction.v, len(x)
    point = x + a * v
    passed = forward(facts.model, point)
    row = np.eye(facts.model.classes)[[other]] - np.eye(facts.model.classes)[[label]]
    backed = backward(facts.model, passed, row)
    h, drift = backed.gradients[0][0], float(backed.drift[0][0])
    longest = 1.0 + direction.off
    off = a * (direction.off + 2 * U * longest) + 2 * U * float(lengths(point, 2, 0))
    size, slope = float(lengths(h, 2, 0)), float(h @ v)
    doubt = raised(drift + size * (direction.off + gamma(n + 4) * longest), 8)
    rest = float(lengths(h - slope * v, 2, 0))
    return _Seen(
        passed,
        backed,
        F=-float(margins(passed.outputs, label, facts.deviations[label])[other]),
        slope=(slope - doubt, slope + doubt),
        across=raised(drift + rest + 2 * U * (abs(slope) * longest + rest), 8),
        size=raised(size + drift),
        off=raised(off, 8) + ROOT_TINY,
    )
