r"""The line certificate: the network itself along the gradient, and curvature only across it, in l2.

A curvature certificate bounds :math:`F = f_i - f_y` by :math:`F(x) + g \cdot d + \tfrac12 K |d|^2`, as if F curved most
in the very direction in which it also rises most.  Along that one direction F need not be bounded at all: it can be
evaluated.  With the unit vector e of the gradient at x, :math:`d = \alpha e + w` and w across e,

.. math:: |d| \le r \iff |w|^2 \le r^2 - \alpha^2,

so that from a point c = x + a e of the line, with :math:`p = \nabla F(c) \cdot e` and :math:`q = |\nabla F(c) - p e|`,

.. math::
    F(x + d) &\le F(c) + p (\alpha - a) + q |w| + \tfrac{\kappa}{2} \left((\alpha - a)^2 + |w|^2\right) \\
             &\le F(c) + p (\alpha - a) + q \sqrt{r^2 - \alpha^2} + \tfrac{\kappa}{2} (r^2 + a^2 - 2 \alpha a),

which but for the root is linear in :math:`\alpha`.  The root is at most its tangent at any :math:`\beta` in the ball,

.. math:: \sqrt{r^2 - \alpha^2} \le \frac{r^2 - \beta \alpha}{\sqrt{r^2 - \beta^2}},

and with :math:`\beta` where the sum is largest in a zone of :math:`\alpha` nothing is lost: the largest value of this
linear bound, at one of the zone's two ends, is the sum's own.  Zones, each with its own c, cover the ball; where all of
these values are negative, the class i stays below y up to r.  With a linear F along e and q = 0 the loss is

.. math:: \max_\alpha\, g \alpha + \tfrac{K}{2} (r^2 - \alpha^2) = g r \quad\text{if } K r \le g, \qquad
          \tfrac{g^2}{2K} + \tfrac{K}{2} r^2 \quad\text{otherwise},

so that curvature costs nothing up to r = g / K, and never more than in the curvature certificate.

:math:`\kappa` is the pair's global curvature, or a bound on how fast its gradient can change within
:math:`\sqrt{r^2 + a^2 - 2 \alpha a}` of c, from the shell certificate's balls.  The line's own rounding counts: with c
within :math:`\delta` of the exact point, a zone also loses
:math:`|\nabla F(c)| \delta + \tfrac{\kappa}{2} \delta (2 (r + \max(r, a)) + \delta)`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_points
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.certificates.radii import decided
from curvcert.certificates.shell import Layers, at_centres, gradient_growth, numbers_of_sample
from curvcert.memory import spare_elements
from curvcert.network import Network
from curvcert.propagation.analysis import AtPoints
from curvcert.propagation.covectors import Covectors
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, norm_upper_bound_of_vectors

ZONES = 6
"""Zones of the line: one about x, half as long, which also covers all that lies behind it, and equal ones up to r."""

CELLS = 64
"""Where no radii are given, they are sought among those that divide the linear limit into so many equal parts."""

_FARTHEST = 72
"""The last of these radii: a line that bends down exceeds the linear limit."""

_LARGEST = 1e100
"""No radius beyond is sought, so that nothing overflows."""

_AGAIN = 4
"""How many times at most some more is tried from what was reached."""

_INSIDE = 2.0**-20
"""How far inside the ball, as a share of r, a tangent touches: at the very end it would stand upright."""

_UNDERFLOW = 2.0**-500
"""More than what the products of the least radii may lose."""

_CHUNK_ELEMENTS = 2**24
"""Numbers that the pairs in hand may take, on a processor."""


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

    `at` and `label` are the samples; `gradient` is (batch, classes, inputs), the others (batch, classes).
    """

    at: AtPoints
    label: Tensor
    gradient: Tensor
    limit: Tensor
    K: Tensor
    known: Tensor

    def part(self, index: Tensor) -> "LineQuery":
        """Return the query about some of the samples."""
        tensors = (self.label, self.gradient, self.limit, self.K, self.known)
        return LineQuery(self.at.of_samples(index), *(tensor[index] for tensor in tensors))


