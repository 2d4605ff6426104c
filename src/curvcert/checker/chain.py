r"""The chain view: a graph as a composition of blocks :math:`Hx + G\Phi(Wx + b) + c`, where it is one.

Going through the nodes, every value is written in this form over a base x, the output of the blocks that are closed.
An affine node multiplies H, G and c; an activation opens the next block; a sum of two values over one base with one
activation has the form again.  Where that fails there is no chain, and what needs one does without.

A block :math:`x - W^T D \Phi(Wx + b)` has a constant of its own, so that its base is closed in front of it.
"""

from dataclasses import dataclass, replace

import numpy as np

from curvcert.checker.activations import Activation
from curvcert.checker.model import Activated, Affine, Input, Model, Node
from curvcert.checker.outward import Array, Enclosed, Factor, plus, product, times
from curvcert.checker.pieces import Piece, identity, linked


class _NoChain(Exception):
    """The network is no composition of blocks."""


@dataclass(frozen=True, eq=False)
class _Hidden:
    """An activation over a base: the pieces before it, W, and the numbers of its nodes."""

    pieces: tuple[Piece, ...]
    closed: tuple[Piece, ...]
    W: Enclosed
    act: Activation
    z: int
    a: int


@dataclass(frozen=True, eq=False)
class _Value:
    """H x + G phi(.) + c over the output x of `pieces`; `skips` tells whether there is an H, None then stands for I."""

    pieces: tuple[Piece, ...]
    number: int
    size: int
    skips: bool
    H: Factor
    shift: Array
    G: Factor = None
    hidden: _Hidden | None = None


def chain_of(model: Model) -> tuple[Piece, ...] | None:
    """Return the blocks that a network is a composition of, or None."""
    starts = {start for k in range(len(model.nodes)) for start in _contracting(model, k)}
    found: list[_Value] = []
    try:
        for k, node in enumerate(model.nodes):
            value = _value(k, node, found)
            found.append(_restarted(value) if k in starts and k else value)
        return linked(_with_last_map_folded(model, found[-1]))
    except _NoChain:
        return None


def _value(k: int, node: Node, found: list[_Value]) -> _Value:
    match node:
        case Input():
            return _Value((), 0, node.size, True, None, np.zeros(node.size))
        case Affine():
            return _summed(k, node, found)
        case Activated():
            return _activated(k, node, found[node.source])


def _activated(k: int, node: Activated, before: _Value) -> _Value:
    inner = _settled(before)
    if not inner.skips:
        raise _NoChain
    W = identity(node.size) if inner.H is None else inner.H
    columns = W.value.shape[1]
    piece = Piece((columns,), node.size, None, k, None, W, node.act, node.source, k)
    hidden = _Hidden(inner.pieces, (*inner.pieces, piece), W, node.act, node.source, k)
    return _Value(inner.pieces, k, node.size, False, None, np.zeros(node.size), None, hidden)


def _settled(value: _Value) -> _Value:
    """Return the same without an activation: its block ends there, and G belongs to what follows."""
    if value.hidden is None:
        return value
    if value.skips:
        return _restarted(value)
    return replace(value, pieces=value.hidden.closed, skips=True, H=value.G, G=None, hidden=None)


def _restarted(value: _Value) -> _Value:
    """Return the same as the base of what follows."""
    return _Value(_closed(value), value.number, value.size, True, None, np.zeros(value.size))


def _closed(value: _Value) -> tuple[Piece, ...]:
    """Return the pieces with this value as the output of the last."""
    if value.hidden is None:
        if value.H is None and not value.shift.any():
            return value.pieces
        H = identity(value.size) if value.H is None else value.H
        return (*value.pieces, Piece((H.value.shape[1],), value.size, H, value.number))
    inner = value.hidden
    H_or_none = value.H if value.skips else None
    if value.skips and value.H is None:
        H_or_none = identity(value.size)
    columns = inner.W.value.shape[1]
    piece = Piece((columns,), value.size, H_or_none, value.number, value.G, inner.W, inner.act, inner.z, inner.a)
    return (*value.pieces, piece)


