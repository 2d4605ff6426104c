r"""What holds at each point of a batch, and within a ball about each: found once, and cut with all that is known.

At the points: every value with its error, the slopes there, and the outputs' gradients with respect to every value.

Over balls, forward: the ball of radius r becomes one of radius :math:`\rho_k` about every value; neuron l then stays
within :math:`\|W_l\|_{p^*} \rho_k` of its value at x.  Where Jacobians are small enough to be formed, in l2, it also
stays within :math:`\|J_l\| r` and what they drift (`jacobians.py`); and where the covectors of all layers are few
enough, within what linear relaxation leaves (`linear_relaxation.py`), relaxed over ranges that the others have cut.
Slopes, and constants of the units, are those over what is left.  Backward, gradients and how far they drift
(`covectors.py`).

A unit that reads several values reads them stacked: radii combine in the p-norm, or part by part where that is less.
Everything is listed by the numbers of nodes: ranges by the pre-activation, slopes by the activation, constants of units
by the value that they give.
"""

import math
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.errors import OutOfRange
from curvcert.network import Block, Network
from curvcert.network.evaluation import Evaluation, evaluate_with_error
from curvcert.network.nodes import NonlinearNode
from curvcert.network.rewriting.units import AbstractUnit, ActivatedUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.propagation.covectors import Backward, Covectors
from curvcert.propagation.jacobians import Images, Jacobian, Read
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import Moved, NetworkFacts, cut
from curvcert.propagation.regions import NormBall
from curvcert.propagation.relaxation import Reach
from curvcert.propagation.slopes import Slopes, anchored_slopes, block_growth, moved_through, slopes_within
from curvcert.rounding import Upper, least, norm_upper_bound_of_vectors, total

JACOBIAN_ELEMENTS = 2**20
"""Largest Jacobian of a layer, in numbers, that is formed for each sample."""

RELAXED_ELEMENTS = 2**20
"""Largest number of numbers that the covectors of all layers of a sample are, where ranges are relaxed linearly."""

JACOBIAN_ROWS = 256
"""Values of at most this width have their gradients carried back where Jacobians are not formed."""


@dataclass(frozen=True, eq=False)
class UnitFacts:
    """A network with what holds over all inputs, in the p-norm: computed once, for any number of points.

    `constants` returns Lipschitz constants of the units' blocks, of all but the last, by the values that they give;
    `prefixes` those of x -> v for the same values v.
    """

    network: Network
    p: float
    norms: NormBounds
    constants: Callable[[], Mapping[int, Tensor]]
    prefixes: Callable[[], Mapping[int, Tensor]]

    def at(self, x: Tensor) -> "AtPoints":
        """Return what holds at a batch of points."""
        return AtPoints(self, evaluate_with_error(self.network, x, self.norms))

    def norm(self, op: AbstractLinearMap) -> Tensor:
        """Bound the p -> p norm of a map."""
        return self.norms.norm(op, self.p, self.p)

    @property
    def last(self) -> AbstractUnit:
        """The unit that gives the output."""
        return self.network.units[-1]

    @cached_property
    def maps(self) -> NetworkFacts:
        """What linear relaxation needs of the maps."""
        return NetworkFacts(self.network, self.p, self.norms)

    @cached_property
    def jacobians_fit(self) -> bool:
        """Whether Jacobians of every value are small enough to be formed, in l2."""
        if self.p != 2 or self.network.pools:
            return False
        return max(unit.widest for unit in self.network.units) * math.prod(self.network.in_shape) <= JACOBIAN_ELEMENTS

    @cached_property
    def covectors_fit(self) -> bool:
        """Whether the covectors of all neurons are few enough for linear relaxation."""
        return covector_numbers(self.maps) <= RELAXED_ELEMENTS


def covector_numbers(facts: NetworkFacts) -> int:
    """Return how many numbers the rows of all layers become on their way to the input, for one sample."""
    nodes = facts.network.nodes
    read = {source for node in nodes if isinstance(node, NonlinearNode) for source in node.sources}
    return sum(math.prod(nodes[value].shape) * facts.numbers_behind(value) for value in read)


