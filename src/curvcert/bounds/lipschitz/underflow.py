r"""Whether float64 can hold a network's constants.

Bounds multiply norms, and square what they multiply before they take a root: up to the fourth power of a weight and of
the Lipschitz constants of blocks.  With :math:`2^{-a}` the least that any chain of blocks does, :math:`2^{-m}` the
least of the maps inside and :math:`2^{-s}` that of the last one, no such product is below :math:`2^{-4(a + m) - s}`.
Where that nears the end of the floats, a product could round to 0, which is no bound, and the network is refused.
"""

import math
from collections.abc import Sequence

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.errors import OutOfRange
from curvcert.network.nodes import AffineNode, ElementwiseNode, MaxPoolNode
from curvcert.network.sweeps import AbstractForward
from curvcert.operators import NormBounds
from curvcert.rounding import bits_below_one, most_bits

_MOST_BITS = 900.0
"""Floats end at 2**-1022; the rest is for activations' constants, and for norms that are known up to the dimension."""


def require_room_for_products(problem: Problem) -> None:
    """Raise where weights are so small that products of their norms could underflow; asked once of a problem."""
    bits, smallest = problem.once("sizes", lambda: _bits(problem))
    if bits > _MOST_BITS:
        raise OutOfRange(
            f"The weights are too small for bounds in float64: linear maps down to 2**-{smallest:.0f}, with products "
            f"of norms that underflow (2**-{bits:.0f}, expected 2**-{_MOST_BITS:.0f} or more). Scale the weights up "
            "and the inputs down, and set weights that do nothing to 0."
        )


def _bits(problem: Problem) -> tuple[float, float]:
    """Return how many bits below 1 a product of norms may be, and how many the smallest map that is not 0."""
    nodes = problem.network.nodes
    bits = _Bits(problem.norms)
    chain = bits.sweep(nodes, 0.0)
    # What is 0 is so exactly, and so is every product with it.
    chain, inside, last = [_finite(each) for each in chain], 0.0, 0.0
    for k, node in enumerate(nodes):
        if not isinstance(node, AffineNode):
            continue
        smallest = _finite(most_bits(map(bits.of, (term.map for term in node.terms))))
        if k == len(nodes) - 1:
            last = smallest
        else:
            inside = max(inside, smallest)
    # Squares and fourth powers are taken of what leads to the maps inside, not of the last activations themselves.
    read = [source for k, node in enumerate(nodes[:-1]) for source in node.sources if isinstance(node, AffineNode)]
    read += [source for source in nodes[-1].sources if not isinstance(nodes[source], ElementwiseNode)]
    before = max((chain[source] for source in read), default=0.0)
    return 4 * (before + inside) + last if inside or before else last, max(inside, last)


def _finite(bits: float) -> float:
    return 0.0 if math.isinf(bits) else bits


class _Bits(AbstractForward[float]):
    """How many bits below 1 the constant of a value may be; inf for one that is 0."""

    def __init__(self, norms: NormBounds) -> None:
        self.of = norms.bits_below_one

    def affine(self, node: AffineNode, values: Sequence[float]) -> float:
        return min(value + self.of(term.map) for term, value in zip(node.terms, values, strict=True))

    def elementwise(self, node: ElementwiseNode, value: float) -> float:
        steepest = max(map(abs, node.activation.slope))
        return value + (0.0 if math.isinf(steepest) else bits_below_one(steepest))

    def max_pool(self, node: MaxPoolNode, value: float) -> float:
        return value
