r"""The line certificate: the network itself along the gradient, and curvature only across it, in l2.

A curvature certificate bounds :math:`F = f_i - f_y` by :math:`F(x) + g \cdot d + \tfrac12 K |d|^2`, as if F curved most
in the very direction in which it also rises most.  Along that one direction F need not be bounded at all: it can be
evaluated.  With the unit vector e of the gradient at x, :math:`d = \alpha e + w` and w across e,

.. math:: |d| \le r \iff |w|^2 \le r^2 - \alpha^2,

so that from a point c = x + a e of the line, with :math:`p = \nabla F(c) \cdot e` and :math:`q = |\nabla F(c) - p e|`,

.. math::
    F(x + d) &\le F(c) + p (\alpha - a) + q |w| + \tfrac{\kappa}{2} \left((\alpha - a)^2 + |w|^2\right) \\
             &\le F(c) + p (\alpha - a) + q \sqrt{r^2 - \alpha^2} + \tfrac{\kappa}{2} (r^2 + a^2 - 2 \alpha a),

which but for the root is linear in :math:`\alpha`.  Zones of :math:`\alpha`, each with its own c, cover the ball; where
all of these bounds are negative, the class i stays below y up to r.  With a linear F along e and q = 0 the loss is

.. math:: \max_\alpha\, g \alpha + \tfrac{K}{2} (r^2 - \alpha^2) = g r \quad\text{if } K r \le g, \qquad
          \tfrac{g^2}{2K} + \tfrac{K}{2} r^2 \quad\text{otherwise},

so that curvature costs nothing up to r = g / K, and never more than in the curvature certificate.

:math:`\kappa` is the pair's global curvature, or a bound on how fast its gradient can change within
:math:`\sqrt{r^2 + a^2 - 2 \alpha a}` of c, from the shell certificate's balls.  The line's own rounding counts: with c
within :math:`\delta` of the exact point, a zone also loses
:math:`|\nabla F(c)| \delta + \tfrac{\kappa}{2} \delta (4 r + \delta)`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.drift import carry_gradients, carry_point
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.certificates.memory import spare_elements
from curvcert.certificates.shell import Layers, gradient_growth, numbers_of_sample
from curvcert.network import Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.rounding import TINY, UNIT_ROUNDOFF, gamma, inflate, norm_upper_bound_of_vectors

ZONES = 6
"""Zones of the line: one about x, which also covers all that lies behind it, and equal ones up to r."""

CELLS = 64
"""Where no radii are given, they are sought among those that divide the linear limit into so many equal parts."""

_FIRST = 1 / 12
"""Where the first zone ends, as a share of r."""

_FARTHEST = 72
"""The last of these radii: a line that bends down exceeds the linear limit."""

_UNDERFLOW = 2.0**-500
"""The root of what the squares of the least radii may lose."""

_CHUNK_ELEMENTS = 2**24
"""Numbers that the pairs in hand may take, on a processor."""


_Share = tuple[float, float, float]
"""A zone as shares of r: its ends, and the place of its point."""


@dataclass(frozen=True, eq=False)
class Line:
    """A network ready for line certificates: its outputs' problem in l2, and what the module's margins lose."""

    problem: Problem
    deviations: Tensor

    @property
    def network(self) -> Network:
        """The network that it is about."""
        return self.problem.network


@dataclass(frozen=True, eq=False)
class LineQuery:
    """Samples to certify, with what is known: gradients of f_i - f_y, linear limits, global curvatures and radii.

    `x` and `label` are (batch, ...); `gradient` is (batch, classes, inputs), the others (batch, classes).
    """

    x: Tensor
    label: Tensor
    gradient: Tensor
    limit: Tensor
    K: Tensor
    known: Tensor

    def part(self, index: Tensor) -> "LineQuery":
        """Return the query about some of the samples."""
        return LineQuery(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def line_radii(line: Line, query: LineQuery, epsilons: tuple[float, ...] = (), layers: Layers | None = None) -> Tensor:
    """Return certified radii of every class, (batch, classes), at least the known ones.

    Given radii are decided, the least first; without any the largest that holds is sought by bisection of a grid, which
    is the same whatever is known.  With `layers` the curvature is bounded over balls where the global one is too large.
    """
    found = query.known.clone()
    if epsilons:
        alive = torch.ones(len(found), dtype=torch.bool, device=found.device)
        for eps in sorted(epsilons):
            short = alive & (found.amin(dim=1) < eps)
            alive[short] = _raised(line, query, found, short, torch.full_like(found[:, 0], eps), layers)
        return found
    limit = query.limit.amin(dim=1)
    step = (1 - 2.0**-12) * limit / CELLS
    low = (found.amin(dim=1) / step).nan_to_num(nan=0.0).clamp(0, _FARTHEST).floor()
    high = torch.full_like(low, _FARTHEST + 1)
    while bool((high - low > 1).any()):
        # The linear limit first, or almost: most that gets anywhere gets there.
        middle = torch.where((low < CELLS) & (high > _FARTHEST), CELLS, ((low + high) / 2).floor())
        todo = (high - low > 1) & step.isfinite()
        holds = torch.zeros_like(todo)
        holds[todo] = _raised(line, query, found, todo, middle * step, layers)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return found


def _raised(line: Line, query: LineQuery, found: Tensor, todo: Tensor, r: Tensor, layers: Layers | None) -> Tensor:
    """Raise the radii in `found` to r where that holds for every class; tell for which of the samples to do it does."""
    index = todo.nonzero().flatten()
    if len(index) == 0:
        return torch.ones(0, dtype=torch.bool, device=r.device)
    part = replace(query.part(index), known=found[index])
    holds = _holds(line, part, r[index], layers)
    won = index[holds]
    found[won] = torch.maximum(found[won], r[won, None])
    return holds


def _holds(line: Line, query: LineQuery, r: Tensor, layers: Layers | None) -> Tensor:
    """Tell which samples keep their class up to r, (batch,): each class that is not known to stay below is tried.

    First by global curvatures, from the far end, where most of what fails does whatever the curvature; then, in what is
    left open, over balls: the class that is known to stay below for the least radius before the others, and from the
    near end, where curvature costs most.
    """
    holds = torch.ones_like(query.label, dtype=torch.bool)
    pairs = (query.known < r[:, None]).scatter(1, query.label[:, None], False).nonzero()
    left: list[tuple[_Share, Tensor]] = []
    for share in reversed(list(_shares())):
        pairs = pairs[holds[pairs[:, 0]]]
        open_ = []
        for piece in _pieces(pairs, line, None):
            look = _look(line, query, piece, share, r)
            proven, hopeful = look.worst(look.K) < 0, look.worst(torch.zeros_like(look.K)) < 0
            holds[piece[~hopeful, 0]] = False
            open_.append(piece[hopeful & ~proven])
        left.append((share, torch.cat([pairs[:0], *open_])))
    weakest = query.known.scatter(1, query.label[:, None], torch.inf).argmin(dim=1)
    for first in (True, False):
        for share, pairs in reversed(left):
            chosen = pairs[((weakest[pairs[:, 0]] == pairs[:, 1]) == first) & holds[pairs[:, 0]]]
            if layers is None:
                holds[chosen[:, 0]] = False
                continue
            for piece in _pieces(chosen, line, layers):
                look = _look(line, query, piece, share, r)
                ball = gradient_growth(layers, look.points, query.label[piece[:, 0]], piece[:, 1], look.reach)
                proven = look.worst(torch.minimum(ball, look.K)) < 0
                holds[piece[~proven, 0]] = False
    return holds


def _pieces(pairs: Tensor, line: Line, layers: Layers | None) -> list[Tensor]:
    """Return pairs, (number of the sample, class) each, in pieces that fit the memory; none if there are none."""
    return list(pairs.split(_size(line, layers))) if len(pairs) else []


def _shares() -> Iterator[_Share]:
    """Yield the ends of every zone and the place of its point, as shares of r."""
    yield -1.0, _FIRST, 0.0
    ends = [_FIRST + (1.0 - _FIRST) * j / (ZONES - 1) for j in range(ZONES - 1)] + [1.0]
    for low, high in pairwise(ends):
        yield low, high, (low + high) / 2


@dataclass(frozen=True, eq=False)
class _Zone:
    """A zone for every pair: its ends, the place of its point, and r."""

    low: Tensor
    high: Tensor
    at: Tensor
    r: Tensor

    @property
    def across(self) -> Tensor:
        """The farthest that w reaches."""
        nearest = torch.where(self.low > 0, self.low, 0.0)
        return inflate(((self.r - nearest) * (self.r + nearest)).sqrt(), 8 * UNIT_ROUNDOFF) + _UNDERFLOW

    def squared(self, alpha: Tensor) -> Tensor:
        """Bound the squared distance from the point, of what lies at alpha along the line."""
        r, a = self.r, self.at
        return (r * r + a * a - 2 * alpha * a).clamp(min=0.0) + gamma(16) * (r + a).square() + TINY

    @property
    def reach(self) -> Tensor:
        """The farthest that anything in the zone is from the point; nothing is farther than behind the near end."""
        return inflate(self.squared(self.low).sqrt(), 8 * UNIT_ROUNDOFF)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A pair as seen from its point: F and its slope along the line, enclosed; bounds across, and on the rounding."""

    F: Tensor
    steep: tuple[Tensor, Tensor]
    across: Tensor
    size: Tensor
    off: Tensor

    def worst(self, zone: _Zone, K: Tensor) -> Tensor:
        """Bound F over the zone, K a bound on the curvature."""
        rounding = self.size * self.off + 0.5 * K * self.off * (4 * zone.r + self.off)
        lost = inflate(self.across * zone.across + rounding, gamma(16))
        ends = []
        for alpha, slope in zip((zone.low, zone.high), self.steep, strict=True):
            along, bent = slope * (alpha - zone.at), inflate(0.5 * K * zone.squared(alpha), gamma(8))
            size = self.F.abs() + slope.abs() * (alpha.abs() + zone.at) + bent + lost
            ends.append(self.F + along + bent + lost + gamma(16) * size)
        return torch.maximum(*ends) + TINY


