r"""Blocks x - W' D phi(W x + b), the layers of Araujo et al. (ICLR 2023): a form that a sum of norms cannot see.

The plain graph has a skip of norm 1 beside a branch of some norm, and so a constant above 1; the block as a whole has
one of 1 (`bounds/lipschitz/monotone.py`).  So the chain view ends a block in front of every such skip.
"""

from collections.abc import Sequence

from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.operators import AbstractLinearMap, Composition, Diagonal, Identity, Scaled
from curvcert.operators.base import structure


def starts_of_contractions(nodes: Sequence[AbstractNode]) -> set[int]:
    """Return the numbers of the values x that stand in front of a skip x - W' D phi(W x + b), with the very same W.

    >>> import torch
    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> x, W = start((3,), torch.device("cpu")), Dense(torch.eye(3, dtype=torch.float64))
    >>> y = x.plus(x.linear(W).activate(TANH, "tanh").linear(-2.0 * W.T), "skip")
    >>> from curvcert.network.rewriting.fusion import fused
    >>> starts_of_contractions(fused(y.builder.nodes, y.number))
    {0}
    """
    return {x for node in nodes if isinstance(node, AffineNode) for x in _starts(node, nodes)}


def _starts(node: AffineNode, nodes: Sequence[AbstractNode]) -> set[int]:
    skips = {term.source for term in node.terms if isinstance(term.map, Identity)}
    found = set()
    for term in node.terms if skips else ():
        activated = nodes[term.source]
        z = nodes[activated.source] if isinstance(activated, ElementwiseNode) else None
        if isinstance(z, AffineNode) and len(z.terms) == 1 and _goes_back(term.map, z.terms[0].map):
            found |= skips & {z.terms[0].source}
    return found


def _goes_back(G: AbstractLinearMap, W: AbstractLinearMap) -> bool:
    """Whether G is W' D for a diagonal D, or a multiple of that."""
    product = G.map if isinstance(G, Scaled) else G
    if isinstance(product, Composition) and isinstance(product.factors[-1], Diagonal):
        rest = product.factors[:-1]
        product = rest[0] if len(rest) == 1 else Composition(rest)
    return structure(product) == structure(W.T)
