r"""The nodes of a network: each computes one value from earlier ones.

A network is a tuple of nodes in an order in which each reads earlier ones only.  Every feed-forward graph of linear
maps and elementwise functions has this form, with any skips, sums, concatenations and shared weights:

.. math:: v_k = \sum_{j < k} A_{kj} v_j + b_k \quad\text{(affine)}, \qquad v_k = \phi_k(v_j) \quad\text{(elementwise)}.

Glossary:

- *value*: what a node computes from the input, a tensor for each sample; `nodes[0]` is the input, the last the output.
- *term*: one use of an earlier value in an affine node, with the linear map that it goes through.
- *nonlinear node*: elementwise, or max-pooling; what it reads is its *pre-activation* z.  A product reads two values.

Maps are never multiplied out.  A concatenation is a sum of embeddings, a slice is a selection.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.errors import InvalidInput
from curvcert.network.block import MaxPool
from curvcert.operators import AbstractLinearMap
from curvcert.operators.base import Shape


class AbstractNode(ABC):
    """One value of a network, and how it is computed."""

    name: str

    @property
    @abstractmethod
    def sources(self) -> tuple[int, ...]:
        """The numbers of the nodes that it reads, once for every use."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Shape of the value of one sample."""

    @abstractmethod
    def renumbered(self, number: dict[int, int]) -> Self:
        """Return the same node in a network whose nodes have other numbers."""

    @final
    def to(self, device: torch.device | str) -> Self:
        """Return the same node on another device."""
        return replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})  # type: ignore[arg-type, type-var]


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor | AbstractLinearMap):
        return value.to(device=device)
    if isinstance(value, Term):
        return Term(value.source, value.map.to(device=device))
    return tuple(_moved(item, device) for item in value) if isinstance(value, tuple) else value


@final
@dataclass(frozen=True, eq=False)
class InputNode(AbstractNode):
    """The input x."""

    input_shape: Shape
    name: str = "input"

    @property
    def sources(self) -> tuple[int, ...]:
        """An input reads nothing."""
        return ()

    @property
    def shape(self) -> Shape:
        """Shape of one input."""
        return self.input_shape

    def renumbered(self, number: dict[int, int]) -> "InputNode":
        """Return the same input."""
        return self


@final
@dataclass(frozen=True, eq=False)
class Term:
    """The image of an earlier value under a linear map."""

    source: int
    map: AbstractLinearMap


@final
@dataclass(frozen=True, eq=False)
class AffineNode(AbstractNode):
    """A sum of linear images of earlier values and an offset, in float64.

    `offset_error` bounds, coordinate by coordinate, what folding adjacent affine layers rounded off the offset; the
    maps themselves are never multiplied together, so they are exact.
    """

    terms: tuple[Term, ...]
    offset: Tensor
    name: str = ""
    offset_error: Tensor | None = None

    def __post_init__(self) -> None:
        for term in self.terms:
            if term.map.out_shape != self.shape:
                raise InvalidInput(f"{self.name}: a map into {term.map.out_shape} in a sum of shape {self.shape}.")
        # A live node, over parameters in training, has offsets without values.
        if not self.terms or (not self.offset.is_meta and not _is_finite_float64(self.offset)):
            raise InvalidInput(f"{self.name}: an affine node needs a term, and a finite float64 offset.")

    @property
    def sources(self) -> tuple[int, ...]:
        """What the terms read."""
        return tuple(term.source for term in self.terms)

    @property
    def shape(self) -> Shape:
        """Shape of the sum."""
        return tuple(self.offset.shape)

    def renumbered(self, number: dict[int, int]) -> "AffineNode":
        """Return the same sum of values with other numbers."""
        return replace(self, terms=tuple(Term(number[term.source], term.map) for term in self.terms))


@final
@dataclass(frozen=True, eq=False)
class ElementwiseNode(AbstractNode):
    """An activation applied to every coordinate of a value."""

    source: int
    activation: Activation
    value_shape: Shape
    name: str = ""

    @property
    def sources(self) -> tuple[int, ...]:
        """What it is applied to."""
        return (self.source,)

    @property
    def shape(self) -> Shape:
        """Shape of the value, before and after."""
        return self.value_shape

    def renumbered(self, number: dict[int, int]) -> "ElementwiseNode":
        """Return the same activation of a value with another number."""
        return replace(self, source=number[self.source])


@final
@dataclass(frozen=True, eq=False)
class MaxPoolNode(AbstractNode):
    """The largest entry of each window; Lipschitz, with no curvature constant."""

    source: int
    pool: MaxPool
    name: str = ""

    @property
    def sources(self) -> tuple[int, ...]:
        """The image that it pools."""
        return (self.source,)

    @property
    def shape(self) -> Shape:
        """Shape of the pooled image."""
        return self.pool.out_shape

    def renumbered(self, number: dict[int, int]) -> "MaxPoolNode":
        """Return the same pooling of a value with another number."""
        return replace(self, source=number[self.source])


@final
@dataclass(frozen=True, eq=False)
class ProductNode(AbstractNode):
    """The product of two values, entry by entry.

    Bounds read it as a difference of squares (`rewriting/products.py`); everything else reads it as it is.
    """

    left: int
    right: int
    value_shape: Shape
    name: str = ""

    @property
    def sources(self) -> tuple[int, ...]:
        """Both factors."""
        return (self.left, self.right)

    @property
    def shape(self) -> Shape:
        """Shape of either factor, and of the product."""
        return self.value_shape

    def renumbered(self, number: dict[int, int]) -> "ProductNode":
        """Return the same product of values with other numbers."""
        return replace(self, left=number[self.left], right=number[self.right])


NonlinearNode = ElementwiseNode | MaxPoolNode
"""What is not linear, of one value."""


def _is_finite_float64(x: Tensor) -> bool:
    return x.dtype == torch.float64 and bool(torch.isfinite(x).all())


def require_order(nodes: tuple[AbstractNode, ...]) -> None:
    """Raise unless the nodes start with the only input, read earlier values that fit, and are read themselves."""
    if not nodes or not isinstance(nodes[0], InputNode) or any(isinstance(node, InputNode) for node in nodes[1:]):
        raise InvalidInput("A network is a tuple of nodes that starts with its one input.")
    read = {source for node in nodes for source in node.sources}
    for k, node in enumerate(nodes):
        if k not in read and 0 < k < len(nodes) - 1:
            raise InvalidInput(f"{node.name}: nothing reads node {k}, which is not the output. Leave it out.")
        for source, wanted in _uses(node):
            if not 0 <= source < k:
                raise InvalidInput(f"{node.name}: node {k} reads value {source}; it may read those before it only.")
            if nodes[source].shape != wanted:
                raise InvalidInput(f"{node.name}: takes a value of shape {wanted}, got {nodes[source].shape}.")


def _uses(node: AbstractNode) -> list[tuple[int, Shape]]:
    """Return every value that a node reads, with the shape that it takes."""
    match node:
        case AffineNode():
            return [(term.source, term.map.in_shape) for term in node.terms]
        case ElementwiseNode():
            return [(node.source, node.value_shape)]
        case MaxPoolNode():
            return [(node.source, node.pool.image_shape)]
        case ProductNode():
            return [(source, node.value_shape) for source in node.sources]
        case _:
            return []
