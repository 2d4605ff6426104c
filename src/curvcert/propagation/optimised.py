r"""Slopes and bends of their own, found by descent, for the few functions of the outputs that rise the furthest.

Taylor models give every neuron one slope and one bend, whatever is asked.  One function F of the outputs is better
served by its own: with any slopes s, any weights w of either sign, and the covectors u that F becomes under s,

.. math:: F(x + d) - F(x) \le \sum_l \sup_\delta [u_l (\phi(z_l + \delta) - \phi(z_l) - s_l \delta)
          - \tfrac12 w_l (\delta - c_l)^2] + \sup_d [u_0 \cdot d + \tfrac12 \sum_l w_l (dz_l - c_l)^2].

The first suprema are over the models' ranges: the largest value on a grid, and what may rise between its nodes.  In the
second, :math:`dz_l - c_l = J_l d + \varepsilon` with :math:`|\varepsilon| \le h_l` by the models, and for any
:math:`\theta > 0`

.. math:: w (a + \varepsilon)^2 \le w (1 + \theta) a^2 + w (1 + 1/\theta) h^2 \quad (w \ge 0), \qquad
          w (1 - \theta) a^2 + |w| (1/\theta - 1) h^2 \quad (w < 0,\ \theta \le 1),

which leaves a parabola.  Rounding is that of the models' rows, with these slopes.

Nothing rests on how the numbers are found: by some steps of Adam on the bound itself, whose gradient needs only the
points where the suprema are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from torch import Tensor

from curvcert.activations import Activation, derivative_range, second_derivative_range, value_range
from curvcert.activations.base import EVERYWHERE
from curvcert.network import Network
from curvcert.network.evaluation import Computed
from curvcert.network.nodes import ElementwiseNode
from curvcert.norms import conjugate
from curvcert.propagation.coordinates import Seen
from curvcert.propagation.remainders import Spread
from curvcert.propagation.taylor import Pass, TaylorModels
from curvcert.rounding import RECURSION_SLACK, TINY, UNIT_ROUNDOFF, gamma, inflate, next_down, next_up

_ROWS = 6
"""Functions of each sample that get numbers of their own."""

_CELLS = 32
"""Cells of the grid over a neuron's range."""

_STEPS, _RATE = 20, 0.2
"""Steps of a descent, and how far the first ones go, in units of a typical slope or weight."""

