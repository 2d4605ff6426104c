r"""Whether float64 can hold a network's constants.

Bounds multiply norms, and square what they multiply before they take a root: up to the fourth power of a weight and of
the Lipschitz constants of blocks.  With :math:`2^{-a}` the least that any chain of blocks does, :math:`2^{-m}` the
least of the maps inside and :math:`2^{-s}` that of the last one, no such product is below :math:`2^{-4(a + m) - s}`.
Where that nears the end of the floats, a product could round to 0, which is no bound, and the network is refused.
"""

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.errors import InvalidInput
from curvcert.network import Affine, Block
from curvcert.operators import AbstractLinearMap, Composition, Scaled, Sum, Transposed

_MOST_BITS = 900.0
"""Floats end at 2**-1022; the rest is for activations' constants, and for norms that are known up to the dimension."""


def require_room_for_products(problem: Problem) -> None:
    """Raise where weights are so small that products of their norms could underflow; asked once of a problem."""
    bits, least = problem.once("sizes", lambda: _bits(problem))
    if bits > _MOST_BITS:
        raise InvalidInput(
            f"The weights are too small for bounds in float64: down to {least:.1e}, with products of norms that "
            f"underflow (2**-{bits:.0f}, expected 2**-{_MOST_BITS:.0f} or more). Scale the weights up and the inputs "
            "down, and set weights that do nothing to 0."
        )


def _bits(problem: Problem) -> tuple[float, float]:
    """Return how many bits below 1 a product of norms may be, and the size of the smallest map that is not 0."""
    chain: list[Tensor] = []
    maps: list[Tensor] = []
    for block in problem.network.blocks:
        if isinstance(block, Affine):
            maps.append(_size(block.H, problem))
            chain.append(maps[-1])
        elif isinstance(block, Block):
            H, G, W = (_size(op, problem) for op in (block.H, block.G, block.W))
            maps += [W, torch.maximum(G, H)]
            chain.append(torch.maximum(H, max(map(abs, block.activation.slope)) * G * W))
    if not maps:
        return 0.0, 1.0
    sizes = torch.stack(maps)
    inside, last = _small(sizes)[:-1], _small(sizes)[-1]
    passed = _small(torch.stack(chain))[:-1].sum()
    bits = 4 * (passed + inside.amax()) + last if len(inside) else last
    return float(bits), float(torch.where(sizes > 0, sizes, torch.inf).amin())


def _size(op: AbstractLinearMap, problem: Problem) -> Tensor:
    """Return the largest sum of a row; of sums and products by their parts.  Other norms are the same up to n."""
    match op:
        case Sum():
            return torch.stack([_size(term, problem) for term in op.terms]).sum()
        case Composition():
            return torch.stack([_size(factor, problem) for factor in op.factors]).prod()
        case Scaled():
            return abs(op.factor) * _size(op.map, problem)
        case Transposed():
            return _size(op.map, problem)
        case _:
            return problem.norms.norm(op, torch.inf, torch.inf)


def _small(sizes: Tensor) -> Tensor:
    """Return by how many bits sizes are below 1; a size of 0 is exact, and so is every product with it."""
    return torch.where(sizes > 0, -sizes.log2(), 0.0).clamp(min=0.0)
