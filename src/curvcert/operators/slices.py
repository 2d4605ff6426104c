"""Parts of a tensor: along each axis every n-th entry is cut out, and the adjoint puts it back among zeros."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractPart, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape


@final
@dataclass(frozen=True, eq=False)
class Slice(AbstractPart):
    """y[j_0, j_1, ...] = x[i_0, i_1, ...] with i_k = starts[k] + steps[k] j_k: some of the coordinates, in order.

    >>> Slice((2, 4), (0, 1), (1, 2), (2, 2)).apply(torch.arange(8.0, dtype=torch.float64).reshape(2, 4))
    tensor([[1., 3.],
            [5., 7.]], dtype=torch.float64)
    """

    source: Shape
    starts: Shape
    steps: Shape
    target: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        axes = tuple(zip(self.source, self.starts, self.steps, self.target, strict=False))
        whole = len(axes) == len(self.source) == len(self.starts) == len(self.steps) == len(self.target)
        if not whole or any(a < 0 or s < 1 or n < 1 or a + s * (n - 1) >= m for m, a, s, n in axes):
            raise InvalidInput(
                f"A slice of shape {self.target} from {self.starts} on in steps of {self.steps} does not fit into "
                f"{self.source}."
            )

    @property
    def in_shape(self) -> Shape:
        return self.source

    @property
    def out_shape(self) -> Shape:
        return self.target

    @cached_property
    def _cut(self) -> tuple[slice, ...]:
        axes = zip(self.starts, self.steps, self.target, strict=True)
        return (slice(None), *(slice(a, a + s * (n - 1) + 1, s) for a, s, n in axes))

    def _apply(self, x: Tensor) -> Tensor:
        return x[self._cut]

    def _adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(len(y), *self.source)
        x[self._cut] = y
        return x


def slice_along(shape: Sequence[int], axis: int, start: int, count: int, step: int = 1) -> Slice:
    """Return the slice of `count` entries along one axis, all of them along the others.

    >>> slice_along((3, 5), 1, 2, 3).out_shape
    (3, 3)
    """
    starts, steps, target = [0] * len(shape), [1] * len(shape), list(shape)
    starts[axis], steps[axis], target[axis] = start, step, count
    return Slice(tuple(shape), tuple(starts), tuple(steps), tuple(target))


@description.register
def _(op: Slice, weights: Weights) -> Description:
    sizes = {name: list(getattr(op, name)) for name in ("starts", "steps")}
    return {"map": "slice", "in_shape": list(op.source), "out_shape": list(op.target), **sizes}


@reads("slice")
def _read(entry: Description, reading: Reading) -> Slice:
    source, starts, steps, target = (shape(entry[name]) for name in ("in_shape", "starts", "steps", "out_shape"))
    return Slice(source, starts, steps, target)
