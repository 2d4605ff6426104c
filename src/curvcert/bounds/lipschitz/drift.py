r"""Balls carried forward and gradients carried back: what anchored and local bounds of both orders share.

Forward, the ball of radius r about x becomes one of radius :math:`\rho_k` about every value; neuron l then stays
within :math:`\|W_l\|_{p^*} \rho_k` of its value at x, and its slopes within the range of :math:`\phi'` there.
Backward, computed covectors :math:`\hat g_k` are pulled back with computed slopes :math:`\hat S`.  If
:math:`\|g_k(x') - \hat g_k\|_{p^*} \le \eta_k` for all x' in the ball, then a unit adds to those of what it reads

.. math:: \|Dh_k\| \eta_k + \|W_k\| \|\Delta \circ G_k^T \hat g_k\| + \text{rounding},

:math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  Read with difference quotients for
slopes it needs no derivative.  Since :math:`\hat g` is what was computed, rounding needs no analysis of its own;
a ball of radius 0 gives the gradient at x with its error.

A unit that reads several values reads them stacked: radii combine in the p-norm, or part by part where that is less,
and a part of a covector is no longer than the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import derivative_range
from curvcert.bounds.lipschitz.anchored import anchored_slopes
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, composed, last_growth
from curvcert.bounds.types import Ball
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.network.evaluation import Computed, Evaluation, evaluate_with_error
from curvcert.network.rewriting.units import Unit
from curvcert.norms import conjugate, vector_norm
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error, rounding_length
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, next_down, next_up, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Reached:
    """What a unit does over the ball: reach and slopes of its neurons (None without them), its constant."""

    unit: Unit
    constant: Tensor
    z: Computed | None = None
    reach: Tensor | None = None
    slopes: Slopes | None = None

    @property
    def block(self) -> AbstractBlock:
        """The unit's block."""
        return self.unit.block


@dataclass(frozen=True, eq=False)
class Covectors:
    """Computed gradients with respect to a value, (batch, outputs, ...), and their drift.

    The drift is in the dual norm, one per covector; for vector outputs one for all together, in the
    Frobenius norm, shape (batch, 1).
    """

    value: Tensor
    drift: Tensor


def ball_slopes(block: Block, z: Computed, reach: Tensor) -> Slopes:
    """Enclose phi' over every value within `reach` of the true z."""
    width = inflate(reach + z.error, gamma(4))
    lower, upper = derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    return Slopes(lower, upper)


def carry_ball(problem: Problem, ball: Ball) -> list[Reached]:
    """Carry the ball forward through the network, unit by unit."""
    network, norms = problem.network, problem.norms
    evaluation, constants = evaluate_with_error(network, ball.x, norms), value_constants(problem)
    reached, rhos = [], {0: ball.r}
    for unit in network.units:
        last, block, read = unit is network.units[-1], unit.block, [rhos[source] for source in unit.sources]
        z = None if unit.z is None else evaluation.values[unit.z]
        if isinstance(block, Block) and z is not None:
            reach = neuron_reach(unit, block, read, problem)
            slopes = ball_slopes(block, z, reach)
            growth = (last_growth if last else block_growth)(block, slopes, problem)
            reached.append(Reached(unit, growth, z, reach, slopes))
            if not last:
                # From the centre a neuron is also no steeper than seen from its own value there.
                growth = block_growth(block, slopes.intersect(anchored_slopes(block, z)), problem)
        else:
            growth = block_product(block, problem, norms, last)
            growth = growth.expand(len(ball.r), *growth.shape)
            reached.append(Reached(unit, growth))
        if not last:
            moved = composed(unit, read, growth, problem, last=False)
            rhos[unit.output] = inflate(torch.minimum(moved, ball.r * constants[unit.output]), gamma(8))
    return reached


def neuron_reach(unit: Unit, block: Block, read: Sequence[Tensor], problem: Problem) -> Tensor:
    """Bound how far each neuron moves, given how far each value that the unit reads does."""
    total = torch.zeros((), dtype=torch.float64, device=read[0].device)
    for W, size in zip(unit.parts or (block.W,), read, strict=True):
        rows = problem.norms.row_norms(W, conjugate(problem.p))
        total = total + size.reshape(-1, *(1,) * rows.dim()) * rows
    return inflate(total, gamma(len(read)))


def carry_point(problem: Problem, evaluation: Evaluation) -> list[Reached]:
    """Return the same for balls of radius 0, with the blocks' global constants: cheap, for gradients at points."""
    network, norms, batch = problem.network, problem.norms, len(evaluation.output.value)
    reached = []
    for unit in network.units:
        block, z = unit.block, None if unit.z is None else evaluation.values[unit.z]
        constant = block_product(block, problem, norms, unit is network.units[-1])
        constant = constant.expand(batch, *constant.shape)
        if isinstance(block, Block) and z is not None:
            reach = torch.zeros_like(z.value)
            reached.append(Reached(unit, constant, z, reach, ball_slopes(block, z, reach)))
        else:
            reached.append(Reached(unit, constant))
    return reached


def carry_gradients(
    problem: Problem, reached: list[Reached], rows: Tensor | None = None
) -> dict[int, Covectors] | None:
    """Carry the outputs' gradients back to every value, by its number; None if a unit has no derivative.

    With `rows`, (batch, any, outputs), those of the exact combinations that they hold, each a scalar.
    """
    network, batch = problem.network, len(reached[0].constant)
    if rows is None:
        g = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
        g = g.reshape(1, network.outputs, *network.out_shape).expand(batch, -1, *network.out_shape)
    else:
        g = rows.reshape(*rows.shape[:2], *network.out_shape)
    end = network.units[-1].output
    found = {end: Covectors(g, g.new_zeros(batch, g.shape[1] if problem.scalars else 1))}
    for part in reversed(reached):
        behind = found[part.unit.output]
        sent = _sent(part, behind, problem, exact=part.unit.output == end)
        if sent is None:
            return None
        for source, covectors in zip(part.unit.sources, sent, strict=True):
            found[source] = _joined(found[source], covectors, problem) if source in found else covectors
    return found


def _sent(part: Reached, behind: Covectors, problem: Problem, exact: bool) -> list[Covectors] | None:
    """Return what a unit sends to each value that it reads."""
    unit = part.unit
    if unit.parts and isinstance(unit.block, Affine):
        norms = [problem.norms.norm(A, problem.p, problem.p) for A in unit.parts]
        rounding = [_rounding(A, behind.value, problem) for A in unit.parts]
        drifts = [error if exact else norm * behind.drift + error for norm, error in zip(norms, rounding, strict=True)]
        values = [A.adjoint(behind.value) for A in unit.parts]
        return [Covectors(v, inflate(drift, gamma(8))) for v, drift in zip(values, drifts, strict=True)]
    pulled = _pull_back(part, behind.value, problem)
    if pulled is None:
        return None
    # The exact covectors at the end have no drift, so the last block's own norm is never used here.
    grown = behind.drift if exact else part.constant[:, None] * behind.drift
    drift = inflate(grown + pulled[1], gamma(8))
    return [Covectors(value, drift) for value in unit.split(pulled[0])]


def _joined(left: Covectors, right: Covectors, problem: Problem) -> Covectors:
    """Return the sum of what two readers of a value send back."""
    value = left.value + right.value
    rounding = 2 * UNIT_ROUNDOFF * covector_size(value, problem)
    return Covectors(value, inflate(left.drift + right.drift + rounding, gamma(8)))


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
        return g.new_zeros(g.shape[0], g.shape[1] if problem.scalars else 1)
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
