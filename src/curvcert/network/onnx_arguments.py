"""What the rules for ONNX operators share: their context, their arguments, and a limit on sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.builder import Value
from curvcert.network.onnx_file import Graph, Node, shown
from curvcert.operators import AbstractLinearMap
from curvcert.operators.base import Shape


class Batch(Enum):
    """Stands for the number of samples, which no computation may depend on."""

    SIZE = "batch"


@dataclass(frozen=True, eq=False)
class Context:
    """What rules know besides their arguments: the file."""

    graph: Graph


Rule = Callable[[Node, Sequence[Any], Context], Value | tuple[Value, ...]]


def weight(node: Node, args: Sequence[Any], position: int, rank: int | None = None) -> Tensor:
    """Return a constant argument as a finite float64 tensor, of the given rank."""
    array = argument(args, position)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fi":
        raise node.unsupported(f"an input number {position} that is not a constant tensor of real numbers")
    name = shown(node.inputs[position])
    if rank is not None and array.ndim != rank:
        raise InvalidInput(f"{node.label}: {name} should have {rank} dimensions, got shape {array.shape}.")
    tensor = torch.from_numpy(np.array(array, dtype=np.float64))
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidInput(f"{node.label}: {name} holds NaN or infinity. Check the training run or the file.")
    return tensor


def value_of(node: Node, args: Sequence[Any], position: int = 0) -> Value:
    """Return an argument that depends on the input."""
    if position < len(args) and isinstance(args[position], Value):
        value: Value = args[position]
        return value
    raise node.unsupported(f"a constant as its input number {position}, and weights that depend on the input,")


def linear(node: Node, context: Context, value: Value, A: AbstractLinearMap, offset: Tensor | None = None) -> Value:
    """Return A value + offset, unless it is too large."""
    require_size(node, context, A.out_shape)
    return value.linear(A, offset)


def require_size(node: Node, context: Context, shape: Shape) -> None:
    """Raise if samples of a shape are too large to be compared, a batch of them, with onnxruntime."""
    largest = context.graph.largest
    if not 1 <= math.prod(shape) <= largest:
        raise InvalidInput(
            f"{node.label}: samples of shape {shape} are empty, or over the {largest} numbers that load_onnx covers."
        )


def argument(args: Sequence[Any], position: int) -> Any:
    """Return an argument that may be left out."""
    return args[position] if position < len(args) else None
