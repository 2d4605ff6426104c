r"""The pieces a network is made of: frozen blocks, each a map between shaped tensors.

The paper's block :math:`h(x) = Hx + G\Phi(Wx + b) + c` carries every smooth bound.  An affine map and a
max-pooling are blocks of their own kind: a bound either has a rule for a kind or refuses it by name.
A deeper residual branch, a concatenation or a general graph is one more kind: a block that holds
networks, evaluates them, and for which each bound states its composition rule.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.activations import Activation
from curvcert.errors import InvalidInput
from curvcert.operators import AbstractLinearMap, Zero
from curvcert.operators.base import Shape
from curvcert.operators.conv import Pair
from curvcert.operators.magnitudes import image_error
from curvcert.rounding import TINY


class AbstractBlock(ABC):
    """One step x -> h(x) of a network."""

    name: str

    @property
    @abstractmethod
    def in_shape(self) -> Shape:
        """Shape of one input."""

    @property
    @abstractmethod
    def out_shape(self) -> Shape:
        """Shape of one output."""

    @abstractmethod
    def evaluate(self, x: Tensor) -> Tensor:
        """Return h(x) for a batch, computed in the batch's own dtype: float64, or another for replaying."""

    @abstractmethod
    def pull_back(self, x: Tensor, g: Tensor) -> Tensor:
        """Return Dh(x)' g for a batch x and covectors g of shape (batch, rows, *out_shape)."""

    @abstractmethod
    def read_out(self, A: AbstractLinearMap) -> "AbstractBlock | None":
        """Return the block A h, if it is of a known kind."""

    @final
    def to(self, device: torch.device | str) -> Self:
        """Return the same block on another device."""
        moved = {
            f.name: getattr(self, f.name).to(device=device)
            for f in fields(self)  # type: ignore[arg-type]
            if isinstance(getattr(self, f.name), Tensor | AbstractLinearMap)
        }
        return replace(self, **moved)  # type: ignore[type-var]


@final
@dataclass(frozen=True, eq=False)
class Block(AbstractBlock):
    r"""h(x) = H x + G Phi(W x + b) + c, in float64.

    `b_error` and `c_error` bound, coordinate by coordinate, what folding adjacent affine layers
    rounded off the offsets; the maps themselves are never multiplied together, so they are exact.
    """

    H: AbstractLinearMap
    G: AbstractLinearMap
    W: AbstractLinearMap
    b: Tensor
    c: Tensor
    activation: Activation
    name: str = ""
    b_error: Tensor | None = None
    c_error: Tensor | None = None

    def __post_init__(self) -> None:
        chain = (self.W.in_shape, self.W.out_shape, self.G.in_shape, self.G.out_shape)
        fits = self.W.out_shape == self.G.in_shape == tuple(self.b.shape)
        fits = fits and self.G.out_shape == self.H.out_shape == tuple(self.c.shape)
        if not (fits and self.H.in_shape == self.W.in_shape):
            raise InvalidInput(f"The shapes of a block do not chain: W and G go {chain}, b has {tuple(self.b.shape)}.")
        _require_float64(self.b, self.c)

    @property
    def in_shape(self) -> Shape:
        return self.W.in_shape

    @property
    def out_shape(self) -> Shape:
        return self.G.out_shape

    @property
    def is_residual(self) -> bool:
        """Whether there is a skip: H is not zero."""
        return not isinstance(self.H, Zero)

    def pre_activation(self, x: Tensor) -> Tensor:
        """Return z = W x + b for a batch."""
        return image(self.W, x) + self.b.to(x.dtype)

    def evaluate(self, x: Tensor) -> Tensor:
        y = image(self.G, self.activation.value(self.pre_activation(x))) + self.c.to(x.dtype)
        return y + image(self.H, x) if self.is_residual else y

    def pull_back(self, x: Tensor, g: Tensor) -> Tensor:
        slopes = self.activation.derivative(self.pre_activation(x)).unsqueeze(1)
        pulled = self.W.adjoint(slopes * self.G.adjoint(g))
        return pulled + self.H.adjoint(g) if self.is_residual else pulled

    def read_out(self, A: AbstractLinearMap) -> "Block":
        c, error = fold_offset(A, self.c, self.c_error)
        return replace(self, H=A @ self.H, G=A @ self.G, c=c, c_error=error)


