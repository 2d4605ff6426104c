"""What the operators of an ONNX file are given: recorded tensors, constants, and sizes, with a symbol for the batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.batched import BATCH, Layout
from curvcert.network.onnx_constants import axes_of, integers
from curvcert.network.onnx_file import Array, Batch, Graph, Node, shown
from curvcert.network.recording import Recorded

Operand = Recorded | Array | None


@dataclass(frozen=True, eq=False)
class Given:
    """A node with its arguments."""

    node: Node
    args: Sequence[Operand]
    graph: Graph
    layout_of: Callable[[Recorded], Layout]
    choose: Callable[[int], int]
    """Which of so many ways to read a size, where a file fixes the batch and any may be meant."""
    device: str = "cpu"
    """Where constants are: "meta" where only the sizes of the results are asked for."""

    def has(self, position: int) -> bool:
        """Whether an argument that may be left out is there."""
        return position < len(self.args) and self.args[position] is not None

    def moves(self, position: int) -> bool:
        """Whether an argument depends on the input."""
        return position < len(self.args) and isinstance(self.args[position], Recorded)

    def array(self, position: int, what: str) -> Array:
        """Return an argument that has to be a constant."""
        found = self.args[position] if position < len(self.args) else None
        if not isinstance(found, np.ndarray):
            raise self.node.unsupported(f"{what} that is not constant")
        return found

    def tensor(self, position: int = 0, finite: bool = True) -> Tensor:
        """Return an argument as a tensor, recorded or constant."""
        found = self.args[position] if position < len(self.args) else None
        if isinstance(found, Recorded):
            return found
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "fib":
            raise self.node.unsupported(f"an input number {position} that is no tensor of numbers")
        if finite and found.dtype.kind == "f" and not bool(np.isfinite(found).all()):
            name = shown(self.node.inputs[position])
            raise InvalidInput(f"{self.node.label}: {name} holds NaN or infinity. Check the training run or the file.")
        return torch.from_numpy(np.array(found)).to(self.device)

    def constant(self, position: int, what: str) -> Tensor:
        """Return an argument that has to be a constant, as a tensor."""
        self.array(position, what)
        return self.tensor(position)

    def optional(self, position: int) -> Tensor | None:
        """Return an argument that may be left out."""
        return self.tensor(position) if self.has(position) else None

    def number(self, position: int, what: str) -> float:
        """Return an argument that has to be one constant number."""
        array = np.zeros(2) if self.moves(position) else self.array(position, what)
        if array.size != 1 or array.dtype.kind not in "fi":
            raise self.node.unsupported(f"{what} that is not one constant")
        return float(array.reshape(()))

    def integers(self, position: int, name: str) -> tuple[int, ...]:
        """Return whole numbers that are an attribute in old opsets, and an input in new ones."""
        if name in self.node.attributes:
            return tuple(self.node.attribute(name, ()))
        return integers(self.node, self.array(position, f"a value of {name}"), name)

    def axes(self, rank: int, position: int = 1) -> tuple[int, ...] | None:
        """Return the axes that are named; None if none are."""
        return axes_of(self.node, self.args, rank, position)

    def axis(self, default: int, rank: int, name: str = "axis") -> int:
        """Return an axis, counted from the front."""
        axis: int = self.node.attribute(name, default)
        if not -rank <= axis < rank:
            raise InvalidInput(f"{self.node.label}: there is no dimension {axis} among {rank}.")
        return axis % rank

    def sizes(self, x: Tensor) -> list[Any]:
        """Return the shape of a tensor, with a symbol where the batch is."""
        found: list[Any] = list(x.shape)
        if isinstance(x, Recorded):
            layout = self.layout_of(x)
            found[layout.axis] = Batch(layout.pre * layout.post)
        return found

    def shape(self, x: Tensor, sizes: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape that a tensor is given, from sizes of the file: -1 is what remains."""
        numbers = [BATCH * n.times if isinstance(n, Batch) else n for n in sizes]
        if not all(type(n) is int and n >= -1 for n in numbers) or numbers.count(-1) > 1:
            raise InvalidInput(f"{self.node.label}: {_written(sizes)} is no shape.")
        fixed = self.graph.batch
        if fixed is None or not isinstance(x, Recorded) or any(isinstance(n, Batch) for n in sizes):
            return tuple(numbers)
        return self._of_a_fixed_batch(x, numbers, fixed)

    def _of_a_fixed_batch(self, x: Recorded, sizes: Sequence[int], fixed: int) -> tuple[int, ...]:
        """Return a shape of `BATCH` samples for one that the file has for `fixed`: the batch stays apart if it can."""
        layout = self.layout_of(x)
        own = [n if k != layout.axis else n // BATCH * fixed for k, n in enumerate(x.shape)]
        known, size = math.prod(n for n in sizes if n != -1), math.prod(own)
        full = [size // max(known, 1) if n == -1 else n for n in sizes]
        if math.prod(full) != size:
            raise InvalidInput(f"{self.node.label}: cannot reshape a value of shape {tuple(own)} into {tuple(sizes)}.")
        before, found = math.prod(own[: layout.axis]) * layout.pre, []
        for k, n in enumerate(full):
            pre, rest = divmod(before, math.prod(full[:k]))
            if not rest and pre and n % (pre * fixed) == 0:
                found.append((pre, n // (pre * fixed), k))
        if not found:
            raise self.node.unsupported(
                f"a change of shape from {tuple(own)} into {tuple(sizes)}", "Keep the batch in a dimension of its own."
            )
        (*_, place) = sorted(found)[self.choose(len(found))]
        return tuple(n // fixed * BATCH if k == place else n for k, n in enumerate(full))

    def require_room(self, numbers: int) -> None:
        """Raise if something on the way is larger than what is covered."""
        if numbers > self.graph.largest:
            raise InvalidInput(
                f"{self.node.label}: {numbers} numbers on the way are over the {self.graph.largest} that load_onnx "
                "covers."
            )


def _written(sizes: Sequence[Any]) -> str:
    return "(" + ", ".join("batch" if isinstance(size, Batch) else str(size) for size in sizes) + ")"
