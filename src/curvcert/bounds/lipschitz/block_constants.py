r"""The Lipschitz constants of single blocks, by the norms of their parts."""

from functools import singledispatch

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.monotone import monotone_residual_constant
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.errors import UnsupportedBlock
from curvcert.network import AbstractBlock, Affine, Block, MaxPool
from curvcert.operators import AbstractLinearMap
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import Upper


def known(constant: Tensor) -> Tensor:
    """Return a constant, inf where an activation without a largest slope left nothing to say: 0 x inf.

    >>> known(torch.tensor([1.0, torch.nan]))
    tensor([1., inf])
    """
    return torch.where(constant.isnan(), torch.inf, constant)


@singledispatch
def block_product(block: AbstractBlock, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    r"""Bound the Lipschitz constant of one block by the norms of its parts.

    .. math:: L_h = \|H\| + \max(|\alpha|, |\beta|) \|G\| \|W\|

    A residual block of the form A (x - W' D phi(Wx + b)) is bounded by its own rule as well (`monotone.py`).

    Reference: Entesari et al. (ICML 2024), equation `eq:naiveLipschitzOfResidual`.
    """
    raise UnsupportedBlock(f"{block.name}: no Lipschitz rule for a {type(block).__name__}.")


@block_product.register
def _(block: Block, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    alpha, beta = block.activation.slope

    def outer(op: AbstractLinearMap) -> Tensor:
        return problem.final_norm(op, norms) if last else norms.norm(op, problem.p, problem.p)

    H = outer(block.H)
    contracting = monotone_residual_constant(block, norms, outer) if problem.p == 2 else None
    # ||H|| is a term of the general rule, which then cannot give less, and costs a norm of G.
    if contracting is not None and bool((contracting <= H * (1 + 1e-9)).all()):
        return contracting
    steepest = max(abs(alpha), abs(beta))
    constant = (Upper(outer(block.G)) * steepest * norms.norm(block.W, problem.p, problem.p) + H).bound
    return constant if contracting is None else torch.minimum(constant, contracting)


@block_product.register
def _(block: Affine, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    return problem.final_norm(block.H, norms) if last else norms.norm(block.H, problem.p, problem.p)


@block_product.register
def _(block: MaxPool, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    return max_pool_constant(block, problem, last)


def max_pool_constant(block: MaxPool, problem: Problem, last: bool) -> Tensor:
    r"""Bound max-pooling: each |difference| of outputs is one of inputs, and an input is in m windows.

    .. math:: \|h(x) - h(y)\|_q \le \|h(x) - h(y)\|_p \, n^{(1/q - 1/p)_+} \le m^{1/p} n^{(1/q - 1/p)_+} \|x - y\|_p
    """
    inverse_p, inverse_q = 1.0 / problem.p, 1.0 / problem.q
    constant = float(block.multiplicity) ** inverse_p
    if last:
        n = torch.Size(block.out_shape).numel()
        if problem.scalars:
            return torch.ones(n, dtype=torch.float64)
        constant *= float(n) ** max(0.0, inverse_q - inverse_p)
    return torch.tensor(constant, dtype=torch.float64)
