"""Maps that put coordinates into another order: axes are permuted or flipped."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape
from curvcert.operators.magnitudes import magnitude, rounding_length
from curvcert.operators.norm_bounds import Measured, NormBounds, spectral_norm_upper_bound
from curvcert.operators.rows import row_norms_upper_bound


@final
@dataclass(frozen=True, eq=False)
class Permutation(AbstractLinearMap):
    """y[j_0, j_1, ...] = x[i_0, i_1, ...] with j_k = i_{axes[k]}: the same coordinates in another order, an isometry.

    >>> Permutation((2, 3), (1, 0)).apply(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    tensor([[0., 3.],
            [1., 4.],
            [2., 5.]], dtype=torch.float64)
    """

    source: Shape
    axes: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    reorders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sorted(self.axes) != list(range(len(self.source))):
            raise InvalidInput(f"Permutation of a shape {self.source} expects each of its axes once, got {self.axes}.")

    @property
    def in_shape(self) -> Shape:
        return self.source

    @cached_property
    def out_shape(self) -> Shape:
        return tuple(self.source[axis] for axis in self.axes)

    def _apply(self, x: Tensor) -> Tensor:
        return x.permute(0, *(axis + 1 for axis in self.axes))

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.permute(0, *(self.axes.index(axis) + 1 for axis in range(len(self.axes))))

    def _matrix(self) -> Tensor:
        order = torch.arange(self.in_size, device=self.device).reshape(self.source).permute(self.axes)
        return torch.eye(self.in_size, dtype=self.dtype, device=self.device)[order.flatten()]


@final
@dataclass(frozen=True, eq=False)
class Flip(AbstractLinearMap):
    """The same coordinates, counted from the other end along some axes: an isometry, and its own adjoint.

    >>> Flip((2, 3), (1,)).apply(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    tensor([[2., 1., 0.],
            [5., 4., 3.]], dtype=torch.float64)
    """

    shape: Shape
    axes: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    reorders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(set(self.axes)) != len(self.axes) or not set(self.axes) <= set(range(len(self.shape))):
            raise InvalidInput(f"Flip of a shape {self.shape} expects some of its axes, each once, got {self.axes}.")

    @property
    def in_shape(self) -> Shape:
        return self.shape

    @property
    def out_shape(self) -> Shape:
        return self.shape

    def _apply(self, x: Tensor) -> Tensor:
        return x.flip([axis + 1 for axis in self.axes])

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)

    def _matrix(self) -> Tensor:
        order = self._apply(torch.arange(self.in_size, device=self.device).reshape(1, *self.shape))
        return torch.eye(self.in_size, dtype=self.dtype, device=self.device)[order.flatten()]


@magnitude.register(Permutation | Flip)
def _(op: AbstractLinearMap) -> AbstractLinearMap:
    return op


@rounding_length.register(Permutation | Flip)
def _(op: AbstractLinearMap) -> int:
    return 0


@row_norms_upper_bound.register(Permutation | Flip)
def _(op: AbstractLinearMap, r: float) -> Tensor:
    return torch.ones(op.out_shape, dtype=op.dtype, device=op.device)


@spectral_norm_upper_bound.register(Permutation | Flip)
def _(op: AbstractLinearMap, norms: NormBounds) -> Measured:
    return torch.ones((), dtype=op.dtype, device=op.device), "isometry"


@description.register
def _(op: Permutation, weights: Weights) -> Description:
    return {"map": "permutation", "in_shape": list(op.in_shape), "axes": list(op.axes)}


@reads("permutation")
def _permutation(entry: Description, reading: Reading) -> Permutation:
    return Permutation(shape(entry["in_shape"]), shape(entry["axes"]))


@description.register
def _(op: Flip, weights: Weights) -> Description:
    return {"map": "flip", "shape": list(op.shape), "axes": list(op.axes)}


@reads("flip")
def _flip(entry: Description, reading: Reading) -> Flip:
    return Flip(shape(entry["shape"]), shape(entry["axes"]))