_SPLITS = 1e-6, 1e6
"""The least and the largest theta."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """The slopes and the weights of the neurons of one activation, (batch, rows, neurons)."""

    slope: Tensor
    weight: Tensor


@final
class Optimised:
    """Taylor models, and numbers of their own for the rows that use up most of `enough`, (batch, rows), at a radius."""

    def __init__(self, models: TaylorModels, radius: Tensor, enough: Tensor, before: "Optimised | None" = None) -> None:
        """Find the numbers, from earlier ones on if there are any: a proof at every radius, the best near this one."""
        self.models = models
        self._which: Tensor = self._worst(radius, enough) if before is None else before._which
        each = torch.arange(len(radius), device=radius.device)[:, None]
        self._rows = models.rows[each, self._which]
        begun = self._of_models() if before is None else before._numbers
        self._numbers: dict[int, Numbers] = self._descended(models.over(radius), begun) if begun else {}
        self._form = models.sent(self._rows, slopes=_slopes(self._numbers))

    @staticmethod
    def apply_to(network: Network, p: float) -> bool:
        """Whether they may gain: not in l1, and only where activations are defined beyond what is possible, too."""
        nodes = [node for node in network.nodes if isinstance(node, ElementwiseNode)]
        return p > 1 and all(node.activation.domain == EVERYWHERE for node in nodes)

    def rise(self, radius: Tensor) -> Tensor:
        """Bound how far the rows rise over the closed balls of that radius, (batch, rows); inf beyond the reach."""
        plain = self.models.rise(radius)
        own = torch.fmin(plain.gather(1, self._which), self._bound(self.models.over(radius)))
        return torch.where((radius > self.models.most)[:, None], torch.inf, plain.scatter(1, self._which, own))

    def _worst(self, radius: Tensor, enough: Tensor) -> Tensor:
        share = torch.where(enough.isinf(), -torch.inf, self.models.rise(radius) / enough).nan_to_num(nan=-torch.inf)
        return share.topk(min(_ROWS, share.shape[1]), dim=1).indices

    def _neurons(self, at: Pass) -> "dict[int, _Neurons]":
        models, nodes = self.models, self.models.facts.network.nodes
        found = {}
        for k, spread in at.spreads.items():
            node = nodes[k]
            assert isinstance(node, ElementwiseNode)
            z = models.evaluation.values[node.source]
            found[k] = _Neurons.of(node.activation, z, spread, models.seen[k])
        return found

    def _bound(self, at: Pass) -> Tensor:
        """Bound the rows with their own numbers, (batch, few)."""
        form, coordinates = self._form, self.models.coordinates
        parts, weights, seen = [form.rounding, inflate(form.off * at.radius[:, None], 0.0)], [], []
        for k, neurons in self._neurons(at).items():
            if k in form.sent:
                weight, left = neurons.split(self._numbers[k].weight)
                parts += [neurons.peaks(form.sent[k], self._numbers[k]), left]
                weights.append(weight)
                seen.append(neurons.seen)
        if weights:
            M = coordinates.matrices(weights, seen)
            parts.append(coordinates.parabolas(form.seen, M, weights, seen).largest(at.radius))
        else:
            parts.append(inflate(form.seen.steepest * at.radius[:, None], 0.0))
        total, size = reduce(torch.add, parts), reduce(torch.add, [part.abs() for part in parts])
        return total + inflate(gamma(len(parts) + 2) * size, gamma(8))

    def _of_models(self) -> dict[int, Numbers]:
        bends = self.models.bends
        sent = self.models.swept(self._rows)[0].sent
        return {
            k: Numbers(bends[k].slope.unsqueeze(1).expand_as(u), u * bends[k].bend.unsqueeze(1))
            for k, u in sent.items()
        }

    def _descended(self, at: Pass, begun: Mapping[int, Numbers]) -> dict[int, Numbers]:
        """Return numbers after some steps from others."""
        neurons = self._neurons(at)
        units = {
            k: Numbers(*(part.abs().mean(dim=2, keepdim=True) + 1e-100 for part in (each.slope, each.weight)))
            for k, each in begun.items()
        }
        raw = {k: Numbers(each.slope / units[k].slope, each.weight / units[k].weight) for k, each in begun.items()}
        free = [part.clone().requires_grad_() for each in raw.values() for part in (each.slope, each.weight)]
        optimiser = torch.optim.Adam(free, _RATE)
        for step in range(_STEPS):
            with torch.enable_grad():
                bound = self._guessed(_scaled(free, units), neurons, at)
                gradients = torch.autograd.grad(bound.sum(), free, allow_unused=True)
            for part, gradient in zip(free, gradients, strict=True):
                part.grad = torch.zeros_like(part) if gradient is None else gradient.nan_to_num(0.0, 0.0, 0.0)
            optimiser.param_groups[0]["lr"] = _RATE * (1 - step / _STEPS)
            optimiser.step()
        found = _scaled([part.detach() for part in free], units)
        return {k: _finite(each, begun[k]) for k, each in found.items()}

    def _guessed(self, numbers: Mapping[int, Numbers], neurons: "Mapping[int, _Neurons]", at: Pass) -> Tensor:
        """Return what the bound is about, but for constants: its gradient is what counts."""
        coordinates = self.models.coordinates
        sweep, J = self.models.swept(self._rows, slopes=_slopes(numbers))
        split = {k: neurons[k].split(numbers[k].weight) for k in sweep.sent}
        costs = [neurons[k].peaks(u, numbers[k]) + split[k][1] for k, u in sweep.sent.items()]
        with torch.no_grad():
            seen = [neurons[k].seen for k in split]
            M = coordinates.matrices([weight.detach() for weight, _ in split.values()], seen)
            y = coordinates.farthest(J.detach() @ coordinates.reduce, M, at.radius)
        # The largest value's own gradient is that of the parabola where it is.
        moved = {k: (y @ neurons[k].seen.rows.mT).square() for k in split}
        curved = [(weight * moved[k]).sum(dim=2) / 2 for k, (weight, _) in split.items()]
        if coordinates.p == 2:
            linear = ((J @ coordinates.reduce) * y).sum(dim=2)
        else:
            linear = at.radius[:, None] * torch.linalg.vector_norm(J, conjugate(coordinates.p), dim=2)
        return reduce(torch.add, [*costs, *curved, linear])


def _slopes(numbers: Mapping[int, Numbers]) -> dict[int, Tensor]:
    return {k: each.slope for k, each in numbers.items()}


def _scaled(free: list[Tensor], units: Mapping[int, Numbers]) -> dict[int, Numbers]:
    """Return the numbers that are free in units of their own, pair by pair."""
    pairs = zip(units.items(), free[::2], free[1::2], strict=True)
    return {k: Numbers(slope * unit.slope, weight * unit.weight) for (k, unit), slope, weight in pairs}


def _finite(numbers: Numbers, begun: Numbers) -> Numbers:
    return Numbers(
        torch.where(numbers.slope.isfinite(), numbers.slope, begun.slope),
        torch.where(numbers.weight.isfinite(), numbers.weight, 0.0),
    )


@final
@dataclass(frozen=True, eq=False)
class _Neurons:
    """The neurons of one activation over a pass: what their functions are on a grid, and where they are.

    Attributes:
        seen: the rows of J.
        delta: the grid of z' - z, (nodes, batch, 1, neurons).
        least: a lower bound on phi(z') - phi(z) there, and `most` an upper one.
        hollow: a bound on -phi'' over the range, (batch, 1, neurons), and `arched` one on phi''.
        bow: the square of a cell's width over 8.
        centre: the c_l, `half` the h_l and `theta` the share of the split.
    """

    seen: Seen
    delta: Tensor
    least: Tensor
    most: Tensor
    hollow: Tensor
    arched: Tensor
    bow: Tensor
    centre: Tensor
    half: Tensor
    theta: Tensor

    @staticmethod
    def of(activation: Activation, z: Computed, spread: Spread, seen: Seen) -> "_Neurons":
        """Evaluate an activation on the grid; z is known but for its error."""
        value, error = (each.flatten(1) for each in (z.value, z.error))
        room = 8 * UNIT_ROUNDOFF * (spread.fall + spread.rise) + TINY
        low, high = -spread.fall - room, spread.rise + room
        grid = torch.linspace(0.0, 1.0, _CELLS + 1, dtype=torch.float64, device=value.device)[:, None, None]
        delta = low + grid * (high - low)
        at, there = value_range(activation, value, value), value_range(activation, value + delta, value + delta)
        ends = (next_down(next_down(value - error) + low), next_up(next_up(value + error) + high))
        flattest, steepest = derivative_range(activation, *ends)
        steepest = torch.maximum(flattest.abs(), steepest.abs())
        off = 2 * steepest * (error + 2 * UNIT_ROUNDOFF * (value.abs() + delta.abs().amax(dim=0)))
        size = torch.maximum(at[0].abs(), at[1].abs()) + there[0].abs().maximum(there[1].abs()).amax(dim=0)
        off = inflate(off + 4 * UNIT_ROUNDOFF * size, gamma(16)) + TINY
        hollow, arched = second_derivative_range(activation, *ends)
        centre = (spread.low + spread.high) / 2
        half = inflate(torch.maximum(spread.high - centre, centre - spread.low), 8 * UNIT_ROUNDOFF) + TINY
        theta = (half / spread.linear.clamp(min=TINY)).nan_to_num(nan=1.0).clamp(*_SPLITS)
        bow = inflate(((high - low) / _CELLS).square() / 8, RECURSION_SLACK)  # nodes are off by roundings of the range
        nodes = [side.unsqueeze(2) for side in (delta, there[0] - at[1] - off, there[1] - at[0] + off)]
        rest = [side.unsqueeze(1) for side in (-hollow, arched, bow, centre, half, theta)]
        return _Neurons(seen, *nodes, *rest)

    def peaks(self, u: Tensor, numbers: Numbers) -> Tensor:
        """Bound the sum of the first suprema for covectors u, (batch, rows, neurons)."""
        up, down = u.clamp(min=0), (-u).clamp(min=0)
        rising = up * self.most - down * self.least
        line, bent = numbers.slope * u * self.delta, numbers.weight * (self.delta - self.centre).square() / 2
        rounded = 16 * UNIT_ROUNDOFF * (rising.abs() + line.abs() + bent.abs())
        # Between two nodes a function exceeds the larger by no more than its chord does, and its second derivative.
        bow = up * self.hollow + down * self.arched + numbers.weight
        bow = bow + 4 * UNIT_ROUNDOFF * (up * self.hollow.abs() + down * self.arched.abs() + numbers.weight.abs())
        each = (rising - line - bent + rounded).amax(dim=0) + inflate(bow.clamp(min=0) * self.bow, 8 * UNIT_ROUNDOFF)
        each = each + 4 * UNIT_ROUNDOFF * each.abs()
        return each.sum(dim=2) + gamma(u.shape[2] + 4) * each.abs().sum(dim=2)

    def split(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of (J d)^2, and bounds on half of what is left, (batch, rows)."""
        plus, minus, shared = weight.clamp(min=0), (-weight).clamp(min=0), self.theta.clamp(max=1.0)
        kept, freed = plus * (1 + self.theta), minus * (1 - shared)
        spared = (1 + 8 * UNIT_ROUNDOFF) / shared - 1
        left = ((plus * (1 + 1 / self.theta) + minus * spared) * self.half.square()).sum(dim=2) / 2
        rounded = kept - freed + 16 * UNIT_ROUNDOFF * (kept + minus)
        return rounded, inflate(left, gamma(weight.shape[2] + 32))
