r"""Taylor models of order 2: every value of a network as a parabola of the input, and what that leaves out.

Give every neuron l of an activation's node a slope :math:`s_l` and a bend :math:`q_l`, any numbers.  Carry the slopes
back from a value: with :math:`u_j` the covector on the values of node j, and J the rows on the input,

.. math:: dz_k = J_k d + e_k, \qquad e_k = \tfrac12 d^T M_k d + \sum_j u_j \cdot \psi_j,
          \qquad M_k = \sum_j J_j^T \mathrm{diag}(u_j \circ q_j) J_j,

exactly, where :math:`\psi = \phi(z + b + e) - \phi(z) - s(b + e) - q b^2/2` at :math:`b = J_j d`, :math:`e = e_j`.
So a neuron's range needs three things, and so does a linear function of the outputs:

- the largest value of :math:`J d \pm d^T M d/2`, by eigenvalues (`Coordinates`);
- the remainders, *coupled*: with :math:`Z^2 \ge \sum_l \omega_l b_l^2` over the ball, for any :math:`\lambda \ge 0`

  .. math:: u \cdot \psi \le \tfrac12 \lambda Z^2 + \sum_l |u_l| G_l^{\pm}(\lambda \omega_l / |u_l|), \qquad
            G^{\pm}(y) = \sup_{b, e} (\pm \psi - y b^2/2),

  as not all neurons can be at the end of their ranges at once (`remainders.Tables`);
- rounding, by the covector identity of `linear_relaxation`, whose sums over values hold here word for word.

Each range is cut with that of linear relaxation before the next node is relaxed.  The slopes, the bends, J and M are
made once, at one radius; they prove something at every radius, and most near that one.

Slopes and bends are those of the secants over a neuron's range: phi' and phi'' at the centre in their place lose a
tenth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import final

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.memory import spare_elements
from curvcert.network import Network
from curvcert.network.evaluation import Evaluation
from curvcert.network.nodes import AffineNode, ElementwiseNode, MaxPoolNode
from curvcert.network.sweeps import AbstractBackward
from curvcert.propagation.coordinates import AbstractParabolas, Coordinates, Seen, coordinates
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import Moved, NetworkFacts, cut
from curvcert.propagation.regions import NormBall
from curvcert.propagation.remainders import KNOTS, Bend, Spread, Tables, sampled, secant
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate, total

REACH = 8.0
"""How many times the radius that a model was made at it serves: rounding is bounded over that ball once."""

_CHUNK_ELEMENTS = 2**20
"""Numbers that the matrices M in hand may take, on a processor: as many as its caches hold, or nearly."""

_SHARES = (1.0, 2.5, 8.0)
"""Lambdas that are tried for a range beside 0: multiples of the one at which a typical neuron is at the unit knot."""

_OUTER_KNOTS = (0, 1, 2, 3, 4)
"""The knots that are tried for a function of the outputs: there the term in Z joins the parabola."""


def models_cost(network: Network) -> float:
    """Return how many numbers the matrices of all neurons of one sample take; inf where models cannot be made.

    They need second derivatives that are bounded, and inputs, or neurons that read them, that are not too many.
    """
    cost = 0.0
    for node in network.nodes:
        if isinstance(node, MaxPoolNode) or (isinstance(node, ElementwiseNode) and node.activation.curvature is None):
            return math.inf
        cost += math.prod(node.shape) if isinstance(node, ElementwiseNode) else 0
    return cost * coordinates(network) ** 2 if Coordinates.reason_to_skip(network) is None else math.inf


@final
@dataclass(frozen=True, eq=False)
class Form:
    r"""Rows on a value as parabolas of the input: what holds over the unit ball, so that that of radius t follows.

    Attributes:
        sent: the covectors :math:`u_j` on the values of the activations before, (batch, rows, neurons), by their nodes.
        seen: the rows of J, and bounds on :math:`|J d|`.
        off: bounds on what d itself is off, (batch, rows).
        rounding: what rounding costs, over the largest ball.
        above: bounds on :math:`d^T M d/2`, and `below` on its negative; 0 where nothing bends before.
    """

    sent: dict[int, Tensor]
    seen: Seen
    off: Tensor
    rounding: Tensor
    above: Tensor
    below: Tensor


@final
@dataclass(frozen=True, eq=False)
class Coupling:
    """How the neurons of a node are weighed against each other, and half a bound on their squares over the ball."""

    weights: Tensor
    squares: Tensor


class TaylorModels:
    """Quadratic models of a network about each point of a batch, and of rows of its outputs, (batch, rows, outputs)."""

    def __init__(
        self, facts: NetworkFacts, evaluation: Evaluation, rows: Tensor, radius: Tensor, enough: Tensor | None = None
    ) -> None:
        """Make the models at a radius, (batch,): they serve up to `most`, `REACH` times it.

        Where intervals are infinite that far out, they serve up to the radius itself, over whose ball rounding is
        bounded by the very ranges that the models cut.

        A row that rises by less than `enough`, (batch, rows), by linear relaxation at that radius needs no parabola.
        """
        self.facts, self.evaluation = facts, evaluation
        self.coordinates = Coordinates.of(facts.network, facts.p)
        self.bends: dict[int, Bend] = {}
        self.seen: dict[int, Seen] = {}
        self._forms: dict[int, Form] = {}
        self._couplings: dict[int, Coupling] = {}
        self._last, self.most = len(facts.network.nodes) - 1, REACH * radius
        coarse = Relaxed(facts, evaluation, self._ball(self.most), most_rows=0)
        self.coarse = coarse if bool(coarse.lost.isfinite().all()) else None
        if self.coarse is None:
            self.most = radius
        self.rows = rows.reshape(*rows.shape[:2], *facts.network.out_shape)
        self._at = Pass(self, self._ball(radius))
        self._curved = _worst(self._at.linear, enough)
        each = torch.arange(len(rows), device=rows.device)[:, None]
        self._output = self.sent(self.rows[each, self._curved])
        # Where no activation is on the way to the outputs, linear relaxation is exact.
        self._parabolas = self._joined() if self._output.sent and self._curved.numel() else None

    def rise(self, radius: Tensor) -> Tensor:
        """Bound how far the rows rise over the closed balls of that radius, (batch, rows); inf beyond the reach."""
        at = self.over(radius)
        within, linear = at.radius, at.linear
        best = linear.gather(1, self._curved)
        fixed = Upper(self._output.off) * within[:, None] + self._output.rounding
        curved = () if self._parabolas is None else self._parabolas.largest(within).split(best.shape[1], dim=1)
        for knot, parabolas in zip(_OUTER_KNOTS, curved, strict=False):
            parts = [at.tables[k].at_knot(u, knot)[0] for k, u in self._output.sent.items()]
            best = torch.fmin(best, total([fixed, parabolas, *parts]).bound)
        return torch.where((radius > self.most)[:, None], torch.inf, linear.scatter(1, self._curved, best))

    def over(self, radius: Tensor) -> "Pass":
        """Return the ranges over balls of that radius, or of the largest that the models serve; the last are kept."""
        within = torch.minimum(radius, self.most)
        if not torch.equal(within, self._at.radius):
            self._at = Pass(self, self._ball(within))
        return self._at

    @property
    def rounded(self) -> Relaxed:
        """What bounds rounding, over the largest ball."""
        assert self.coarse is not None  # the first pass is that, from its first range on
        return self.coarse

    def form(self, value: int) -> Form:
        """Return the neurons of a value as parabolas; made when it is first asked for."""
        if value not in self._forms:
            shape = self.facts.network.nodes[value].shape
            unit = torch.eye(torch.Size(shape).numel(), dtype=torch.float64, device=self.most.device)
            rows = unit.reshape(1, len(unit), *shape).expand(len(self.most), -1, *shape)
            self._forms[value] = self._with_peaks(self.sent(rows, value))
        return self._forms[value]

    def coupled(self, k: int, u: Tensor, tables: Tables, t: Tensor) -> tuple[Tensor, Tensor]:
        """Bound u.psi, and -u.psi, for the neurons of node k over balls of radius t, and rows u."""
        coupling, size = self._coupling(k, u), u.abs()
        ratio = coupling.weights.unsqueeze(1) / size.clamp(min=1e-300)
        typical = (size / coupling.weights.unsqueeze(1)).mean(dim=2)
        above, below = tables.at_knot(u, 0)
        for share in _SHARES:
            multiplier = share * typical
            held = Upper(multiplier) * (Upper(coupling.squares) * t * t)[:, None]
            more, less = tables.between(u, multiplier.unsqueeze(2) * ratio)
            above, below = (
                torch.minimum(above, (held + more).bound),
                torch.minimum(below, (held + less).bound),
            )
        return above, below

    def _coupling(self, k: int, u: Tensor) -> Coupling:
        """Return the weights of a node's neurons: what the first value that reads it makes of each."""
        if k not in self._couplings:
            weights = torch.linalg.vector_norm(u, dim=1)
            weights = torch.maximum(weights, 1e-6 * weights.amax(dim=1, keepdim=True)).clamp(min=1e-100)
            omega = inflate(weights * self.bends[k].unit, 0.0).unsqueeze(1)
            seen = [self.seen[k]]
            squares = self.coordinates.peak(self.coordinates.matrices([omega], seen), [omega], seen)
            self._couplings[k] = Coupling(weights, squares.squeeze(1))
        return self._couplings[k]

    def _joined(self) -> AbstractParabolas:
        """Return the parabolas of the outputs, with what the remainders leave in them at each knot in turn."""
        sent, knots = self._output.sent, [KNOTS[knot] for knot in _OUTER_KNOTS]
        own = [u * self.bends[k].bend.unsqueeze(1) for k, u in sent.items()]
        # Larger weights are on the safe side: the squares are not negative.
        unit = [inflate(u.abs() * self.bends[k].unit.unsqueeze(1), 0.0) for k, u in sent.items()]
        slack = 8 * UNIT_ROUNDOFF
        own = [w + slack * w.abs() for w in own]
        weights = [
            torch.cat([w + knot * v + slack * (w.abs() + knot * v) for knot in knots], dim=1)
            for w, v in zip(own, unit, strict=True)
        ]
        seen, outer = [self.seen[k] for k in sent], self._output.seen
        M = self.coordinates.matrices(own, seen).plus(self.coordinates.matrices(unit, seen), knots)
        return self.coordinates.parabolas(outer.repeated(len(knots)), M, weights, seen)

    def _with_peaks(self, form: Form) -> Form:
        """Return the same with bounds on the quadratic part, a few samples at a time, or a few rows of one."""
        if not form.sent:
            return form
        (batch, rows), r = form.off.shape, self.coordinates.expand.shape[1]
        held = spare_elements(form.off.device, _CHUNK_ELEMENTS) // (r * r)
        samples, some = max(1, held // rows), max(1, min(held, rows))
        above, below = torch.empty_like(form.above), torch.empty_like(form.below)
        for start in range(0, batch, samples):
            part = slice(start, start + samples)
            seen = [self.seen[k].of_samples(part) for k in form.sent]
            weights = [u[part] * self.bends[k].bend[part].unsqueeze(1) for k, u in form.sent.items()]
            for first in range(0, rows, some):
                few = slice(first, first + some)
                above[part, few], below[part, few] = self.coordinates.peaks([w[:, few] for w in weights], seen)
        return replace(form, above=above, below=below)

    def sent(self, rows: Tensor, value: int | None = None, slopes: Mapping[int, Tensor] | None = None) -> Form:
        """Carry rows on a value, the outputs by default, back to everything before it.

        They go through the models' slopes, or others, (batch, rows, neurons) by the activations' numbers.
        """
        sweep, J = self.swept(rows, value, slopes)
        seen, off = self.coordinates.seen(J)
        rounding = inflate(sweep.rounding + self.rounded.lost[:, None], gamma(sweep.longest + 16))
        zero = torch.zeros_like(off)
        return Form(sweep.sent, seen, off, rounding.expand_as(off), zero, zero)

    def swept(
        self, rows: Tensor, value: int | None = None, slopes: Mapping[int, Tensor] | None = None
    ) -> "tuple[_Slopes, Tensor]":
        """Return the covectors that the rows become, and the rows on the input, (batch, rows, inputs)."""
        own = {k: bend.slope.unsqueeze(1) for k, bend in self.bends.items()} if slopes is None else slopes
        sweep = _Slopes(self, rows, own)
        found = sweep.sweep(self.facts.network.nodes[: (self._last if value is None else value) + 1], rows)[0]
        J = rows.new_zeros(*rows.shape[:2], *self.facts.network.in_shape) if found is None else found
        return sweep, J.flatten(2)

    def _ball(self, radius: Tensor) -> NormBall:
        return NormBall(self.facts.p, radius, torch.Size(self.facts.network.in_shape).numel())


def _worst(rise: Tensor, enough: Tensor | None) -> Tensor:
    """Return the numbers of the rows to model, (batch, any), the same count for all: those that rise the furthest."""
    excess = rise if enough is None else rise - enough
    most = rise.shape[1] if enough is None else int((excess >= 0).sum(dim=1).amax())
    return excess.topk(most, dim=1).indices


class Pass:
    """The ranges of every node over one ball, each cut with the others before the next is found.

    Attributes:
        radius: the ball's.
        spreads: where every pre-activation is, by the numbers of the activations.
        tables: what these leave beside their parabolas.
        linear: how far the models' rows rise by linear relaxation over these ranges, (batch, rows).
    """

    def __init__(self, models: TaylorModels, ball: NormBall) -> None:
        self._models, self.radius = models, ball.radius
        self.spreads: dict[int, Spread] = {}
        self.tables: dict[int, Tables] = {}
        relaxed = Relaxed(models.facts, models.evaluation, ball, narrowed=self._narrowed)
        self.linear = relaxed.change(len(models.facts.network.nodes) - 1, models.rows).rise

    def _narrowed(self, relaxed: Relaxed, value: int, moved: Moved) -> Moved:
        """Return the range of a pre-activation cut with that of its parabolas; and find what its activations leave."""
        if self._models.coarse is None:
            self._models.coarse = relaxed
        form, t = self._models.form(value), self.radius[:, None]
        linear = inflate(form.seen.steepest * t, 0.0)
        above, below = self._rest(form)
        # What is not a number, where ranges are infinite, says nothing.
        steep = Upper(linear)
        fall = torch.fmin(moved.fall.flatten(1), (steep + below).bound)
        rise = torch.fmin(moved.rise.flatten(1), (steep + above).bound)
        high, low = (torch.fmin(rest, (steep + side).bound) for rest, side in ((above, rise), (below, fall)))
        for k, node in enumerate(self._models.facts.network.nodes):
            if isinstance(node, ElementwiseNode) and node.source == value:
                self._bent(k, node, form, Spread(linear, -low, high, fall, rise), torch.maximum(fall, rise))
        return cut(fall.reshape(moved.fall.shape), rise.reshape(moved.rise.shape), moved.length, self._models.facts.p)

    def _rest(self, form: Form) -> tuple[Tensor, Tensor]:
        """Bound e, and its negative, for every neuron of a value."""
        t = self.radius[:, None]
        parts = [self._models.coupled(k, u, self.tables[k], self.radius) for k, u in form.sent.items()]
        off = Upper(form.off) * t + form.rounding
        above, below = (Upper(peak) * t * t + off for peak in (form.above, form.below))
        for more, less in parts:
            above, below = above + more, below + less
        return above.bound, below.bound

    def _bent(self, k: int, node: ElementwiseNode, form: Form, spread: Spread, farthest: Tensor) -> None:
        """Find what the parabolas of a node leave; the first time, find the parabolas."""
        checkpoint()
        models, z = self._models, self._models.evaluation.values[node.source]
        if k in models.bends:
            bend = models.bends[k]
            found = sampled(node.activation, z, bend.slope, bend.bend, spread)
        else:
            slope, curve = secant(node.activation, z.value.flatten(1), torch.minimum(spread.linear, farthest))
            found = sampled(node.activation, z, slope, curve, spread)
            bend = Bend(slope, curve, found.unit)
            models.bends[k], models.seen[k] = bend, form.seen
        self.tables[k], self.spreads[k] = Tables.of(found, bend, spread.linear), spread


class _Slopes(AbstractBackward[Tensor | None]):
    """Rows, (batch, rows, *shape), carried back through slopes; None where nothing leads on from a value.

    On the way the covectors on activations are kept, and the cost of rounding adds up.  The slopes are those of each
    row, (batch, rows, neurons), or of all, (batch, 1, neurons).
    """

    def __init__(self, models: TaylorModels, rows: Tensor, slopes: Mapping[int, Tensor]) -> None:
        self._models, self._slopes = models, slopes
        self.sent: dict[int, Tensor] = {}
        self.rounding = rows.new_zeros(rows.shape[:2])
        self.longest = 1

    def joined(self, k: int, arriving: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in arriving if value is not None]
        return reduce(torch.add, known) if known else None

    def affine(self, k: int, node: AffineNode, value: Tensor | None) -> Sequence[Tensor | None]:
        checkpoint()
        if value is None:
            return [None] * len(node.terms)
        self._pay(value, self._models.rounded.rounded_off[node].flatten(1).unsqueeze(1))
        return [term.map.adjoint(value) for term in node.terms]

    def elementwise(self, k: int, node: ElementwiseNode, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        self.sent[k] = value.flatten(2)
        s, facts = self._slopes[k], self._models.facts
        moved = self._models.rounded.moved(node.source).farthest.flatten(1).unsqueeze(1)
        cost = inflate(gamma(facts.uses[node.source] + 2) * s.abs() * moved, 0.0) + 2 * node.activation.deviation
        self._pay(value, cost)
        return value * s.reshape(*s.shape[:2], *value.shape[2:])

    def _pay(self, u: Tensor, cost: Tensor) -> None:
        """Add |u| . cost, for costs of each row or of all."""
        u, n = u.flatten(2).abs(), cost.shape[2]
        self.longest += n + 1
        paid = (u @ cost.mT).squeeze(2) if cost.shape[1] == 1 else (u * cost).sum(dim=2)
        self.rounding = self.rounding + paid
