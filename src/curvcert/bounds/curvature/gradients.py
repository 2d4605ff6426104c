r"""Bounds on back-propagated gradients that hold at every input: what the unrolled bound weighs layers with.

For scalar outputs f, let :math:`u_k = \partial f / \partial a_k` be the gradient with respect to the k-th
activations.  Two bounds are kept: in the dual norm, by LipLT's z-form carried back over the path maps P,

.. math:: \gamma_k = \|P_{fk}\|_{p^*} + \sum_{j > k} \rho_j \|P_{jk}\|_p \gamma_j,

and neuron by neuron, by intervals through the transposed maps with slopes in :math:`[\alpha, \beta]`
(`propagation/gradient_intervals.py`).  On a chain :math:`P_{jk} = W_j \hat H_{j-1} \cdots \hat H_{k+1} G_k`.

In networks with skips the constants :math:`L_j` of the blocks come in as well, the last in the final norm: contracting
blocks have constants that no sum of norms can match.  What reads a value sends back at most its constant times what
arrives behind it, and all that is sent adds up: on a chain :math:`\gamma_k \le \|G_k\|_p L_{k+1} \cdots L_K`.  And
since the middle slope is a slope like any other, :math:`\|P_{jk}\|_p` is at most the sum over paths of products of
constants, which stands for the norm of a map that is too large to be bounded as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

import torch
from torch import Tensor

from curvcert.bounds.curvature.compositional import glimpsed_lipschitz, unit_lipschitz
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.growth import quick
from curvcert.bounds.lipschitz.on_torus import ImageGradients, image_gradients, images_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed
from curvcert.bounds.types import Global
from curvcert.network import Block
from curvcert.network.rewriting.levels import Level, levels_of
from curvcert.network.rewriting.units import AbstractUnit, ActivatedUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, Composition, Identity, NormBounds, Zero
from curvcert.operators.images import is_nearly_exact
from curvcert.operators.lanczos import glimpsed_norm
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.segments import on_top_of_each_other, side_by_side
from curvcert.propagation.gradient_intervals import GradientIntervals, Interval
from curvcert.propagation.path_maps import PathMaps, rest_slope
from curvcert.rounding import Upper, least, norm_upper_bound_of_vectors, total

_CHAIN_ELEMENTS = 2**23
"""Basis vectors of a map's smaller end, in numbers at its widest, up to which it is bounded as one map."""

Constant = Callable[[AbstractUnit, Problem, AbstractNorms[R], bool], Tensor]
"""A rule for the Lipschitz constant of a unit; the last argument tells whether it is the last."""


@dataclass(frozen=True, eq=False)
class GradientBound:
    """Bounds on the gradient with respect to one unit's activations: its dual norm, and every entry.

    `behind` bounds the dual norm of the gradient with respect to the output of a residual block that is not the last.
    """

    size: Tensor
    interval: Interval
    behind: Tensor | None = None

    @property
    def entries(self) -> Tensor:
        """The largest absolute value of each entry."""
        return self.interval.largest


def gradient_sizes(problem: Problem, norms: AbstractNorms[R]) -> dict[int, Tensor]:
    """Return the dual-norm bounds gamma_k, (outputs,), by the number of each activation."""
    return _GradientSizes(problem, norms, _product).activations


def gradient_bounds(problem: Problem, norms: AbstractNorms[R]) -> dict[int, GradientBound]:
    r"""Return bounds on the gradient of each scalar output, by the number of each activation.

    Outputs that are one vector have one row, that of all :math:`w \cdot f` with :math:`\|w\|_{q^*} \le 1`: its size is
    at most :math:`\|\partial f/\partial a_k\|_{p \to q}`, and an entry the q-norm of those of all outputs.
    """
    sizes, network = _GradientSizes(problem, norms, unit_lipschitz), problem.network
    if not problem.scalars:
        rows = Problem(network, problem.p, problem.p, Global(), scalars=True, norms=problem.norms)
        found = {}
        for hidden, each in gradient_bounds(rows, norms).items():
            size, behind = sizes.activations[hidden].reshape(1), sizes.behind(sizes.unit(hidden))
            whole = norm_upper_bound_of_vectors(each.entries, problem.q, 0)[None].clamp(max=float(size))
            found[hidden] = GradientBound(size, Interval(-whole, whole), None if behind is None else behind.reshape(1))
        return found
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    eye = eye.reshape(network.outputs, *network.out_shape)
    # The norm of column l of A bounds the l-th entry of A'w: |(A'w)_l| <= ||A_:l||_p ||w||_{p*}.
    capped = {unit.z for unit in network.activated}
    domain = GradientIntervals(sizes.of_nodes(), capped, lambda A: norms.row_norms(A.T, problem.p))
    intervals = domain.sweep(network.nodes, Interval(eye, eye))
    return {
        unit.hidden: GradientBound(sizes.activations[unit.hidden], intervals[unit.hidden], sizes.behind(unit))
        for unit in network.activated
    }


