"""Maps that put coordinates into another order: axes are permuted or flipped."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractReordering, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape


@final
@dataclass(frozen=True, eq=False)
class Permutation(AbstractReordering):
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


@final
@dataclass(frozen=True, eq=False)
class Flip(AbstractReordering):
    """The same coordinates, counted from the other end along some axes: an isometry, and its own adjoint.

    >>> Flip((2, 3), (1,)).apply(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    tensor([[2., 1., 0.],
            [5., 4., 3.]], dtype=torch.float64)
    """

    shape: Shape
    axes: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

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