@dataclass(frozen=True, eq=False)
class _Look:
    """Pairs in one zone: their points, what is seen from there, and their global curvatures."""

    zone: _Zone
    points: Tensor
    seen: _Seen
    K: Tensor

    def worst(self, K: Tensor) -> Tensor:
        """Bound F over the zone, K a bound on the curvature."""
        return self.seen.worst(self.zone, K)

    @property
    def reach(self) -> Tensor:
        """How far from its point a zone reaches, the point's own rounding included."""
        return inflate(self.zone.reach + self.seen.off, 0.0)


def _look(line: Line, query: LineQuery, pairs: Tensor, share: _Share, r: Tensor) -> _Look:
    """Look at pairs, (number of the sample, class) each, from their points of one zone."""
    sample, other = pairs.unbind(dim=1)
    label, here = query.label[sample], r[sample]
    low, high, at = (part * here for part in share)
    zone = _Zone(low, high, at, here)
    points, direction, off = _points(query.x[sample], query.gradient[sample, other], zone)
    return _Look(zone, points, _seen(line, points, direction, label, other, off), query.K[sample, other])


def _points(x: Tensor, g: Tensor, zone: _Zone) -> tuple[Tensor, Tensor, Tensor]:
    """Return the computed points x + a v, the computed direction v, and how far they may be from x + a v / |v|.

    Without a gradient g there is no direction, and nothing is known of the points: they may be infinitely far.
    """
    peak = g.abs().amax(dim=1, keepdim=True)
    g = g / peak.clamp(min=2.0**-900)
    v = g / torch.linalg.vector_norm(g, dim=1, keepdim=True).clamp(min=2.0**-900)
    flat = x.flatten(1)
    points = (flat + zone.at[:, None] * v).reshape(x.shape)
    size = norm_upper_bound_of_vectors(flat, 2, 1) + 2 * zone.r
    off = inflate(gamma(2 * flat.shape[1] + 64) * size, gamma(4)) + TINY
    return points, v, torch.where(peak[:, 0] > 0, off, torch.inf)


