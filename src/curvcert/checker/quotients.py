r"""Difference quotients as seen from a point: bounds on (f(y) - f(z)) / (y - z) over all real y.

Let g = f'.  The quotient is a mean of g between z and y.  To the right of z its supremum is the largest of g(z), of the
limit of g, of the quotients at the jumps of g, and of the suprema over the pieces [a, b], a > z, on which g falls: on
a piece where g rises the quotient is largest at an end, and on a falling piece that holds z it is at most g(z).  On a
falling piece f is concave, hence below its tangent at any y0, so that

.. math:: q(y) \le g(y_0) + \max\left(\frac{-F}{a - z}, \frac{-F}{b - z}\right), \qquad
          F = g(y_0) (y_0 - z) - (f(y_0) - f(z)),

for every y0, and with equality where F = 0.  Bisection brings y0 near that point; the proof does not rest on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from curvcert.checker.activations import ERROR, Activation, Graph
from curvcert.checker.outward import Array, U, up

_STEPS = 60


@dataclass(frozen=True, eq=False)
class _Seen:
    """f and g = f', perhaps reflected: f(s y) scaled so that the case "supremum to the right" covers all four."""

    f: Callable[[Array], Array]
    g: Callable[[Array], Array]
    points: tuple[float, ...]
    jumps: tuple[float, ...]
    limit: float
    peak: float
    periodic: bool


def steepest_quotients(act: Activation, z: Array, error: Array) -> tuple[Array, Array]:
    """Enclose (phi(y) - phi(z)) / (y - z) over all y, for every z within `error` of the given one.

    >>> from curvcert.checker.activations import activation
    >>> low, high = steepest_quotients(activation("tanh"), np.array([2.0]), np.zeros(1))
    >>> float(low[0]), round(float(high[0]), 10)
    (0.0, 0.5815729372)
    """
    low, high = _range(act.value, act.first, z, ())
    drift = up(0.5 * act.c * error)
    alpha, beta = act.slope
    return np.maximum(low - drift, alpha), np.minimum(high + drift, beta)


def curvature_quotients(act: Activation, z: Array, error: Array) -> Array:
    """Bound |phi'(y) - phi'(z)| / |y - z| over all y, for every z within `error` of the given one.

    As a function of z a quotient of phi' moves by at most |phi'''| / 2, or where phi'' jumps at a distance d from
    z by at most 2c / d.

    >>> from curvcert.checker.activations import activation
    >>> round(float(curvature_quotients(activation("tanh"), np.zeros(1), np.zeros(1))[0]), 10)
    0.5825829084
    """
    low, high = _range(act.first, act.second, z, act.jumps)
    rate = np.full_like(z, 0.5 * act.third)
    for jump in act.jumps:
        distance = np.maximum(np.abs(z - jump) - error, 2.0**-200)
        rate = np.maximum(rate, 2 * act.c / distance)
    found: Array = np.minimum(up(np.maximum(-low, high) + rate * error), act.c)
    return found


def _range(f: Graph, g: Graph, z: Array, jumps: tuple[float, ...]) -> tuple[Array, Array]:
    bottom, top = g.range
    least, most = g.over(z, z)
    points = tuple(turn.point for turn in g.turns)
    mirrored, back = tuple(-p for p in reversed(points)), tuple(-j for j in jumps)
    units, periodic = (f.unit, g.unit), g.known < np.inf
    views = {
        1: (
            _Seen(f.function, g.function, points, jumps, g.limits[1], top, periodic),
            _Seen(lambda y: -f.function(-y), lambda y: g.function(-y), mirrored, back, g.limits[0], top, periodic),
        ),
        -1: (
            _Seen(lambda y: -f.function(y), lambda y: -g.function(y), points, jumps, -g.limits[1], -bottom, periodic),
            _Seen(lambda y: f.function(-y), lambda y: -g.function(-y), mirrored, back, -g.limits[0], -bottom, periodic),
        ),
    }
    highest = np.maximum(most, np.maximum(_to_the_right(views[1][0], z, units), _to_the_right(views[1][1], -z, units)))
    lowest = np.maximum(
        -least, np.maximum(_to_the_right(views[-1][0], z, units), _to_the_right(views[-1][1], -z, units))
    )
    far = np.abs(z) > g.known
    return np.where(far, bottom, np.maximum(-lowest, bottom)), np.where(far, top, np.minimum(highest, top))


def _to_the_right(seen: _Seen, z: Array, units: tuple[float, float]) -> Array:
    """Bound the quotients with y > z, less those that g(z) bounds."""
    found = np.full_like(z, seen.limit)
    for jump in seen.jumps:
        gap = jump - z
        spread = 4 * _error(seen.f(z), units[0]) + 4 * _error(seen.f(np.full_like(z, jump)), units[0])
        safe = np.where(gap > 0, gap, 1.0)
        quotient = (seen.f(np.full_like(z, jump)) - seen.f(z)) / safe
        quotient = quotient + (spread / safe + 8 * U * np.abs(quotient))
        found = np.where(gap > 0, np.maximum(found, np.minimum(quotient, seen.peak)), found)
    ends = [*seen.points] if seen.periodic else [*seen.points, np.inf]
    for a, b in pairwise(ends):
        if not _falls(seen.g, a, b):
            continue
        right = z < a
        if bool(right.any()):
            found[right] = np.maximum(found[right], _over_falling_piece(seen, z[right], a, b, units))
    return found


def _falls(g: Callable[[Array], Array], a: float, b: float) -> bool:
    width = 1.0 if b == np.inf else b - a
    ends = g(np.array([a + 0.25 * width, a + 0.75 * width]))
    # A piece that is taken for falling by mistake only adds a candidate to a maximum.
    return bool(ends[0] >= ends[1])


def _over_falling_piece(seen: _Seen, z: Array, a: float, b: float, units: tuple[float, float]) -> Array:
    start = a + 1e-12 * (1 + abs(a))
    low = np.full_like(z, start)
    high = np.full_like(z, b if b < np.inf else start + 1e4) if b < np.inf else start + 1e4 + 10 * np.abs(z)
    base = seen.f(z)
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        above = seen.g(middle) * (middle - z) - (seen.f(middle) - base) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    y, best = low, np.full_like(z, seen.peak)
    slope, rise, step = seen.g(y), seen.f(y) - base, y - z
    slope_error = _error(slope, units[1])
    lost = slope_error * step + _error(seen.f(y), units[0]) + _error(base, units[0])
    F = slope * step - rise - up(lost + 4 * U * (np.abs(slope * step) + np.abs(rise)), 8)
    beyond = np.zeros_like(z) if b == np.inf else -F / (b - z)
    tangent = slope + slope_error + np.maximum(-F / (a - z), beyond)
    return np.minimum(best, tangent + 16 * U * (np.abs(tangent) + np.abs(F) / (a - z)))


def _error(value: Array, unit: float) -> Array:
    return ERROR * (np.abs(value) + unit)
