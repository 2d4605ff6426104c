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
differences of gradients, since :math:`\phi'` is Lipschitz.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network import Block, Network
from curvcert.network.rewriting.units import Unit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.propagation.analysis import OverBalls
from curvcert.propagation.covectors import Covectors, activation_gradients
from curvcert.propagation.jacobians import Jacobian
from curvcert.propagation.slopes import curvatures_within, stacked_size
from curvcert.rounding import gamma, inflate

_BATCHED_GRAM = 128
"""Largest layer with one eigenvalue problem per sample and output."""


@dataclass(frozen=True, eq=False)
class Term:
    """A unit with an activation: its block, and the numbers of its pre-activation and of the activation."""

    unit: Unit
    block: Block
    z: int
    hidden: int


def terms_of(network: Network) -> Iterator[Term]:
    """Yield the units that add to curvature."""
    for unit in network.units:
        if isinstance(unit.block, Block) and unit.z is not None and unit.hidden is not None:
            yield Term(unit, unit.block, unit.z, unit.hidden)


def total_curvature(balls: OverBalls, covectors: Mapping[int, Covectors]) -> Tensor:
    """Bound the curvature of every output over the balls, (batch, outputs), by what is known there alone."""
    total, anywhere = torch.zeros_like(covectors[0].drift), torch.full((), torch.inf).to(balls.radius)
    for term in terms_of(balls.facts.network):
        total = total + curvature_term(balls, term, balls.prefix, covectors[term.unit.output], anywhere)
    return inflate(total, gamma(8 * len(balls.facts.network.units)))


def curvature_term(
    balls: OverBalls, term: Term, prefix: Callable[[int], Tensor], behind: Covectors, most: Tensor
) -> Tensor:
    """Bound what one unit adds, (batch, outputs), given the gradients behind it.

    `prefix` returns Lipschitz constants over the balls of x -> v; `most` bounds each entry of |u| anywhere.
    """
    norms, p, block, z = balls.facts.norms, balls.facts.p, term.block, term.z
    L = stacked_size([prefix(source) for source in term.unit.sources], p)
    c = curvatures_within(block.activation, balls.reaches[z])
    u, drift = activation_gradients(block, behind, p, norms)
    first = weighted_bilinear(block.W, c, u, p, norms) * L[:, None] * L[:, None]
    second = (_spread(block.W, c, p, norms) * L * L)[:, None]
    # All at once, with each |gradient| at most its value at the centre and the drift, and at most its bound anywhere.
    largest = torch.minimum(inflate(u + drift.reshape(*drift.shape, *(1,) * (u.dim() - 2)), 0.0), most)
    together = weighted_bilinear(block.W, c, largest, p, norms) * L[:, None] * L[:, None]
    if z in balls.jacobians:
        flat, J = c.flatten(1), balls.jacobians[z]
        first = torch.minimum(first, _weighted(J, flat, u.flatten(2)))
        second = torch.minimum(second, _spread_of_jacobian(J, flat)[:, None])
        together = torch.minimum(together, _weighted(J, flat, largest.flatten(2)))
    apart = first + drift * second
    return inflate(torch.minimum(apart, together), gamma(16))


def weighted_bilinear(W: AbstractLinearMap, constants: Tensor, sizes: Tensor, p: float, norms: NormBounds) -> Tensor:
    """Bound the bilinear form with weights c_l |g_l|, for every sample and output."""
    sizes = sizes if sizes.dim() == constants.dim() + 1 else sizes.unsqueeze(0)
    weights = inflate(constants.unsqueeze(1) * sizes, 0.0)
    value = norms.bilinear(W, weights.flatten(0, 1), p, _BATCHED_GRAM)
    return value.reshape(weights.shape[:2])


def _spread(W: AbstractLinearMap, c: Tensor, p: float, norms: NormBounds) -> Tensor:
    r"""Bound :math:`\sup_{a,b} \|c \circ W a \circ W b\|_p` for each sample."""
    rows = norms.row_norms(W, conjugate(p))
    spread = norms.norm(W, p, p) * inflate(c * rows, 0.0).flatten(1).amax(dim=1)
    if p == 2:
        spread = torch.minimum(spread, c.flatten(1).amax(dim=1) * norms.hadamard(W))
    if math.isinf(p):
        spread = torch.minimum(spread, inflate(c * rows.square(), gamma(4)).flatten(1).amax(dim=1))
    return spread


def _weighted(J: Jacobian, c: Tensor, u: Tensor) -> Tensor:
    r"""Bound :math:`\|\mathrm{diag}(h)^{1/2} J\|^2 \le (\|\mathrm{diag}(h)^{1/2} \hat J\| + \sqrt{\max h}\, E)^2`."""
    h = inflate(c[:, None] * u, 0.0)
    root = J.squared_norms(h).sqrt() + h.amax(dim=2).sqrt() * J.drift[:, None]
    return inflate(root.square(), gamma(16))


def _spread_of_jacobian(J: Jacobian, c: Tensor) -> Tensor:
    r"""Bound :math:`\sup_{a,b} \|c \circ Ja \circ Jb\|_2 \le (\|\hat J\| + E) \max_l c_l (\|\hat J_l\| + E)`."""
    size = J.weighted_norm(torch.ones_like(c)) + J.drift
    return inflate(size * (c * (J.rows + J.drift[:, None])).amax(dim=1), gamma(16))
