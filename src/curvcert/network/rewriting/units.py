r"""Units: a network as blocks that each read one or several earlier values.

A unit is the paper's block :math:`H x + G\Phi(Wx + b) + c`, an affine map or max-pooling, where x holds the values that
it reads, stacked into one vector if there are several.  So every graph has the form that bounds over balls are written
in: what a block does to x, and what becomes of x on the way.  A network that is a chain has its chain view's blocks,
each of which reads the one before it.

Nodes become one unit where that is worth something.  An affine node that only one activation reads belongs to it; and
so does a skip around it, :math:`x + G\Phi(Wx + b)`, whose constant no sum of norms can match, and a last affine map.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.errors import UnsupportedModule
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, Term
from curvcert.network.rewriting.chain import Chain
from curvcert.operators import AbstractLinearMap, Identity, Zero
from curvcert.operators.base import Shape
from curvcert.operators.segments import side_by_side


@dataclass(frozen=True, eq=False)
class AbstractUnit(ABC):
    """One block of a network and where its values stand among the nodes.

    Attributes:
        block: the block, on the stacked values that it reads.
        sources: the numbers of these values, each once.
        shapes: their shapes.
        output: the number of the value that it gives.
        parts: where it reads several values, the part of H, or of a block's W, that each goes through; otherwise empty.
    """

    block: AbstractBlock
    sources: tuple[int, ...]
    shapes: tuple[Shape, ...]
    output: int
    parts: tuple[AbstractLinearMap, ...]

    @property
    @abstractmethod
    def activated(self) -> "ActivatedUnit | None":
        """The unit itself if it has an activation."""

    @property
    @abstractmethod
    def terms(self) -> tuple[AbstractLinearMap, ...]:
        """The maps whose images it sums up, if it is affine and reads several values; otherwise empty."""

    @property
    @abstractmethod
    def H(self) -> AbstractLinearMap:
        """The map that leads past the activation, or is all of an affine unit."""

    @final
    @property
    def is_residual(self) -> bool:
        """Whether something leads past its activation."""
        return self.activated is not None and self.activated.block.is_residual

    @final
    @property
    def pools(self) -> bool:
        """Whether it is max-pooling, which has no derivative."""
        return isinstance(self, PoolUnit)

    @final
    @property
    def widest(self) -> int:
        """How many numbers its pre-activation holds, or what it gives."""
        if self.activated is not None:
            return self.activated.block.W.out_size
        return int(torch.Size(self.block.out_shape).numel())

    @final
    def stacked(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values that it reads as its block takes them, (batch, ...)."""
        return values[0] if len(values) == 1 else torch.cat([value.flatten(1) for value in values], dim=1)

    @final
    def split(self, stacked: Tensor) -> list[Tensor]:
        """Return the parts of covectors, (batch, rows, ...), with respect to each value that it reads."""
        if len(self.sources) == 1:
            return [stacked]
        sizes = [int(torch.Size(shape).numel()) for shape in self.shapes]
        parts = stacked.split(sizes, dim=2)
        return [part.reshape(*part.shape[:2], *shape) for part, shape in zip(parts, self.shapes, strict=True)]


@final
@dataclass(frozen=True, eq=False)
class ActivatedUnit(AbstractUnit):
    """The paper's block, with the numbers of its pre-activation and of the activation itself."""

    block: Block
    z: int
    hidden: int

    @property
    def activated(self) -> "ActivatedUnit":
        """The unit itself."""
        return self

    @property
    def terms(self) -> tuple[AbstractLinearMap, ...]:
        """None: what it reads meets in front of the activation."""
        return ()

    @property
    def H(self) -> AbstractLinearMap:
        """The map that leads past the activation."""
        return self.block.H

    @property
    def maps(self) -> tuple[AbstractLinearMap, ...]:
        """What each value that it reads goes through on its way to the pre-activation."""
        return self.parts or (self.block.W,)


@final
@dataclass(frozen=True, eq=False)
class AffineUnit(AbstractUnit):
    """An affine map."""

    block: Affine

    @property
    def activated(self) -> None:
        """None: it has no activation."""
        return

    @property
    def terms(self) -> tuple[AbstractLinearMap, ...]:
        """The maps whose images it sums up."""
        return self.parts

    @property
    def H(self) -> AbstractLinearMap:
        """All of it but the offset."""
        return self.block.H


@final
@dataclass(frozen=True, eq=False)
class PoolUnit(AbstractUnit):
    """Max-pooling of one image."""

    block: MaxPool

    @property
    def activated(self) -> None:
        """None: it has no activation."""
        return

    @property
    def terms(self) -> tuple[AbstractLinearMap, ...]:
        """None: it reads one value."""
        return ()

    @property
    def H(self) -> AbstractLinearMap:
        """Refused: no map stands for a maximum."""
        raise UnsupportedModule(f"{self.block.name or 'A block'} is max-pooling, which no linear map stands for.")


def unit_of_block(
    block: AbstractBlock,
    sources: tuple[int, ...],
    shapes: tuple[Shape, ...],
    z: int | None,
    hidden: int | None,
    output: int,
    parts: tuple[AbstractLinearMap, ...] = (),
) -> AbstractUnit:
    """Return the unit of a block of any kind.

    Raises:
        UnsupportedModule: if none is known for it.
    """
    match block:
        case Block() if z is not None and hidden is not None:
            return ActivatedUnit(block, sources, shapes, output, parts, z, hidden)
        case Affine():
            return AffineUnit(block, sources, shapes, output, parts)
        case MaxPool():
            return PoolUnit(block, sources, shapes, output, parts)
        case _:
            raise UnsupportedModule(f"{block.name}: no unit is known for a {type(block).__name__}.")


