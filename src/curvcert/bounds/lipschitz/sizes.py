r"""Whether float64 can hold a network's constants.

Bounds multiply norms, and square what they multiply before they take a root: up to the fourth power of a weight and of
the Lipschitz constants of blocks.  With :math:`2^{-a}` the least that any chain of blocks does, :math:`2^{-m}` the
least of the maps inside and :math:`2^{-s}` that of the last one, no such product is below :math:`2^{-4(a + m) - s}`.
Where that nears the end of the floats, a product could round to 0, which is no bound, and the network is refused.
"""

import math

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.errors import OutOfRange
from curvcert.network import Affine, Block
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
    chain: list[float] = []
    maps: list[float] = []
    for block in problem.network.blocks:
        if isinstance(block, Affine):
            maps.append(problem.norms.bits_below_one(block.H))
            chain.append(maps[-1])
        elif isinstance(block, Block):
            H, G, W = map(problem.norms.bits_below_one, (block.H, block.G, block.W))
            slope = bits_below_one(max(map(abs, block.activation.slope)))
            maps += [W, most_bits((G, H))]
            chain.append(min(H, G + slope + W))
    # What is 0 is so exactly, and so is every product with it.
    maps, chain = ([0.0 if math.isinf(bits) else bits for bits in each] for each in (maps, chain))
    if not maps:
        return 0.0, 0.0
    inside = 4 * (sum(chain[:-1]) + max(maps[:-1])) if len(maps) > 1 else 0.0
    return inside + maps[-1], max(maps)
