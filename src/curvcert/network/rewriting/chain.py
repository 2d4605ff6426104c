r"""The chain view: a network as a composition of the paper's blocks, where it is one.

While nodes are read, a value is an expression :math:`Hx + G\Phi(Wx + b) + c` of the output x of the blocks closed so
far.  An affine node multiplies H, G and c from the left; an activation starts the next Phi; a sum of two expressions of
the same x is one again, as long as they share one Phi.  Where that ends, the network is no chain, and the node where it
ended is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.errors import UnsupportedBlock
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool, add_offsets, fold_offset
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, Term
from curvcert.network.rewriting.sll import starts_of_contractions
from curvcert.operators import AbstractLinearMap, Composition, Identity, Scaled, Sum, Zero
from curvcert.operators.base import Shape

_MOST_MAPS = 1000
"""A sum of sums of ... is written out here, and could double with every node."""


@dataclass(frozen=True, eq=False)
class Link:
    """One block of a chain, and where its values stand among the nodes: its pre-activation, if any, and its output."""

    block: AbstractBlock
    z: int | None
    output: int


Chain = tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class _Hidden:
    """The inner part Phi(W x + b) of an expression, where x is the output of `below`."""

    below: Chain
    W: AbstractLinearMap
    b: Tensor
    b_error: Tensor | None
    activation: Activation
    z: int
    number: int
    name: str

    @cached_property
    def chain(self) -> Chain:
        """The blocks up to and including this Phi; one tuple, so that branches that start here know each other."""
        shape = self.W.out_shape
        H, G = _zero(self.W.in_shape, shape, self.W), Identity(shape, self.W.dtype, self.W.device)
        block = Block(H, G, self.W, self.b, torch.zeros_like(self.b), self.activation, self.name, self.b_error)
        return (*self.below, Link(block, self.z, self.number))


@dataclass(frozen=True, eq=False)
class _Branch:
    """The outer part G Phi(.) of an expression."""

    G: AbstractLinearMap
    hidden: _Hidden


@dataclass(frozen=True, eq=False)
class _Expression:
    """H x + G Phi(W x + b) + c, where x is the output of `chain`; `number` is that of its node."""

    chain: Chain
    number: int
    H: AbstractLinearMap
    c: Tensor
    c_error: Tensor | None = None
    branch: _Branch | None = None
    name: str = ""

    def image(self, term: Term, number: int) -> "_Expression":
        """Return this under the map of a term."""
        A = term.map
        if isinstance(A, Identity):
            return replace(self, number=number)
        c, error = fold_offset(A, self.c, self.c_error)
        branch = None if self.branch is None else _Branch(A @ self.branch.G, self.branch.hidden)
        return replace(self, H=A @ self.H, branch=branch, c=c, c_error=error, number=number)

    def shift(self, offset: Tensor, offset_error: Tensor | None) -> "_Expression":
        """Return this plus an offset."""
        c, error = add_offsets(self.c, offset, self.c_error, offset_error)
        return replace(self, c=c, c_error=error)

    def activated(self, node: ElementwiseNode, number: int) -> "_Expression":
        """Return Phi of this."""
        inner = self.settled()
        hidden = _Hidden(inner.chain, inner.H, inner.c, inner.c_error, node.activation, self.number, number, node.name)
        H = _zero(inner.H.in_shape, node.shape, self.H)
        branch = _Branch(Identity(node.shape, self.H.dtype, self.H.device), hidden)
        return _Expression(inner.chain, number, H, torch.zeros_like(self.c), branch=branch, name=node.name)

    def settled(self) -> "_Expression":
        """Return the same without a branch: its Phi ends a block, and G and c belong to what follows."""
        if self.branch is None:
            return self
        if not isinstance(self.H, Zero):
            return self.restarted()
        return replace(self, chain=self.branch.hidden.chain, H=self.branch.G, branch=None)

    def restarted(self) -> "_Expression":
        """Return the same as the x of the expressions that follow."""
        return _starting(self.closed(), self.number, self.H.out_shape, self.H, self.c)

    def closed(self) -> Chain:
        """Return the chain with this expression as its last block."""
        if self.branch is None:
            shifted = not self.c.is_meta and (bool(self.c.any()) or self.c_error is not None)
            if isinstance(self.H, Identity) and not shifted:
                return self.chain
            return (*self.chain, Link(Affine(self.H, self.c, self.name or "affine", self.c_error), None, self.number))
        G, inner = self.branch.G, self.branch.hidden
        block = Block(self.H, G, inner.W, inner.b, self.c, inner.activation, inner.name, inner.b_error, self.c_error)
        return (*self.chain, Link(block, inner.z, self.number))


def chain_of(nodes: Sequence[AbstractNode], like: AbstractLinearMap, live: bool) -> Chain:
    """Return the blocks that a network is a composition of.

    `like` gives the dtype and device of its maps; the offsets of a live network have no numbers.

    Raises:
        UnsupportedBlock: where it is no composition of blocks, with the node's name.
    """
    found: list[_Expression] = []
    starts = starts_of_contractions(nodes)
    for k, node in enumerate(nodes):
        value = _expression(k, node, found, like, live)
        found.append(value.restarted() if k in starts else value)
    return _with_last_map_folded(found[-1])


def _expression(
    k: int, node: AbstractNode, found: Sequence[_Expression], like: AbstractLinearMap, live: bool
) -> _Expression:
    match node:
        case InputNode():
            offset = torch.zeros(node.shape, dtype=torch.float64, device="meta" if live else like.device)
            return _starting((), k, node.shape, like, offset)
        case AffineNode():
            terms = [found[term.source].image(term, k) for term in node.terms]
            return _summed(terms, node)
        case ElementwiseNode():
            return found[node.source].activated(node, k)
        case MaxPoolNode():
            before = found[node.source]
            chain = (*before.closed(), Link(node.pool, None, k))
            return _starting(chain, k, node.shape, before.H, before.c)
        case _:
            raise UnsupportedBlock(f"{node.name}: a {type(node).__name__} is no part of a chain of blocks.")


def _starting(chain: Chain, number: int, shape: Shape, like: AbstractLinearMap, offset: Tensor) -> _Expression:
    """Return the output of a chain itself; the new offset has numbers where the given one has."""
    return _Expression(chain, number, Identity(shape, like.dtype, like.device), offset.new_zeros(shape))


def _summed(terms: list[_Expression], node: AffineNode) -> _Expression:
    total = reduce(lambda left, right: _plus(left, right, node.name), terms).shift(node.offset, node.offset_error)
    total = replace(total, name=node.name) if len(terms) > 1 else total
    residual = len(terms) > 1 and total.branch is not None and not isinstance(total.H, Zero)
    return total.restarted() if residual else total


def _plus(left: _Expression, right: _Expression, name: str) -> _Expression:
    left, right = _on_the_same_chain(left, right, name)
    if _count(left) + _count(right) > _MOST_MAPS:
        raise UnsupportedBlock(f"{name}: a block with over {_MOST_MAPS} linear maps is not written out.")
    branch = _sum_of_branches(left.branch, right.branch, name)
    return replace(left.shift(right.c, right.c_error), H=left.H + right.H, branch=branch)


def _count(value: _Expression) -> int:
    """Count the elementary maps that an expression is made of, repetitions included, and stop beyond the limit."""
    stack: list[AbstractLinearMap] = [value.H] if value.branch is None else [value.H, value.branch.G]
    count = 0
    while stack and count <= _MOST_MAPS:
        op = stack.pop()
        count += 1
        match op:
            case Sum():
                stack.extend(op.terms)
            case Composition():
                stack.extend(op.factors)
            case Scaled():
                stack.append(op.map)
    return count


def _on_the_same_chain(left: _Expression, right: _Expression, name: str) -> tuple[_Expression, _Expression]:
    """Return both as expressions of one x: h + Phi(W h + b) is one of h, even if h itself ends in an activation."""
    for pair in ((left, right), (left.settled(), right), (left, right.settled())):
        if pair[0].chain is pair[1].chain:
            return pair
    raise UnsupportedBlock(
        f"{name}: a skip around more than one activation, or around a whole block, has no place in a chain of blocks. "
        "Read the network as `nodes` or `units`."
    )


def _sum_of_branches(left: _Branch | None, right: _Branch | None, name: str) -> _Branch | None:
    if left is None or right is None:
        return left or right
    if left.hidden is not right.hidden:
        raise UnsupportedBlock(
            f"{name}: a sum or concatenation of two branches with an activation each has no place in a chain of "
            "blocks. Read the network as `nodes` or `units`."
        )
    return _Branch(left.G + right.G, left.hidden)


def _with_last_map_folded(value: _Expression) -> Chain:
    """Return the closed chain; a last affine map belongs to the last block's H, G and c."""
    chain = value.closed()
    if not chain:
        return (Link(Affine(value.H, value.c, "identity"), None, value.number),)
    if len(chain) > 1 and isinstance(last := chain[-1].block, Affine) and isinstance(block := chain[-2].block, Block):
        block = block.read_out(last.H)
        c, error = add_offsets(block.c, last.c, block.c_error, last.c_error)
        return (*chain[:-2], Link(replace(block, c=c, c_error=error), chain[-2].z, chain[-1].output))
    return chain


