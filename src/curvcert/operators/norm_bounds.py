r"""Operator norms of linear maps, bounded from above: `norm_upper_bound(op, p, q)`.

Exact up to rounding for 2 -> 2 of what fits in memory (nearly so for large maps between images, see `images.py`),
for 1 -> q (the largest column) and for p -> inf (the largest row); a proven bound for every other 1 <= p, q <= inf.
"""

import math
from collections.abc import Hashable
from functools import reduce, singledispatch

import torch
from torch import Tensor

from curvcert.bounds.types import Bound, LayerTerm, Scope
from curvcert.budget import checkpoint
from curvcert.errors import InvalidInput, OutOfRange, UnsupportedOperator
from curvcert.norms import conjugate, validate_p
from curvcert.operators import chains, fourier, khatri_rao
from curvcert.operators.base import (
    AbstractLinearMap,
    AbstractPart,
    AbstractReordering,
    Composition,
    Scaled,
    Sum,
    Transposed,
    Zero,
    require_finite,
    structure,
    weights,
)
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Conv2d, overlaps
from curvcert.operators.dense import Dense
from curvcert.operators.images import GRAM_SIZE as IMAGE_GRAM_SIZE
from curvcert.operators.images import large_norm_upper_bound
from curvcert.operators.interpolation import interpolated_norm_upper_bound
from curvcert.operators.lanczos import glimpsed_norm
from curvcert.operators.magnitudes import absolute_norm_upper_bound
from curvcert.operators.norm_rule import AbstractNorms
from curvcert.operators.rows import column_norms_upper_bound, row_norms_upper_bound
from curvcert.operators.structured import AveragePool2d, Diagonal
from curvcert.operators.verified import spectral_norm_of_matrix_upper_bound
from curvcert.operators.weighted import GRAM_SIZE, bilinear_upper_bound
from curvcert.rounding import (
    RECURSION_SLACK,
    UNIT_ROUNDOFF,
    Upper,
    bits_below_one,
    inflate,
    most_bits,
    root_below,
    total,
)

MEMORY_BUDGET = 4 * 2**30
"""Bytes that one norm may take by default."""

_EXPLICIT_WORK = 2**36
"""A convolution is made explicit if its Gram matrix takes at most this many multiplications."""

_MOST_BITS = 900.0
"""How far below 1 a product of norms may be: floats end at 2**-1022, and norms differ by the dimension."""

_ATTAINED = 1e-6
"""A product of norms that is reached to within this share is not refined."""

Measured = tuple[Tensor, str]
"""A norm's upper bound and the name of the method that proved it."""


def norm_upper_bound(
    op: AbstractLinearMap, p: float = 2, q: float | None = None, *, memory_budget: int = MEMORY_BUDGET
) -> Bound:
    r"""Bound :math:`\|A\|_{p \to q} = \max \|Ax\|_q / \|x\|_p` from above, rounding included.

    The weights count as the exact numbers that they hold, whatever their dtype.  q defaults to p.
    A product whose Gram matrices don't fit `memory_budget` (bytes) is bounded by its best split.

    >>> W = Dense(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    >>> norm_upper_bound(W)
    Bound(<= 4, l2 -> l2, global, by verified Cholesky)
    >>> float(norm_upper_bound(W, p=1, q=math.inf))
    4.0
    """
    return NormBounds(memory_budget).bound(op, p, q)


