r"""Balls carried forward and gradients carried back: what anchored and local bounds of both orders share.

Forward, the ball of radius r about x becomes one of radius :math:`\rho_k` about x_k; neuron l then stays
within :math:`\|W_l\|_{p^*} \rho_k` of its value at x, and its slopes within the range of :math:`\phi'` there.
Backward, computed covectors :math:`\hat g_k` are pulled back with computed slopes :math:`\hat S`.  If
:math:`\|g_k(x') - \hat g_k\|_{p^*} \le \eta_k` for all x' in the ball, then

.. math:: \eta_{k-1} = \|Dh_k\| \eta_k + \|W_k\| \|\Delta \circ G_k^T \hat g_k\| + \text{rounding},

:math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  Read with difference quotients for
slopes it needs no derivative.  Since :math:`\hat g` is what was computed, rounding needs no analysis of its own;
a ball of radius 0 gives the gradient at x with its error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import derivative_range
from curvcert.bounds.lipschitz.anchored import anchored_slopes
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, last_growth
from curvcert.bounds.types import Ball
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.network.evaluation import Computed, Evaluation, evaluate_with_error
from curvcert.norms import conjugate, vector_norm
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error, rounding_length
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, next_down, next_up, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Reached:
    """What a block does over the ball: reach and slopes of its neurons (None without them), its constant."""

    block: AbstractBlock
    constant: Tensor
    z: Computed | None = None
    reach: Tensor | None = None
    slopes: Slopes | None = None


@dataclass(frozen=True, eq=False)
class Covectors:
    """Computed gradients with respect to the input of a block, (batch, outputs, ...), and their drift.

    The drift is in the dual norm, one a covector; for vector outputs one for all together, in the
    Frobenius norm, shape (batch, 1).
    """

    value: Tensor
    drift: Tensor


def ball_slopes(block: Block, z: Computed, reach: Tensor) -> Slopes:
    """Enclose phi' over every value within `reach` of the true z."""
    width = inflate(reach + z.error, gamma(4))
    lower, upper = derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    return Slopes(lower, upper)


def carry_ball(problem: Problem, ball: Ball, prefixes: list[Tensor]) -> list[Reached]:
    """Carry the ball forward through the network."""
    network, norms = problem.network, problem.norms
    evaluation = evaluate_with_error(network, ball.x, norms)
    reached, rho = [], ball.r
    for k, (block, z) in enumerate(zip(network.blocks, evaluation.pre_activations, strict=True)):
        last = k == len(network.blocks) - 1
        if isinstance(block, Block) and z is not None:
            rows = norms.row_norms(block.W, conjugate(problem.p))
            reach = inflate(rho.reshape(-1, *(1,) * rows.dim()) * rows, 0.0)
            slopes = ball_slopes(block, z, reach)
            growth = (last_growth if last else block_growth)(block, slopes, problem)
            reached.append(Reached(block, growth, z, reach, slopes))
            if not last:
                # From the centre a neuron is also no steeper than seen from its own value there.
                growth = block_growth(block, slopes.intersect(anchored_slopes(block, z)), problem)
        else:
            growth = block_product(block, problem, norms, last)
            growth = growth.expand(len(rho), *growth.shape)
            reached.append(Reached(block, growth))
        if not last:
            rho = inflate(torch.minimum(rho * growth, ball.r * prefixes[k + 1]), gamma(8))
    return reached


def carry_point(problem: Problem, evaluation: Evaluation) -> list[Reached]:
    """Return the same for balls of radius 0, with the blocks' global constants: cheap, for gradients at points."""
    network, norms, batch = problem.network, problem.norms, len(evaluation.states[0].value)
    reached = []
    for k, (block, z) in enumerate(zip(network.blocks, evaluation.pre_activations, strict=True)):
        constant = block_product(block, problem, norms, k == len(network.blocks) - 1)
        constant = constant.expand(batch, *constant.shape)
        if isinstance(block, Block) and z is not None:
            reach = torch.zeros_like(z.value)
            reached.append(Reached(block, constant, z, reach, ball_slopes(block, z, reach)))
        else:
            reached.append(Reached(block, constant))
    return reached


