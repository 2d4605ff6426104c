r"""What each unit adds to the curvature of scalar outputs over a ball: both points in it, all as large as can be.

For x' in the ball, :math:`\nabla^2 f(x') = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k` at x'.
There :math:`|\phi''(z_{kl})| \le c_{kl}` over the neuron's range, :math:`|u_k|` is at most the gradient at x plus its
drift :math:`\eta_k`, and :math:`J_k` is :math:`W_k` behind a prefix with constant :math:`L_k` over the ball.  So

.. math::
    K \le \sum_k L_k^2 \Big[ \sup_{a,b} \sum_l h_{kl} |W_l a| |W_l b| + \eta_k \sup_{a,b} \|c_k \circ W
    a \circ W b\|_p \Big],
          \qquad h_k = |u_k(x)| \circ c_k.

In l2, where Jacobians are formed, :math:`J_k` is instead the one at x with its drift over the ball (`jacobians.py`),
and each part of the sum is the lesser of both.  Where :math:`\phi''` does not exist everywhere the same holds for
differences of gradients, since :math:`\phi'` is Lipschitz.  From one side :math:`\max(\pm u_{kl} \phi'', 0)` takes the
place of :math:`|u_{kl}| c_{kl}`.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvcert.bounds.types import Side
from curvcert.network.rewriting.units import ActivatedUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error
from curvcert.propagation.analysis import OverBalls
from curvcert.propagation.covectors import Covectors, activation_gradients
from curvcert.propagation.gradient_intervals import Interval
from curvcert.propagation.jacobians import Jacobian
from curvcert.propagation.slopes import curvature_range_within, stacked_size
from curvcert.rounding import UNIT_ROUNDOFF, Upper, least, total

_BATCHED_GRAM = 128
"""Largest layer with one eigenvalue problem per sample and output."""


def total_curvature(balls: OverBalls, covectors: Mapping[int, Covectors]) -> Tensor:
    """Bound the curvature of every output over the balls, (batch, outputs), by what is known there alone."""
    inf = torch.full((), torch.inf).to(balls.radius)
    anywhere, units = Interval(-inf, inf), balls.facts.network.activated
    terms = [curvature_term(balls, unit, balls.prefix, covectors[unit.output], anywhere) for unit in units]
    return total([torch.zeros_like(covectors[0].drift), *terms]).bound


def curvature_term(
    balls: OverBalls,
    unit: ActivatedUnit,
    prefix: Callable[[int], Tensor],
    behind: Covectors,
    most: Interval,
    side: Side = "both",
) -> Tensor:
    """Bound what one unit adds, (batch, outputs), given the gradients behind it.

    `prefix` returns Lipschitz constants over the balls of x -> v; `most` encloses each entry of u anywhere.
    """
    norms, p, block, z = balls.facts.norms, balls.facts.p, unit.block, unit.z
    L = stacked_size([prefix(source) for source in unit.sources], p)
    low, high = curvature_range_within(block.activation, balls.reaches[z])
    c, one = torch.maximum(low.abs(), high.abs()), torch.ones_like(low)
    low, high = low.unsqueeze(1), high.unsqueeze(1)
    _, drift = activation_gradients(block, behind, p, norms)
    u = block.G.adjoint(behind.value)
    off = image_error(block.G.T, behind.value) + 2 * UNIT_ROUNDOFF * u.abs()
    there = Interval(u - off, u + off).bent(low, high, side)
    first = Upper(weighted_bilinear(block.W, one, there, p, norms)) * L[:, None] * L[:, None]
    second = (_spread(block.W, c, p, norms) * L * L)[:, None]
    # All at once, with each gradient within the drift of its value at the centre, and within its bounds anywhere.
    moved = Upper(off) + drift.reshape(*drift.shape, *(1,) * (u.dim() - 2))
    width = (moved + Upper(u.abs()) * (2 * UNIT_ROUNDOFF)).bound
    within = Interval(torch.maximum(u - width, most.lower), torch.minimum(u + width, most.upper))
    all_over = within.bent(low, high, side)
    together = Upper(weighted_bilinear(block.W, one, all_over, p, norms)) * L[:, None] * L[:, None]
    if z in balls.jacobians:
        flat, J = c.flatten(1), balls.jacobians[z]
        first = least(first, _weighted(J, there.flatten(2)))
        second = least(second, _spread_of_jacobian(J, flat)[:, None])
        together = least(together, _weighted(J, all_over.flatten(2)))
    return least(first + second * drift, together).bound


def weighted_bilinear(W: AbstractLinearMap, constants: Tensor, sizes: Tensor, p: float, norms: NormBounds) -> Tensor:
    """Bound the bilinear form with weights c_l |g_l|, for every sample and output."""
    sizes = sizes if sizes.dim() == constants.dim() + 1 else sizes.unsqueeze(0)
    weights = (Upper(constants.unsqueeze(1)) * sizes).bound
    value = norms.bilinear(W, weights.flatten(0, 1), p, _BATCHED_GRAM)
    return value.reshape(weights.shape[:2])


def _spread(W: AbstractLinearMap, c: Tensor, p: float, norms: NormBounds) -> Upper:
    r"""Bound :math:`\sup_{a,b} \|c \circ W a \circ W b\|_p` for each sample."""
    rows = norms.row_norms(W, conjugate(p))
    weighted = Upper(c.flatten(1)) * rows.flatten()
    spread = weighted.amax(1) * norms.norm(W, p, p)
    if p == 2:
        spread = least(spread, Upper(c.flatten(1).amax(dim=1)) * norms.hadamard(W))
    if math.isinf(p):
        spread = least(spread, (weighted * rows.flatten()).amax(1))
    return spread


def _weighted(J: Jacobian, h: Tensor) -> Upper:
    r"""Bound :math:`\|\mathrm{diag}(h)^{1/2} J\|^2 \le (\|\mathrm{diag}(h)^{1/2} \hat J\| + \sqrt{\max h}\, E)^2`."""
    return (Upper(h.amax(dim=2)).root() * J.drift[:, None] + Upper(J.squared_norms(h)).root()).square()


def _spread_of_jacobian(J: Jacobian, c: Tensor) -> Upper:
    r"""Bound :math:`\sup_{a,b} \|c \circ Ja \circ Jb\|_2 \le (\|\hat J\| + E) \max_l c_l (\|\hat J_l\| + E)`."""
    size = Upper(J.weighted_norm(torch.ones_like(c))) + J.drift
    return ((Upper(J.rows) + J.drift[:, None]) * c).amax(1) * size