@final
@dataclass(frozen=True, eq=False)
class Affine(AbstractBlock):
    """h(x) = H x + c."""

    H: AbstractLinearMap
    c: Tensor
    name: str = ""
    c_error: Tensor | None = None

    def __post_init__(self) -> None:
        if self.H.out_shape != tuple(self.c.shape):
            raise InvalidInput(f"An affine map into {self.H.out_shape} got an offset of shape {tuple(self.c.shape)}.")
        _require_float64(self.c)

    @property
    def in_shape(self) -> Shape:
        return self.H.in_shape

    @property
    def out_shape(self) -> Shape:
        return self.H.out_shape

    def evaluate(self, x: Tensor) -> Tensor:
        return image(self.H, x) + self.c.to(x.dtype)

    def pull_back(self, x: Tensor, g: Tensor) -> Tensor:
        return self.H.adjoint(g)

    def read_out(self, A: AbstractLinearMap) -> "Affine":
        c, error = fold_offset(A, self.c, self.c_error)
        return replace(self, H=A @ self.H, c=c, c_error=error)


@final
@dataclass(frozen=True, eq=False)
class MaxPool(AbstractBlock):
    """The largest entry of each window; Lipschitz, with no curvature constant."""

    image_shape: Shape
    kernel_size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.image_shape) != 3 or min(self.out_shape) < 1:
            raise InvalidInput(f"MaxPool by {self.kernel_size} does not fit into an image of shape {self.image_shape}.")

    @property
    def in_shape(self) -> Shape:
        return self.image_shape

    @property
    def out_shape(self) -> Shape:
        axes = zip(self.image_shape[1:], self.kernel_size, self.stride, self.padding, strict=True)
        return (self.image_shape[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in axes))

    @property
    def multiplicity(self) -> int:
        """The largest number of windows that one entry lies in."""
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        return -(-kh // sh) * -(-kw // sw)

    def evaluate(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)

    def pull_back(self, x: Tensor, g: Tensor) -> Tensor:
        _, index = F.max_pool2d(x, self.kernel_size, self.stride, self.padding, return_indices=True)
        rows = g.shape[1]
        pulled = g.new_zeros(*g.shape[:2], self.image_shape[0], self.image_shape[1] * self.image_shape[2])
        source = index.flatten(2).unsqueeze(1).expand(-1, rows, -1, -1)
        return pulled.scatter_add(-1, source, g.flatten(3)).reshape(*g.shape[:2], *self.image_shape)

    def read_out(self, A: AbstractLinearMap) -> None:
        return None


def _require_float64(*offsets: Tensor) -> None:
    for offset in offsets:
        if offset.is_meta:  # a live block: offsets without values
            continue
        if offset.dtype != torch.float64 or not bool(torch.isfinite(offset).all()):
            raise InvalidInput(f"A block needs finite float64 offsets, got {offset.dtype}, or NaN or infinity.")


def image(A: AbstractLinearMap, x: Tensor) -> Tensor:
    """Return A x in the dtype of x."""
    return A.apply(x) if A.dtype == x.dtype else A.to(x.dtype).apply(x)


def fold_offset(A: AbstractLinearMap, offset: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return A offset and a bound on its error, given a bound on the offset's; exact zeros stay exact."""
    if offset.is_meta:
        return offset.new_empty(A.out_shape), None
    if not bool(offset.any()) and error is None:
        return offset.new_zeros(A.out_shape), None
    return A.apply(offset), image_error(A, offset, error) + TINY


def add_offsets(
    left: Tensor, right: Tensor, left_error: Tensor | None, right_error: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return left + right and a bound on its error; a sum with an exact zero does not round."""
    if left.is_meta:
        return left, None
    errors = [error for error in (left_error, right_error) if error is not None]
    total = left + right
    if bool(left.any()) and bool(right.any()):
        errors.append(total.abs() * torch.finfo(torch.float64).eps)
    return total, reduce(torch.add, errors) if errors else None
