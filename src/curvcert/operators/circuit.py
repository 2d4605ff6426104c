"""A linear map computed in steps that share what they need: for graphs in which writing out all paths would explode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar, final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, Shape
from curvcert.operators.description import Description, Reading, Weights, description, reads, shape

V = TypeVar("V")

Step = tuple[tuple[int, AbstractLinearMap], ...]
"""A sum of images of earlier values, each given by its number; value 0 is the input, value k what step k - 1 gives."""


@final
@dataclass(frozen=True, eq=False)
class Circuit(AbstractLinearMap):
    """The last of several values, each a sum of linear images of earlier ones.

    >>> from curvcert.operators.dense import Dense
    >>> A = Dense(torch.full((1, 1), 3.0))
    >>> Circuit((((0, A),), ((0, A), (1, A)))).apply(torch.ones(1))  # 3 x + 3 (3 x)
    tensor([12.])
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        shapes = [self.in_shape]
        for step in self.steps:
            fits = (shapes[source] == op.in_shape and op.out_shape == step[0][1].out_shape for source, op in step)
            if not step or not all(fits):
                raise InvalidInput("The steps of a circuit do not fit together.")
            shapes.append(step[0][1].out_shape)

    @property
    def in_shape(self) -> Shape:
        return self.steps[0][0][1].in_shape

    @property
    def out_shape(self) -> Shape:
        return self.steps[-1][0][1].out_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.steps[0][0][1].dtype

    @property
    def device(self) -> torch.device:
        return self.steps[0][0][1].device

    def _apply(self, x: Tensor) -> Tensor:
        return self.carried(x, lambda op, value: op._apply(value), lambda images: reduce(torch.add, images))

    def _adjoint(self, y: Tensor) -> Tensor:
        arrived: list[Tensor | None] = [*([None] * len(self.steps)), y]
        for k in range(len(self.steps), 0, -1):
            value = arrived[k]
            if value is None:  # nothing reads this value
                continue
            for source, op in self.steps[k - 1]:
                sent, known = op._adjoint(value), arrived[source]
                arrived[source] = sent if known is None else known + sent
        first = arrived[0]
        return y.new_zeros(len(y), *self.in_shape) if first is None else first

    def _matrix(self) -> Tensor:
        eye = torch.eye(self.in_size, dtype=self.dtype, device=self.device)
        return self.carried(eye, lambda op, matrix: op._matrix() @ matrix, lambda images: reduce(torch.add, images))

    def carried(self, start: V, image: Callable[[AbstractLinearMap, V], V], total: Callable[[Sequence[V]], V]) -> V:
        """Return what `image` and `total` make of the start, step by step: one rule for a map and one for a sum."""
        values = [start]
        for step in self.steps:
            values.append(total([image(op, values[source]) for source, op in step]))
        return values[-1]

    def over(self, change: Callable[[AbstractLinearMap], AbstractLinearMap]) -> "Circuit":
        """Return the circuit with every map changed."""
        return Circuit(tuple(tuple((source, change(op)) for source, op in step) for step in self.steps))


@description.register
def _(op: Circuit, weights: Weights) -> Description:
    steps = [[{"source": source, "map": description(part, weights)} for source, part in step] for step in op.steps]
    return {"map": "circuit", "steps": steps}


@reads("circuit")
def _read(entry: Description, reading: Reading) -> Circuit:
    steps = (tuple((shape([part["source"]])[0], reading.map(part["map"])) for part in step) for step in entry["steps"])
    return Circuit(tuple(steps))