class NormBounds(AbstractNorms[Bound]):
    """Norm bounds that remember: the norms of shared maps are computed once in its lifetime.

    >>> norms = NormBounds()
    >>> W = Dense(torch.eye(3))
    >>> norms.bound(W) is norms.bound(W)
    True
    """

    def __init__(
        self, memory_budget: int = MEMORY_BUDGET, gram_size: int = IMAGE_GRAM_SIZE, beside: "NormBounds | None" = None
    ) -> None:
        """Start with an empty memory and a budget in bytes.

        Maps between images take Gram matrices up to `gram_size` where a torus is less exact.  What `beside` knows by
        then is not computed again.
        """
        if memory_budget < 2**20:
            raise InvalidInput(f"memory_budget is a number of bytes, at least 2**20, got {memory_budget}.")
        self.memory_budget, self._gram_size, self._beside = memory_budget, gram_size, beside
        self._known: dict[tuple[Hashable, float, float], tuple[AbstractLinearMap, Bound]] = {}
        self._hadamards: dict[Hashable, tuple[AbstractLinearMap, Tensor]] = {}
        self._absolutes: dict[tuple[Hashable, float], tuple[AbstractLinearMap, Tensor]] = {}
        self._grams: dict[Hashable, tuple[AbstractLinearMap, Tensor, Tensor]] = {}
        self._quick: dict[Hashable, tuple[AbstractLinearMap, Tensor]] = {}
        self._bits: dict[Hashable, tuple[AbstractLinearMap, float]] = {}
        self._chain: chains.ChainMatrix | None = None
        self._finite: dict[int, Tensor] = {}

    def bound(self, op: AbstractLinearMap, p: float = 2, q: float | None = None) -> Bound:
        """Bound the p -> q norm of a map."""
        p = validate_p(p)
        q = p if q is None else validate_p(q, "q")
        key = (structure(op), p, q)
        if self._beside is not None and key in self._beside._known:
            return self._beside._known[key][1]
        if key not in self._known:
            checkpoint()
            self._require_usable(op)
            # The map is kept beside its bound, so that its parts' ids cannot be taken over by others.
            with torch.no_grad():
                value, method = self._measure(_in_float64(op), p, q)
            if not bool(torch.isfinite(value)):
                raise OutOfRange(f"The norm of this {type(op).__name__} overflows float64. Rescale the weights.")
            self._known[key] = (op, Bound(value, p, q, method=method))
        return self._known[key][1]

    def bits_below_one(self, op: AbstractLinearMap) -> float:
        """Return by how many bits the products of norms on the way to a map's norm may be below 1; inf for the map 0.

        >>> W = Dense(torch.eye(3) / 32)
        >>> round(NormBounds().bits_below_one(W @ W))
        10
        """
        key = structure(op)
        if key not in self._bits:
            self._bits[key] = (op, self._bits_of(op))
        return self._bits[key][1]

    def _bits_of(self, op: AbstractLinearMap) -> float:
        match op:
            case Sum():
                return most_bits(map(self.bits_below_one, op.terms))
            case Composition():
                return sum(map(self.bits_below_one, op.factors))
            case Circuit():
                return op.carried(0.0, lambda part, bits: bits + self.bits_below_one(part), most_bits)
            case Scaled():
                return bits_below_one(abs(op.factor)) + self.bits_below_one(op.map)
            case Transposed():
                return self.bits_below_one(op.map)
            case _:  # the largest sum of a row; other norms are the same up to the dimension
                return bits_below_one(float(self.norm(op, math.inf, math.inf)))

    def _require_usable(self, op: AbstractLinearMap) -> None:
        """Raise if any weight is NaN or infinite (each is looked at once), or a product of norms could underflow."""
        fresh = {id(weight): weight for weight in weights(op) if id(weight) not in self._finite}
        if fresh:
            require_finite(op)
            self._finite |= fresh
        if isinstance(op, Sum | Composition | Scaled | Circuit) and _MOST_BITS < self.bits_below_one(op) < math.inf:
            raise OutOfRange(
                f"The maps of this {type(op).__name__} are too small for norms in float64: 2**-"
                f"{self.bits_below_one(op):.0f}, expected 2**-{_MOST_BITS:.0f} or more. Scale the weights up."
            )

    def norm(self, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        """Bound the p -> q norm of a map, as a plain number."""
        return self.bound(op, p, q).value

    def may_be_below(self, op: AbstractLinearMap, size: Tensor) -> bool:
        """Whether it is worth while to bound a 2 -> 2 norm that only counts below a size: no growth reaches that."""
        return (structure(op), 2.0, 2.0) in self._known or bool(glimpsed_norm(_in_float64(op)) < size)

    def row_norms(self, op: AbstractLinearMap, r: float) -> Tensor:
        """Bound the r-norms of the rows of a map."""
        self._require_usable(op.map if isinstance(op, Transposed) else op)
        with torch.no_grad():
            return row_norms_upper_bound(op.to(torch.float64), r)

    def result(
        self,
        value: Tensor,
        p: float,
        q: float,
        scope: Scope,
        method: str,
        per_layer: tuple[LayerTerm, ...] = (),
        assumes: tuple[str, ...] = (),
        skipped: tuple[str, ...] = (),
    ) -> Bound:
        """Return the final number of a recursion, rounded up, as a Bound."""
        return Bound(inflate(value, RECURSION_SLACK), p, q, scope, method, per_layer, assumes, skipped)

    def absolute(self, op: AbstractLinearMap, p: float) -> Tensor:
        """Bound the p -> p norm of the map of absolute values: what rounding errors are measured with."""
        key = (structure(op), p)
        if key not in self._absolutes:
            self._absolutes[key] = (op, absolute_norm_upper_bound(op, p))
        return self._absolutes[key][1]

    def gram(self, op: AbstractLinearMap) -> tuple[Tensor, Tensor]:
        """Return A A' of a float64 map, and a bound on its error in the Frobenius norm."""
        key = structure(op)
        if key not in self._grams:
            self._grams[key] = (op, *chains.gram_matrix(op, self.quick_spectral))
        return self._grams[key][1:]

    def chain(self, op: Composition) -> Tensor | None:
        """Bound the 2 -> 2 norm of a product by its matrix, or None where that is too large to be held.

        The last one is kept: a product with more factors behind it goes on from there.
        """
        widest = max(op.in_size, *(factor.out_size for factor in op.factors))
        if op.out_size * widest > min(chains.MATRIX_ELEMENTS, self.memory_budget // 64):
            return None
        known = self._chain
        found = known if known is not None and known.begins(op.factors) else chains.empty_chain(op)
        for factor in op.factors[len(found.factors) :]:
            found = found.times(factor, self.quick_spectral, lambda part: self.absolute(part, 2.0))
        self._chain = found
        return found.norm_upper_bound()

    def gram_fits(self, n: int) -> bool:
        """Whether Gram matrices of size n fit the memory budget."""
        return chains.outer_gram_bytes(n) <= self.memory_budget

    def hadamard(self, op: AbstractLinearMap) -> Tensor:
        """Bound the root of the largest eigenvalue of (A A') squared entry by entry."""
        key = structure(op)
        if key not in self._hadamards:
            with torch.no_grad():
                self._hadamards[key] = (op, khatri_rao.hadamard_norm_upper_bound(_in_float64(op), self))
        return self._hadamards[key][1]

    def vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor:
        """Bound the root of the largest eigenvalue of (G'G) o (WW')."""
        with torch.no_grad():
            return khatri_rao.vectorised_norm_upper_bound(_in_float64(G), _in_float64(W), self)

    def scaled_vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor | None:
        """Bound the scaled vectorised Jacobian, or None where its Gram matrices don't fit the budget."""
        G, W = _in_float64(G), _in_float64(W)
        if not self.gram_fits(W.out_size):
            return None
        with torch.no_grad():
            d, root = khatri_rao.scaled_vectorised_norms(G, W, self)
            return inflate(root * self.spectral(Diagonal(d, W.out_shape) @ W), 0.0)

    def bilinear(
        self, op: AbstractLinearMap, d: Tensor, p: float, gram_size: int = GRAM_SIZE, known: Tensor | None = None
    ) -> Tensor:
        """Bound the bilinear form with weights d over the p-ball, one value for each d >= 0; or by what is known."""
        with torch.no_grad():
            return bilinear_upper_bound(_in_float64(op), d, p, self, gram_size, known)

    def spectral(self, op: AbstractLinearMap) -> Tensor:
        """Bound the 2 -> 2 norm of a float64 map."""
        return self.bound(op, 2, 2).value

    def quick_spectral(self, op: AbstractLinearMap) -> Tensor:
        """Bound the 2 -> 2 norm by sums and products of the norms of elementary maps."""
        key = structure(op)
        if key not in self._quick:
            self._quick[key] = (op, self._quick_of(op))
        return self._quick[key][1]

    def _quick_of(self, op: AbstractLinearMap) -> Tensor:
        match op:
            case Sum():
                return total(map(self.quick_spectral, op.terms)).bound
            case Composition():
                first, *others = map(self.quick_spectral, op.factors)
                return reduce(Upper.__mul__, others, Upper(first)).bound
            case Scaled():
                return (Upper(self.quick_spectral(op.map)) * abs(op.factor)).bound
            case Transposed():
                return self.quick_spectral(op.map)
            case _:
                return self.spectral(op)

    def _measure(self, op: AbstractLinearMap, p: float, q: float) -> Measured:
        match op:
            case Zero():
                return torch.zeros((), dtype=op.dtype, device=op.device), "zero"
            case Scaled():
                inner = self.bound(op.map, p, q)
                return inflate(abs(op.factor) * inner.value, 0.0), inner.method
            case Transposed():
                inner = self.bound(op.map, conjugate(q), conjugate(p))
                return inner.value, inner.method
            case _ if p == 2 and q == 2:
                return large_norm_upper_bound(op, self._gram_size) or spectral_norm_upper_bound(op, self)
            case _ if p == 1:
                return column_norms_upper_bound(op, q).amax(), "largest column"
            case _ if math.isinf(q):
                return row_norms_upper_bound(op, conjugate(p)).amax(), "largest row"
            case _:
                return interpolated_norm_upper_bound(op, p, q, lambda: self.spectral(op))


def _in_float64(op: AbstractLinearMap) -> AbstractLinearMap:
    return op if op.dtype == torch.float64 else op.to(torch.float64)


@singledispatch
def spectral_norm_upper_bound(op: AbstractLinearMap, norms: NormBounds) -> Measured:
    """Bound the 2 -> 2 norm of a float64 map, and name the method."""
    raise UnsupportedOperator(
        f"norm_upper_bound has no 2 -> 2 rule for {type(op).__name__}. "
        "Register one with spectral_norm_upper_bound.register."
    )


@spectral_norm_upper_bound.register(AbstractPart)
def _(op: AbstractLinearMap, norms: NormBounds) -> Measured:
    return torch.ones((), dtype=op.dtype, device=op.device), "isometry"


@spectral_norm_upper_bound.register
def _(op: Diagonal, norms: NormBounds) -> Measured:
    return op.weight.abs().amax(), "largest entry"


@spectral_norm_upper_bound.register
def _(op: Dense, norms: NormBounds) -> Measured:
    if chains.outer_gram_bytes(min(op.weight.shape)) > norms.memory_budget:
        return absolute_norm_upper_bound(op), "row and column sums (over the memory budget)"
    return spectral_norm_of_matrix_upper_bound(op.weight), "verified Cholesky"


@spectral_norm_upper_bound.register
def _(op: AveragePool2d, norms: NormBounds) -> Measured:
    value, method = spectral_norm_upper_bound(op.as_conv, norms)
    return inflate(value, 4 * UNIT_ROUNDOFF), method


@spectral_norm_upper_bound.register
def _(op: Conv2d, norms: NormBounds) -> Measured:
    if not overlaps(op):
        matrices = op.weight.flatten(1).unflatten(0, (op.groups, -1))
        return spectral_norm_of_matrix_upper_bound(matrices), "matrix of the kernel"
    small, large = sorted((op.in_size, op.out_size))
    if small**2 * large <= _EXPLICIT_WORK and 8 * small * (large + 4 * small) <= norms.memory_budget:
        return spectral_norm_of_matrix_upper_bound(op.as_matrix()), "explicit matrix"
    if fourier.covers(op):
        return fourier.fourier_norm_upper_bound(op), "Fourier"
    return absolute_norm_upper_bound(op), "row and column sums (a stride that does not divide a circular image)"


@spectral_norm_upper_bound.register
def _(op: Sum, norms: NormBounds) -> Measured:
    if chains.outer_gram_bytes(min(op.in_size, op.out_size)) <= norms.memory_budget:
        return chains.gram_norm_of_chain_upper_bound(op, norms.quick_spectral), "Gram matrix of the sum"
    return norms.quick_spectral(op), "sum of norms (over the memory budget)"


@spectral_norm_upper_bound.register
def _(op: Circuit, norms: NormBounds) -> Measured:
    one = Upper(torch.ones((), dtype=op.dtype, device=op.device))
    paths = op.carried(one, lambda part, size: size * norms.quick_spectral(part), total).bound
    if chains.outer_gram_bytes(min(op.in_size, op.out_size)) <= norms.memory_budget:
        return chains.gram_norm_of_chain_upper_bound(op, lambda _: paths), "Gram matrix of the circuit"
    return paths, "sum over paths (over the memory budget)"


@spectral_norm_upper_bound.register
def _(op: Composition, norms: NormBounds) -> Measured:
    factors = _without_reordering_ends(op.factors)
    if len(factors) < len(op.factors):
        known = norms.bound(_product(factors))
        return known.value, known.method
    pool = factors[-1]
    if isinstance(pool, AveragePool2d) and not overlaps(pool.as_conv):
        # Its rows are orthogonal and of one length, so it maps the ball onto a ball.
        known = norms.bound(_product(factors[:-1]))
        return (Upper(known.value) / root_below(math.prod(pool.kernel_size))).bound, known.method
    attained = _attained_product(op, norms)
    if attained is not None:
        return attained, "product of norms, attained"
    whole = norms.chain(op)
    if whole is not None:
        return whole, "matrix of the chain"
    outer = min(op.in_size, op.out_size)
    cut = min(range(1, len(factors)), key=lambda c: factors[c].out_size)
    inner = factors[cut].out_size
    fits_outer = chains.outer_gram_bytes(outer) <= norms.memory_budget
    fits_inner = chains.inner_gram_bytes(inner) <= norms.memory_budget
    if fits_outer and not (fits_inner and 2 * inner < outer):
        return chains.gram_norm_of_chain_upper_bound(op, norms.quick_spectral), "Gram matrix of the chain"
    if fits_inner:
        left, right = _product(factors[:cut]), _product(factors[cut:])
        value = chains.middle_gram_norm_upper_bound(left, right, norms.quick_spectral)
        return value, "Gram matrices in the middle of the chain"
    return _best_split(factors, norms)


def _without_reordering_ends(factors: tuple[AbstractLinearMap, ...]) -> tuple[AbstractLinearMap, ...]:
    """Return a product's factors but those at its ends that only reorder coordinates: its norm is the same."""
    while len(factors) > 1 and isinstance(factors[0], AbstractReordering):
        factors = factors[1:]
    while len(factors) > 1 and isinstance(factors[-1], AbstractReordering):
        factors = factors[:-1]
    return factors


def _attained_product(op: Composition, norms: NormBounds) -> Tensor | None:
    """Return the product of the factors' norms where a vector shows that the product of maps reaches it, or None.

    Any vector shows it for maps that keep lengths, such as those of orthogonal layers.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, *op.in_shape, generator=random, dtype=op.dtype).to(op.device)
    stretched = torch.linalg.vector_norm(op.apply(x).flatten(1), dim=1) / torch.linalg.vector_norm(x.flatten(1), dim=1)
    longest = stretched.amax()  # inf where squares overflow
    if not bool(longest.isfinite() & (longest <= (1 + 2 * _ATTAINED) * stretched.amin())):
        return None  # lengths are not kept: the norms of the factors, which may be dear, are not needed
    product = norms.quick_spectral(op)
    return product if bool(product <= (1 + _ATTAINED) * longest) else None


def _best_split(factors: tuple[AbstractLinearMap, ...], norms: NormBounds) -> Measured:
    """Bound a long product by the best product of two shorter ones."""
    known: dict[tuple[AbstractLinearMap, ...], Tensor] = {}

    def norm(part: tuple[AbstractLinearMap, ...]) -> Tensor:
        if part not in known:
            known[part] = norms.spectral(_product(part))
        return known[part]

    splits = [norm(factors[:c]) * norm(factors[c:]) for c in range(1, len(factors))]
    return inflate(torch.stack(splits).amin(), 0.0), "best split (over the memory budget)"


def _product(factors: tuple[AbstractLinearMap, ...]) -> AbstractLinearMap:
    return factors[0] if len(factors) == 1 else Composition(factors)