class AbstractAnalysis(ABC):
    """What holds about each point of a batch: enclosures of slopes, and Lipschitz constants of the units' blocks.

    The constants are those of all units but the last, (batch,), by the values that they give.
    """

    facts: UnitFacts
    evaluation: Evaluation
    slopes: Mapping[int, Slopes]
    growths: Mapping[int, Tensor]

    @final
    def covectors(self, rows: Tensor, value: int | None = None, together: bool = False) -> dict[int, Covectors] | None:
        """Return the gradients of exact combinations of a value, (batch, any, size), of the output by default.

        They are listed by the numbers of the values that they are with respect to.  None if a unit has no derivative.
        With `together` they drift as one, in the Frobenius norm.
        """
        network, end = self.facts.network, self.facts.last.output if value is None else value
        shaped = rows.reshape(*rows.shape[:2], *network.nodes[end].shape)
        back = Backward(network, self.facts.p, self.facts.norms, self.evaluation, self.slopes, self.growths, together)
        return back.carried(shaped, end)

    @final
    def gradients_of(self, value: int | None = None, together: bool = False) -> dict[int, Covectors] | None:
        """Return the gradients of every coordinate of a value, of the output by default."""
        network, batch = self.facts.network, len(self.evaluation.output.value)
        n = math.prod(network.out_shape if value is None else network.nodes[value].shape)
        eye = torch.eye(n, dtype=torch.float64, device=network.device)
        return self.covectors(eye.expand(batch, n, n), value, together)


@final
class AtPoints(AbstractAnalysis):
    """What holds at the points themselves."""

    def __init__(
        self, facts: UnitFacts, evaluation: Evaluation, part_of: "tuple[AtPoints, Tensor] | None" = None
    ) -> None:
        """Start from an evaluation; `part_of` are the points that these are some of, and their numbers among them."""
        self.facts, self.evaluation, self._part_of = facts, evaluation, part_of

    @cached_property
    def reaches(self) -> Mapping[int, Reach]:
        """Where the pre-activations are, by their numbers."""
        found = {}
        for unit in self.facts.network.activated:
            z = self.evaluation.values[unit.z]
            found[unit.z] = Reach(z, torch.zeros_like(z.value), torch.zeros_like(z.value))
        return found

    @cached_property
    def slopes(self) -> Mapping[int, Slopes]:  # type: ignore[override]
        """Enclosures of the slopes."""
        return {
            unit.hidden: slopes_within(unit.block.activation, self.reaches[unit.z])
            for unit in self.facts.network.activated
        }

    @cached_property
    def seen(self) -> Mapping[int, Slopes]:
        """Enclosures of the slopes that are seen from the points, to anywhere, by the activations' numbers."""
        return {
            unit.hidden: anchored_slopes(unit.block.activation, self.evaluation.values[unit.z])
            for unit in self.facts.network.activated
        }

    @cached_property
    def growths(self) -> Mapping[int, Tensor]:  # type: ignore[override]
        """The blocks' constants anywhere: cheap, and only errors grow by them."""
        batch = len(self.evaluation.output.value)
        return {value: constant.expand(batch) for value, constant in self.facts.constants().items()}

    @cached_property
    def gradients(self) -> dict[int, Covectors] | None:
        """The gradients of every output; None if a unit has no derivative."""
        if self._part_of is None:
            return self.gradients_of()
        whole, index = self._part_of
        if whole.gradients is None:
            return None
        return {value: covectors.of_samples(index) for value, covectors in whole.gradients.items()}

    def of_samples(self, index: Tensor) -> "AtPoints":
        """Return what holds at some of the points."""
        return AtPoints(self.facts, self.evaluation.of_samples(index), (self, index))


