r"""Residual blocks that contract: h(x) = x - W' D phi(W x + b), the form of SLL layers.

With slopes in :math:`[0, \beta]`, :math:`\Delta a_l \Delta z_l \ge \Delta a_l^2 / \beta`, so

.. math:: \|\Delta h\|^2 = \|\Delta x\|^2 - 2 \Delta z^T D \Delta a + \|W^T D \Delta a\|^2
          \le \|\Delta x\|^2 + (\rho - 2/\beta) \|D^{1/2} \Delta a\|^2, \qquad \rho = \|D^{1/2} W\|_2^2,

hence :math:`L \le 1` if :math:`\rho \le 2/\beta`, and otherwise
:math:`L^2 \le 1 + (\rho - 2/\beta) \beta^2 \rho`.  With
:math:`D = 2T^{-1}` this is the layer of Araujo et al. (ICLR 2023), whose T makes :math:`\rho \le 2`: here that is not
assumed but proven, weight by weight, when a bound is asked for.
"""

import torch
from torch import Tensor

from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Composition, Diagonal, Identity, Scaled
from curvcert.operators.base import structure
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate


def monotone_residual_constant(block: Block, norms: AbstractNorms[R]) -> Tensor | None:
    """Bound the l2 Lipschitz constant of x - W' D phi(W x + b), or None for a block of another form."""
    alpha, beta = block.activation.slope
    weights = _weights(block)
    if weights is None or alpha < 0 or beta <= 0:
        return None
    roots = inflate(weights.sqrt(), 4 * UNIT_ROUNDOFF).expand(block.W.out_shape)
    norm = norms.norm(Diagonal(roots, block.W.out_shape) @ block.W, 2, 2)
    rho = inflate(norm * norm, 0.0)
    excess = (rho - 2.0 / beta * (1 - 4 * UNIT_ROUNDOFF)).clamp(min=0.0)
    return torch.where(excess > 0, inflate(1 + excess * beta * beta * rho, gamma(8)).sqrt(), torch.ones_like(rho))


def _weights(block: Block) -> Tensor | None:
    """Return the diagonal of D if the block is x - W' D phi(.), with D >= 0."""
    if not isinstance(block.H, Identity):
        return None
    factor, G = _unscaled(block.G)
    factors = G.factors if isinstance(G, Composition) else (G,)
    diagonal = factors[-1] if isinstance(factors[-1], Diagonal) else None
    rest = factors[:-1] if diagonal is not None else factors
    if not rest or _key(rest) != _key(_factors(block.W.T)):
        return None
    weight = torch.ones((), dtype=block.c.dtype, device=block.c.device) if diagonal is None else diagonal.weight
    weights = -factor * weight * (1 + 2 * UNIT_ROUNDOFF)
    return weights if bool((weights >= 0).all()) else None


def _unscaled(op: AbstractLinearMap) -> tuple[float, AbstractLinearMap]:
    return (op.factor, op.map) if isinstance(op, Scaled) else (1.0, op)


def _factors(op: AbstractLinearMap) -> tuple[AbstractLinearMap, ...]:
    return op.factors if isinstance(op, Composition) else (op,)


def _key(factors: tuple[AbstractLinearMap, ...]) -> tuple[object, ...]:
    return tuple(map(structure, factors))