class _GradientSizes(Generic[R]):
    """Bounds on the dual norms of the gradients of each scalar output, (outputs,), with respect to all values.

    `activations` has them by the number of each activation.
    """

    def __init__(self, problem: Problem, norms: AbstractNorms[R], constant: Constant[R]) -> None:
        self._problem, self._constant, self._of_units = problem, constant, norms
        self._norms: AbstractNorms[R] | NormBounds = norms
        self._units, self._paths = problem.network.units, PathMaps(problem.network.nodes)
        self._end = self._units[-1].output
        self._readers: dict[int, list[tuple[AbstractUnit, int]]] = {}
        for unit in self._units:
            for place, source in enumerate(unit.sources):
                self._readers.setdefault(source, []).append((unit, place))
        self._images = self._images_of(problem, norms)
        if self._images is not None and isinstance(norms, NormBounds):
            # Gram matrices of paths between images would take longer than all the rest.
            self._norms = problem.once("quick norms", lambda: quick(norms))
        self._values: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self.activations: dict[int, Tensor] = {}
        self._of_level: dict[Level, Tensor] = {}
        self._levels = levels_of(problem.network.nodes)
        self._bent = {unit.hidden: unit for unit in problem.network.activated}
        # From the end on: deep networks then need no deep recursion.  No path leads within a level.
        for place in range(len(self._levels) - 1, -1, -1):
            self._bound_level(place)

    @staticmethod
    def _images_of(problem: Problem, norms: AbstractNorms[R]) -> ImageGradients | None:
        """Return what bounds the gradients with respect to large images."""
        if problem.p != 2 or not (problem.scalars or problem.q == 2) or not isinstance(norms, NormBounds):
            return None
        images = problem.once("images", lambda: images_of(problem.network.nodes))
        if images is None:
            return None
        return problem.once("gradients of images", lambda: image_gradients(images, norms, problem.scalars))

    def _of_image(self, node: int) -> Tensor | None:
        """Bound the gradient with respect to an image on the torus of all images; None for anything else."""
        if self._images is None or node not in self._images.images.number:
            return None
        return self._images.of(node, lambda k: self.activations[k])

    @cached_property
    def _plain(self) -> bool:
        """Whether the network has no skips: the blocks' own constants then say nothing that norms do not."""
        residual = any(unit.is_residual for unit in self._units)
        return not residual and all(
            len(unit.sources) == len(self._readers[unit.sources[0]]) == 1 for unit in self._units
        )

    def unit(self, hidden: int) -> ActivatedUnit:
        """Return the unit of an activation."""
        return self._bent[hidden]

    def behind(self, unit: ActivatedUnit) -> Tensor | None:
        """Bound the gradient with respect to the output of a residual block that is not the last."""
        return self._of_value(unit.output) if unit.is_residual and unit.output != self._end else None

    def of_nodes(self) -> dict[int, Tensor]:
        """Return what is known, by the numbers of nodes: activations, pre-activations, and beside skips the rest."""
        ends = {0, *(unit.output for unit in self._units)}
        found = {}
        for unit in self._bent.values():
            found[unit.hidden] = self.activations[unit.hidden]
            if unit.z not in ends:
                found[unit.z] = (Upper(found[unit.hidden]) * _steepest(unit.block)).bound
        if not self._plain:
            found |= {value: self._of_value(value) for value in ends - {0, self._end} if value not in found}
        return found

    def _of_activation(self, unit: ActivatedUnit) -> Tensor:
        """Return gamma_k, given those of later units."""
        block, hidden = unit.block, unit.hidden
        if unit.output == self._end:
            return self._problem.final_norm(block.G, self._norms)
        candidates = []
        if not block.is_residual and not isinstance(block.G, Identity):
            candidates.append(self._sent_back(unit.output, block.G))
        if isinstance(block.G, Identity) or not self._plain:
            candidates.append((Upper(self._norm(block.G)) * self._of_value(unit.output)).bound)
        later = self._levels[1 + next(place for place, level in enumerate(self._levels) if hidden in level) :]
        on_torus = self._of_image(hidden)
        if on_torus is None or self._is_cheap(hidden, later):
            passed = None if self._plain else self._passed(unit)
            candidates.append(self._sum((hidden,), later, passed))
        candidates += [] if on_torus is None else [on_torus]
        return torch.stack(candidates).amin(dim=0)

    def _bound_level(self, place: int) -> None:
        """Bound the activations of a level, given all levels above it: one by one, and as one vector."""
        level = tuple(number for number in self._levels[place] if number in self._bent)
        for hidden in reversed(level):
            unit = self._bent[hidden]
            if not self._plain and unit.output != self._end:
                self._of_value(unit.output)
            self.activations[hidden] = self._of_activation(unit)
        if len(level) > 1:
            alone = torch.stack([self.activations[hidden] for hidden in level])
            separate = norm_upper_bound_of_vectors(alone, conjugate(self._problem.p), 0)
            together = torch.minimum(separate, self._sum(level, self._levels[place + 1 :], None))
            self._of_level[level] = together
            for hidden in level:  # a part of a gradient is no longer than the whole
                self.activations[hidden] = torch.minimum(self.activations[hidden], together)

    def _sum(self, starts: Level, later: Sequence[Level], passed: dict[int, Tensor] | None) -> Tensor:
        """Return the sum over paths to the output from activations of one level, as one vector."""
        network = self._problem.network
        outputs = (network.outputs,) if self._problem.scalars else ()
        parts: list[Upper | Tensor] = [torch.zeros(outputs, dtype=torch.float64, device=network.device)]
        for level in later:
            paths = {j: path for j in level if (path := self._path(self._bent[j].z, starts)) is not None}
            if not paths:
                continue
            slopes = {j: rest_slope(self._bent[j].block.activation) for j in paths}
            rests = [slopes[j] * path for j, path in paths.items()]
            share = total(
                self._link(path, self._bent[j], passed) * slopes[j] * self.activations[j] for j, path in paths.items()
            )
            if len(rests) > 1 and level in self._of_level and (passed is None or all(map(_is_small, rests))):
                share = least(share, Upper(self._norm(on_top_of_each_other(rests))) * self._of_level[level])
            parts.append(share)
        end = self._path(self._end, starts)
        if end is not None:
            parts.append(self._problem.final_norm(end, self._norms))
        return total(parts).bound

    def _is_cheap(self, hidden: int, later: Sequence[Level]) -> bool:
        """Whether the norms of all paths from an activation on are a matter of seconds, and nearly exact."""
        targets = (*(self._bent[j].z for level in later for j in level if j in self._bent), self._end)
        paths = (self._path(target, (hidden,)) for target in targets)
        return all(path is None or is_nearly_exact(path) for path in paths)

    def _path(self, target: int | None, starts: Level) -> AbstractLinearMap | None:
        """Return the path map to a value from activations side by side, or None where there is none."""
        reach = {} if target is None else self._paths.to(target)
        like = next((reach[start] for start in starts if start in reach), None)
        if target is None or like is None:
            return None
        nodes = self._problem.network.nodes
        shapes = [(nodes[start].shape, nodes[target].shape) for start in starts]
        zeros = (Zero(*shape, like.dtype, like.device) for shape in shapes)
        return side_by_side([reach.get(start, zero) for start, zero in zip(starts, zeros, strict=True)])

    def _of_value(self, value: int) -> Tensor:
        """Bound the gradient with respect to a value that a unit ends in, given those of later activations."""
        if value not in self._values:
            on_torus = self._of_image(value)
            if on_torus is None:
                self._values[value] = self._sent_back(value, None)
            elif bool((self._glimpsed_back(value) < on_torus).any()):
                self._values[value] = torch.minimum(self._sent_back(value, None), on_torus)
            else:  # what is sent back by the norms of single maps is more
                self._values[value] = on_torus
        return self._values[value]

    def _sent_back(self, value: int, G: AbstractLinearMap | None) -> Tensor:
        """Bound what all readers of a value send back to it, or through G to what is in front of G."""
        return total(self._sent(unit, place, G) for unit, place in self._readers[value]).bound

    def _glimpsed_back(self, value: int) -> Tensor:
        """Return less than what all readers of a value send back to it, with norms in l2 as one vector shows them."""
        return total(self._sent(unit, place, None, seen=True) for unit, place in self._readers[value]).bound

    def _sent(self, unit: AbstractUnit, place: int, G: AbstractLinearMap | None, seen: bool = False) -> Upper:
        norm = glimpsed_norm if seen else self._norm
        bent, last = unit.activated, unit.output == self._end
        if bent is None:
            part = _through(unit.terms[place] if unit.terms else unit.H, G)
            if last:
                return Upper(self._problem.final_norm(part, self._norms))
            return Upper(norm(part)) * self._of_value(unit.output)
        block, steep = bent.block, Upper(self.activations[bent.hidden]) * _steepest(bent.block)
        if not block.is_residual:
            return steep * norm(_through(bent.maps[place], G))
        whole = Upper(glimpsed_lipschitz(unit, self._problem, last) if seen else self._of_unit(unit))
        whole = whole if last else whole * self._of_value(unit.output)
        if G is not None:
            return whole * self._norm(G)
        skip = Upper(self._problem.final_norm(block.H, self._norms) if last else norm(block.H))
        skip = skip if last else skip * self._of_value(unit.output)
        return least(whole, steep * norm(block.W) + skip)

    def _passed(self, unit: ActivatedUnit) -> dict[int, Tensor]:
        """Bound how far later values move for a unit of an activation, by the constants of the blocks between."""
        found = {unit.output: self._norm(unit.block.G)}
        for later in self._units[self._units.index(unit) + 1 : -1]:
            if any(source in found for source in later.sources):
                moved = [found.get(source, torch.zeros_like(found[unit.output])) for source in later.sources]
                constant = self._of_unit(later)
                found[later.output] = composed(later, moved, constant, self._problem, False, self._norms)
        return found

    def _link(self, reach: AbstractLinearMap, unit: ActivatedUnit, passed: dict[int, Tensor] | None) -> Upper:
        """Bound the norm of a path map: as one map, or by `passed` where that is large, and W behind it."""
        if passed is None:
            return Upper(self._norm(reach))
        parts = zip(unit.sources, unit.maps, strict=True)
        product = total(Upper(self._norm(W)) * passed[source] for source, W in parts if source in passed)
        return least(self._norm(reach), product) if _is_small(reach) else product

    def _of_unit(self, unit: AbstractUnit) -> Tensor:
        if unit.output not in self._constants:
            last = unit.output == self._end
            self._constants[unit.output] = self._constant(unit, self._problem, self._of_units, last)
        return self._constants[unit.output]

    def _norm(self, op: AbstractLinearMap) -> Tensor:
        return self._problem.inner_norm(op, self._norms)


def _product(unit: AbstractUnit, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    return block_product(unit.block, problem, norms, last)


def _steepest(block: Block) -> float:
    return max(map(abs, block.activation.slope))


def _through(A: AbstractLinearMap, G: AbstractLinearMap | None) -> AbstractLinearMap:
    return A if G is None else A @ G


def _is_small(op: AbstractLinearMap) -> bool:
    """Whether a map may be bounded as one."""
    factors = op.factors if isinstance(op, Composition) else (op,)
    widest = max(max(factor.in_size, factor.out_size) for factor in factors)
    return min(op.in_size, op.out_size) * widest <= _CHAIN_ELEMENTS
