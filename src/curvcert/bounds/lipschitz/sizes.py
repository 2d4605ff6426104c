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
    chain, inside, end = [], [], []
    for k, block in enumerate(problem.network.blocks):
        last = k == len(problem.network.blocks) - 1
        if isinstance(block, Affine):
            H = _size(block.H, problem)
            (end if last else inside).append(H)
            through = H
        elif isinstance(block, Block):
            H, G, W = (_size(op, problem) for op in (block.H, block.G, block.W))
            inside.append(W)
            (end if last else inside).append(torch.maximum(G, H) if last else G)
            through = torch.maximum(H, max(map(abs, block.activation.slope)) * G * W)
        else:
            continue
        if not last:
            chain.append(through)
    one = torch.ones(1, dtype=torch.float64, device=problem.network.device)
    sizes = torch.stack([*inside, *end]) if inside or end else one
    lost = [_small(torch.stack(part)) if part else 0.0 * one for part in (chain, inside, end)]
    bits = 4 * (lost[0].sum() + lost[1].amax()) + lost[2].amax()
    least = torch.where(sizes > 0, sizes, torch.inf).amin()
    return float(bits), float(least)


def _size(op: AbstractLinearMap, problem: Problem) -> Tensor:
    """Return the largest sum of a row, of sums and products by their parts: any norm is the same up to the dimension."""
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