def _summed(k: int, node: Affine, found: list[_Value]) -> _Value:
    total: _Value | None = None
    for term in node.terms:
        image = _image(term.matrix, found[term.source], k)
        total = image if total is None else _plus(total, image)
    assert total is not None
    total = replace(total, number=k, shift=total.shift + np.abs(node.offset) + node.error)
    residual = len(node.terms) > 1 and total.hidden is not None and total.skips
    return _restarted(total) if residual else total


def _image(A: Factor, value: _Value, k: int) -> _Value:
    if A is None:
        return replace(value, number=k)
    # A shift only tells whether a value is another one than its base: what it is stands in the nodes.
    shift = A.size @ value.shift
    H = times(A, value.H) if value.skips else None
    G = times(A, value.G) if value.hidden is not None else None
    return replace(value, number=k, size=len(A.value), H=H, G=G, shift=shift)


def _plus(left: _Value, right: _Value) -> _Value:
    for one, other in ((left, right), (_settled(left), right), (left, _settled(right))):
        if one.pieces is other.pieces:
            break
    else:
        raise _NoChain
    if one.hidden is not None and other.hidden is not None and one.hidden is not other.hidden:
        raise _NoChain
    H, skips = (one.H, one.skips) if not other.skips else (other.H, True)
    if one.skips and other.skips:
        H = _total(one.H, other.H, one.size)
    G = one.G if one.hidden is not None else other.G
    if one.hidden is not None and other.hidden is not None:
        G = _total(one.G, other.G, one.size)
    return replace(one, skips=skips, H=H, G=G, hidden=one.hidden or other.hidden, shift=one.shift + other.shift)


def _total(left: Factor, right: Factor, size: int) -> Enclosed:
    eye = identity(size)
    return plus(eye if left is None else left, eye if right is None else right)


def _with_last_map_folded(model: Model, value: _Value) -> tuple[Piece, ...]:
    """Return the closed chain; a last affine piece belongs to the last block's H and G."""
    pieces = _closed(value)
    if not pieces:
        size = model.nodes[0].size
        return (Piece((size,), size, identity(size), len(model.nodes) - 1),)
    if len(pieces) > 1 and pieces[-1].act is None and pieces[-2].act is not None:
        last, block = pieces[-1], pieces[-2]
        H = None if block.H is None or last.H is None else product(last.H, block.H)
        folded = replace(block, H=H, G=times(last.H, block.G), outputs=last.outputs, output=last.output)
        return (*pieces[:-2], folded)
    return pieces


def _contracting(model: Model, k: int) -> set[int]:
    """Return the values x for which node k has a term x and one -W' D phi(W x + b)."""
    node = model.nodes[k]
    found: set[int] = set()
    if not isinstance(node, Affine):
        return found
    skips = {term.source for term in node.terms if term.map is None}
    for term in node.terms if skips else ():
        activated = model.nodes[term.source]
        z = model.nodes[activated.source] if isinstance(activated, Activated) else None
        if isinstance(z, Affine) and len(z.terms) == 1 and z.terms[0].source in skips:
            W, G = z.terms[0].matrix, term.matrix
            if W is not None and G is not None and diagonal_between(None, G, W) is not None:
                found.add(z.terms[0].source)
    return found


def diagonal_between(H: Factor, G: Enclosed, W: Enclosed) -> Array | None:
    """Return the d >= 0 that brings G nearest to -H W' diag(d), where it is near that at all."""
    M = W.value.T if H is None else H.value @ W.value.T
    if M.shape != G.value.shape:
        return None
    squares = (M * M).sum(axis=0)
    d = np.where(squares > 0, -(G.value * M).sum(axis=0) / np.where(squares > 0, squares, 1.0), 0.0)
    d = np.maximum(d, 0.0)
    near = float(np.abs(G.value + M * d).max()) <= 1e-9 * float(np.abs(G.value).max())
    return d if near else None
