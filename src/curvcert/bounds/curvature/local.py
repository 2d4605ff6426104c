r"""Curvature over a ball: both points in it, everything as large as it gets there.

For a scalar f and x' in the ball, :math:`\nabla^2 f(x') = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k` at x'.
There :math:`|\phi''(z_{kl})| \le c_{kl}` over the neuron's interval, :math:`|u_k|` is at most the gradient at
x plus its
drift :math:`\eta_k`, and :math:`J_k` is :math:`W_k` behind a prefix with constant :math:`L_k` over the ball.  So

.. math::
    K \le \sum_k L_k^2 \Big[ \sup_{a,b} \sum_l h_{kl} |W_l a| |W_l b| + \eta_k \sup_{a,b} \|c_k \circ W
    a \circ W b\|_p \Big],
          \qquad h_k = |u_k(x)| \circ c_k.

Where :math:`\phi''` does not exist everywhere the same holds for differences of gradients, since :math:`\phi'`
is Lipschitz.
"""

import math

import torch
from torch import Tensor

from curvcert.activations import second_derivative_range
from curvcert.bounds.curvature.anchored import weighted_bilinear
from curvcert.bounds.lipschitz.drift import Covectors, Reached, activation_gradients, carry_ball, carry_gradients
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.network import Block
from curvcert.network.evaluation import Computed
from curvcert.norms import conjugate
from curvcert.rounding import gamma, inflate, next_down, next_up

_PREFIX_ROWS = 256
"""Prefixes of at most this width get a local Lipschitz bound with their Jacobians."""


def local_curvature_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs over balls about a batch of points."""
    problem.network.require_smooth()
    ball = problem.scope
    if not isinstance(ball, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    reached = carry_ball(problem, ball, liplt_prefixes(problem, problem.norms))
    covectors = carry_gradients(problem, reached)
    if covectors is None:
        raise InvalidInput("The local curvature bound needs a derivative of every block.")
    prefixes = _prefix_constants(problem, ball, reached)
    total = torch.zeros_like(covectors[0].drift)
    per_layer = []
    for part, behind, L in zip(reached, covectors[1:], prefixes, strict=True):
        if not isinstance(part.block, Block):
            continue
        term = _term(part, part.block, behind, L, problem)
        total = total + term
        per_layer.append(LayerTerm(part.block.name, "term", term, "local"))
    value = problem.shaped(inflate(total, gamma(8 * len(reached))))
    return problem.norms.result(value, problem.p, problem.q, ball, "local", tuple(per_layer), problem.network.assumes)


def _prefix_constants(problem: Problem, ball: Ball, reached: list[Reached]) -> list[Tensor]:
    """Return Lipschitz constants over the ball of x -> x_k, for every block's input."""
    constants = [torch.ones_like(ball.r)]
    for k in range(1, len(reached)):
        product = constants[-1] * reached[k - 1].constant
        prefix = problem.network.prefix(k)
        if prefix.outputs <= _PREFIX_ROWS or problem.p != 2:
            product = torch.minimum(product, _local_prefix(problem, ball, k))
        constants.append(inflate(product, gamma(4)))
    return constants


def _local_prefix(problem: Problem, ball: Ball, k: int) -> Tensor:
    prefix = Problem(problem.network.prefix(k), problem.p, problem.p, ball, norms=problem.norms)
    return local_bound(prefix).value


def ball_curvatures(block: Block, z: Computed, reach: Tensor) -> Tensor:
    """Bound |phi''|, or the slopes of phi', over every value within `reach` of the true z."""
    width = inflate(reach + z.error, gamma(4))
    lower, upper = second_derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    return torch.maximum(lower.abs(), upper.abs())


def _term(part: Reached, block: Block, behind: Covectors, L: Tensor, problem: Problem) -> Tensor:
    assert part.z is not None
    assert part.reach is not None
    norms, p = problem.norms, problem.p
    c = ball_curvatures(block, part.z, part.reach)
    u, drift = activation_gradients(block, behind, problem)
    at_point = weighted_bilinear(block.W, c, u, p, norms)
    rows = norms.row_norms(block.W, conjugate(p))
    spread = norms.norm(block.W, p, p) * inflate(c * rows, 0.0).flatten(1).amax(dim=1)
    if p == 2:
        spread = torch.minimum(spread, c.flatten(1).amax(dim=1) * norms.hadamard(block.W))
    if math.isinf(p):
        spread = torch.minimum(spread, inflate(c * rows.square(), gamma(4)).flatten(1).amax(dim=1))
    return inflate((at_point + drift * spread[:, None]) * L.square()[:, None], gamma(16))
