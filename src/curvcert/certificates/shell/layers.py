r"""What the shell certificate needs of a network, computed once: norms of every block's maps.

Jacobians at the samples are formed where they fit.  Behind a first layer :math:`W_1` with fewer neurons than
inputs, only norms of :math:`M W_1` matter, and :math:`\|M W_1\| \le \|M R\|` for any R with
:math:`R R^T \succeq W_1 W_1^T`: a square R stands for :math:`W_1`, and no Jacobian is wider than that layer.

Where the first layers are too wide, as convolutions are, Jacobians are formed from the first one, k, that is not.  What
leads there is nearly linear in a network that was trained to be certified: the Jacobian of :math:`z_k` is close to
:math:`\nu W_k \cdots W_1` with a number :math:`\nu` of the sample's own, and a square R stands for that product.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvcert.bounds.curvature.compositional import unit_lipschitz
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem, outputs_of
from curvcert.certificates.shell.norms import congruent_eigenvalues, frobenius_norms
from curvcert.errors import UnsupportedModule
from curvcert.network import Block, Network
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, Identity, NormBounds
from curvcert.operators.magnitudes import (
    absolute_row_sums_upper_bound,
    image_error,
    interpolated,
    magnitude,
    rounding_length,
)
from curvcert.operators.rows import basis_vectors
from curvcert.operators.verified import dominating_factor, spectral_norm_of_matrix_upper_bound
from curvcert.propagation.slopes import stacked_size
from curvcert.rounding import Upper, gamma, inflate, least, norm_upper_bound_of_vectors

JACOBIAN_ELEMENTS = 2**20
"""Largest Jacobian of a layer, in numbers, that is formed for each sample."""

BEHIND_WIDER_LAYERS = 2**22
"""The same behind layers with more neurons than inputs, as convolutions have: there it is worth its time."""

_LARGEST = 1e100
"""A product of maps is formed only where its norm cannot reach this: squares must not overflow."""

_FACTOR_SIZE = 1024
"""Largest layer with a norm of diag(S) W of its own for each sample."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One unit, with the p -> p norms of its maps; `reach` is a Lipschitz constant of x -> v, v what the unit gives."""

    unit: AbstractUnit
    p: float
    norms: NormBounds
    constant: Tensor
    reach: Tensor

    @cached_property
    def H(self) -> Tensor:
        """The norm of H."""
        return self.norms.norm(self.unit.H, self.p, self.p)

    @cached_property
    def G(self) -> Tensor:
        """The norm of G."""
        return self.norms.norm(self.smooth.G, self.p, self.p)

    @cached_property
    def W(self) -> Tensor:
        """The norm of W."""
        return self.norms.norm(self.smooth.W, self.p, self.p)

    @cached_property
    def rows(self) -> Tensor:
        """The norms of W's rows, that of functionals: in the dual norm; flat."""
        return self.norms.row_norms(self.smooth.W, conjugate(self.p)).flatten()

    @cached_property
    def parts(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Where several values are read, the norm and the rows' norms, flat, of the part that each goes through."""
        each = ((A, conjugate(self.p)) for A in self.unit.parts)
        return tuple((self.norms.norm(A, self.p, self.p), self.norms.row_norms(A, q).flatten()) for A, q in each)

    @cached_property
    def plain(self) -> bool:
        """Whether the block is phi(W x + b)."""
        return not self.smooth.is_residual and isinstance(self.smooth.G, Identity)

    @cached_property
    def about_centre(self) -> tuple[float, Tensor]:
        """The middle slope mu, and the norm of H + mu G W."""
        alpha, beta = self.smooth.activation.slope
        mu = (alpha + beta) / 2
        linear = self.smooth.H + mu * (self.smooth.G @ self.smooth.W)
        return mu, self.norms.norm(linear, self.p, self.p)

    @cached_property
    def factor(self) -> tuple[Tensor, Tensor] | None:
        """A matrix R and an error with ||diag(s) W||_2 <= ||diag(s) R||_2 + max(s) error for every s >= 0.

        R is W itself where it has fewer columns than rows; None where it is too large, or p is not 2.
        """
        W = self.smooth.W
        if self.p != 2 or W.out_size > _FACTOR_SIZE:
            return None
        if W.in_size >= W.out_size:
            R = dominating_factor(*self.norms.gram(W))
            return R, torch.zeros_like(R[0, 0])
        basis = basis_vectors(W.in_shape, 0, W.in_size, W)
        error = frobenius_norms(image_error(W, basis).flatten(1)[None])[0]
        return W.apply(basis).flatten(1).mT, error

    @cached_property
    def gram(self) -> Tensor | None:
        """The absolute values of W W', (1, n, n), rounded up; None as the factor is."""
        if self.factor is None:
            return None
        B, error = self.norms.gram(self.smooth.W)
        return (Upper(B.abs()) + error).bound[None]

    def weighted_by_gram(self, s: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(s) W\|` for each s >= 0, (batch, n): by the largest, and by |W W'|."""
        largest = Upper(s.amax(dim=1)) * self.W
        if self.gram is None:
            return largest.bound
        eigenvalues = congruent_eigenvalues(self.gram, Upper(s).square().bound[:, None], self.rows[None])
        return least(largest, Upper(eigenvalues).root()[:, 0]).bound

    def weighted(self, s: Tensor) -> Tensor:
        r"""Bound the same by the largest, and by the sums along rows and columns."""
        W = self.smooth.W
        largest = (Upper(s.amax(dim=1)) * self.W).bound
        by_rows = (Upper(s) * self._row_sums).amax(1).bound
        if math.isinf(self.p):
            return torch.minimum(largest, by_rows)
        shaped = self._magnitude.adjoint(s.reshape(len(s), *W.out_shape))
        by_columns = Upper(shaped.flatten(1).amax(dim=1), rounding_length(W) + 1).bound
        if self.p == 1:
            return torch.minimum(largest, by_columns)
        return torch.minimum(largest, interpolated(by_columns, by_rows, self.p))

    @cached_property
    def _row_sums(self) -> Tensor:
        return absolute_row_sums_upper_bound(self.smooth.W).flatten()

    @cached_property
    def _magnitude(self) -> AbstractLinearMap:
        return magnitude(self.smooth.W)

    @property
    def smooth(self) -> Block:
        """The block, which has an activation."""
        if self.unit.activated is None:
            raise UnsupportedModule(f"{self.unit.block.name or 'A block'} has no activation.")
        return self.unit.activated.block


@dataclass(frozen=True, eq=False)
class Root:
    """The transpose of R, which dominates a product of maps: R R' is its Gram matrix, or more."""

    transposed: Tensor

    @cached_property
    def norm(self) -> Tensor:
        """A bound on the norm of R."""
        return spectral_norm_of_matrix_upper_bound(self.transposed.mT)

    @cached_property
    def gram(self) -> Tensor:
        """Bounds on the absolute values of R R', (1, n, n)."""
        R = self.transposed.mT
        rows = norm_upper_bound_of_vectors(R, 2, 1)
        rounding = Upper(rows[:, None]) * rows[None, :] * gamma(len(R) + 16)
        return (rounding + (R @ R.mT).abs()).bound[None]


@dataclass(frozen=True, eq=False)
class Layers:
    """A network ready for shell certificates; made by `layers_of`.  Its norms are computed when they are needed."""

    problem: Problem
    pairs: Problem
    jacobians_from: int | None
    """The first block whose Jacobian is formed; None where there is none."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The blocks with their norms."""
        units, norms, p = self.network.units, self.problem.norms, self.problem.p
        constants, layers = value_constants(self.pairs), []
        for k, unit in enumerate(units):
            last = k == len(units) - 1
            # Distances behind the last block are never asked for.
            constant = constants[0] if last else unit_lipschitz(unit, self.problem, norms, last)
            reach = inflate(constants[0 if last else unit.output], gamma(8 * (k + 1)))
            layers.append(Layer(unit, p, norms, inflate(constant, gamma(16)), reach))
        return tuple(layers)

    @property
    def network(self) -> Network:
        """The network that it is about."""
        return self.problem.network

    @cached_property
    def root(self) -> "Root | None":
        """What stands for the product of all W so far, or None where Jacobians start from a basis."""
        if self.jacobians_from is None:
            return None
        front = self.network.units[: self.jacobians_from + 1]
        maps = [unit.activated.block.W for unit in front if unit.activated is not None]
        if len(maps) < len(front) or front[0].is_residual or not reads_alone(self.network, 0):
            return None
        product, *behind = maps
        if not (behind or product.out_size < product.in_size):
            return None
        for W in behind:
            product = W @ product
        return Root(dominating_factor(*self.problem.norms.gram(product)).mT.contiguous())

    def steepness(self, k: int) -> Tensor:
        """Bound the norm of the Jacobian of z in block k, anywhere."""
        layer = self.layers[k]
        if layer.unit.sources == (0,):
            return layer.W
        given = {0: torch.ones_like(layer.W)} | {each.unit.output: each.reach for each in self.layers}
        read = [given[source] for source in layer.unit.sources]
        return (Upper(stacked_size(read, self.problem.p)) * layer.W).bound

    @property
    def columns(self) -> int:
        """The width of the Jacobians that are formed."""
        return _columns(self.network, self.jacobians_from or 0)

    @cached_property
    def basis(self) -> Tensor:
        """The input's basis, (1, inputs, *in_shape)."""
        n = math.prod(self.network.in_shape)
        eye = torch.eye(n, dtype=torch.float64, device=self.network.device)
        return eye.reshape(1, n, *self.network.in_shape)


def layers_of(pairs: Problem, network: Network) -> Layers:
    """Prepare a network; `pairs` is the problem of its differences of outputs, whose norms and prefixes are shared.

    Raises:
        UnsupportedModule: at a block without a derivative, such as max-pooling.
        UnsupportedActivation: at an activation with a kink.
    """
    network.require_smooth()
    problem = outputs_of(pairs, network)
    start = _jacobians_from(network) if pairs.p == 2 else None
    return Layers(problem, pairs, start if start is None or _product_of_norms(problem, start) < _LARGEST else None)


def _jacobians_from(network: Network) -> int | None:
    """Return the first unit whose Jacobian fits, with those of all behind it; those before it are plain."""
    for k, unit in enumerate(network.units):
        if k and not reads_alone(network, k):
            return None
        if _jacobians_fit(network, k):
            return k
        if unit.activated is None or unit.is_residual or not isinstance(unit.activated.block.G, Identity):
            return None
    return None


def reads_alone(network: Network, k: int) -> bool:
    """Whether a unit reads the value before it and no other, and nobody else reads that."""
    before = network.units[k - 1].output if k else 0
    readers = [j for j, unit in enumerate(network.units) if before in unit.sources]
    return network.units[k].sources == (before,) and readers == [k]


def _product_of_norms(problem: Problem, start: int) -> float:
    """Bound what the product of the W of a front can grow to; 1 where there is no front."""
    front = [unit.activated for unit in problem.network.units[: start + 1]] if start else []
    return math.prod(float(problem.norms.norm(unit.block.W, 2, 2)) for unit in front if unit is not None)


def _columns(network: Network, start: int) -> int:
    first, inputs = network.units[start], math.prod(network.in_shape)
    if first.activated is not None and not first.is_residual and reads_alone(network, start):
        return first.widest if start else min(first.widest, inputs)
    return inputs


def _jacobians_fit(network: Network, start: int) -> bool:
    """Whether Jacobians from a unit on fit; behind others it must be one with a W of its own."""
    units = network.units[start:]
    if start and (units[0].activated is None or units[0].is_residual):
        return False
    sizes = [math.prod(unit.block.out_shape) for unit in units[:-1]]
    sizes += [unit.widest for unit in units if unit.activated is not None]
    sizes += [math.prod(unit.block.in_shape) for unit in units if unit.parts]
    inputs, front = math.prod(network.in_shape), network.units[:start]
    wider = any(unit.activated is not None and unit.widest > inputs for unit in front)
    most = BEHIND_WIDER_LAYERS if wider else JACOBIAN_ELEMENTS
    return max(sizes, default=1) * _columns(network, start) <= most
