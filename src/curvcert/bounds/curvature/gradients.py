r"""Bounds on back-propagated gradients that hold at every input: what the unrolled bound weighs layers with.

For scalar outputs f, let :math:`u_k = \partial f / \partial a_k` be the gradient with respect to the k-th
activations.  Two bounds are kept: in the dual norm, by LipLT on the tail,

.. math:: \gamma_k = \|v^T \hat H_K \cdots \hat H_{k+1} G_k\|_{p^*}
          + \sum_{j > k} \rho_j \|W_j \hat H_{j-1} \cdots \hat H_{k+1} G_k\|_p \gamma_j,

and neuron by neuron, by intervals through the transposed maps with slopes in :math:`[\alpha, \beta]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.liplt import loop_transformed
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error, magnitude, rounding_length
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import gamma, inflate


@dataclass(frozen=True, eq=False)
class GradientBound:
    """Bounds on the gradient with respect to one block's activations: its dual norm, and each |entry|."""

    size: Tensor
    entries: Tensor


def gradient_bounds(problem: Problem, norms: AbstractNorms[R]) -> list[GradientBound | None]:
    """Return, for every block, bounds on the gradient of each scalar output; None for an affine block."""
    sizes = gradient_sizes(problem, norms)
    return _entries(problem, sizes, norms)


def gradient_sizes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor | None]:
    """Return the dual-norm bounds gamma_k, shape (outputs,), for every block with an activation."""
    p, blocks = problem.p, [_affine_or_block(block) for block in problem.network.blocks]
    parts = [loop_transformed(block) for block in blocks]
    sizes: list[Tensor | None] = [None] * len(blocks)
    for k in range(len(blocks) - 1, -1, -1):
        rest = parts[k].rest
        if rest is None:
            continue
        reach: AbstractLinearMap = rest[1]
        candidates = []
        total = torch.zeros(problem.network.outputs, dtype=torch.float64, device=problem.network.device)
        for j in range(k + 1, len(blocks)):
            later, size, block = parts[j].rest, sizes[j], blocks[j]
            if later is not None and size is not None:
                link = norms.norm(later[2] @ reach, p, p)
                total = total + later[0] * link * size
                if j == k + 1 and isinstance(block, Block) and not block.is_residual:
                    candidates.append(max(map(abs, block.activation.slope)) * link * size)
            reach = parts[j].linear @ reach
        candidates.append(total + problem.final_norm(reach, norms))
        # A path through the sum rounds three times a block; the final slack alone would not cover deep networks.
        sizes[k] = inflate(torch.stack(candidates).amin(dim=0), gamma(4 * len(blocks) + 8))
    return sizes


def _affine_or_block(block: AbstractBlock) -> Block | Affine:
    assert isinstance(block, Block | Affine)
    return block


def _entries(problem: Problem, sizes: list[Tensor | None], norms: AbstractNorms[R]) -> list[GradientBound | None]:
    outputs, shape = problem.network.outputs, problem.network.out_shape
    eye = torch.eye(outputs, dtype=torch.float64, device=problem.network.device).reshape(outputs, *shape)
    lower, upper = eye, eye
    found: list[GradientBound | None] = []
    for block, size in zip(reversed(problem.network.blocks), reversed(sizes), strict=True):
        if isinstance(block, Affine):
            lower, upper = _pulled(block.H, lower, upper)
            found.append(None)
            continue
        assert isinstance(block, Block)
        assert size is not None
        alpha, beta = block.activation.slope
        u_lower, u_upper = _clipped(*_pulled(block.G, lower, upper), _per_output(size, block.G.in_shape))
        found.append(GradientBound(size, torch.maximum(u_lower.abs(), u_upper.abs())))
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
