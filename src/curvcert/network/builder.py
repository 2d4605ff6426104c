"""A network under construction: front ends call `linear`, `shift`, `activate`, `plus`, `concat`, ... on its values.

A value is that of one sample: its axes are counted from 0, without the batch.  Sums and concatenations are affine nodes
of several values, the latter with an embedding for each; what cuts, turns or scales a value is an affine node of one.

A value is either exact (float64 copies of the weights: what `trace` reads) or live: over a module's own parameters, in
their dtype and with their gradients, for estimates in training.  What holds at every input does not depend on offsets,
so those of live values have no numbers (torch's meta device).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.errors import UnsupportedModule
from curvcert.network.block import MaxPool
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, ProductNode, Term
from curvcert.operators import AbstractLinearMap, Diagonal, Identity, Reshape, scale
from curvcert.operators.base import Shape
from curvcert.operators.gather import gather_along
from curvcert.operators.permutation import Flip, Permutation
from curvcert.operators.slices import Slice, slice_along

F64 = torch.float64


class Builder:
    """The nodes so far, and the kind of numbers that they are made of."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype = F64,
        live: bool = False,
        nodes: Sequence[AbstractNode] = (),
    ) -> None:
        """Start with the input, or go on from the nodes of a network."""
        self.device, self.dtype, self.live = device, dtype, live
        self._nodes: list[AbstractNode] = list(nodes) or [InputNode(shape)]
        self.shares: set[int] = set()
        """The values that sum to 1 along their last axis, as a softmax does."""
        self.scores: dict[int, int] = {}
        """For a softmax or log-softmax of all entries, the number of what it is of: the order of both is the same."""

    @property
    def nodes(self) -> tuple[AbstractNode, ...]:
        """The nodes so far."""
        return tuple(self._nodes)

    @property
    def last(self) -> "Value":
        """The value of the newest node; at the start, the input."""
        return Value(self, len(self._nodes) - 1)

    def add(self, node: AbstractNode) -> "Value":
        """Append a node and return its value."""
        self._nodes.append(node)
        return self.last

    def zeros(self, shape: Shape) -> Tensor:
        """Return an offset of zeros."""
        return torch.zeros(shape, dtype=F64, device="meta" if self.live else self.device)


