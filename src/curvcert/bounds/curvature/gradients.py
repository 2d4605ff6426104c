r"""Bounds on back-propagated gradients that hold at every input: what the unrolled bound weighs layers with.

For scalar outputs f, let :math:`u_k = \partial f / \partial a_k` be the gradient with respect to the k-th
activations.  Two bounds are kept: in the dual norm, by LipLT on the tail,

.. math:: \gamma_k = \|v^T \hat H_K \cdots \hat H_{k+1} G_k\|_{p^*}
          + \sum_{j > k} \rho_j \|W_j \hat H_{j-1} \cdots \hat H_{k+1} G_k\|_p \gamma_j,

and neuron by neuron, by intervals through the transposed maps with slopes in :math:`[\alpha, \beta]`.

In networks with skips the constants :math:`L_j` of the blocks come in as well, the last in the final norm: contracting
blocks have constants that no sum of norms can match.  They bound :math:`\gamma_k \le \|G_k\|_p L_{k+1} \cdots L_K` and,
since the middle slope is a slope like any other, :math:`\|W_j \hat H_{j-1} \cdots \hat H_{k+1} G_k\|_p \le
\|W_j\|_p L_{j-1} \cdots L_{k+1} \|G_k\|_p`, which stands for the norm of a chain too large to bound as one map.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.curvature.compositional import block_lipschitz
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.liplt import loop_transformed
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.operators import AbstractLinearMap, Composition
from curvcert.operators.magnitudes import image_error, magnitude, rounding_length
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import gamma, inflate

_CHAIN_ELEMENTS = 2**23
"""Basis vectors of a chain's smaller end, in numbers at its widest, up to which it is bounded as one map."""


@dataclass(frozen=True, eq=False)
class GradientBound:
    """Bounds on the gradient with respect to one block's activations: its dual norm, and each |entry|.

    `behind` bounds the dual norm of the gradient with respect to the block's output; None where no skip follows.
    """

    size: Tensor
    entries: Tensor
    behind: Tensor | None = None


def gradient_bounds(problem: Problem, norms: AbstractNorms[R]) -> list[GradientBound | None]:
    """Return, for every block, bounds on the gradient of each scalar output; None for an affine block."""
    return _entries(problem, gradient_sizes(problem, norms), _tail_constants(problem, norms), norms)


def gradient_sizes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor | None]:
    """Return the dual-norm bounds gamma_k, shape (outputs,), for every block with an activation."""
    blocks = [_affine_or_block(block) for block in problem.network.blocks]
    parts = [loop_transformed(block) for block in blocks]
    constants = _constants(blocks, problem, norms)
    sizes: list[Tensor | None] = [None] * len(blocks)
    for k in range(len(blocks) - 1, -1, -1):
        rest = parts[k].rest
        if rest is None:
            continue
        # `passed` bounds the blocks between k and j, whatever their slopes; None without skips, where it gains nothing.
        reach, passed = rest[1], None if constants is None else norms.norm(rest[1], problem.p, problem.p)
        candidates = []
        total = torch.zeros(problem.network.outputs, dtype=torch.float64, device=problem.network.device)
        for j in range(k + 1, len(blocks)):
            later, size, block = parts[j].rest, sizes[j], blocks[j]
            if later is not None and size is not None:
                link = _link(later[2], reach, passed, problem, norms)
                total = total + later[0] * link * size
                if j == k + 1 and isinstance(block, Block) and not block.is_residual:
                    candidates.append(max(map(abs, block.activation.slope)) * link * size)
            reach = parts[j].linear @ reach
            if constants is not None and passed is not None:
                passed = passed * constants[j]
        candidates.append(total + problem.final_norm(reach, norms))
        if passed is not None and k < len(blocks) - 1:
            candidates.append(passed)
        # A path through the sum rounds three times a block; the final slack alone would not cover deep networks.
        sizes[k] = inflate(torch.stack(candidates).amin(dim=0), gamma(4 * len(blocks) + 8))
    return sizes


def _constants(blocks: list[Block | Affine], problem: Problem, norms: AbstractNorms[R]) -> list[Tensor] | None:
    """Return the blocks' Lipschitz constants, the last in the final norm; None for a network without skips."""
    if not any(isinstance(block, Block) and block.is_residual for block in blocks):
        return None
    return [block_product(block, problem, norms, k == len(blocks) - 1) for k, block in enumerate(blocks)]


