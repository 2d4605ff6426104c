r"""Difference quotients with one point fixed: the exact range of (f(y) - f(z)) / (y - z) over all real y.

Let g = f' and q(y) = (f(y) - f(z)) / (y - z).  Then :math:`q' = F / (y - z)^2` with

.. math:: F(y) = g(y) (y - z) - (f(y) - f(z)), \qquad F' = g'(y) (y - z).

**Where the supremum is.**  To the right of z, on a piece where g rises (f convex), F does not decrease, so
that q is largest at the piece's ends; on the piece that holds z, if g falls there, q <= g(z) by concavity.
Hence the supremum over y > z is the largest of g(z), the limit of q at infinity (that of g), the values q(c)
at jumps c of g, and the suprema over the falling pieces that lie wholly to the right of z.  The point
reflection f(y) -> -f(-y) keeps q and turns left into right, and f -> -f turns the supremum into the infimum:
one case is enough.

**A bound on a falling piece** [a, b], z < a.  There f lies below its tangent at any y0 of the piece, so

.. math:: q(y) \le g(y_0) - F(y_0) / (y - z) \le g(y_0) + \max(-F(y_0) / (a - z), -F(y_0) / (b - z)).

This holds for *every* y0; at the touching point F(y0) = 0 it is the supremum itself.  So the search for y0 (a
table, two Newton steps, and a bracketing root finder where that is loose) needs no proof at all: only
the last evaluation counts, with g rounded up and F rounded down by the errors of f, g and the sums.  The
search aims at F = its error bound rather than 0, the side on which the error costs least (for tanh: the end
of the bracket nearer to 0).

**Periodic f** (sin): z is reduced to one period with an error below 2^-48 (q is Lipschitz in z, with constant
c/2 = 1/2), the limit of q at infinity is 0, and a piece further than one period away is beaten by the same
piece one period nearer, or by that 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from curvcert.activations.base import Activation, Elementwise, Profile, Turn, no_curvature
from curvcert.activations.interval import (
    LARGEST,
    NEARNESS,
    PERIODIC_LIMIT,
    Intervals,
    check_tensor,
    profile_range,
)
from curvcert.errors import InvalidInput
from curvcert.memory import spare_elements
from curvcert.rounding import TINY, UNIT_ROUNDOFF

CHUNK = 2**15
"""Points solved together: small enough for the cache, large enough for both cores; more on an accelerator."""

COPIES = 128
"""Intermediate results held at a time for one point."""

MOST_STEPS = 64
"""Steps of the root finder; stopping early costs tightness, never soundness."""

NODES, NEAREST, FARTHEST = 8192, 1e-6, 1e6
"""Size and ends (in units of the profile's scale) of the tables of touching points."""

LOOSENESS = 1e-12
"""The relative looseness beyond which the tabulated touching point is searched for anew."""

NOISE = 1e-8
"""The looseness, relative to the peak, that is put down to rounding where F is within its own error."""

PERIODS = (-2, -1, 0, 1, 2)

# 2 pi in two parts: the first has 23 bits, so that k TWO_PI_HIGH is exact for |k| < 2^30.
TWO_PI_HIGH = 6.283185005187988
TWO_PI_LOW = 3.019915981956753e-07


@torch.no_grad()
def anchored_slope_range(act: Activation, z: Tensor) -> Intervals:
    r"""Enclose :math:`(\phi(y) - \phi(z)) / (y - z)` over all real y, and phi'(z), elementwise in z.

    >>> from curvcert.activations import TANH
    >>> lo, hi = anchored_slope_range(TANH, torch.tensor([2.0], dtype=torch.float64))
    >>> lo.item(), round(hi.item(), 10)
    (0.0, 0.5815729372)

    Raises:
        InvalidInput: if z is not a finite float64 tensor.
    """
    _check_anchor(z)
    if act.profiles is None or not act.is_tame:
        return torch.full_like(z, act.slope[0]), torch.full_like(z, act.slope[1])
    return _anchored_range(act.profiles[0], act.profiles[1], z)


@torch.no_grad()
def anchored_curvature_range(act: Activation, z: Tensor) -> Intervals:
    r"""Enclose :math:`(\phi'(y) - \phi'(z)) / (y - z)` over all real y, and phi''(z), elementwise in z.

    >>> from curvcert.activations import TANH
    >>> lo, hi = anchored_curvature_range(TANH, torch.zeros(1, dtype=torch.float64))
    >>> round(lo.item(), 10), round(hi.item(), 10)
    (-0.5825829084, 0.5825829084)

    Raises:
        UnsupportedActivation: if phi' is not Lipschitz, or its curvature was not declared.
    """
    _check_anchor(z)
    if act.curvature is None:
        raise no_curvature(act)
    if act.profiles is None or act.profiles[2] is None or not act.is_tame:
        return torch.full_like(z, act.curvature[0]), torch.full_like(z, act.curvature[1])
    return _anchored_range(act.profiles[1], act.profiles[2], z)


def _anchored_range(f: Profile, g: Profile, z: Tensor) -> Intervals:
    """Enclose the difference quotients of f, whose derivative is g, chunk by chunk."""
    together = spare_elements(z.device, COPIES * CHUNK) // COPIES
    chunks = [_enclose_chunk(f, g, chunk) for chunk in z.flatten().split(together)]
    lows, highs = zip(*chunks, strict=True)
    return torch.cat(lows).reshape(z.shape), torch.cat(highs).reshape(z.shape)


def _enclose_chunk(f: Profile, g: Profile, z: Tensor) -> Intervals:
    least, greatest = g.range
    at, far = (z, torch.zeros_like(z, dtype=torch.bool)) if g.period is None else _reduced(z)
    lowest, highest = profile_range(g, at, at)
    high = _supremum(f, g, at, highest, 1)
    low = -_supremum(f, g, at, -lowest, -1)
    if g.period is not None:
        high, low = high + 2.0**-48, low - 2.0**-48
    # NaN comes from overflow alone, beyond 1e307: the global range serves there.
    low = torch.where(far | low.isnan(), least, low).clamp(least, greatest)
    high = torch.where(far | high.isnan(), greatest, high).clamp(least, greatest)
    return low, high


def _supremum(f: Profile, g: Profile, z: Tensor, g_z: Tensor, sign: int) -> Tensor:
    """Bound sign q(y) over all y from above, given such a bound for y = z."""
    best = g_z.clamp(min=max(sign * g.limits[0], sign * g.limits[1]))
    for turn in g.turns:
        if turn.jump:
            best = torch.maximum(best, _jump_upper_bound(f, g, z, turn, sign))
    for arc in _arcs(f, g, sign):
        best = _with_arc(arc, z, best)
    return best


@dataclass(frozen=True)
class _Piece:
    """A piece on which g is monotone, between two turns; None is infinity."""

    left: Turn | None
    right: Turn | None
    trend: str


def _pieces(g: Profile) -> tuple[_Piece, ...]:
    turns, trend = g.turns, g.trend
    if g.period is not None:
        turns = tuple(replace(turn, point=turn.point + k * g.period) for k in PERIODS for turn in g.turns)
        trend = g.trend[0] + g.trend[1:] * len(PERIODS)
    ends = (None, *turns, None)
    pieces = tuple(_Piece(*piece) for piece in zip(ends, ends[1:], trend, strict=False))
    return pieces if g.period is None else pieces[1:-1]


def _jump_upper_bound(f: Profile, g: Profile, z: Tensor, turn: Turn, sign: int) -> Tensor:
    """Bound sign q(c) at a jump c of g from above; near c, by the range of g."""
    d = turn.point - z
    f_c, f_z = f.function(torch.full_like(z, turn.point)), f.function(z)
    error = f.slack(f_c) + f.slack(f_z) + 4 * UNIT_ROUNDOFF * (f_c.abs() + f_z.abs())
    bound = sign * (f_c - f_z) / d + error / d.abs()
    largest = g.range[1] if sign > 0 else -g.range[0]
    return torch.where(d == 0, largest, bound + bound.abs() * 4 * UNIT_ROUNDOFF).clamp(max=largest)


def _margin(turn: Turn) -> float:
    """Return a bound on the error of a turn's point, also after adding periods."""
    return 4 * NEARNESS * max(abs(turn.point), 2.0**-900)


@dataclass(frozen=True)
class _Arc:
    """A piece seen from z: sign g falls from `near` to `far` (None: infinity), away from z on its `side`."""

    f: Profile
    g: Profile
    near: Turn
    far: Turn | None
    side: int
    sign: int

    @property
    def peak(self) -> float:
        """The largest value of sign g on the piece."""
        return self.near.upper if self.sign > 0 else -self.near.lower

    @property
    def floor(self) -> float:
        """The largest limit of sign g, which every supremum reaches."""
        return max(self.sign * self.g.limits[0], self.sign * self.g.limits[1])

    @property
    def least(self) -> float:
        """A w that is inside the true piece, whose ends are known to a margin."""
        return _margin(self.near)

    @property
    def most(self) -> float:
        """The largest such w."""
        if self.far is None:
            return LARGEST / 64
        return abs(self.far.point - self.near.point) - _margin(self.near) - _margin(self.far)

    def distances(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance from z to the near end, rounded down, and to the far end, rounded up."""
        near = self.side * (self.near.point - z) - _margin(self.near)
        if self.far is None:
            return near, torch.full_like(z, torch.inf)
        return near, self.side * (self.far.point - z) + _margin(self.far)


def _arcs(f: Profile, g: Profile, sign: int) -> Iterator[_Arc]:
    """Yield every piece on which sign g falls away from a z on one side of it."""
    for piece in _pieces(g):
        for side in (1, -1):
            near, far = (piece.left, piece.right) if side > 0 else (piece.right, piece.left)
            if near is not None and piece.trend == ("-" if side * sign > 0 else "+"):
                yield _Arc(f, g, near, far, side, sign)


def _with_arc(arc: _Arc, z: Tensor, best: Tensor) -> Tensor:
    """Raise `best` to a bound on sign q over one piece, wherever it may hold the supremum.

    A supremum there is a touching point, where q = g: it is at most the peak, the value at the near end.
    """
    distance = arc.side * (arc.near.point - z)
    margin = _margin(arc.near)
    active = (distance > -margin) & (best < arc.peak)
    if arc.g.period is not None:
        active &= distance <= arc.g.period + 2 * margin
    index = active.nonzero().squeeze(-1)
    if index.numel() == 0:
        return best
    bound = _Tangent(arc, z[index], best[index]).upper_bound()
    bound = torch.where(distance[index] > margin, bound.clamp(max=arc.peak), arc.peak)
    return best.index_put((index,), torch.maximum(best[index], bound))


@dataclass(frozen=True, eq=False)
class _Tangent:
    """The tangents from (z, f(z)) to f on one falling piece: y = near + side w with w > 0, d = |y - z|."""

    arc: _Arc
    z: Tensor
    best: Tensor

    @cached_property
    def f_z(self) -> Tensor:
        """The value at the anchor."""
        return self.arc.f.function(self.z)

    @cached_property
    def f_z_error(self) -> Tensor:
        """Its error, and that of subtracting it."""
        return self.arc.f.slack(self.f_z) + 4 * UNIT_ROUNDOFF * self.f_z.abs()

    def evaluate(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an upper bound on G = sign g, a lower bound on F, and twice the error in F, at w."""
        arc = self.arc
        y = arc.near.point + arc.side * w
        d = arc.side * (y - self.z)
        f, g = arc.f.function(y), arc.g.function(y)
        g_error, gd = arc.g.slack(g), g * d
        error = g_error * d + arc.f.slack(f) + self.f_z_error + 8 * UNIT_ROUNDOFF * (gd.abs() + f.abs())
        F = arc.sign * (gd - arc.side * (f - self.f_z)) - error
        return arc.sign * g + g_error, F, 2 * error

    def upper_bound(self) -> Tensor:
        """Bound sign q on the piece: by the table of touching points, by search where that is loose."""
        bound, loose = self._bound_at(self._refined())
        index = loose.nonzero().squeeze(-1)
        if index.numel() == 0:
            return bound
        rest = _Tangent(self.arc, self.z[index], self.best[index])
        return bound.index_put((index,), torch.minimum(bound[index], rest._bound_at(rest.touch())[0]))

    def _bound_at(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return G(y0) + max(-F/d_near, -F/d_far), rounded up, and where a better y0 may lower it."""
        G, F, error = self.evaluate(w)
        near, far = self.arc.distances(self.z)
        correction = -F / torch.where(F < 0, near, far)
        bound = G + correction + 8 * UNIT_ROUNDOFF * (G.abs() + correction.abs()) + TINY
        attained = G - (F + error) / (near + w)
        excess = bound - torch.maximum(attained, self.best)
        converged = (F.abs() <= 4 * error) & (excess <= NOISE * abs(self.arc.peak))
        return bound, ~converged & ~(excess <= LOOSENESS * bound.abs())

    def _refined(self) -> Tensor:
        """Interpolate the touching point in the table, and take two Newton steps with the tabulated slope."""
        w, slope = _touching_table(self.arc, self.z.device).interpolate(self.arc.distances(self.z)[0])
        least, most = self.arc.least, self.arc.most
        for _ in range(2):
            w = w.clamp(least, most)
            step = self.evaluate(w)[1] / slope
            w = torch.where(step.isfinite(), torch.minimum((w - step).clamp(min=w / 2), 2 * w), w)
        return w.clamp(least, most)

    def touch(self) -> Tensor:
        """Search for w with F = 0; whatever is returned gives a valid bound."""
        low = torch.full_like(self.z, self.arc.least)
        high, F_high = self._outer_end()
        F_low = self.evaluate(low)[1]
        root = _last_nonnegative(lambda w: self.evaluate(w)[1], (low, F_low), (high, F_high), self.arc.g.scale)
        return torch.where(F_low <= 0, low, torch.where(F_high >= 0, high, root))

    def _outer_end(self) -> tuple[Tensor, Tensor]:
        """Return w beyond the touching point, and F there: the piece's end, or a point found by growing w."""
        arc = self.arc
        w = torch.full_like(self.z, arc.g.scale if arc.far is None else arc.most)
        G, F, _ = self.evaluate(w)
        growing = self._may_grow(G, F)
        while arc.far is None and bool(growing.any()) and float(w.max()) < LARGEST / 64:
            w = torch.where(growing, 8 * w, w)
            G, F, _ = self.evaluate(w)
            growing = self._may_grow(G, F)
        return w, F

    def _may_grow(self, G: Tensor, F: Tensor) -> Tensor:
        """Tell where a larger w may still lower the bound by more than the looseness that we accept."""
        return (F > 0) & (G - self.best > LOOSENESS * (G.abs() + self.best.abs()))


@dataclass(frozen=True, eq=False)
class _Table:
    """log w and dF/dw of the touching point, on a uniform grid of the log of the distance to the piece."""

    start: float
    step: float
    log_w: Tensor
    slope: Tensor

    def interpolate(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return w and dF/dw, linear between the nodes; the end nodes serve beyond them."""
        t = ((torch.log(distance) - self.start) / self.step).nan_to_num(0.0).clamp(0, len(self.log_w) - 1.001)
        i = t.long()
        t = t - i
        w = torch.exp(torch.lerp(self.log_w[i], self.log_w[i + 1], t))
        return w, torch.lerp(self.slope[i], self.slope[i + 1], t)


@lru_cache(maxsize=512)
def _touching_table(arc: _Arc, device: torch.device) -> _Table:
    """Tabulate the touching points of one piece; nothing rests on them but tightness."""
    start, end = math.log(NEAREST * arc.g.scale), math.log(FARTHEST * arc.g.scale)
    step = (end - start) / (NODES - 1)
    distance = torch.exp(torch.arange(NODES, dtype=torch.float64, device=device) * step + start)
    z = arc.near.point - arc.side * (distance + _margin(arc.near))
    tangent = _Tangent(arc, z, torch.full_like(z, -torch.inf).clamp(min=arc.floor))
    w = tangent.touch()
    above, below = tangent.evaluate(w * (1 + 2.0**-14))[1], tangent.evaluate(w * (1 - 2.0**-14))[1]
    return _Table(start, step, torch.log(w), (above - below) / (w * 2.0**-13))


def _last_nonnegative(F: Elementwise, low: Intervals, high: Intervals, scale: float) -> Tensor:
    """Return, close to the root of F between low and high, a point where F >= 0 (Chandrupatla 1997).

    Both ends come with the value of F; entries without a change of sign return something of no use.
    """
    (x1, f1), (x2, f2) = low, high
    t = torch.full_like(x1, 0.5)
    idle = (f1 <= 0) | (f2 >= 0)
    for _ in range(MOST_STEPS):
        x = x1 + t * (x2 - x1)
        value = F(x)
        same = (value > 0) == (f1 > 0)
        x3, f3 = torch.where(same, x1, x2), torch.where(same, f1, f2)
        x2, f2 = torch.where(same, x2, x1), torch.where(same, f2, f1)
        x1, f1 = x, value
        tolerance = 2.0**-46 * (x1.abs() + 2.0**-8 * scale)
        limit = tolerance / (x2 - x1).abs()
        if bool(((limit > 0.5) | idle).all()):
            break
        xi, ratio = (x1 - x2) / (x3 - x2), (f1 - f2) / (f3 - f2)
        smooth = (ratio * ratio < xi) & ((1 - ratio) * (1 - ratio) < 1 - xi)
        quadratic = f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2)
        t = torch.where(smooth, quadratic, 0.5).clamp(limit.clamp(max=0.5), 1 - limit.clamp(max=0.5))
    return torch.where(f1 >= 0, x1, x2)


def _reduced(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return z less a multiple of 2 pi, within 2^-49, and where z is too large for that."""
    far = z.abs() > PERIODIC_LIMIT
    k = torch.round(torch.where(far, 0.0, z) / (TWO_PI_HIGH + TWO_PI_LOW))
    return (torch.where(far, 0.0, z) - k * TWO_PI_HIGH) - k * TWO_PI_LOW, far


def _check_anchor(z: Tensor) -> None:
    check_tensor(z, "z")
    if bool(z.isinf().any()):
        raise InvalidInput("An anchor must be finite, got an infinite entry. Check the network's inputs.")
