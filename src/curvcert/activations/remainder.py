r"""Remainders beside a line: the range of :math:`R(z) = \phi(z) - sz` over intervals, for any slope s.

For any u the largest value of :math:`u\phi(z) - usz` over an interval is u times an end of that range.  A range needs
no proof that a root was found: cut where :math:`\phi` turns from convex to concave, which the table knows.  Where R is
convex its largest value is at an end, and for *any* z in the piece [a, b]

.. math:: \min R \ge R(z) + \min\{R'(z)(b - z), R'(z)(a - z)\},

which is exact where :math:`R'(z) = 0`; a concave piece mirrors that, and in a linear one both ends decide.  The sign
of the curvature comes from the table, never from a computed value, which rounds to 0 in the tails.
"""

import torch
from torch import Tensor

from curvcert.activations.base import EVERYWHERE, Activation, Profile
from curvcert.activations.interval import (
    NEARNESS,
    PERIODIC_LIMIT,
    Intervals,
    derivative_range,
    is_defined,
    value_range,
)
from curvcert.rounding import UNIT_ROUNDOFF, next_down, next_up

_STEPS = 40
"""Steps of a search for a root, which in the worst case are bisections."""

_NEAR_ROOT = 2.0**-40
"""A derivative this small, relative to the steepest slope, is one at a root."""

_ROUNDINGS = 8 * UNIT_ROUNDOFF
"""More than the roundings of any one line below."""


