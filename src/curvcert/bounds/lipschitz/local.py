r"""Lipschitz constants over a ball: both points in it, slopes from the interval that each neuron can reach.

The ball of radius r about x becomes one of radius :math:`\rho_k` about x_k; neuron l then stays within
:math:`\|W_l\|_{p^*} \rho_k` of its value at x, and its slopes within the range of :math:`\phi'` there.
Two bounds follow, and the smaller counts: the product of the blocks' constants over those balls, and the
gradient at x with a bound on how far it drifts (`drift.py`), which is exact as r goes to 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import derivative_range
from curvcert.bounds.lipschitz.anchored import anchored_slopes
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.product import block_product
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, last_growth
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.network.evaluation import Computed, evaluate_with_error
from curvcert.norms import conjugate, vector_norm
from curvcert.operators.magnitudes import image_error
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, next_down, next_up, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Reached:
    """What a block does over the ball: its slopes (None without an activation) and its constant."""

    block: AbstractBlock
    z: Computed | None
    slopes: Slopes | None
    constant: Tensor


def local_bound(problem: Problem) -> Bound:
    """Bound the Lipschitz constants over balls about a batch of points."""
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    prefixes = liplt_prefixes(problem, problem.norms)
    reached = _forward(problem, problem.scope, prefixes)
    total = torch.ones_like(problem.scope.r)
    per_layer = []
    for k, part in enumerate(reached):
        if k == len(reached) - 1 and problem.scalars:
            total = total[:, None]
        total = torch.minimum(total * part.constant, prefixes[k + 1])
        per_layer.append(LayerTerm(part.block.name, "prefix", total, "local"))
    if problem.scalars or problem.p == problem.q == 2:
        drifted = _gradient_with_drift(problem, reached)
        total = total if drifted is None else torch.minimum(total, drifted)
    value = problem.shaped(inflate(total, gamma(64)))
    return problem.norms.result(
        value, problem.p, problem.q, problem.scope, "local", tuple(per_layer), problem.network.assumes
    )


def ball_slopes(block: Block, z: Computed, reach: Tensor) -> Slopes:
    """Enclose phi' over every value within `reach` of the true z."""
    width = inflate(reach + z.error, gamma(4))
    lower, upper = derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    return Slopes(lower, upper)


def _forward(problem: Problem, ball: Ball, prefixes: list[Tensor]) -> list[Reached]:
    """Carry the ball through the network."""
    network, norms = problem.network, problem.norms
    evaluation = evaluate_with_error(network, ball.x, norms)
    reached, rho = [], ball.r
    for k, (block, z) in enumerate(zip(network.blocks, evaluation.pre_activations, strict=True)):
        last = k == len(network.blocks) - 1
        if isinstance(block, Block) and z is not None:
            rows = norms.row_norms(block.W, conjugate(problem.p))
            slopes = ball_slopes(block, z, inflate(rho.reshape(-1, *(1,) * rows.dim()) * rows, 0.0))
            growth = (last_growth if last else block_growth)(block, slopes, problem)
            reached.append(Reached(block, z, slopes, growth))
            if not last:
                # From the centre a neuron is also no steeper than seen from its own value there.
                growth = block_growth(block, slopes.intersect(anchored_slopes(block, z)), problem)
        else:
            growth = block_product(block, problem, norms, last).expand(
                len(rho), *(() if not last else (-1,) * problem.scalars)
            )
            reached.append(Reached(block, None, None, growth))
        if not last:
            rho = inflate(torch.minimum(rho * growth, ball.r * prefixes[k + 1]), gamma(8))
    return reached


def _gradient_with_drift(problem: Problem, reached: list[Reached]) -> Tensor | None:
    r"""Bound the gradient over the ball by the one at its centre and its drift.

    Computed covectors :math:`\hat g_k` are pulled back with computed slopes :math:`\hat S`.  If
    :math:`\|g_k(x') - \hat g_k\| \le \eta_k` for all x' in the ball, then

    .. math:: \eta_{k-1} = \|Dh_k\| \eta_k + \|W_k\| \|\Delta \circ G_k^T \hat g_k\| + \text{rounding},

    :math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  None if a block has
    no derivative.
    """
    batch, outputs, dual = len(problem.anchor), problem.network.outputs, conjugate(problem.p)
    g = torch.eye(outputs, dtype=torch.float64, device=problem.anchor.device)
    g = g.reshape(1, outputs, *problem.network.out_shape).expand(batch, -1, *problem.network.out_shape)
    eta = g.new_zeros(batch, outputs) if problem.scalars else g.new_zeros(batch, 1)
    for k in range(len(reached) - 1, -1, -1):
        part = reached[k]
        # The first step back starts from the exact unit covectors: there is no drift to carry yet.
        grown = eta if k == len(reached) - 1 else part.constant[:, None] * eta
        if isinstance(part.block, Affine):
            rounding = image_error(part.block.H.T, g)
            g = part.block.H.adjoint(g)
            eta = grown + _size(rounding, dual, problem.scalars)
        elif isinstance(part.block, Block) and part.z is not None and part.slopes is not None:
            g, step = _pull_back(part.block, part.z, part.slopes, g, dual, problem)
            eta = inflate(grown + step, gamma(8))
        else:
            return None
    if problem.scalars:
        return inflate(_size(g, dual, True) + eta, gamma(4))
    return inflate(_spectral(g.flatten(2)) + eta[:, 0], gamma(4))


def _pull_back(
    block: Block, z: Computed, slopes: Slopes, g: Tensor, dual: float, problem: Problem
) -> tuple[Tensor, Tensor]:
    """Return the next covectors and what one block adds to their drift."""
    S = block.activation.derivative(z.value)
    gap = inflate(torch.maximum(slopes.upper - S, S - slopes.lower).clamp(min=0.0), 0.0)
    pulled = block.G.adjoint(g)
    pulled_error = image_error(block.G.T, g)
    inner = S.unsqueeze(1) * pulled
    # What is off in front of W': the slopes' change, the error of G'g, and one rounding.
    steepest = slopes.steepest.unsqueeze(1)
    off = gap.unsqueeze(1) * pulled.abs() + steepest * pulled_error + UNIT_ROUNDOFF * inner.abs()
    result = block.W.adjoint(inner)
    rounding = image_error(block.W.T, inner)
    if block.is_residual:
        skip = block.H.adjoint(g)
        result = result + skip
        rounding = rounding + image_error(block.H.T, g) + 2 * UNIT_ROUNDOFF * result.abs()
    W = problem.norms.norm(block.W, problem.p, problem.p)
    step = W * _size(inflate(off, gamma(8)), dual, problem.scalars)
    return result, step + _size(inflate(rounding, gamma(8)), dual, problem.scalars)


def _size(g: Tensor, dual: float, scalars: bool) -> Tensor:
    """Return the dual norm of each covector, or the Frobenius norm of all of them together."""
    if scalars:
        return norm_upper_bound_of_vectors(g.flatten(2), dual, 2)
    return inflate(vector_norm(g.flatten(1), 2, dim=1), gamma(g[0].numel() + 4))[:, None]


def _spectral(J: Tensor) -> Tensor:
    """Bound the spectral norm of each of a batch of matrices with few rows."""
    error = gamma(J.shape[2] + 2) * inflate(J.square().sum(dim=(1, 2)), gamma(J[0].numel() + 2))
    return inflate(largest_eigenvalues_upper_bound(J @ J.mT, error).sqrt(), 0.0)