@final
class OverBalls(AbstractAnalysis):
    """What holds over the closed ball of a radius about each point.

    Attributes:
        reaches: where the pre-activations lie, by their numbers.
        jacobians: those of the pre-activations, by the same numbers; empty where they are too large.
        prefixes: Lipschitz constants of x -> v for the input and every value v that a unit ends in but the last.
    """

    def __init__(self, facts: UnitFacts, evaluation: Evaluation, radius: Tensor) -> None:
        """Carry the balls forward."""
        self.facts, self.evaluation, self.radius = facts, evaluation, radius
        self.reaches: dict[int, Reach] = {}
        self.slopes: dict[int, Slopes] = {}
        self.growths: dict[int, Tensor] = {}
        self.jacobians: dict[int, Jacobian] = {}
        self.prefixes = {0: torch.ones_like(radius)}
        self._distances = {0: radius}
        self._images = {0: Images.of_input(evaluation.values[0].value)} if facts.jacobians_fit else {}
        self._giving = {unit.output: unit for unit in facts.network.units}
        self._carried = {0}
        if facts.covectors_fit and bool((radius > 0).any()):
            ball = NormBall(facts.p, radius, math.prod(facts.network.in_shape))
            Relaxed(facts.maps, evaluation, ball, narrowed=self._narrowed)
        for unit in facts.network.units:
            self._carry(unit)

    def prefix(self, value: int) -> Tensor:
        """Return the constant of x -> v, also by the gradients of v where its Jacobian is not formed."""
        found = self.prefixes[value]
        if self._images or value == 0 or math.prod(self.facts.network.nodes[value].shape) > JACOBIAN_ROWS:
            return found
        return torch.minimum(found, self._by_gradients(value))

    def _by_gradients(self, value: int) -> Tensor:
        covectors, p = self.gradients_of(value), self.facts.p
        if covectors is None:
            return torch.full_like(self.radius, torch.inf)
        return norm_upper_bound_of_vectors(covectors[0].largest(p), p, 1)

    def _narrowed(self, relaxed: Relaxed, value: int, moved: Moved) -> Moved:
        """Return the range of a pre-activation cut with what units know of it; and carry on from there."""
        units = [unit for unit in self.facts.network.activated if unit.z == value]
        for unit in units:
            self._carry(unit, moved)
        if not units:
            return moved
        reach = self.reaches[value]
        return cut(reach.fall, reach.rise, moved.length, self.facts.p)

    def _carry(self, unit: AbstractUnit, moved: Moved | None = None) -> None:
        """Carry the balls through a unit, and through those before it."""
        if unit.output in self._carried:
            return
        self._carried.add(unit.output)
        for source in unit.sources:
            if source not in self._carried:
                self._carry(self._giving[source])
        bent, last = unit.activated, unit is self.facts.last
        read = Read.of([self._images[source] for source in unit.sources]) if self._images else None
        if bent is not None:
            self._bend(bent, read, moved)
        if last:
            return
        growth = from_centre = self.facts.constants()[unit.output].expand(len(self.radius))
        if bent is not None:
            slopes, z = self.slopes[bent.hidden], self.evaluation.values[bent.z]
            growth = torch.minimum(growth, self._sloped(bent.block, slopes))
            # From the centre a neuron is also no steeper than seen from its own value there.
            seen = slopes.intersect(anchored_slopes(bent.block.activation, z))
            from_centre = torch.minimum(growth, self._sloped(bent.block, seen))
        everywhere = self.facts.prefixes()[unit.output]
        prefix = torch.minimum(self._moved(unit, self.prefixes, growth), everywhere)
        if read is not None:
            image = self._image(unit, read, growth)
            self._images[unit.output] = image
            prefix = torch.minimum(prefix, image.jacobian.norm)
        distance = least(self._moved(unit, self._distances, from_centre), Upper(self.radius) * prefix)
        self.growths[unit.output], self.prefixes[unit.output] = growth, prefix
        self._distances[unit.output] = distance.bound

    def _bend(self, unit: ActivatedUnit, read: Read | None, moved: Moved | None) -> None:
        """Find the range of a unit's pre-activation, its Jacobian and its slopes."""
        z, far = unit.z, self._farthest(unit)
        if read is not None:
            J = read.of_neurons(unit.block, self.facts.norms)
            by_jacobian = (Upper(J.rows) + J.drift[:, None]) * self.radius[:, None]
            far, self.jacobians[z] = torch.fmin(far, by_jacobian.bound.reshape(far.shape)), J
        sides = (far, far) if moved is None else (torch.fmin(far, moved.fall), torch.fmin(far, moved.rise))
        if z in self.reaches:  # another activation of the same value
            known = self.reaches[z]
            sides = (torch.fmin(sides[0], known.fall), torch.fmin(sides[1], known.rise))
        self.reaches[z] = Reach(self.evaluation.values[z], *sides)
        self.slopes[unit.hidden] = slopes_within(unit.block.activation, self.reaches[z])
        if not unit.block.activation.is_tame and not bool(self.slopes[unit.hidden].steepest.isfinite().all()):
            raise OutOfRange(
                f"{unit.block.name}: over the ball the input of {unit.block.activation.name} may leave the numbers "
                "that it is defined on, or overflow, for all that is known of it. Ask for a smaller radius."
            )

    def _farthest(self, unit: ActivatedUnit) -> Tensor:
        """Bound how far each neuron moves, given how far each value that the unit reads does."""
        far = []
        for W, source in zip(unit.maps, unit.sources, strict=True):
            rows = self.facts.norms.row_norms(W, conjugate(self.facts.p))
            far.append(Upper(self._distances[source].reshape(-1, *(1,) * rows.dim())) * rows)
        return total(far).bound

    def _image(self, unit: AbstractUnit, read: Read, growth: Tensor) -> Images:
        """Return the Jacobian of the value that a unit gives."""
        bent, norms = unit.activated, self.facts.norms
        if bent is None:
            return read.straight(unit, growth, norms)
        S = bent.block.activation.derivative(self.evaluation.values[bent.z].value)
        return read.bent(bent, self.jacobians[bent.z], S, self.slopes[bent.hidden], growth, norms)

    def _sloped(self, block: Block, slopes: Slopes) -> Tensor:
        return block_growth(block, slopes, self.facts.p, self.facts.norms)

    def _moved(self, unit: AbstractUnit, sizes: Mapping[int, Tensor], growth: Tensor) -> Tensor:
        return moved_through(unit, [sizes[source] for source in unit.sources], growth, self.facts.p, self.facts.norm)