def line_radii(line: Line, query: LineQuery, epsilons: tuple[float, ...] = (), layers: Layers | None = None) -> Tensor:
    """Return certified radii of every class, (batch, classes), at least the known ones.

    They are sought among the given radii, or, without any, in a grid of the linear limit.  With `layers` the curvature
    is bounded over balls where the global one is too large.
    """
    found, choice = query.known.clone(), _Choice.of(query, epsilons)
    # What fails whatever the curvature is found out without balls, which cost most.
    place = _farthest(line, query, choice, curved=layers is None)
    if layers is not None:
        place = _over_balls(line, query, choice, layers, place)
    won = place > choice.known
    found[won] = torch.maximum(found[won], choice.radius(place)[won, None])
    return found


_Ends = tuple[Tensor, Tensor, Tensor]
"""A zone of every pair: its ends, and the place of its point."""


@dataclass(frozen=True, eq=False)
class _Choice:
    """The radii that are sought, (batch, count) from 0 up, the place of the last one known, and where to look first."""

    radii: Tensor
    known: Tensor
    first: int

    @staticmethod
    def of(query: LineQuery, epsilons: tuple[float, ...]) -> "_Choice":
        """Return the given radii, or the grid of the linear limit; nothing is sought where that is not finite."""
        limit, least = query.limit.amin(dim=1), query.known.amin(dim=1)
        if epsilons:
            given = limit.new_tensor([0.0, *(decided(eps) for eps in sorted(epsilons))])
            radii, first = given.expand(len(limit), -1), len(epsilons)
        else:
            cells = torch.arange(_FARTHEST + 1, dtype=limit.dtype, device=limit.device)
            # The linear limit first, or almost: most that gets anywhere gets there.
            radii, first = ((1 - 2.0**-12) * limit / CELLS)[:, None] * cells, CELLS
            radii = torch.where(limit.isfinite()[:, None], radii, 0.0)
        radii = radii.clamp(max=_LARGEST)
        return _Choice(radii, (radii <= least[:, None]).sum(dim=1) - 1, first)

    @property
    def last(self) -> int:
        """The place of the largest."""
        return self.radii.shape[1] - 1

    def radius(self, place: Tensor) -> Tensor:
        """Return every sample's radius at a place."""
        return self.radii.gather(1, place[:, None])[:, 0]

    def of_samples(self, index: Tensor) -> "_Choice":
        """Return the choice of some of the samples, each any number of times."""
        return _Choice(self.radii[index], self.known[index], self.first)


