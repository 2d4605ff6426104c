r"""LipLT: Lipschitz bounds through a loop transformation of the activations.

With :math:`\phi(z) = \mu z + \psi(z)` about the middle slope :math:`\mu = (\alpha + \beta)/2`, the rest
:math:`\psi` is :math:`\rho = (\beta - \alpha)/2`-Lipschitz and a block is
:math:`\hat H x + G\Psi(Wx + b) + c` with :math:`\hat H = H + \mu GW`.  Unrolled,

.. math::
    L_{k+1} = \|\hat H_k \cdots \hat H_0\|
    + \sum_{j \le k} \rho_j \|\hat H_k \cdots \hat H_{j+1} G_j\| \|W_j\| L_j.

Never above the product of the blocks' constants: where a norm of a product is only bounded, the block's own
constant times :math:`L_k` is taken if it is less.  In networks with skips, where contracting blocks have constants that
no sum of norms can match, the sum is first estimated from below by power iteration, and its norms are not bounded where
that is already too much.  Reference: Fazlyab et al. (NeurIPS 2023); Entesari et al. (ICML 2024), equation
`eq:lipLtRecursive`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.product import block_product, max_pool_constant
from curvcert.bounds.types import Global, LayerTerm
from curvcert.errors import UnsupportedBlock
from curvcert.network import AbstractBlock, Affine, Block, MaxPool
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import TINY, gamma, inflate

NormOf = Callable[[AbstractLinearMap], Tensor]

_GLIMPSE_STEPS = 8
"""Power-iteration steps of a norm that is only glimpsed, from below."""


@dataclass(frozen=True, eq=False)
class LoopTransformed:
    """The linear part of a block about the middle slope, and what is left: rho, G and W."""

    linear: AbstractLinearMap
    rest: tuple[float, AbstractLinearMap, AbstractLinearMap] | None


def loop_transformed(block: Block | Affine) -> LoopTransformed:
    """Split a block about the middle of its slopes; rho is rounded up so that it covers both ends."""
    if isinstance(block, Affine):
        return LoopTransformed(block.H, None)
    alpha, beta = block.activation.slope
    mu = (alpha + beta) / 2
    rho = math.nextafter(max(beta - mu, mu - alpha), math.inf)
    return LoopTransformed(block.H + mu * (block.G @ block.W), (rho, block.G, block.W))


def liplt_prefixes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor]:
    """Return Lipschitz constants of x -> x_k for k = 0, ..., K; the last in the problem's final norm.

    Max-pooling has no loop transformation: the sum starts again behind it.  The constants that belong to the
    problem's own norms are computed once.
    """
    if norms is problem.norms:
        return problem.once("liplt", lambda: _prefixes(problem, norms))
    return _prefixes(problem, norms)


def _prefixes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor]:
    blocks = problem.network.blocks
    prefixes = [torch.ones((), dtype=torch.float64, device=problem.network.device)]
    segment: list[LoopTransformed] = []
    for k, block in enumerate(blocks):
        last = k == len(blocks) - 1
        if isinstance(block, MaxPool):
            prefixes.append(max_pool_constant(block, problem, last).to(prefixes[-1].device) * prefixes[-1])
            segment = []
        else:
            segment.append(loop_transformed(_known(block)))
            before = prefixes[len(prefixes) - len(segment) :]
            stepwise = prefixes[-1] * block_product(block, problem, norms, last)
            if _may_win(segment, before, stepwise, problem, norms, last):
                stepwise = torch.minimum(_unrolled(segment, before, problem, norms, last), stepwise)
            prefixes.append(stepwise)
    return prefixes


def _known(block: AbstractBlock) -> Block | Affine:
    if isinstance(block, Block | Affine):
        return block
    raise UnsupportedBlock(f"{block.name}: LipLT has no rule for a {type(block).__name__}.")


def _unrolled(
    segment: Sequence[LoopTransformed],
    prefixes: Sequence[Tensor],
    problem: Problem,
    norms: AbstractNorms[R],
    last: bool,
) -> Tensor:
    """Return the next prefix constant; `prefixes` are those before each part of the segment."""

    def norm(op: AbstractLinearMap) -> Tensor:
        return norms.norm(op, problem.p, problem.p)

    total = _sum(segment, prefixes, norm, (lambda op: problem.final_norm(op, norms)) if last else norm)
    # A path through the sums rounds five times a part; the final slack alone would not cover deep networks.
    return inflate(total, gamma(5 * len(segment)))


def _sum(segment: Sequence[LoopTransformed], prefixes: Sequence[Tensor], norm: NormOf, outer: NormOf) -> Tensor:
    """Return the sum over the parts of a segment; `outer` measures the maps that end behind its last part."""
    # `tail` is the product of the linear parts behind block j.
    tail: AbstractLinearMap | None = None
    total = torch.zeros((), dtype=torch.float64, device=prefixes[0].device)
    for part, L in zip(reversed(segment), reversed(prefixes), strict=True):
        if part.rest is not None:
            rho, G, W = part.rest
            reach = G if tail is None else tail @ G
            total = total + rho * outer(reach) * norm(W) * L
        tail = part.linear if tail is None else tail @ part.linear
    return total if tail is None else total + outer(tail) * prefixes[0]


def _may_win(
    segment: Sequence[LoopTransformed],
    prefixes: Sequence[Tensor],
    stepwise: Tensor,
    problem: Problem,
    norms: AbstractNorms[R],
    last: bool,
) -> bool:
    """Tell whether the sum may be less than the stepwise bound, by norms from below; true where those are not tried.

    They are tried for bounds in l2 of networks with skips: contracting blocks are what makes sums lose.
    """
    skips = any(isinstance(block, Block) and block.is_residual for block in problem.network.blocks)
    if not (skips and isinstance(norms, NormBounds) and problem.p == 2 and (problem.scalars or problem.q == 2)):
        return True

    def outer(op: AbstractLinearMap) -> Tensor:
        return problem.final_norm(op, norms) if last and problem.scalars else _glimpsed(op)

    return bool((_sum(segment, prefixes, _glimpsed, outer) < stepwise).any())


def _glimpsed(op: AbstractLinearMap) -> Tensor:
    """Return the growth of one vector, after steps of power iteration: the 2 -> 2 norm is no less."""
    v = torch.cos(torch.arange(op.in_size, dtype=op.dtype, device=op.device)).reshape(1, *op.in_shape)
    for _ in range(_GLIMPSE_STEPS):
        v = op.adjoint(op.apply(v))
        v = v / torch.linalg.vector_norm(v).clamp(min=TINY)
    growth: Tensor = torch.linalg.vector_norm(op.apply(v))
    return growth


def liplt_bound(problem: Problem, norms: AbstractNorms[R]) -> R:
    """Bound the Lipschitz constant of a network by LipLT."""
    prefixes = liplt_prefixes(problem, norms)
    names = [block.name for block in problem.network.blocks]
    per_layer = tuple(LayerTerm(n, "prefix", L, "liplt") for n, L in zip(names, prefixes[1:], strict=True))
    value = problem.shaped(prefixes[-1])
    return norms.result(value, problem.p, problem.q, Global(), "liplt", per_layer, problem.network.assumes)