def carry_gradients(problem: Problem, reached: list[Reached], rows: Tensor | None = None) -> list[Covectors] | None:
    """Carry the outputs' gradients back; entry k is with respect to x_k.  None if a block has no derivative.

    With `rows`, (batch, any, outputs), those of the exact combinations that they hold, each a scalar.
    """
    network, batch = problem.network, len(reached[0].constant)
    if rows is None:
        g = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
        g = g.reshape(1, network.outputs, *network.out_shape).expand(batch, -1, *network.out_shape)
    else:
        g = rows.reshape(*rows.shape[:2], *network.out_shape)
    found = [Covectors(g, g.new_zeros(batch, g.shape[1] if problem.scalars else 1))]
    for part in reversed(reached):
        # The exact covectors at the end have no drift, so the last block's own norm is never used here.
        grown = found[-1].drift if len(found) == 1 else part.constant[:, None] * found[-1].drift
        pulled = _pull_back(part, found[-1].value, problem)
        if pulled is None:
            return None
        found.append(Covectors(pulled[0], inflate(grown + pulled[1], gamma(8))))
    return list(reversed(found))


def _pull_back(part: Reached, g: Tensor, problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Return the next covectors and what one block adds to their drift."""
    block = part.block
    if isinstance(block, Affine):
        return block.H.adjoint(g), _rounding(block.H, g, problem)
    if not isinstance(block, Block) or part.z is None or part.slopes is None:
        return None
    S = block.activation.derivative(part.z.value)
    gap = inflate(torch.maximum(part.slopes.upper - S, S - part.slopes.lower).clamp(min=0.0), 0.0).unsqueeze(1)
    pulled = block.G.adjoint(g)
    inner = S.unsqueeze(1) * pulled
    # In front of W' three things are off: the slopes' change, the rounding of G'g, and that of the product.
    pulled_size = covector_size(pulled, problem)
    steepest = (part.slopes.steepest + gap.squeeze(1)).flatten(1).amax(dim=1)[:, None]
    off = covector_size(gap * pulled, problem) + steepest * _rounding(block.G, g, problem)
    off = off + 2 * UNIT_ROUNDOFF * steepest * pulled_size
    result = block.W.adjoint(inner)
    rounding = _rounding(block.W, inner, problem)
    if block.is_residual:
        result = result + block.H.adjoint(g)
        rounding = rounding + _rounding(block.H, g, problem) + 2 * UNIT_ROUNDOFF * covector_size(result, problem)
    return result, inflate(problem.norms.norm(block.W, problem.p, problem.p) * off + rounding, gamma(16))


def _rounding(A: AbstractLinearMap, g: Tensor, problem: Problem) -> Tensor:
    r"""Bound the rounding of :math:`A^T g` in the dual norm: :math:`\gamma_K \| |A| \|_p \|g\|_{p^*}`."""
    length = rounding_length(A)
    if length == 0:
        return g.new_zeros(g.shape[0], 1)
    return inflate(gamma(length + 1) * problem.norms.absolute(A, problem.p) * covector_size(g, problem), gamma(4))


def covector_size(g: Tensor, problem: Problem) -> Tensor:
    """Bound the dual norm of each covector, or the Frobenius norm of all of them together."""
    if problem.scalars:
        return norm_upper_bound_of_vectors(g.flatten(2), conjugate(problem.p), 2)
    return inflate(vector_norm(g.flatten(1), 2, dim=1), gamma(g[0].numel() + 4))[:, None]


def activation_gradients(block: Block, covectors: Covectors, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return |G' g| for the computed covectors behind a block, outward, and the drift of G' g in the dual norm."""
    size = inflate(block.G.adjoint(covectors.value).abs() + image_error(block.G.T, covectors.value), gamma(4))
    G = problem.norms.norm(block.G, problem.p, problem.p)
    return size, inflate(G * covectors.drift, gamma(4))