@dataclass(frozen=True, eq=False)
class BlockAt:
    """Part of a network that is a block of its own: x, and the block from x to the value where it ends."""

    start: int
    block: Block


def block_at(nodes: Sequence[AbstractNode], value: int) -> BlockAt | None:
    """Return the residual block H x + G Phi(W x + b) + c that ends in a value, in any network, or None."""
    node = nodes[value]
    if not isinstance(node, AffineNode) or len(node.terms) != 2:
        return None
    for skip, branch in (node.terms, node.terms[::-1]):
        hidden = nodes[branch.source]
        z = nodes[hidden.source] if isinstance(hidden, ElementwiseNode) else None
        if isinstance(hidden, ElementwiseNode) and isinstance(z, AffineNode) and z.sources == (skip.source,):
            H, G, W = skip.map, branch.map, z.terms[0].map
            return BlockAt(skip.source, Block(H, G, W, z.offset, node.offset, hidden.activation, hidden.name))
    return None


def _zero(source: Shape, target: Shape, like: AbstractLinearMap) -> AbstractLinearMap:
    return Zero(source, target, like.dtype, like.device)


def expanded(blocks: Sequence[AbstractBlock]) -> tuple[tuple[AbstractNode, ...], Chain]:
    """Return the nodes of a composition of blocks, and the chain that they are, with those very blocks."""
    nodes: list[AbstractNode] = [InputNode(blocks[0].in_shape)]
    chain: list[Link] = []
    for block in blocks:
        x, z = len(nodes) - 1, None
        match block:
            case Affine():
                nodes.append(AffineNode((Term(x, block.H),), block.c, block.name, block.c_error))
            case Block():
                if not (isinstance(block.W, Identity) and _is_zero(block.b, block.b_error)):
                    nodes.append(AffineNode((Term(x, block.W),), block.b, block.name, block.b_error))
                z = len(nodes) - 1
                nodes.append(ElementwiseNode(z, block.activation, block.W.out_shape, block.name))
                plain = isinstance(block.G, Identity) and not block.is_residual
                if not (plain and _is_zero(block.c, block.c_error)):
                    terms = (Term(x, block.H), Term(len(nodes) - 1, block.G))
                    nodes.append(AffineNode(terms[not block.is_residual :], block.c, block.name, block.c_error))
            case MaxPool():
                nodes.append(MaxPoolNode(x, block, block.name))
            case _:
                raise UnsupportedBlock(f"{block.name}: no node is known for a {type(block).__name__}.")
        chain.append(Link(block, z, len(nodes) - 1))
    return tuple(nodes), tuple(chain)


def _is_zero(offset: Tensor, error: Tensor | None) -> bool:
    return offset.is_meta or (error is None and not bool(offset.any()))
