"""Parts of concatenated values: a segment is cut out, and its adjoint puts it back among zeros."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, AbstractPart, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape


@final
@dataclass(frozen=True, eq=False)
class Segment(AbstractPart):
    """x -> x[start], x[start + 1], ... in a shape: part of a vector; its rows are unit vectors.

    >>> Segment(5, 1, (2,)).apply(torch.arange(5.0, dtype=torch.float64))
    tensor([1., 2.], dtype=torch.float64)
    """

    total: int
    start: int
    part: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.start + self.out_size <= self.total or self.out_size < 1:
            raise InvalidInput(f"A segment of shape {self.part} from {self.start} on does not fit into {self.total}.")

    @property
    def in_shape(self) -> Shape:
        return (self.total,)

    @property
    def out_shape(self) -> Shape:
        return self.part

    def _apply(self, x: Tensor) -> Tensor:
        return x[:, self.start : self.start + self.out_size].reshape(len(x), *self.part)

    def _adjoint(self, y: Tensor) -> Tensor:
        behind = self.total - self.start - self.out_size
        return torch.nn.functional.pad(y.flatten(1), (self.start, behind))


def side_by_side(maps: Sequence[AbstractLinearMap]) -> AbstractLinearMap:
    """Return [A_1, A_2, ...], which takes the inputs of all of them as one vector and adds what they give.

    >>> from curvcert.operators.dense import Dense
    >>> side_by_side([Dense(torch.ones(1, 2)), Dense(2 * torch.ones(1, 1))]).as_matrix()
    tensor([[1., 1., 2.]])
    """
    if len(maps) == 1:
        return maps[0]
    sizes = [op.in_size for op in maps]
    starts = [0, *accumulate(sizes)]
    parts = [
        Segment(starts[-1], start, op.in_shape, op.dtype, op.device) for start, op in zip(starts, maps, strict=False)
    ]
    return reduce(lambda left, right: left + right, (op @ part for op, part in zip(maps, parts, strict=True)))


def on_top_of_each_other(maps: Sequence[AbstractLinearMap]) -> AbstractLinearMap:
    """Return the map x -> (A_1 x, A_2 x, ...), its images joined into one vector.

    >>> from curvcert.operators.dense import Dense
    >>> on_top_of_each_other([Dense(torch.ones(2, 1)), Dense(3 * torch.ones(1, 1))]).as_matrix()
    tensor([[1.],
            [1.],
            [3.]])
    """
    return maps[0] if len(maps) == 1 else side_by_side([op.T for op in maps]).T


@description.register
def _(op: Segment, weights: Weights) -> Description:
    return {"map": "segment", "total": op.total, "start": op.start, "shape": list(op.part)}


@reads("segment")
def _read(entry: Description, reading: Reading) -> Segment:
    total, start = shape([entry["total"], entry["start"]])
    return Segment(total, start, shape(entry["shape"]))
