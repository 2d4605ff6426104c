r"""Linear relaxation over a ball or a box: how far every value, and every linear function of the outputs, can move.

*The covector identity.*  Take any float covectors: the row wanted at the output; :math:`w = fl(s \circ u)` through an
activation, with any slopes s; :math:`fl(A^T w)` through an affine node, summed over the readers of a value.  Then for
every x' = x + d

.. math:: F(x') - F(x) = u_0 \cdot d + \sum_l [u_l (\phi(z'_l) - \phi(z_l)) - w_l (z'_l - z_l)]
          + \sum_v e_v \cdot (v' - v),

e_v what the covector of a value v is off the sum of its readers'.  So the change is at most the largest value of
:math:`u_0 \cdot d`, plus what the lines cost, plus :math:`\gamma_{N_v} \sum |A|^T |w| \cdot |v' - v|`.  It is exact in
the slopes: they need no proof.  The same with unit rows gives the range of every pre-activation, layer by layer, each
cut with what intervals and norms know.

Reference: Zhang et al. (NeurIPS 2018), CROWN, whose bound this is, up to the choice of slopes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.errors import UnsupportedModule
from curvcert.memory import spare_elements
from curvcert.network.evaluation import Evaluation
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode
from curvcert.network.sweeps import AbstractBackward
from curvcert.norms import conjugate
from curvcert.propagation.reach import Moved, NetworkFacts, cut, moved_activation, moved_pool, moved_sum
from curvcert.propagation.regions import AbstractRegion
from curvcert.propagation.relaxation import AbstractRelaxation, Reach, relaxed_activation, relaxed_pool
from curvcert.rounding import TINY, Upper, gamma, inflate, least, norm_upper_bound_of_vectors, total

_CHUNK_ELEMENTS = 2**23
"""Numbers that the covectors in hand may take, on a processor."""

MOST_ROWS = 2**26
"""Numbers that the covectors of all neurons of a layer may take, for one sample: wider layers have norms alone."""


@dataclass(frozen=True, eq=False)
class Change:
    """How far linear functions of a value fall and rise over a region, (batch, rows) each."""

    fall: Tensor
    rise: Tensor


class Relaxed:
    """A network relaxed over a region about each point of a batch."""

    def __init__(
        self,
        facts: NetworkFacts,
        evaluation: Evaluation,
        region: AbstractRegion,
        most_rows: int = MOST_ROWS,
        narrowed: "Callable[[Relaxed, int, Moved], Moved]" = lambda relaxed, value, moved: moved,
    ) -> None:
        """Find the range of every pre-activation, and lines for it, from the input on.

        `narrowed` is given every range that lines are about to be drawn over, beside what is relaxed so far, and
        returns what else is known of it.
        """
        self.facts, self.region = facts, region
        self._relaxations: dict[AbstractNode, AbstractRelaxation] = {}
        self._lines: dict[AbstractNode, Callable[[], AbstractRelaxation]] = {}
        self.rounded_off: dict[AbstractNode, Tensor] = {}
        self._values, self._nodes = evaluation.values, facts.network.nodes
        self._most_rows, self._narrowed = most_rows, narrowed
        self._moved: list[Moved] = []
        self._ranges: dict[int, Moved] = {}
        for node in self._nodes:
            self._moved.append(self._reached(node))

    def _reached(self, node: AbstractNode) -> Moved:
        """Return how far a value moves, and note what covectors meet at its node."""
        p, uses = self.facts.p, self.facts.uses
        match node:
            case InputNode():
                fall, rise = (side.reshape(-1, *node.shape) for side in self.region.sides)
                return Moved(fall, rise, self.region.length)
            case AffineNode():
                self.rounded_off[node] = self._rounded_off(node)
                return moved_sum(self.facts.maps[node], [self._moved[source] for source in node.sources], p)
            case ElementwiseNode():
                z, moved = self._reach(node.source)
                a = self._values[len(self._moved)]
                self._lines[node] = partial(relaxed_activation, node.activation, z, a, uses[node.source])
                return moved_activation(node.activation, z, moved.length, a, p)
            case MaxPoolNode():
                z, moved = self._reach(node.source)
                self._lines[node] = partial(relaxed_pool, node.pool, z, uses[node.source])
                return moved_pool(node.pool, moved, p)
        raise UnsupportedModule(f"{node.name}: linear relaxation has no rule for a {type(node).__name__}.")

    def relaxation(self, node: AbstractNode) -> AbstractRelaxation:
        """Return the lines of a node; drawn when a covector first meets it."""
        if node not in self._relaxations:
            self._relaxations[node] = self._lines[node]()
        return self._relaxations[node]

    def _rounded_off(self, node: AffineNode) -> Tensor:
        r"""Return what a unit covector on each coordinate of a sum costs by rounding: gamma |A| |v' - v|."""
        parts = zip(self.facts.maps[node], node.sources, strict=True)
        costs = (each.spread(self._moved[k].farthest) * gamma(self.facts.uses[k]) for each, k in parts)
        return total(costs).bound

    def moved(self, value: int) -> Moved:
        """Return how far a pre-activation moves."""
        if value not in self._ranges:
            self._ranges[value] = self._narrowed(self, value, self._by_rows(value))
        return self._ranges[value]

    def _reach(self, value: int) -> tuple[Reach, Moved]:
        moved = self.moved(value)
        return Reach(self._values[value], moved.fall, moved.rise), moved

    def _by_rows(self, value: int) -> Moved:
        """Return how far a value moves, by a row for each coordinate where that could tell more, and fits."""
        moved, shape = self._moved[value], self._nodes[value].shape
        size, numbers = math.prod(shape), self.facts.numbers_behind(value)
        if self._by_norms_alone(value) or size * numbers > self._most_rows:
            return moved
        unit = torch.eye(size, dtype=moved.fall.dtype, device=moved.fall.device)
        change = self._by_covectors(value, unit.reshape(1, size, *shape))
        fall = torch.minimum(moved.fall, change.fall.reshape(moved.fall.shape))
        rise = torch.minimum(moved.rise, change.rise.reshape(moved.rise.shape))
        return cut(fall, rise, moved.length, self.facts.p)

    def _by_norms_alone(self, value: int) -> bool:
        """Whether norms are exact already: one map of the input, over a ball."""
        node = self._nodes[value]
        return value == 0 or (self.region.symmetric and isinstance(node, AffineNode) and node.sources == (0,))

    def change(self, value: int, rows: Tensor) -> Change:
        """Bound how far rows . v moves, v the value of a node, for rows of shape (batch or 1, rows, *shape)."""
        moved, u = self._moved[value], rows.flatten(2)
        whole = Upper(moved.length[:, None]) * norm_upper_bound_of_vectors(u, conjugate(self.facts.p), 2)
        up, down = Upper(u.clamp(min=0)), Upper((-u).clamp(min=0))
        fall, rise = (side.flatten(1)[:, :, None] for side in (moved.fall, moved.rise))
        change = self._by_covectors(value, rows)
        sides = (up @ fall + down @ rise, up @ rise + down @ fall)
        falls, rises = ((least(whole, side[:, :, 0]) + TINY).bound for side in sides)
        return Change(torch.fmin(change.fall, falls), torch.fmin(change.rise, rises))

    def _by_covectors(self, value: int, rows: Tensor) -> Change:
        numbers = self.facts.numbers_behind(value) * len(self._moved[0].fall)
        count = max(1, spare_elements(rows.device, _CHUNK_ELEMENTS) // numbers)
        found = [self._change(value, part) for part in rows.split(count, dim=1)]
        return Change(*(torch.cat(sides, dim=1) for sides in zip(*found, strict=True)))

    def _change(self, value: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        if all(self.relaxation(node).symmetric for node in self._nodes[: value + 1] if node in self._lines):
            rise, fall = _Covectors(self, rows).bounds(value)
            return fall, rise
        rise, _ = _Covectors(self, torch.cat([rows, -rows], dim=1)).bounds(value)
        return rise[:, rows.shape[1] :], rise[:, : rows.shape[1]]

    @property
    def lost(self) -> Tensor:
        """What underflow may lose of any one row, (batch,): less than `TINY` for every unit that a value moves."""
        sizes = [moved.farthest.flatten(1).sum(dim=1) for moved in self._moved]
        return TINY * (1 + torch.stack(sizes).sum(dim=0))


class _Covectors(AbstractBackward[Tensor | None]):
    """Covectors, (batch, rows, *shape), pulled back through lines; None where nothing leads on from a value.

    On the way the costs of the lines, and those of rounding, add up: of the rows as they are, and of their negatives.
    """

    def __init__(self, relaxed: Relaxed, rows: Tensor) -> None:
        self._relaxed, self._rows = relaxed, rows
        self._up, self._down = rows.new_zeros(()), rows.new_zeros(())
        self._longest = 1

    def bounds(self, value: int) -> tuple[Tensor, Tensor]:
        """Return how far the rows rise, and their negatives, (batch, rows)."""
        nodes, region = self._relaxed.facts.network.nodes[: value + 1], self._relaxed.region
        found = self._rows if value == 0 else self.sweep(nodes, self._rows)[0]
        assert found is not None
        u = found.flatten(2)
        up, lost = region.largest(u), self._relaxed.lost[:, None]
        down = up if region.symmetric else region.largest(-u)
        relative = gamma(self._longest + 4 * len(nodes) + 16)
        rise, fall = (inflate(ways + costs + lost, relative) for ways, costs in ((up, self._up), (down, self._down)))
        return torch.where(rise.isnan(), torch.inf, rise), torch.where(fall.isnan(), torch.inf, fall)

    def joined(self, k: int, arriving: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in arriving if value is not None]
        return reduce(torch.add, known) if known else None

    def affine(self, k: int, node: AffineNode, value: Tensor | None) -> Sequence[Tensor | None]:
        checkpoint()
        if value is None:
            return [None] * len(node.terms)
        off = self._relaxed.rounded_off[node]
        self._pay(value, off, off)
        return [term.map.adjoint(value) for term in node.terms]

    def elementwise(self, k: int, node: ElementwiseNode, value: Tensor | None) -> Tensor | None:
        return self._through(node, value)

    def max_pool(self, k: int, node: MaxPoolNode, value: Tensor | None) -> Tensor | None:
        return self._through(node, value)

    def _through(self, node: AbstractNode, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        relaxation = self._relaxed.relaxation(node)
        self._pay(value, relaxation.costs.up, relaxation.costs.down)
        return relaxation.pull_back(value)

    def _pay(self, u: Tensor, up: Tensor, down: Tensor) -> None:
        """Add u+ . up + u- . down for the rows, and the reverse for their negatives, with the rounding of both."""
        u, n = u.flatten(2), up[0].numel()
        half = inflate((up + down) / 2, 4 * gamma(n + 8)).flatten(1).unsqueeze(2)
        rest = ((up - down) / 2).flatten(1).unsqueeze(2)
        both, gap = (u.abs() @ half).squeeze(2), (u @ rest).squeeze(2)
        self._up, self._down = self._up + (both + gap), self._down + (both - gap)
        self._longest = max(self._longest, n)
