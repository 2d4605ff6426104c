r"""The unrolled bound by the sizes of gradients alone: cheap, differentiable, for norms of either kind.

.. math:: K \le c\,L_{m-1}^2\, \lambda_{max}(W_m^T \mathrm{diag}|v| W_m)
          + \sum_{k < m} c\,\gamma_k L_{k-1}^2\, \omega_k,

with :math:`\gamma_k` the bound on the back-propagated gradient (LipLT on the tail), :math:`L_{k-1}` that of the
prefix and :math:`\omega_k` a bound on the curvature of :math:`x \mapsto \Phi(W_k x)`.  The full bound (`unrolled.py`)
also weighs single neurons and knows the LipSDP recursion; this one is what training pushes on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvcert.bounds.curvature.blocks import block_curvature, scalar_block_curvatures
from curvcert.bounds.curvature.gradients import gradient_sizes
from curvcert.bounds.lipschitz.liplt import growth
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global, LayerTerm
from curvcert.network import Block
from curvcert.operators import Identity, Zero
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.propagation.slopes import stacked_size
from curvcert.rounding import Upper, total


def unrolled_sizes_bound(problem: Problem, norms: AbstractNorms[R], block_bounds: Sequence[str] = ("product",)) -> R:
    """Bound the curvature of scalar outputs by a sum over layers, one value per output.

    `block_bounds` names the bounds on a layer's own curvature to choose from.
    """
    problem.network.require_smooth()
    prefixes, sizes, units = growth(problem, norms), gradient_sizes(problem, norms), problem.network.units
    terms, per_layer = list[Tensor](), list[LayerTerm]()
    for unit in problem.network.activated:
        block = unit.block
        L = stacked_size([prefixes.of(source) for source in unit.sources], problem.p)
        if unit is units[-1]:
            term = (Upper(scalar_block_curvatures(block, problem.p, norms)) * L * L).bound
        else:
            omega, _ = block_curvature(_inner(block), problem.p, problem.p, norms, block_bounds)
            term = (Upper(sizes[unit.hidden]) * omega * L * L).bound
        per_layer.append(LayerTerm(block.name, "term", term, "gradient norm"))
        terms.append(term)
    value = problem.shaped(total(terms).bound)
    return norms.result(value, problem.p, problem.q, Global(), "unrolled by sizes", tuple(per_layer))


def _inner(block: Block) -> Block:
    """Return x -> Phi(W x + b): the gradient's size already counts what lies behind Phi."""
    W = block.W
    outer = Identity(W.out_shape, W.dtype, W.device)
    skip = Zero(W.in_shape, W.out_shape, W.dtype, W.device)
    return Block(skip, outer, W, block.b, torch.zeros_like(block.b), block.activation, block.name)
