"""Affine nodes in a row become one: maps are composed, and offsets folded with a bound on their rounding.

A node that several others read stays, since its value would otherwise be computed, and bounded, once for every
reader; and so does a sum, which the chain view closes a block with.
"""

from collections import Counter
from collections.abc import Sequence

from curvcert.network.block import add_offsets, fold_offset
from curvcert.network.nodes import AbstractNode, AffineNode, Term
from curvcert.operators import AbstractLinearMap, Identity, Zero


def fused(nodes: Sequence[AbstractNode], output: int) -> tuple[AbstractNode, ...]:
    """Return the nodes that the output is computed from, the output last, with rows of affine nodes as one.

    >>> import torch
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> double = Dense(2 * torch.eye(3, dtype=torch.float64))
    >>> value = start((3,), torch.device("cpu")).linear(double).shift(torch.ones(3)).linear(double)
    >>> [node.offset.tolist() for node in fused(value.builder.nodes, value.number)[1:]]
    [[2.0, 2.0, 2.0]]
    """
    readers = Counter(source for k in _needed(nodes, output) for source in nodes[k].sources)
    simple = list(nodes)
    for k, node in enumerate(nodes):
        if isinstance(node, AffineNode):
            simple[k] = _merged(_taken_in(node, simple, readers))
    kept = _needed(simple, output)
    number = {k: place for place, k in enumerate(kept)}
    return tuple(simple[k].renumbered(number) for k in kept)


def _needed(nodes: Sequence[AbstractNode], output: int) -> list[int]:
    """Return the numbers of the input and of all nodes that the output depends on, in order."""
    needed = {0, output}
    for k in range(output, 0, -1):
        if k in needed:
            needed.update(nodes[k].sources)
    return sorted(needed)


def _taken_in(node: AffineNode, nodes: Sequence[AbstractNode], readers: Counter[int]) -> AffineNode:
    """Return the node with each term that nobody else reads, and that is a single map itself, written out."""
    terms: list[Term] = []
    offset, error = node.offset, node.offset_error
    for term in node.terms:
        source = nodes[term.source]
        if not isinstance(source, AffineNode) or len(source.terms) > 1 or readers[term.source] > 1:
            terms.append(term)
            continue
        inner, below, below_error = source.terms[0], source.offset, source.offset_error
        terms.append(Term(inner.source, term.map @ inner.map))
        if not isinstance(term.map, Identity):
            below, below_error = fold_offset(term.map, below, below_error)
        offset, error = add_offsets(below, offset, below_error, error)
    return AffineNode(tuple(terms), offset, node.name, error)


def _merged(node: AffineNode) -> AffineNode:
    """Return the node with one term for each value that it reads, and without terms that are zero, but for one."""
    maps: dict[int, AbstractLinearMap] = {}
    for term in node.terms:
        maps[term.source] = maps[term.source] + term.map if term.source in maps else term.map
    terms = [Term(source, op) for source, op in maps.items()]
    kept = [term for term in terms if not isinstance(term.map, Zero)] or terms[:1]
    return AffineNode(tuple(kept), node.offset, node.name, node.offset_error)
