r"""A last normalisation before a linear head, multiplied out: which class is largest does not depend on it.

With :math:`f = A (c / s) + a` and a number :math:`s > 0` of the sample's own, :math:`s f = A c + a s` has its outputs
in the same order, without a quotient or a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import power
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, ProductNode, Term
from curvcert.operators import AbstractLinearMap, Dense, Diagonal, Reshape

_INVERSE_ROOT, _ROOT = power(-0.5), power(0.5)


@dataclass(frozen=True, eq=False)
class _Way:
    """A chain of affine nodes from a value to a later one: its map, None for none, and offsets on the way, each with
    the map that it goes through.
    """

    start: int
    map: AbstractLinearMap | None
    offsets: tuple[tuple[AbstractLinearMap | None, Tensor], ...]


def without_last_normalisation(nodes: Sequence[AbstractNode], output: int) -> tuple[AbstractNode, ...] | None:
    """Return nodes that end in s f, where f ends in a normalisation of the whole sample and a linear head, or None.

    >>> from curvcert.network.builder import start
    >>> from curvcert.network.composed import layer_norm
    >>> x = start((3,), torch.device("cpu"))
    >>> y = layer_norm(x, 1, None, None, 1e-5, "norm").linear(Dense(torch.ones(2, 3, dtype=torch.float64)))
    >>> found = without_last_normalisation(y.builder.nodes, y.number)
    >>> [type(nodes[nodes[-1].sources[0]]).__name__ for nodes in (y.builder.nodes, found)]
    ['ProductNode', 'AffineNode']
    """
    head = _way_back(nodes, output)
    product = nodes[head.start]
    if not isinstance(product, ProductNode):
        return None
    for c, inverse in (product.sources, product.sources[::-1]):
        way = _way_back(nodes, inverse)
        root = nodes[way.start]
        if way.offsets or way.map is None or not isinstance(root, ElementwiseNode) or way.map.in_size != 1:
            continue
        if root.activation is _INVERSE_ROOT:
            return (*nodes, *_multiplied_out(nodes, head, c, root, way.map, output))
    return None


def _multiplied_out(
    nodes: Sequence[AbstractNode], head: _Way, c: int, root: ElementwiseNode, spread: AbstractLinearMap, output: int
) -> tuple[AbstractNode, AbstractNode]:
    """Return s, and A (e c) + a s, where the inverse of s is spread to the entries of c with factors e."""
    one = torch.ones(1, *spread.in_shape, dtype=torch.float64, device=spread.device)
    scaled: AbstractLinearMap = Diagonal(spread.apply(one)[0], spread.out_shape)
    s, last = ElementwiseNode(root.source, _ROOT, root.shape, root.name), nodes[output]
    terms = [Term(c, scaled if head.map is None else head.map @ scaled)]
    for way, offset in head.offsets:
        column = Dense(offset.reshape(-1, 1)) @ Reshape(root.shape, (1,), torch.float64, spread.device)
        shaped = Reshape((offset.numel(),), tuple(offset.shape), torch.float64, spread.device) @ column
        terms.append(Term(len(nodes), shaped if way is None else way @ shaped))
    zero = torch.zeros(last.shape, dtype=torch.float64, device=spread.device)
    return s, AffineNode(tuple(terms), zero, last.name)


def _way_back(nodes: Sequence[AbstractNode], value: int) -> _Way:
    """Follow affine nodes of one term back from a value, as long as their offsets are exact."""
    found: AbstractLinearMap | None = None
    offsets: list[tuple[AbstractLinearMap | None, Tensor]] = []
    node = nodes[value]
    while isinstance(node, AffineNode) and len(node.terms) == 1 and node.offset_error is None:
        if bool(node.offset.any()):
            offsets.append((found, node.offset))
        found = node.terms[0].map if found is None else found @ node.terms[0].map
        value = node.terms[0].source
        node = nodes[value]
    return _Way(value, found, tuple(offsets))