def _link(
    W: AbstractLinearMap, reach: AbstractLinearMap, passed: Tensor | None, problem: Problem, norms: AbstractNorms[R]
) -> Tensor:
    """Bound the norm of W reach: as one map, or by W's own where `passed` bounds the reach and the chain is large."""
    chain = W @ reach
    if passed is None:
        return norms.norm(chain, problem.p, problem.p)
    product = norms.norm(W, problem.p, problem.p) * passed
    if min(chain.in_size, chain.out_size) * _widest(chain) > _CHAIN_ELEMENTS:
        return product
    return torch.minimum(norms.norm(chain, problem.p, problem.p), product)


def _widest(chain: AbstractLinearMap) -> int:
    factors = chain.factors if isinstance(chain, Composition) else (chain,)
    return max(max(factor.in_size, factor.out_size) for factor in factors)


def _affine_or_block(block: AbstractBlock) -> Block | Affine:
    assert isinstance(block, Block | Affine)
    return block


def _tail_constants(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor | None]:
    """Return the products of the constants of all blocks behind each; None without skips, and behind the last."""
    blocks = problem.network.blocks
    found: list[Tensor | None] = [None] * len(blocks)
    if any(isinstance(block, Block) and block.is_residual for block in blocks):
        tail = torch.ones(problem.network.outputs, dtype=torch.float64, device=problem.network.device)
        for k in range(len(blocks) - 1, 0, -1):
            tail = inflate(tail * block_lipschitz(blocks[k], problem, norms, k == len(blocks) - 1), gamma(8))
            found[k - 1] = tail
    return found


def _entries(
    problem: Problem, sizes: list[Tensor | None], tails: list[Tensor | None], norms: AbstractNorms[R]
) -> list[GradientBound | None]:
    outputs, shape = problem.network.outputs, problem.network.out_shape
    eye = torch.eye(outputs, dtype=torch.float64, device=problem.network.device).reshape(outputs, *shape)
    lower, upper = eye, eye
    found: list[GradientBound | None] = []
    for block, size, tail in zip(*map(reversed, (problem.network.blocks, sizes, tails)), strict=True):
        if isinstance(block, Affine):
            lower, upper = _pulled(block.H, lower, upper)
            found.append(None)
            continue
        assert isinstance(block, Block)
        assert size is not None
        alpha, beta = block.activation.slope
        u_lower, u_upper = _clipped(*_pulled(block.G, lower, upper), _per_output(size, block.G.in_shape))
        found.append(GradientBound(size, torch.maximum(u_lower.abs(), u_upper.abs()), tail))
        corners = torch.stack([alpha * u_lower, alpha * u_upper, beta * u_lower, beta * u_upper])
        slack = 4 * torch.finfo(torch.float64).eps * corners.abs().amax(dim=0)
        inner = _pulled(block.W, corners.amin(dim=0) - slack, corners.amax(dim=0) + slack)
        # |(W' w)_j| <= ||W_:j||_p ||w||_{p*}
        columns = norms.row_norms(block.W.T, problem.p)
        cap = max(abs(alpha), abs(beta)) * _per_output(size, block.W.in_shape) * columns
        inner = _clipped(*inner, inflate(cap, gamma(4)))
        if block.is_residual:
            skip = _pulled(block.H, lower, upper)
            inner = (_down(inner[0] + skip[0]), _up(inner[1] + skip[1]))
        lower, upper = inner
    return list(reversed(found))


def _per_output(size: Tensor, shape: tuple[int, ...]) -> Tensor:
    return size.reshape(-1, *(1,) * len(shape))


def _pulled(A: AbstractLinearMap, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Enclose A' g for every g between lower and upper, coordinate by coordinate."""
    centre = (lower + upper) / 2
    radius = inflate(torch.maximum(upper - centre, centre - lower), 0.0)
    width = inflate(magnitude(A).adjoint(radius), gamma(rounding_length(A) + 2)) + image_error(A.T, centre)
    middle = A.adjoint(centre)
    return _down(middle - width), _up(middle + width)


def _clipped(lower: Tensor, upper: Tensor, cap: Tensor) -> tuple[Tensor, Tensor]:
    return torch.maximum(lower, -cap), torch.minimum(upper, cap)


def _up(x: Tensor) -> Tensor:
    return x + 2 * torch.finfo(torch.float64).eps * x.abs()


def _down(x: Tensor) -> Tensor:
    return x - 2 * torch.finfo(torch.float64).eps * x.abs()
