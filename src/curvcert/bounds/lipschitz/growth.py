r"""How far every value of a network can move for a unit of its input: node by node, and by LipLT in its z-form.

With :math:`\phi(z) = \mu z + \psi(z)` about the middle slope :math:`\mu = (\alpha + \beta)/2`, the rest
:math:`\psi` is :math:`\rho = (\beta - \alpha)/2`-Lipschitz.  With the path maps P (`propagation/path_maps.py`) of the
network whose activations are their middle slopes, the pre-activations and the output are

.. math:: z_k = P_{k0} x + \sum_{i < k} P_{ki} \psi_i(z_i) + \text{const}, \qquad
          Z_k = \|P_{k0}\| + \sum_{i < k} \|P_{ki}\| \rho_i Z_i.

Nodes of one level (`network/rewriting/levels.py`) are also bounded together: with the pre-activations of a level as one
vector, of growth :math:`Z_l`, its share is the least of :math:`\|[P_{ki} \rho_i]_{i \in l}\| Z_l` and the sum over its
members, so that a layer loses nothing by being written as several nodes.  Max-pooling has no middle slope: all of it is
rest.

The published recursion is about blocks, and carries :math:`\|W_j\| L_j` where :math:`Z_j` stands here, which is never
less.  Never above the layerwise product either: where a norm of a path map is only bounded, a sum's own constant, from
those of the values that it reads, is taken if it is less.  In networks with skips, where contracting blocks have
constants that no sum of norms can match, the sum over paths is first estimated from below by power iteration, and its
norms are not bounded where that is already too much.

In l2 networks of large images are bounded on one torus for all of them (`on_torus.py`).  The sum over paths is then
only taken where their norms are cheap and nearly exact, as for dense layers behind images, and for small ones.

Reference: Fazlyab et al. (NeurIPS 2023); Entesari et al. (ICML 2024), equation `eq:lipLtRecursive`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.block_constants import block_product, max_pool_constant
from curvcert.bounds.lipschitz.on_torus import images_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global, LayerTerm
from curvcert.network.nodes import AffineNode, ElementwiseNode, MaxPoolNode, Term
from curvcert.network.rewriting.chain import block_at
from curvcert.network.rewriting.levels import Level, levels_of
from curvcert.operators import AbstractLinearMap, NormBounds, Zero
from curvcert.operators.images import EXPLICIT_SIZE, is_nearly_exact
from curvcert.operators.lanczos import glimpsed_norm
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.segments import on_top_of_each_other, side_by_side
from curvcert.progress import working_on
from curvcert.propagation.path_maps import PathMaps, rest_slope
from curvcert.rounding import Upper, least, norm_upper_bound_of_vectors, total

NormOf = Callable[[AbstractLinearMap], Tensor]


@dataclass(frozen=True, eq=False)
class _Whole:
    """The constant of a block, and whether the sum of its terms cannot be less."""

    constant: Tensor
    settled: bool


class Growth:
    """How far every value of a network can move, in the p-norm, for a unit of the input; by any kind of norms."""

    def __init__(self, problem: Problem, norms: AbstractNorms[R], paths: bool = True) -> None:
        """Read a network; every constant is computed when it is first asked for.

        Without `paths` it is what the nodes give one by one.
        """
        self._problem, self._look_back = problem, paths
        self._nodes = problem.network.nodes
        self._images: dict[int, Tensor] = {}
        self._norms: AbstractNorms[R] | NormBounds = norms
        if problem.p == 2 and isinstance(norms, NormBounds):
            images = problem.once("images", lambda: images_of(self._nodes))
            if images is not None:
                self._images = images.constants
                # Gram matrices of these maps would take longer than all the rest.
                self._norms = problem.once("quick norms", lambda: quick(norms))
        self._paths = PathMaps(self._nodes)
        self._levels = levels_of(self._nodes)
        self._values: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}
        self._of_level: dict[Level, Tensor] = {}
        skips = any(isinstance(node, AffineNode) and len(node.terms) > 1 for node in self._nodes)
        exact = problem.p == 2 and (problem.scalars or problem.q == 2)
        self._glimpses = skips and exact and isinstance(norms, NormBounds)

    def of(self, value: int) -> Tensor:
        """Return the constant of x -> a value."""
        if value not in self._values:
            self._values[value] = self._bounded(value, self._norm, last=False)
        return self._values[value]

    def of_output(self) -> Tensor:
        """Return the constant of the network, in its final norm."""
        return self._bounded(len(self._nodes) - 1, lambda op: self._problem.final_norm(op, self._norms), last=True)

    def _step(self, value: int) -> Tensor:
        """Return a constant of what a sum reads: where that is only a sum itself, by its own terms.

        The sum over paths to whatever reads it will look through it, and so its own is not worth its norms.
        """
        node = self._nodes[value]
        if not isinstance(node, AffineNode) or value in self._values or block_at(self._nodes, value) is not None:
            return self.of(value)
        if value not in self._steps:
            self._steps[value] = self._layerwise(value, self._norm, last=False)
        return self._steps[value]

    def _norm(self, op: AbstractLinearMap) -> Tensor:
        return self._norms.norm(op, self._problem.p, self._problem.p)

    def _bounded(self, value: int, outer: NormOf, last: bool) -> Tensor:
        """Return the least of a node's own constant and the sum over paths; `outer` measures maps that end here."""
        self._prepare(value)
        node = self._nodes[value]
        layerwise = self._layerwise(value, outer, last)
        if self._look_back and value in self._images and not last:
            layerwise = torch.minimum(layerwise, self._images[value])
            if not self._is_cheap((value,)):
                return layerwise
        # Of an input, of max-pooling and of an activation the sum over paths says no more than the node's own constant.
        tells = isinstance(node, AffineNode) or (last and isinstance(node, ElementwiseNode))
        if not (tells and self._look_back):
            return layerwise
        if self._glimpses:
            quick = outer if last and self._problem.scalars else glimpsed_norm
            if not bool((self._sum((value,), quick).value < layerwise).any()):
                return layerwise
        return torch.minimum(layerwise, self._sum((value,), outer).bound)

    def _prepare(self, value: int) -> None:
        """Bound what comes before a value, from the input on: deep networks then need no deep recursion.

        Level by level, so that each finds those below it; without sums over paths, what is not inside a block.
        """
        if self._look_back:
            for level in self._levels:
                if level not in self._of_level and all(number < value for number in level):
                    self._of_level[level] = self._together(level)
        elif not self._values:
            inside = {source for k in range(value) if block_at(self._nodes, k) for source in self._nodes[k].sources}
            for k, node in enumerate(self._nodes[:value]):
                if block_at(self._nodes, k) or not (isinstance(node, AffineNode) or k in inside):
                    self._values[k] = self._bounded(k, self._norm, last=False)

    def _layerwise(self, value: int, outer: NormOf, last: bool) -> Tensor:
        """Bound a value from those that its node reads."""
        node = self._nodes[value]
        match node:
            case AffineNode():
                whole = self._of_block(value, outer, last)
                if whole is not None and whole.settled:
                    return whole.constant
                by_terms = total(Upper(outer(term.map)) * self._step(term.source) for term in node.terms).bound
                inner = self._nodes[node.sources[0]]
                if last and len(node.terms) == 1 and isinstance(inner, AffineNode):
                    by_terms = torch.minimum(by_terms, self._behind_a_sum(node.terms[0], inner, outer))
                return by_terms if whole is None else torch.minimum(by_terms, whole.constant)
            case ElementwiseNode():
                moved = Upper(self.before(value)) * max(map(abs, node.activation.slope))
                return (moved * outer(self._paths.to(value)[value])).bound if last else moved.bound
            case MaxPoolNode():
                constant = max_pool_constant(node.pool, self._problem, last).to(self._problem.network.device)
                return (Upper(constant) * self.before(value)).bound
            case _:
                one = torch.ones((), dtype=torch.float64, device=self._problem.network.device)
                return outer(self._paths.to(value)[value]) if last else one

    def _of_block(self, value: int, outer: NormOf, last: bool) -> "_Whole | None":
        """Bound the end of a residual block by the block's own constant, or None where no block ends."""
        found = block_at(self._nodes, value)
        if found is None:
            return None
        start = self.of(found.start)
        constant = (Upper(block_product(found.block, self._problem, self._norms, last)) * start).bound
        if not isinstance(self._norms, NormBounds):  # estimates are not looked at: that would wait for the device
            return _Whole(constant, settled=False)
        # The skip is a term of the sum, which then cannot give less, and costs a norm of the branch.
        return _Whole(constant, settled=bool((constant <= outer(found.block.H) * start * (1 + 1e-9)).all()))

    def _behind_a_sum(self, last: Term, read: AffineNode, outer: NormOf) -> Tensor:
        """Bound a last map behind a sum term by term: a row that the terms share may be short for each of them."""
        return total(Upper(outer(last.map @ term.map)) * self._step(term.source) for term in read.terms).bound

    def before(self, number: int) -> Tensor:
        """Return the constant of the pre-activation of a nonlinear node, alone or as part of its level."""
        level = next(level for level in self._levels if number in level)
        alone = self.of(self._nodes[number].sources[0])
        return torch.minimum(alone, self._of_level[level]) if level in self._of_level else alone

    def _together(self, level: Level) -> Tensor:
        """Bound the pre-activations of a level as one vector, given all levels below it."""
        # Two activations of one value count it twice: what they leave is as long as the value beside itself.
        working_on(self._nodes[level[0]].name)
        targets = tuple(self._nodes[number].sources[0] for number in level)
        alone = torch.stack([self.of(target) for target in targets])
        if len(targets) == 1:
            return alone[0]
        separate = norm_upper_bound_of_vectors(alone, self._problem.p, 0)
        if self._images and not self._is_cheap(targets):
            return separate
        return torch.minimum(separate, self._sum(targets, self._norm).bound)

    def _sum(self, targets: tuple[int, ...], outer: NormOf) -> Upper:
        """Return the sum over paths to values, as one vector; `outer` measures the maps that end there."""
        maps = [self._paths.to(target) for target in targets]

        def path(source: int) -> AbstractLinearMap:
            found = [
                to.get(source, Zero(self._nodes[source].shape, self._nodes[target].shape, like.dtype, like.device))
                for to, target in zip(maps, targets, strict=True)
            ]
            return on_top_of_each_other(found)

        like = next(iter(maps[0].values()))
        parts: list[Upper | Tensor] = [outer(path(0))] if any(0 in to for to in maps) else []
        for level in reversed(self._levels):
            members = [number for number in reversed(level) if any(number in to for to in maps)]
            if not members:
                continue
            if any(math.isinf(self._rest(number)) for number in members):
                return Upper(torch.full((), torch.inf, dtype=torch.float64, device=self._problem.network.device))
            paths = {number: path(number) for number in members}
            share = total(Upper(outer(paths[number])) * self._rest(number) * self.before(number) for number in members)
            if len(members) > 1 and level in self._of_level:
                joint = side_by_side([self._rest(number) * paths[number] for number in members])
                share = least(share, Upper(outer(joint)) * self._of_level[level])
            parts.append(share)
        if not parts:
            return Upper(torch.zeros((), dtype=torch.float64, device=self._problem.network.device))
        return total(parts)

    def _is_cheap(self, targets: tuple[int, ...]) -> bool:
        """Whether the norms of all paths to some values are a matter of seconds, and nearly exact."""
        return all(
            is_nearly_exact(path)
            for target in targets
            for source, path in self._paths.to(target).items()
            if source == 0 or isinstance(self._nodes[source], ElementwiseNode | MaxPoolNode)
        )

    def _rest(self, number: int) -> float:
        """Return the Lipschitz constant of what of a nonlinear node is not linear."""
        node = self._nodes[number]
        if isinstance(node, MaxPoolNode):
            return math.nextafter(float(max_pool_constant(node.pool, self._problem, False)), math.inf)
        assert isinstance(node, ElementwiseNode)
        return rest_slope(node.activation)


def quick(norms: NormBounds) -> NormBounds:
    """Return norms that take a torus where a Gram matrix would be large."""
    return NormBounds(norms.memory_budget, EXPLICIT_SIZE, norms)


def bound_of(found: Growth, problem: Problem, norms: AbstractNorms[R], method: str) -> R:
    """Return the network's constant as a result, with that of every activation on the way."""
    nodes, constant = problem.network.nodes, found.of_output()
    nonlinear = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode | MaxPoolNode)]
    values = [*(found.of(k) for k in nonlinear[:-1]), constant]
    named = zip(nonlinear or [len(nodes) - 1], values, strict=True)
    per_layer = tuple(LayerTerm(nodes[k].name, "prefix", value, method) for k, value in named)
    return norms.result(
        problem.shaped(constant), problem.p, problem.q, Global(), method, per_layer, problem.network.assumes
    )
