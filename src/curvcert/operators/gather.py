"""Entries of a tensor by lists of indices, one list for each axis, repeated ones too."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractSelection, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape
from curvcert.operators.magnitudes import rounding_length
from curvcert.operators.norm_bounds import Measured, NormBounds, spectral_norm_upper_bound
from curvcert.rounding import UNIT_ROUNDOFF, inflate


@final
@dataclass(frozen=True, eq=False)
class Gather(AbstractSelection):
    r"""y[j_0, j_1, ...] = x[i_0, i_1, ...] with `i_k = indices[k][j_k]`: borders that mirror, whole factors of size.

    An entry that stands in n places of the output is a column of n ones, and columns are orthogonal: the 2-norm is
    :math:`\sqrt n` for the entry that is repeated most.

    >>> Gather((3,), ((2, 0, 0),)).apply(torch.arange(3.0, dtype=torch.float64))
    tensor([2., 0., 0.], dtype=torch.float64)
    """

    source: Shape
    indices: tuple[Shape, ...]
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        fits = len(self.indices) == len(self.source) and all(self.indices)
        if not fits or any(not 0 <= k < n for n, chosen in zip(self.source, self.indices, strict=True) for k in chosen):
            raise InvalidInput(f"Gather expects indices into each axis of {self.source}, at least one for each.")

    @property
    def in_shape(self) -> Shape:
        return self.source

    @cached_property
    def out_shape(self) -> Shape:
        return tuple(map(len, self.indices))

    @cached_property
    def repeats(self) -> Shape:
        """How often the entry that is repeated most stands in the output, along each axis."""
        return tuple(max(Counter(chosen).values()) for chosen in self.indices)

    @cached_property
    def _moving(self) -> tuple[tuple[int, Tensor], ...]:
        axes = enumerate(zip(self.source, self.indices, strict=True), start=1)
        return tuple((axis, torch.tensor(i, device=self.device)) for axis, (n, i) in axes if i != tuple(range(n)))

    def _apply(self, x: Tensor) -> Tensor:
        for axis, index in self._moving:
            x = x.index_select(axis, index)
        return x

    def _adjoint(self, y: Tensor) -> Tensor:
        for axis, index in reversed(self._moving):
            shape = (*y.shape[:axis], self.source[axis - 1], *y.shape[axis + 1 :])
            y = y.new_zeros(shape).index_add(axis, index, y)
        return y


def gather_along(source: Shape, chosen: Mapping[int, Sequence[int]]) -> Gather:
    """Return the map that takes the chosen entries along some axes, and all of them along the others.

    >>> gather_along((2, 3), {1: [0, 0, 1, 1]}).out_shape
    (2, 4)
    """
    return Gather(source, tuple(tuple(chosen.get(axis, range(n))) for axis, n in enumerate(source)))


@rounding_length.register
def _(op: Gather) -> int:
    return sum(op.repeats) - len(op.repeats)


@spectral_norm_upper_bound.register
def _(op: Gather, norms: NormBounds) -> Measured:
    repeats = math.prod(op.repeats)
    root = torch.tensor(float(repeats), dtype=op.dtype, device=op.device).sqrt()
    return root if repeats == 1 else inflate(root, UNIT_ROUNDOFF), "repeated entries"


@description.register
def _(op: Gather, weights: Weights) -> Description:
    return {"map": "gather", "in_shape": list(op.source), "indices": [list(chosen) for chosen in op.indices]}


@reads("gather")
def _read(entry: Description, reading: Reading) -> Gather:
    return Gather(shape(entry["in_shape"]), tuple(shape(chosen) for chosen in entry["indices"]))