@torch.no_grad()
def remainder_range(act: Activation, slope: Tensor, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose :math:`\{\phi(z) - sz : l \le z \le u\}`, elementwise; unbounded where an end is not finite.

    >>> from curvcert.activations import RELU
    >>> half, one = torch.tensor([0.5], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> [f"{end.item():.3f}" for end in remainder_range(RELU, half, -one, one)]  # 1/2 at both ends, 0 at the kink
    ['-0.000', '0.500']
    """
    return remainder_ends(act, slope, slope, lower, upper)


@torch.no_grad()
def remainder_ends(act: Activation, below: Tensor, above: Tensor, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Bound :math:`\phi(z) - sz` from below for one slope and from above for another: half the work of two ranges."""
    below, above, lower, upper = torch.broadcast_tensors(below, above, lower, upper)
    inside = lower.isfinite() & upper.isfinite() & is_defined(act, lower, upper)
    known = (inside & below.isfinite(), inside & above.isfinite())
    # Anywhere in the domain, where nothing is known.
    place = 0.0 if act.domain == EVERYWHERE else 1.0
    a, b = (torch.where(inside, value, place) for value in (lower, upper))
    s, t = (torch.where(each, value, place) for each, value in zip(known, (below, above), strict=True))
    if act.profiles is None:
        least, greatest = _declared(act, s, a, b)[0], _declared(act, t, a, b)[1]
    elif act.profiles[0].period is not None:
        least, greatest = _sine(act, s, a, b)[0], _sine(act, t, a, b)[1]
    else:
        least, greatest = _by_pieces(act, act.profiles[1], s, t, a, b)
    # What overflowed says nothing.
    least = torch.where(known[0] & ~least.isnan(), least, -torch.inf)
    return least, torch.where(known[1] & ~greatest.isnan(), greatest, torch.inf)


def _by_pieces(
    act: Activation, derivative: Profile, below: Tensor, above: Tensor, lower: Tensor, upper: Tensor
) -> Intervals:
    """Return the hull of the ranges over the pieces between the points where the curvature changes its sign.

    Ends of pieces are ends of the interval or cuts.  Inside, R has its least value only where it is convex, and its
    greatest only where it is concave: those pieces, of both sides, are searched together.
    """
    ends = [lower, *(torch.full_like(lower, turn.point).clamp(lower, upper) for turn in derivative.turns), upper]
    points = torch.stack(ends)
    least, greatest = _at(act, below, points)[0].amin(dim=0), _at(act, above, points)[1].amax(dim=0)
    cuts = [-torch.inf, *(turn.point for turn in derivative.turns), torch.inf]
    inside = [
        (kind == "+", (lower < right) & (upper > left) & (lower < upper), left, right)
        for kind, left, right in zip(derivative.trend, cuts[:-1], cuts[1:], strict=True)
        if kind != "0"
    ]
    if inside:
        parts = [
            ((below if convex else above)[met], lower[met].clamp(min=left), upper[met].clamp(max=right))
            for convex, met, left, right in inside
        ]
        s, a, b = (torch.cat(each) for each in zip(*parts, strict=True))
        counts = [len(part[0]) for part in parts]
        signs = [torch.full_like(part[0], 1.0 if one[0] else -1.0) for part, one in zip(parts, inside, strict=True)]
        found = _inside(act, torch.cat(signs), s, a, b).split(counts)
        for (convex, met, _, _), values in zip(inside, found, strict=True):
            side, least_of = (least, torch.minimum) if convex else (greatest, torch.maximum)
            side[met] = least_of(side[met], values)
    slack = [_rounded_cuts(act, derivative, s, lower, upper) for s in (below, above)]
    return least - slack[0], greatest + slack[1]


def _rounded_cuts(act: Activation, derivative: Profile, s: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Bound what it matters that a cut is beside the true point by its rounding: in value, and in the derivative."""
    total = torch.zeros_like(s)
    steepest = max(map(abs, act.slope))
    for turn in derivative.turns:
        if turn.point != 0.0 and not turn.jump:
            sliver = NEARNESS * abs(turn.point)
            met = (lower <= turn.point + sliver) & (upper >= turn.point - sliver)
            beside = 2 * sliver * (s.abs() + steepest) + sliver * act.curvature_c * (upper - lower)
            total = total + torch.where(met, beside, 0.0)
    return total


def _inside(act: Activation, sign: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Bound R over pieces with a < b: from below where the sign is 1 and R convex, from above where it is concave."""
    # Inside, as at an end the derivative may jump.
    z = torch.maximum(torch.minimum(_near_root(act, s, a, b, sign), next_down(b)), torch.minimum(next_up(a), b))
    flattest, steepest = derivative_range(act, z, z)
    convex = sign > 0
    right, left = (torch.where(convex, *ends) for ends in ((flattest, steepest), (steepest, flattest)))
    beside = torch.maximum(-sign * (right - s) * (b - z), -sign * (left - s) * (a - z))
    rest = beside + _ROUNDINGS * (steepest.abs() + flattest.abs() + s.abs()) * (b - a)
    low, high = _at(act, s, z)
    return torch.where(convex, low - rest, high + rest)


def _at(act: Activation, s: Tensor, z: Tensor) -> Intervals:
    """Enclose R at a point."""
    assert act.profiles is not None
    phi, line = act.value(z), s * z
    error = act.profiles[0].slack(phi) + _ROUNDINGS * (phi.abs() + line.abs())
    return phi - line - error, phi - line + error


def _near_root(act: Activation, s: Tensor, a: Tensor, b: Tensor, sign: Tensor) -> Tensor:
    """Return a point of [a, b], near the root of phi' - s if there is one: Newton's method, kept in a bracket.

    Where the sign is 1, phi' rises; where it is -1, it falls.
    """
    at_a, at_b = sign * (act.derivative(a) - s), sign * (act.derivative(b) - s)
    small: float | Tensor = _NEAR_ROOT * max(map(abs, act.slope))
    if not act.is_tame:
        small = _NEAR_ROOT * torch.maximum(act.derivative(a).abs(), act.derivative(b).abs())
    left, right = a, torch.where(at_a >= 0, a, b)
    left = torch.where((at_b <= 0) & (at_a < 0), b, left)
    z = (left + right) / 2
    for _ in range(_STEPS):
        f = sign * (act.derivative(z) - s)
        if bool(((f.abs() <= small) | (left == right)).all()):
            break
        left, right = torch.where(f < 0, z, left), torch.where(f > 0, z, right)
        bend = torch.zeros_like(f) if act.second_derivative is None else sign * act.second_derivative(z)
        step = z - f / bend
        z = torch.where((step > left) & (step < right), step, (left + right) / 2)
    return z


def _sine(act: Activation, s: Tensor, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose sin z - s z: ends, and the first and last of the points where cos z = s on each side.

    R is stationary at :math:`\pm\theta + 2\pi k`, :math:`\theta = \arccos s`, with the values
    :math:`\pm\sqrt{1 - s^2} - s(\pm\theta + 2\pi k)`, linear in k: so the first and the last in the interval decide.
    One that rounding may have put beside the interval counts as inside.
    """
    at_a, at_b = _at(act, s, lower), _at(act, s, upper)
    least, greatest = torch.minimum(at_a[0], at_b[0]), torch.maximum(at_a[1], at_b[1])
    theta, top = torch.arccos(s.clamp(-1, 1)), ((1 - s) * (1 + s)).clamp(min=0).sqrt()
    turns, period = s.abs() <= 1, 2 * torch.pi
    for sign in (1.0, -1.0):
        first, last = (lower - sign * theta) / period, (upper - sign * theta) / period
        margin = NEARNESS * (1 + first.abs() + last.abs())
        low, high = torch.ceil(first - margin), torch.floor(last + margin)
        for k in (low, high):
            z = sign * theta + period * k
            value = sign * top - s * z
            slack = act.profiles[0].absolute + 4 * _ROUNDINGS * (1 + s.abs() * (theta + period * k.abs()))  # type: ignore[index]
            inside = turns & (low <= high)
            least = torch.where(inside, torch.minimum(least, value - slack), least)
            greatest = torch.where(inside, torch.maximum(greatest, value + slack), greatest)
    # Far out, where the place in a period is lost, sin is between -1 and 1.
    far = torch.maximum(lower.abs(), upper.abs()) > PERIODIC_LIMIT
    line_low, line_high = torch.minimum(s * lower, s * upper), torch.maximum(s * lower, s * upper)
    slack = 1 + _ROUNDINGS * (line_low.abs() + line_high.abs())
    return torch.where(far, -slack - line_high, least), torch.where(far, slack - line_low, greatest)


def _declared(act: Activation, s: Tensor, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose a declared phi's remainder by the range [m, M] of R' alone.

    R is at most :math:`R(l) + Mt` and :math:`R(u) - m(w - t)` at l + t, w = u - l; where m < 0 < M the weighted mean of
    both with weights -m and M is free of t.
    """
    at_a, at_b = value_range(act, lower, lower), value_range(act, upper, upper)
    flattest, steepest = derivative_range(act, lower, upper)
    width, line_a, line_b = upper - lower, s * lower, s * upper
    m, M = (flattest - s).clamp(max=0), (steepest - s).clamp(min=0)
    size = sum(v.abs() for v in (*at_a, *at_b, line_a, line_b)) + (m.abs() + M + s.abs() + 1) * width
    slack = 4 * _ROUNDINGS * size
    spread = torch.where(m < M, M - m, 1.0)
    greatest = (M * (at_b[1] - line_b) - m * (at_a[1] - line_a) - m * M * width) / spread
    least = (M * (at_a[0] - line_a) - m * (at_b[0] - line_b) + m * M * width) / spread
    flat = m >= M  # both are 0: R is constant
    greatest = torch.where(flat, torch.maximum(at_a[1] - line_a, at_b[1] - line_b), greatest)
    least = torch.where(flat, torch.minimum(at_a[0] - line_a, at_b[0] - line_b), least)
    return least - slack, greatest + slack