def _bisected(low: Tensor, high: Tensor, first: Tensor, holds: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the largest place from `low` on and before `high` that was found to hold, the one at `low` as given.

    `holds` is asked about places, and told which of them count; `first` is asked about first where it lies between.
    """
    middle = torch.where((low < first) & (first < high), first, (low + high) // 2)
    while bool((todo := high - low > 1).any()):
        yes = holds(middle, todo)
        low, high = torch.where(todo & yes, middle, low), torch.where(todo & ~yes, middle, high)
        middle = (low + high) // 2
    return low


def _farthest(line: Line, query: LineQuery, choice: _Choice, curved: bool) -> Tensor:
    """Return the place of the largest radius that is found to hold, (batch,), by global curvatures or by none."""

    def holds(place: Tensor, todo: Tensor) -> Tensor:
        index, found = todo.nonzero().flatten(), torch.zeros_like(todo)
        found[index] = _holds(line, query.part(index), choice.radius(place)[index], curved)
        return found

    end = torch.full_like(choice.known, choice.last + 1)
    return _bisected(choice.known, end, torch.full_like(end, choice.first), holds)


def _holds(line: Line, query: LineQuery, r: Tensor, curved: bool) -> Tensor:
    """Tell which samples keep their class up to r, (batch,): from the far end, where most of what fails does."""
    holds = torch.ones_like(query.label, dtype=torch.bool)
    pairs = _open_pairs(query, r)
    start = r / (2 * ZONES)
    for low, high, at in reversed([(-r, start, 0.0 * r), *_beyond(start, r)]):
        pairs = pairs[holds[pairs[:, 0]]]
        for piece in _pieces(pairs, line, None):
            look = _look(line, query, piece, _Zone(*(part[piece[:, 0]] for part in (low, high, at, r))))
            proven = look.seen.worst(look.zone, look.K if curved else torch.zeros_like(look.K)) < 0
            holds[piece[~proven, 0]] = False
    return holds


def _over_balls(line: Line, query: LineQuery, choice: _Choice, layers: Layers, top: Tensor) -> Tensor:
    """Return the places of the largest radii, none beyond `top`, that are found to hold by curvatures over balls.

    Zones are laid for the largest radius that is tried; at a much smaller one few of them would be left.  So where that
    was not reached, some more is tried from what was, with zones of its own, and twice as many.
    """
    place = _OverBalls(line, query, choice, layers).of_all_pairs(top)
    index = (place < top).nonzero().flatten()
    for _ in range(_AGAIN):
        if not len(index):
            break
        reached = place[index]
        goal = torch.minimum(top[index], reached + (reached // 4).clamp(min=1))
        again = replace(choice.of_samples(index), known=reached)
        place[index] = _OverBalls(line, query.part(index), again, layers, 2 * ZONES).of_all_pairs(goal)
        index = index[(reached < place[index]) & (place[index] < top[index])]
    return place


def _open_pairs(query: LineQuery, r: Tensor) -> Tensor:
    """Return the pairs, (number of the sample, class) each, that are not known to hold up to r."""
    return (query.known < r[:, None]).scatter(1, query.label[:, None], False).nonzero()


@dataclass(frozen=True, eq=False)
class _OverBalls:
    """The search by curvatures over balls.

    A zone keeps its point for all radii, so that what is known there serves them all.  The one about x comes first,
    where curvature costs most; only what that leaves is divided into the others.
    """

    line: Line
    query: LineQuery
    choice: _Choice
    layers: Layers
    zones: int = ZONES

    def of_all_pairs(self, top: Tensor) -> Tensor:
        """Return the places of the radii, none beyond `top`, up to which all pairs hold, (batch,)."""
        return self.farthest(self.farthest(top, weakest=True), weakest=False)

    def farthest(self, place: Tensor, weakest: bool) -> Tensor:
        """Return the places of the radii, none beyond `place`, up to which some of the pairs hold, (batch,).

        These are the pairs of the class with the least linear limit, or all others.
        """
        query, choice = self.query, self.choice
        weakest_class = query.limit.scatter(1, query.label[:, None], torch.inf).argmin(dim=1)
        pairs = _open_pairs(query, choice.radius(place))
        pairs = pairs[(weakest_class[pairs[:, 0]] == pairs[:, 1]) == weakest]
        for piece in _pieces(pairs, self.line, self.layers):
            whole = choice.radius(place)[piece[:, 0]]
            start = whole / (2 * self.zones)
            place = self._within(place, piece, (-whole, start, 0.0 * whole))
            for ends in _beyond(start, torch.maximum(choice.radius(place)[piece[:, 0]], start), self.zones):
                place = self._within(place, piece, ends)
        return place

    def _within(self, place: Tensor, pairs: Tensor, ends: _Ends) -> Tensor:
        """Return the places of the radii, none beyond `place`, up to which pairs hold in a zone."""
        r = self.choice.radius(place)[pairs[:, 0]]
        todo = (place > self.choice.known)[pairs[:, 0]] & (ends[0] < r)
        if not bool(todo.any()):
            return place
        pairs, ends = pairs[todo], _of_pairs(ends, todo)
        look = _look(self.line, self.query, pairs, _Zone.cut(ends, r[todo]))
        hard = ~(look.seen.worst(look.zone, look.K) < 0)
        if not bool(hard.any()):
            return place
        pairs, ends, look = pairs[hard], _of_pairs(ends, hard), look.part(hard)
        sample = pairs[:, 0]
        choice, top = self.choice.of_samples(sample), place[sample]
        centres = at_centres(self.layers, look.at, look.gradients)

        def holds(place: Tensor, _: Tensor) -> Tensor:
            r = choice.radius(place)
            zone = _Zone.cut(ends, r)
            ball = gradient_growth(self.layers, centres, inflate(zone.reach + look.seen.off, 0.0))
            return (look.seen.worst(zone, torch.minimum(ball, look.K)) < 0) | (ends[0] >= r)

        return place.scatter_reduce(0, sample, _bisected(choice.known, top + 1, top, holds), "amin")


def _of_pairs(ends: _Ends, index: Tensor) -> _Ends:
    """Return the zones of some of the pairs."""
    low, high, at = (end[index] for end in ends)
    return low, high, at


def _beyond(start: Tensor, end: Tensor, zones: int = ZONES) -> Iterator[_Ends]:
    """Yield the zones that follow the one about x, equal ones from its end to the ball's."""
    places = [start + (end - start) * (j / (zones - 1)) for j in range(zones - 1)] + [end]
    for low, high in pairwise(places):
        yield low, high, (low + high) / 2


def _pieces(pairs: Tensor, line: Line, layers: Layers | None) -> list[Tensor]:
    """Return pairs, (number of the sample, class) each, in pieces that fit the memory; none if there are none."""
    return list(pairs.split(_size(line, layers))) if len(pairs) else []


@dataclass(frozen=True, eq=False)
class _Zone:
    """A zone for every pair: its ends, the place of its point, and r."""

    low: Tensor
    high: Tensor
    at: Tensor
    r: Tensor

    @staticmethod
    def cut(ends: _Ends, r: Tensor) -> "_Zone":
        """Return what of a zone lies in the ball of radius r."""
        low, high, at = ends
        return _Zone(torch.maximum(low, -r), torch.minimum(high, r), at, r)

    def part(self, index: Tensor) -> "_Zone":
        """Return those of some of the pairs."""
        return _Zone(self.low[index], self.high[index], self.at[index], self.r[index])

    def touching(self, along: Tensor, across: Tensor) -> Tensor:
        """Return where in the zone along x alpha + across x sqrt(r^2 - alpha^2) is about largest, as a share of r."""
        share = along / torch.hypot(along, across).clamp(min=TINY)
        return share.clamp(self.low / self.r, self.high / self.r).clamp(_INSIDE - 1, 1 - _INSIDE)

    def across(self, alpha: Tensor, touch: Tensor) -> Tensor:
        """Bound how far w reaches at alpha, linearly in alpha: by the tangent to the circle at a share of r."""
        share = alpha / self.r
        height = (1 - touch * share).clamp(min=0.0) + gamma(8) * (1 + share.abs())
        return inflate(self.r * (height / ((1 - touch) * (1 + touch)).sqrt()), 16 * UNIT_ROUNDOFF) + _UNDERFLOW

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

    def part(self, index: Tensor) -> "_Seen":
        """Return some of the pairs."""
        low, high = self.steep
        steep = (low[index], high[index])
        return _Seen(self.F[index], steep, self.across[index], self.size[index], self.off[index])

    def worst(self, zone: _Zone, K: Tensor) -> Tensor:
        """Bound F over the zone, K a bound on the curvature."""
        low, high = self.steep
        steepest, reach = torch.maximum(low.abs(), high.abs()), zone.r + torch.maximum(zone.r, zone.at)
        rounding = Upper(self.size) * self.off + (Upper(2 * reach, 2) + self.off) * self.off * K / 2.0
        touch = zone.touching(high - K * zone.at, self.across)
        ends = []
        for alpha in (zone.low, zone.high):
            lost = (rounding + Upper(self.across) * zone.across(alpha, touch)).bound
            # A zone that was cut may lie before its point altogether: the step's sign chooses the slope.
            step = alpha - zone.at
            along, bent = torch.maximum(low * step, high * step), (Upper(zone.squared(alpha)) * K / 2.0).bound
            size = self.F.abs() + steepest * (alpha.abs() + zone.at) + bent + lost
            ends.append(self.F + along + bent + lost + gamma(16) * size)
        return torch.maximum(*ends) + TINY


@dataclass(frozen=True, eq=False)
class _Look:
    """Pairs in one zone: what holds at their points, what is seen from there, and their global curvatures.

    `gradients` are those of each pair, by the numbers of the values that they are with respect to.
    """

    zone: _Zone
    at: AtPoints
    gradients: Mapping[int, Covectors]
    seen: _Seen
    K: Tensor

    def part(self, index: Tensor) -> "_Look":
        """Return some of the pairs."""
        gradients = {value: each.of_samples(index) for value, each in self.gradients.items()}
        return _Look(self.zone.part(index), self.at.of_samples(index), gradients, self.seen.part(index), self.K[index])


def _look(line: Line, query: LineQuery, pairs: Tensor, zone: _Zone) -> _Look:
    """Look at pairs, (number of the sample, class) each, from their points of one zone."""
    sample, other = pairs.unbind(dim=1)
    x = query.at.evaluation.values[0].value[sample]
    points, direction, off = _points(x, query.gradient[sample, other], zone)
    at = at_points(line.problem, points) if bool(zone.at.any()) else query.at.of_samples(sample)
    label = query.label[sample]
    rows = torch.zeros(len(x), line.network.outputs, dtype=x.dtype, device=x.device)
    gradients = at.covectors(rows.scatter(1, other[:, None], 1.0).scatter(1, label[:, None], -1.0)[:, None])
    assert gradients is not None  # only smooth networks have a line
    seen = _seen(line, at, gradients[0], direction, label, other, off)
    return _Look(zone, at, gradients, seen, query.K[sample, other])


def _points(x: Tensor, g: Tensor, zone: _Zone) -> tuple[Tensor, Tensor, Tensor]:
    """Return the computed points x + a v, the computed direction v, and how far they may be from x + a v / |v|.

    Without a gradient g there is no direction, and nothing is known of the points: they may be infinitely far.
    """
    peak = g.abs().amax(dim=1, keepdim=True)
    g = g / peak.clamp(min=2.0**-900)
    v = g / torch.linalg.vector_norm(g, dim=1, keepdim=True).clamp(min=2.0**-900)
    flat = x.flatten(1)
    points = (flat + zone.at[:, None] * v).reshape(x.shape)
    size = Upper(norm_upper_bound_of_vectors(flat, 2, 1)) + zone.r + torch.maximum(zone.r, zone.at)
    off = size * gamma(2 * flat.shape[1] + 64) + TINY
    return points, v, torch.where(peak[:, 0] > 0, off.bound, torch.inf)


def _seen(line: Line, at: AtPoints, gradient: Covectors, v: Tensor, label: Tensor, other: Tensor, off: Tensor) -> _Seen:
    """Return f_i - f_y and its gradient at the points."""
    n, last = v.shape[1], at.evaluation.output
    value, error = last.value.flatten(1), last.error.flatten(1)
    own, others = label[:, None], other[:, None]
    gap = (value.gather(1, others) - value.gather(1, own))[:, 0]
    doubt = (Upper(error.gather(1, others)) + error.gather(1, own))[:, 0] + line.deviations[label, other]
    F = gap + (doubt + 2 * UNIT_ROUNDOFF * gap.abs()).bound
    g, drift = gradient.value.flatten(2)[:, 0], gradient.drift[:, 0]
    length = Upper(norm_upper_bound_of_vectors(g, 2, 1))
    slope = (g * v).sum(dim=1)
    unsure = (length * gamma(2 * n + 64) + drift + TINY).bound
    across = length * (16 * UNIT_ROUNDOFF) + norm_upper_bound_of_vectors(g - slope[:, None] * v, 2, 1) + drift + TINY
    return _Seen(F, (slope - unsure, slope + unsure), across.bound, (length + drift).bound, off)


def _size(line: Line, layers: Layers | None) -> int:
    """Return how many pairs are looked at at once."""
    network = line.network
    widest = max(math.prod(unit.block.out_shape) for unit in network.units)
    widest = max(math.prod(network.in_shape), widest)
    numbers = 24 * widest if layers is None else numbers_of_sample(layers)
    return max(1, spare_elements(network.device, _CHUNK_ELEMENTS) // numbers)