@dataclass(frozen=True, eq=False)
class Value:
    """The value of a node under construction."""

    builder: Builder
    number: int

    @property
    def node(self) -> AbstractNode:
        """The node that computes it."""
        return self.builder.nodes[self.number]

    @property
    def shape(self) -> Shape:
        """Shape of one sample."""
        return self.node.shape

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.builder.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the maps: float64, or that of the parameters of a live value."""
        return self.builder.dtype

    @property
    def live(self) -> bool:
        """Whether it is over parameters in training; offsets then have no numbers."""
        return self.builder.live

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a module's weight as this value needs it: the parameter itself, or its exact values in float64."""
        return parameter if self.live else parameter.detach().to(F64).clone()

    def linear(self, A: AbstractLinearMap, offset: Tensor | None = None, name: str = "") -> "Value":
        """Return A value + offset."""
        A = A.to(self.dtype, self.device)
        # What changes nothing makes no node, so that a skip around it is a skip around nothing.
        value = self if isinstance(A, Identity) else self._affine((Term(self.number, A),), None, None, name)
        return value if offset is None else value.shift(offset, name=name)

    def shift(self, offset: Tensor, offset_error: Tensor | None = None, name: str = "") -> "Value":
        """Return value + offset, where the true offset is within `offset_error` of the given one."""
        if self.live:
            return self
        offset = offset.detach().to(F64).to(self.device).expand(self.shape)
        if not bool(offset.any()) and offset_error is None:
            return self
        return self._affine((self._itself(),), offset, offset_error, name)

    def activate(self, activation: Activation, name: str) -> "Value":
        """Return Phi(value)."""
        return self.builder.add(ElementwiseNode(self.number, activation, self.shape, name))

    def plus(self, other: "Value", name: str) -> "Value":
        """Return value + other."""
        if self.shape != other.shape:
            raise UnsupportedModule(
                f"{name}: a sum of shapes {self.shape} and {other.shape} is not supported. Give both the same shape."
            )
        return self._affine((self._itself(), other._itself()), None, None, name)

    def times(self, factor: Tensor, name: str = "") -> "Value":
        """Return factor * value, entry by entry; one factor for all entries stays a number, which norms can use."""
        factor = factor.detach().to(F64).to(self.device)
        first = float(factor.reshape(-1)[0])
        if bool((factor == first).all()):
            return self.linear(scale(first, Identity(self.shape, self.dtype, self.device)), name=name)
        return self.linear(Diagonal(factor, self.shape), name=name)

    def multiplied(self, other: "Value", name: str) -> "Value":
        """Return value * other, entry by entry; both depend on the input."""
        if self.live:
            raise UnsupportedModule(
                f"{name}: a product of values has no constants that a training loss could estimate. Leave it out."
            )
        if self.shape != other.shape:
            raise UnsupportedModule(
                f"{name}: a product of shapes {self.shape} and {other.shape} is not supported. Give both the same "
                "shape (`expanded` repeats a value along axes of size 1)."
            )
        return self.builder.add(ProductNode(self.number, other.number, self.shape, name))

    def expanded(self, shape: Shape, name: str = "") -> "Value":
        """Return the value repeated along axes of size 1, or new ones in front, until it has this shape."""
        value = self.reshaped((*(1,) * (len(shape) - len(self.shape)), *self.shape), name)
        return value.gathered({k: [0] * n for k, n in enumerate(shape) if value.shape[k] == 1 and n > 1}, name)

    def negative(self) -> "Value":
        """Return -value."""
        return self.times(torch.tensor(-1.0))

    def reshaped(self, shape: Shape, name: str = "") -> "Value":
        """Return the same entries in another shape."""
        return self if shape == self.shape else self.linear(Reshape(self.shape, shape), name=name)

    def permuted(self, axes: Shape, name: str = "") -> "Value":
        """Return the value with its axes in another order."""
        shape = tuple(self.shape[axis] for axis in axes)
        long = [axis for axis in axes if self.shape[axis] > 1]
        if long == sorted(long):
            return self.reshaped(shape, name)
        return self.linear(Permutation(self.shape, axes), name=name)

    def flipped(self, axes: Shape, name: str = "") -> "Value":
        """Return the value counted from the other end along some axes."""
        long = tuple(axis for axis in axes if self.shape[axis] > 1)
        return self.linear(Flip(self.shape, long), name=name) if long else self

    def cut(self, axis: int, start: int, count: int, step: int = 1, name: str = "") -> "Value":
        """Return `count` entries along an axis, `step` apart."""
        if count == self.shape[axis]:
            return self
        return self.linear(slice_along(self.shape, axis, start, count, step), name=name)

    def gathered(self, chosen: Mapping[int, Sequence[int]], name: str = "") -> "Value":
        """Return the chosen entries along some axes, in their order, repeated ones too."""
        moving = {axis: places for axis, places in chosen.items() if list(places) != list(range(self.shape[axis]))}
        return self.linear(gather_along(self.shape, moving), name=name) if moving else self

    def padded(self, sides: dict[int, tuple[int, int]], name: str = "") -> "Value":
        """Return the value with zeros before and behind it, so many along each of some axes."""
        grown = {axis: (before, after) for axis, (before, after) in sides.items() if before or after}
        if not grown:
            return self
        starts = tuple(grown.get(axis, (0, 0))[0] for axis in range(len(self.shape)))
        whole = tuple(n + sum(grown.get(axis, (0, 0))) for axis, n in enumerate(self.shape))
        return self.linear(Slice(whole, starts, (1,) * len(whole), self.shape).T, name=name)

    def max_pool(self, pool: MaxPool) -> "Value":
        """Return the largest entry of each window."""
        return self.builder.add(MaxPoolNode(self.number, pool, pool.name))

    def _itself(self) -> Term:
        return Term(self.number, Identity(self.shape, self.dtype, self.device))

    def _affine(self, terms: tuple[Term, ...], offset: Tensor | None, error: Tensor | None, name: str) -> "Value":
        offset = self.builder.zeros(terms[0].map.out_shape) if offset is None else offset
        return self.builder.add(AffineNode(terms, offset, name, error))


def concat(values: Sequence[Value], axis: int, name: str) -> Value:
    """Return values joined along an axis: the sum of their embeddings.

    >>> x = start((2, 3), torch.device("cpu"))
    >>> concat([x, x.cut(0, 1, 1)], 0, "joined").shape
    (3, 3)
    """
    first = values[0]
    shapes = [value.shape for value in values]
    if any((s[:axis], s[axis + 1 :]) != (shapes[0][:axis], shapes[0][axis + 1 :]) for s in shapes):
        raise UnsupportedModule(
            f"{name}: values of shapes {', '.join(map(str, shapes))} cannot be joined along axis {axis} of a sample. "
            "Give them the same sizes along all others."
        )
    if len(values) == 1:
        return first
    whole = (*first.shape[:axis], sum(shape[axis] for shape in shapes), *first.shape[axis + 1 :])
    terms, reached = [], 0
    for value in values:
        part = slice_along(whole, axis, reached, value.shape[axis]).to(first.dtype, first.device)
        terms.append(Term(value.number, part.T))
        reached += value.shape[axis]
    return first.builder.add(AffineNode(tuple(terms), first.builder.zeros(whole), name))


def start(shape: Shape, device: torch.device, dtype: torch.dtype = F64, live: bool = False) -> Value:
    """Return the input of a new network.

    >>> from curvcert.activations import TANH
    >>> x = start((3,), torch.device("cpu"))
    >>> [type(node).__name__ for node in x.plus(x.activate(TANH, "tanh"), "sum").builder.nodes]
    ['InputNode', 'ElementwiseNode', 'AffineNode']
    """
    return Builder(shape, device, dtype, live).last