def units_of_chain(nodes: Sequence[AbstractNode], chain: Chain) -> tuple[AbstractUnit, ...]:
    """Return the blocks of a chain as units, each of which reads the one before it."""
    activated = {node.source: k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode)}
    units: list[AbstractUnit] = []
    for link in chain:
        source = units[-1].output if units else 0
        hidden = None if link.z is None else activated[link.z]
        units.append(unit_of_block(link.block, (source,), (link.block.in_shape,), link.z, hidden, link.output))
    return tuple(units)


def units_of(nodes: Sequence[AbstractNode]) -> tuple[AbstractUnit, ...]:
    """Return the units of any network.

    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> x, W = start((2,), torch.device("cpu")), Dense(torch.eye(2, dtype=torch.float64))
    >>> twice = x.linear(W).activate(TANH, "a").linear(W).activate(TANH, "b")
    >>> [(type(unit.block).__name__, unit.sources) for unit in units_of(x.plus(twice, "skip").builder.nodes)]
    [('Block', (0,)), ('Block', (2,)), ('Affine', (0, 4))]
    """
    readers = _readers(nodes)
    units: dict[int, AbstractUnit] = {}
    inside: set[int] = set()
    ends: set[int] = set()
    for k, node in enumerate(nodes):
        match node:
            case InputNode():
                continue
            case AffineNode():
                # Those that belong to a block with an activation are found from there.
                units.setdefault(k, _affine(nodes, k, node))
            case ElementwiseNode():
                # A residual block's end is a value of its own, even where only an activation reads it.
                alone = len(readers[node.source]) == 1 and node.source not in ends
                inner = nodes[node.source] if alone and node.source != len(nodes) - 1 else None
                unit = _block(nodes, readers, k, node, inner if isinstance(inner, AffineNode) else None)
                units[unit.output] = unit
                ends |= {unit.output} - {k}
                inside |= ({node.source} if isinstance(inner, AffineNode) else set()) | {k} - {unit.output}
            case MaxPoolNode():
                units[k] = PoolUnit(node.pool, (node.source,), (node.pool.image_shape,), k, ())
            case _:
                raise UnsupportedModule(f"{node.name}: no unit is known for a {type(node).__name__}.")
    return tuple(units[k] for k in sorted(units) if k not in inside)


def _readers(nodes: Sequence[AbstractNode]) -> list[list[int]]:
    """Return the numbers of the nodes that read each value, once for every use."""
    found: list[list[int]] = [[] for _ in nodes]
    for k, node in enumerate(nodes):
        for source in node.sources:
            found[source].append(k)
    return found


def _merged(terms: Sequence[Term]) -> dict[int, AbstractLinearMap]:
    """Return the map of every value that is read, those of several uses as their sum."""
    found: dict[int, AbstractLinearMap] = {}
    for term in terms:
        found[term.source] = found[term.source] + term.map if term.source in found else term.map
    return found


def _affine(nodes: Sequence[AbstractNode], k: int, node: AffineNode) -> AbstractUnit:
    maps = _merged(node.terms)
    H = side_by_side(list(maps.values()))
    block = Affine(H, node.offset, node.name or "affine", node.offset_error)
    parts = tuple(maps.values()) if len(maps) > 1 else ()
    return AffineUnit(block, tuple(maps), _shapes(nodes, maps), k, parts)


def _block(
    nodes: Sequence[AbstractNode], readers: list[list[int]], k: int, node: ElementwiseNode, inner: AffineNode | None
) -> AbstractUnit:
    """Return the block of an activation; without `inner`, its pre-activation is a value that others read too."""
    if inner is None:
        like = _like(nodes)
        maps: dict[int, AbstractLinearMap] = {node.source: Identity(node.shape, like.dtype, like.device)}
        b, b_error = torch.zeros(node.shape, dtype=torch.float64, device=like.device), None
    else:
        maps, b, b_error = _merged(inner.terms), inner.offset, inner.offset_error
    W, end = side_by_side(list(maps.values())), _end(nodes, readers, k, set(maps))
    H: AbstractLinearMap = Zero(W.in_shape, node.shape, W.dtype, W.device)
    G: AbstractLinearMap = Identity(node.shape, W.dtype, W.device)
    c, c_error, output = torch.zeros(node.shape, dtype=torch.float64, device=W.device), None, k
    if end is not None:
        outer = nodes[end]
        assert isinstance(outer, AffineNode)
        G, *skips = _merged(sorted(outer.terms, key=lambda term: term.source != k)).values()
        H = skips[0] if skips else Zero(W.in_shape, outer.shape, W.dtype, W.device)
        c, c_error, output = outer.offset, outer.offset_error, end
    block = Block(H, G, W, b, c, node.activation, node.name, b_error, c_error)
    parts = tuple(maps.values()) if len(maps) > 1 else ()
    return ActivatedUnit(block, tuple(maps), _shapes(nodes, maps), output, parts, node.source, k)


def _end(nodes: Sequence[AbstractNode], readers: list[list[int]], k: int, read: set[int]) -> int | None:
    """Return the number of the affine node that a block with activation k ends in, or None where k itself ends it."""
    if len(readers[k]) != 1:
        return None
    end = readers[k][0]
    if not isinstance(nodes[end], AffineNode):
        return None
    others = set(nodes[end].sources) - {k}
    residual = len(read) == 1 and others == read
    return end if residual or (not others and end == len(nodes) - 1) else None


def _shapes(nodes: Sequence[AbstractNode], sources: Sequence[int] | dict[int, AbstractLinearMap]) -> tuple[Shape, ...]:
    return tuple(nodes[source].shape for source in sources)


def _like(nodes: Sequence[AbstractNode]) -> AbstractLinearMap:
    maps = (term.map for node in nodes if isinstance(node, AffineNode) for term in node.terms)
    return next(maps, Identity((), torch.float64))
