"""Linear maps between shaped tensors, and their algebra: `A @ B`, `A + B`, `2 * A`, `A.T`.

A map is a frozen value that knows how to apply itself, how to apply its adjoint, and which matrix
it is.  Sums, multiples and compositions stay lazy: no weight is ever multiplied into another, so
the map that a bound reads is, exactly, the one that the weights define.

The lazy composites live beside the abstract class because its operators build them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any, Self, final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput

Shape = tuple[int, ...]


class AbstractLinearMap(ABC):
    """A linear map from tensors of `in_shape` to tensors of `out_shape`.

    A subclass is a frozen dataclass that gives the two shapes, dtype, device, and three methods:
    `_apply`, `_adjoint` (both on a batch) and `_matrix`, its slow and obvious meaning.
    """

    @property
    @abstractmethod
    def in_shape(self) -> Shape:
        """Shape of one input, without the batch dimension."""

    @property
    @abstractmethod
    def out_shape(self) -> Shape:
        """Shape of one output, without the batch dimension."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _adjoint(self, y: Tensor) -> Tensor: ...

    @abstractmethod
    def _matrix(self) -> Tensor: ...

    @final
    @property
    def in_size(self) -> int:
        """Number of input coordinates."""
        return math.prod(self.in_shape)

    @final
    @property
    def out_size(self) -> int:
        """Number of output coordinates."""
        return math.prod(self.out_shape)

    @final
    def apply(self, x: Tensor) -> Tensor:
        """Return the image of x, of shape (..., *in_shape)."""
        return _batched(self._apply, x, self.in_shape, self.dtype, f"{type(self).__name__}.apply")

    @final
    def adjoint(self, y: Tensor) -> Tensor:
        """Return the image of y, of shape (..., *out_shape), under the adjoint map."""
        return _batched(self._adjoint, y, self.out_shape, self.dtype, f"{type(self).__name__}.adjoint")

    @final
    def as_matrix(self) -> Tensor:
        """Return the (out_size, in_size) matrix of the map on flattened tensors."""
        return self._matrix()

    @final
    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """Return the same map with its weights in another dtype or on another device."""
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidInput(f"A linear map needs a real floating-point dtype, got {dtype}.")
        # "cuda" becomes the current device by its number, as on a tensor, so that devices compare equal.
        target = None if device is None else torch.empty(0, device=device).device
        if dtype in (None, self.dtype) and target in (None, self.device):
            return self
        moved: Self = _moved(self, dtype, target)
        return moved

    @final
    @property
    def T(self) -> "AbstractLinearMap":
        """The adjoint as a map of its own."""
        return _transpose(self)

    @final
    def __matmul__(self, other: "AbstractLinearMap") -> "AbstractLinearMap":
        return compose(self, other) if isinstance(other, AbstractLinearMap) else NotImplemented

    @final
    def __add__(self, other: "AbstractLinearMap") -> "AbstractLinearMap":
        return add(self, other) if isinstance(other, AbstractLinearMap) else NotImplemented

    @final
    def __sub__(self, other: "AbstractLinearMap") -> "AbstractLinearMap":
        return add(self, scale(-1.0, other)) if isinstance(other, AbstractLinearMap) else NotImplemented

    @final
    def __rmul__(self, factor: float) -> "AbstractLinearMap":
        return scale(factor, self)

    @final
    def __neg__(self) -> "AbstractLinearMap":
        return scale(-1.0, self)


def _batched(function: Callable[[Tensor], Tensor], x: Tensor, shape: Shape, dtype: torch.dtype, name: str) -> Tensor:
    lead = x.shape[: x.dim() - len(shape)]
    if x.shape[len(lead) :] != shape:
        raise InvalidInput(f"{name} expected a tensor of shape (..., {_commas(shape)}), got {tuple(x.shape)}.")
    if x.dtype != dtype:
        raise InvalidInput(f"{name} expected {dtype}, got {x.dtype}. Convert with .to({dtype}).")
    y = function(x.reshape(-1, *shape))
    return y.reshape((*lead, *y.shape[1:]))