def _seen(line: Line, points: Tensor, v: Tensor, label: Tensor, other: Tensor, off: Tensor) -> _Seen:
    """Evaluate f_i - f_y and its gradient at the points."""
    network, n = line.network, v.shape[1]
    evaluation = evaluate_with_error(network, points, line.problem.norms)
    last = evaluation.states[-1]
    value, error = last.value.flatten(1), last.error.flatten(1)
    own, others = label[:, None], other[:, None]
    gap = (value.gather(1, others) - value.gather(1, own))[:, 0]
    doubt = (error.gather(1, others) + error.gather(1, own))[:, 0] + line.deviations[label, other]
    F = gap + inflate(doubt + 2 * UNIT_ROUNDOFF * gap.abs(), gamma(4))
    rows = torch.zeros_like(value).scatter(1, others, 1.0).scatter(1, own, -1.0)
    covectors = carry_gradients(line.problem, carry_point(line.problem, evaluation), rows[:, None])
    assert covectors is not None  # only smooth networks have a line
    g, drift = covectors[0].value.flatten(2)[:, 0], covectors[0].drift[:, 0]
    length = norm_upper_bound_of_vectors(g, 2, 1)
    slope = (g * v).sum(dim=1)
    doubt = inflate(drift + gamma(2 * n + 64) * length, gamma(4)) + TINY
    across = norm_upper_bound_of_vectors(g - slope[:, None] * v, 2, 1)
    across = inflate(across + drift + 16 * UNIT_ROUNDOFF * length, gamma(8)) + TINY
    return _Seen(F, (slope - doubt, slope + doubt), across, inflate(length + drift, gamma(4)), off)


def _size(line: Line, layers: Layers | None) -> int:
    """Return how many pairs are looked at at once."""
    network = line.network
    widest = max([math.prod(network.in_shape), *(math.prod(block.out_shape) for block in network.blocks)])
    numbers = 24 * widest if layers is None else numbers_of_sample(layers)
    return max(1, spare_elements(network.device, _CHUNK_ELEMENTS) // numbers)
