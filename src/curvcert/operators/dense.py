"""The map of a fully connected layer."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.operators.base import AbstractLinearMap, Shape, require_weight
from curvcert.operators.description import Description, Reading, Weights, description, reads, stored


@final
@dataclass(frozen=True, eq=False)
class Dense(AbstractLinearMap):
    """x -> W x, for a matrix W of shape (outputs, inputs).

    >>> Dense(torch.tensor([[3.0, 4.0]])).apply(torch.tensor([1.0, 2.0]))
    tensor([11.])
    """

    weight: Tensor

    def __post_init__(self) -> None:
        require_weight(self.weight, 2, "Dense")

    @property
    def in_shape(self) -> Shape:
        return (self.weight.shape[1],)

    @property
    def out_shape(self) -> Shape:
        return (self.weight.shape[0],)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def _apply(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def _adjoint(self, y: Tensor) -> Tensor:
        return y @ self.weight

    def _matrix(self) -> Tensor:
        return self.weight


@description.register
def _(op: Dense, weights: Weights) -> Description:
    return {"map": "dense", "weight": stored(op.weight, weights)}


@reads("dense")
def _read(entry: Description, reading: Reading) -> Dense:
    weight = reading.weight(entry["weight"])
    reading.take(0, weight.numel())
    return Dense(weight)