def _commas(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def _moved(value: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Return a copy of a frozen map, its tensors, dtypes and devices replaced all the way down."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, device=device)
    if isinstance(value, torch.dtype):
        return value if dtype is None else dtype
    if isinstance(value, torch.device):
        return value if device is None else device
    if isinstance(value, tuple):
        return tuple(_moved(item, dtype, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _moved(getattr(value, f.name), dtype, device) for f in fields(value)})
    return value


def weights(op: AbstractLinearMap) -> Iterator[Tensor]:
    """Yield every weight tensor that the map is made of."""
    stack: list[Any] = [op]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            stack.extend(value)
        elif is_dataclass(value):
            stack.extend(getattr(value, f.name) for f in fields(value))


def require_weight(weight: Tensor, dimensions: int, owner: str) -> None:
    """Raise unless the weight is a real floating-point tensor with that many dimensions."""
    if weight.dim() != dimensions:
        raise InvalidInput(
            f"{owner} expected a weight tensor with {dimensions} dimensions, got shape {tuple(weight.shape)}."
        )
    if not weight.dtype.is_floating_point:
        raise InvalidInput(f"{owner} expected real floating-point weights, got {weight.dtype}.")


def require_finite(op: AbstractLinearMap) -> None:
    """Raise if any weight is NaN or infinite."""
    for weight in weights(op):
        if not bool(torch.isfinite(weight).all()):
            raise InvalidInput(
                f"{type(op).__name__} has NaN or infinite weights, so it has no norm. "
                "Check the training run or the file that they came from."
            )


class AbstractSelection(AbstractLinearMap):
    """A map each of whose outputs is one of the coordinates, some perhaps left out and some repeated."""

    @final
    def _matrix(self) -> Tensor:
        order = self._apply(torch.arange(self.in_size, device=self.device).reshape(1, *self.in_shape))
        return torch.eye(self.in_size, dtype=self.dtype, device=self.device)[order.flatten()]


class AbstractPart(AbstractSelection):
    """A map that repeats no coordinate: its rows are unit vectors, all different."""


class AbstractReordering(AbstractPart):
    """A map that only puts all coordinates into another order, or another shape."""


@final
@dataclass(frozen=True, eq=False)
class Identity(AbstractReordering):
    """x -> x."""

    shape: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    @property
    def in_shape(self) -> Shape:
        return self.shape

    @property
    def out_shape(self) -> Shape:
        return self.shape

    def _apply(self, x: Tensor) -> Tensor:
        return x

    def _adjoint(self, y: Tensor) -> Tensor:
        return y


@final
@dataclass(frozen=True, eq=False)
class Zero(AbstractLinearMap):
    """x -> 0."""

    source: Shape
    target: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    @property
    def in_shape(self) -> Shape:
        return self.source

    @property
    def out_shape(self) -> Shape:
        return self.target

    def _apply(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), *self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.new_zeros(len(y), *self.in_shape)

    def _matrix(self) -> Tensor:
        return torch.zeros(self.out_size, self.in_size, dtype=self.dtype, device=self.device)


@final
@dataclass(frozen=True, eq=False)
class Reshape(AbstractReordering):
    """The same coordinates, in the same order, in another shape."""

    source: Shape
    target: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if self.in_size != self.out_size:
            raise InvalidInput(f"Reshape cannot turn {self.in_shape} into {self.out_shape}: sizes differ.")

    @property
    def in_shape(self) -> Shape:
        return self.source

    @property
    def out_shape(self) -> Shape:
        return self.target

    def _apply(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.reshape(len(y), *self.in_shape)


@final
@dataclass(frozen=True, eq=False)
class Transposed(AbstractLinearMap):
    """The adjoint of a map that is not a product."""

    map: AbstractLinearMap

    @property
    def in_shape(self) -> Shape:
        return self.map.out_shape

    @property
    def out_shape(self) -> Shape:
        return self.map.in_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.map.dtype

    @property
    def device(self) -> torch.device:
        return self.map.device

    def _apply(self, x: Tensor) -> Tensor:
        return self.map._adjoint(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.map._apply(y)

    def _matrix(self) -> Tensor:
        return self.map._matrix().T


@final
@dataclass(frozen=True, eq=False)
class Scaled(AbstractLinearMap):
    """A real multiple of a map."""

    factor: float
    map: AbstractLinearMap

    @property
    def in_shape(self) -> Shape:
        return self.map.in_shape

    @property
    def out_shape(self) -> Shape:
        return self.map.out_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.map.dtype

    @property
    def device(self) -> torch.device:
        return self.map.device

    def _apply(self, x: Tensor) -> Tensor:
        return self.factor * self.map._apply(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.factor * self.map._adjoint(y)

    def _matrix(self) -> Tensor:
        return self.factor * self.map._matrix()


@final
@dataclass(frozen=True, eq=False)
class Sum(AbstractLinearMap):
    """A sum of maps of the same shapes."""

    terms: tuple[AbstractLinearMap, ...]

    @property
    def in_shape(self) -> Shape:
        return self.terms[0].in_shape

    @property
    def out_shape(self) -> Shape:
        return self.terms[0].out_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].device

    def _apply(self, x: Tensor) -> Tensor:
        return reduce(torch.add, (term._apply(x) for term in self.terms))

    def _adjoint(self, y: Tensor) -> Tensor:
        return reduce(torch.add, (term._adjoint(y) for term in self.terms))

    def _matrix(self) -> Tensor:
        return reduce(torch.add, (term._matrix() for term in self.terms))


@final
@dataclass(frozen=True, eq=False)
class Composition(AbstractLinearMap):
    """A product of maps in the order of matrices: the last factor is applied first."""

    factors: tuple[AbstractLinearMap, ...]

    @property
    def in_shape(self) -> Shape:
        return self.factors[-1].in_shape

    @property
    def out_shape(self) -> Shape:
        return self.factors[0].out_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.factors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.factors[0].device

    def _apply(self, x: Tensor) -> Tensor:
        return reduce(lambda y, factor: factor._apply(y), reversed(self.factors), x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return reduce(lambda x, factor: factor._adjoint(x), self.factors, y)

    def _matrix(self) -> Tensor:
        return reduce(torch.matmul, (factor._matrix() for factor in self.factors))


def scale(factor: float, op: AbstractLinearMap) -> AbstractLinearMap:
    """Return factor * op, simplified.

    >>> scale(0.5, scale(2.0, Identity((3,))))
    Identity(shape=(3,), dtype=torch.float64, device=device(type='cpu'))
    """
    factor = float(factor)
    if not math.isfinite(factor):
        raise InvalidInput(f"A linear map can only be scaled by a finite number, got {factor}.")
    if factor == 0.0 or isinstance(op, Zero):
        return Zero(op.in_shape, op.out_shape, op.dtype, op.device)
    if isinstance(op, Scaled) and _exact_product(factor, op.factor):
        factor, op = factor * op.factor, op.map
    return op if factor == 1.0 else Scaled(factor, op)


def _exact_product(a: float, b: float) -> bool:
    return math.isfinite(a * b) and Fraction(a) * Fraction(b) == Fraction(a * b)


def add(*maps: AbstractLinearMap) -> AbstractLinearMap:
    """Return the sum of the maps: nested sums flattened, zeros dropped.

    >>> add(Zero((3,), (3,)), Identity((3,)))
    Identity(shape=(3,), dtype=torch.float64, device=device(type='cpu'))
    """
    first = maps[0]
    for other in maps[1:]:
        if (other.in_shape, other.out_shape) != (first.in_shape, first.out_shape):
            raise InvalidInput(
                f"Cannot add a map {first.in_shape} -> {first.out_shape} "
                f"and a map {other.in_shape} -> {other.out_shape}."
            )
        _require_same_type(first, other, "add")
    flat = [term for op in maps for term in (op.terms if isinstance(op, Sum) else (op,))]
    kept = [term for term in flat if not isinstance(term, Zero)]
    return Sum(tuple(kept)) if len(kept) > 1 else (kept or [first])[0]


def compose(*maps: AbstractLinearMap) -> AbstractLinearMap:
    """Return the product of the maps, the last one applied first, simplified.

    Nested products are flattened, identities dropped, adjacent reshapes merged, scalars pulled to
    the front and a zero absorbs everything.  No weights are multiplied: that would round.

    >>> compose(Reshape((6,), (2, 3)), Reshape((3, 2), (6,)))
    Reshape(source=(3, 2), target=(2, 3), dtype=torch.float64, device=device(type='cpu'))
    """
    for left, right in pairwise(maps):
        if left.in_shape != right.out_shape:
            raise InvalidInput(
                f"Cannot compose: the left map takes {left.in_shape}, the right one gives {right.out_shape}."
            )
        _require_same_type(left, right, "compose")
    if any(isinstance(op, Zero) for op in maps):
        return Zero(maps[-1].in_shape, maps[0].out_shape, maps[0].dtype, maps[0].device)
    factors: list[AbstractLinearMap] = []
    scalars: list[float] = []
    for op in maps:
        if isinstance(op, Scaled):
            scalars.append(op.factor)
            op = op.map
        for factor in op.factors if isinstance(op, Composition) else (op,):
            _append_factor(factors, factor)
    product = factors[0] if len(factors) == 1 else Composition(tuple(factors))
    if not factors:
        product = Identity(maps[-1].in_shape, maps[0].dtype, maps[0].device)
    return reduce(lambda op, factor: scale(factor, op), scalars, product)


def _append_factor(factors: list[AbstractLinearMap], factor: AbstractLinearMap) -> None:
    if isinstance(factor, Reshape) and factors and isinstance(factors[-1], Reshape):
        factor = replace(factor, target=factors.pop().out_shape)
    trivial = isinstance(factor, Reshape) and factor.in_shape == factor.out_shape
    if not isinstance(factor, Identity) and not trivial:
        factors.append(factor)


def _require_same_type(left: AbstractLinearMap, right: AbstractLinearMap, verb: str) -> None:
    if (left.dtype, left.device) != (right.dtype, right.device):
        raise InvalidInput(
            f"Cannot {verb} maps of {left.dtype} on {left.device} and {right.dtype} on {right.device}. "
            "Bring them together with .to(dtype, device)."
        )


def _transpose(op: AbstractLinearMap) -> AbstractLinearMap:
    match op:
        case Transposed():
            return op.map
        case Identity():
            return op
        case Zero() | Reshape():
            return replace(op, source=op.target, target=op.source)
        case Scaled():
            return scale(op.factor, _transpose(op.map))
        case Composition():
            return Composition(tuple(_transpose(factor) for factor in reversed(op.factors)))
        case _:
            return Transposed(op)


def structure(op: AbstractLinearMap) -> Hashable:
    """Return a key that is equal for products, sums and multiples of the same elementary maps."""
    match op:
        case Scaled():
            return ("scaled", op.factor, structure(op.map))
        case Transposed():
            return ("transposed", structure(op.map))
        case Sum():
            return ("sum", *map(structure, op.terms))
        case Composition():
            return ("product", *map(structure, op.factors))
        case Identity() | Zero() | Reshape():
            return (type(op).__name__, op.in_shape, op.out_shape, str(op.device))
        case _:
            return id(op)
