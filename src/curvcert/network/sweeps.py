"""The traversal of a network, written once: what is carried, and its rule for each kind of node, is a domain.

Forward, a domain gives the value of a node what it has of the values that the node reads.  Backward, every node is
given what arrives from its readers, and sends on to what it reads.  A domain without a rule for a kind of node refuses
it by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NoReturn, TypeVar, final

from curvcert.errors import UnsupportedModule
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, ProductNode

V = TypeVar("V")


class AbstractForward(ABC, Generic[V]):
    """Something carried from the input on."""

    @abstractmethod
    def affine(self, node: AffineNode, values: Sequence[V]) -> V:
        """Return what holds for a sum, given one value for each of its terms."""

    @abstractmethod
    def elementwise(self, node: ElementwiseNode, value: V) -> V:
        """Return what holds behind an activation."""

    def max_pool(self, node: MaxPoolNode, value: V) -> V:
        """Return what holds behind max-pooling; refused where a domain has no rule for it."""
        self._refuse(node)

    def product(self, node: ProductNode, left: V, right: V) -> V:
        """Return what holds for a product of two values; refused where a domain has no rule for it."""
        self._refuse(node)

    @final
    def sweep(self, nodes: Sequence[AbstractNode], start: V, known: Sequence[V] = ()) -> list[V]:
        """Return what holds for the value of every node, given that of the input, or those of the first nodes."""
        found: list[V] = list(known)
        for node in nodes[len(known) :]:
            found.append(start if isinstance(node, InputNode) else self._at(node, [found[k] for k in node.sources]))
        return found

    def _at(self, node: AbstractNode, values: list[V]) -> V:
        match node:
            case AffineNode():
                return self.affine(node, values)
            case ElementwiseNode():
                return self.elementwise(node, values[0])
            case MaxPoolNode():
                return self.max_pool(node, values[0])
            case ProductNode():
                return self.product(node, *values)
        self._refuse(node)

    @final
    def _refuse(self, node: AbstractNode) -> NoReturn:
        raise UnsupportedModule(f"{node.name}: {type(self).__name__} has no rule for a {type(node).__name__}.")


class AbstractBackward(ABC, Generic[V]):
    """Something carried from the output back to the input."""

    @abstractmethod
    def joined(self, k: int, arriving: Sequence[V]) -> V:
        """Return what holds for the value of node k, given what each of its readers sends back."""

    @abstractmethod
    def affine(self, k: int, node: AffineNode, value: V) -> Sequence[V]:
        """Return what a sum sends back, one for each of its terms."""

    @abstractmethod
    def elementwise(self, k: int, node: ElementwiseNode, value: V) -> V:
        """Return what an activation sends back."""

    def max_pool(self, k: int, node: MaxPoolNode, value: V) -> V:
        """Return what max-pooling sends back; refused where a domain has no rule for it."""
        self._refuse(node)

    def product(self, k: int, node: ProductNode, value: V) -> tuple[V, V]:
        """Return what a product sends back to both factors; refused where a domain has no rule for it."""
        self._refuse(node)

    @final
    def sweep(self, nodes: Sequence[AbstractNode], end: V) -> list[V]:
        """Return what holds for the value of every node, given that of the last; each is read by a later one."""
        arriving: list[list[V]] = [[] for _ in nodes]
        found: list[V] = [end]
        for k in range(len(nodes) - 1, -1, -1):
            value = end if k == len(nodes) - 1 else self.joined(k, arriving[k])
            found.append(value)
            for source, sent in zip(nodes[k].sources, self._at(k, nodes[k], value), strict=True):
                arriving[source].append(sent)
        return found[:0:-1]

    def _at(self, k: int, node: AbstractNode, value: V) -> Sequence[V]:
        match node:
            case InputNode():
                return ()
            case AffineNode():
                return self.affine(k, node, value)
            case ElementwiseNode():
                return (self.elementwise(k, node, value),)
            case MaxPoolNode():
                return (self.max_pool(k, node, value),)
            case ProductNode():
                return self.product(k, node, value)
        self._refuse(node)

    @final
    def _refuse(self, node: AbstractNode) -> NoReturn:
        raise UnsupportedModule(f"{node.name}: {type(self).__name__} has no rule for a {type(node).__name__}.")
