r"""Curvature over a ball: both points in it, everything as large as it gets there.

For a scalar f and x' in the ball, :math:`\nabla^2 f(x') = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k` at x'.
There :math:`|\phi''(z_{kl})| \le c_{kl}` over the neuron's interval, :math:`|u_k|` is at most the gradient at
x plus its
drift :math:`\eta_k`, and :math:`J_k` is :math:`W_k` behind a prefix with constant :math:`L_k` over the ball.  So

.. math::
    K \le \sum_k L_k^2 \Big[ \sup_{a,b} \sum_l h_{kl} |W_l a| |W_l b| + \eta_k \sup_{a,b} \|c_k \circ W
    a \circ W b\|_p \Big],
          \qquad h_k = |u_k(x)| \circ c_k.

In l2, where Jacobians are small enough to be formed, :math:`J_k` is instead the one at x with its drift over the
ball (`jacobians.py`), and each part of the sum is the lesser of both.  No layer's term exceeds that of the
unrolled bound, and :math:`u_k` leaves no global bound on it.  From one side
:math:`\max(\pm u_{kl} \phi'', 0)` takes the place of :math:`|u_{kl}| c_{kl}`.
Where :math:`\phi''` does not exist everywhere
the same holds for differences of gradients, since :math:`\phi'` is Lipschitz.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.activations import second_derivative_range
from curvcert.bounds.curvature.anchored import weighted_bilinear
from curvcert.bounds.curvature.batching import JACOBIAN_ROWS, in_pieces
from curvcert.bounds.curvature.gradients import GradientBound, gradient_bounds
from curvcert.bounds.curvature.jacobians import Pushed, can_push, push_jacobians
from curvcert.bounds.curvature.unrolled import bends_unevenly, unrolled_terms
from curvcert.bounds.lipschitz.drift import Covectors, Reached, activation_gradients, carry_ball, carry_gradients
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed, stacked_size
from curvcert.bounds.types import SIDES, Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.network import Block
from curvcert.network.evaluation import Computed
from curvcert.norms import conjugate
from curvcert.operators.magnitudes import image_error
from curvcert.propagation.gradient_intervals import Interval
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, next_down, next_up


def local_curvature_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs over balls about a batch of points."""
    problem.network.require_smooth()
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    bound = _from_side(problem)
    if problem.side != "both" or problem.p != 2 or not bends_unevenly(problem):
        return bound
    # In l2 the norm of a second derivative is the larger of its two sides.
    sides = [_from_side(replace(problem, side=side)).value for side in SIDES[1:]]
    return replace(bound, value=torch.minimum(bound.value, torch.maximum(*sides)))


def _from_side(problem: Problem) -> Bound:
    everywhere = {hidden: term.value for hidden, term in unrolled_terms(problem).items()}
    gradients = gradient_bounds(problem, problem.norms)
    return in_pieces(lambda part: _bound(part, everywhere, gradients), problem)


def _bound(problem: Problem, everywhere: dict[int, Tensor], gradients: dict[int, GradientBound]) -> Bound:
    ball = problem.scope
    assert isinstance(ball, Ball)
    reached = carry_ball(problem, ball)
    jacobians: list[Pushed | None] = [None] * len(reached)
    if can_push(problem):
        reached, jacobians = push_jacobians(problem, ball, reached)
    covectors = carry_gradients(problem, reached)
    if covectors is None:
        raise InvalidInput("The local curvature bound needs a derivative of every block.")
    constants = _constants(problem, ball, reached)
    total = torch.zeros_like(covectors[0].drift)
    per_layer = []
    for k, part in enumerate(reached):
        hidden = part.unit.hidden
        if not isinstance(part.block, Block) or hidden is None:
            continue
        L = stacked_size([constants[source] for source in part.unit.sources], problem.p)
        term = _term(part, part.block, covectors[part.unit.output], L, jacobians[k], gradients[hidden], problem)
        term = torch.minimum(term, everywhere[hidden])
        total = total + term
        per_layer.append(LayerTerm(part.block.name, "term", term, "local"))
    value = problem.shaped(inflate(total, gamma(8 * len(reached))))
    found = problem.norms.result(value, problem.p, problem.q, ball, "local", tuple(per_layer), problem.network.assumes)
    return replace(found, side=problem.side)


def _constants(problem: Problem, ball: Ball, reached: list[Reached]) -> dict[int, Tensor]:
    """Return Lipschitz constants over the ball of x -> v, for every value that a unit may read."""
    found, everywhere = {0: torch.ones_like(ball.r)}, value_constants(problem)
    for part in reached[:-1]:
        unit = part.unit
        L = composed(unit, [found[source] for source in unit.sources], part.constant, problem, last=False)
        L = torch.minimum(L, everywhere[unit.output])
        if math.prod(part.block.out_shape) <= JACOBIAN_ROWS:
            L = torch.minimum(L, _local_prefix(problem, ball, unit.output))
        found[unit.output] = inflate(L, gamma(4))
    return found


def _local_prefix(problem: Problem, ball: Ball, value: int) -> Tensor:
    prefix = Problem(problem.network.up_to(value), problem.p, problem.p, ball, norms=problem.norms)
    return local_bound(prefix).value


def ball_curvatures(block: Block, z: Computed, reach: Tensor) -> Tensor:
    """Bound |phi''|, or the slopes of phi', over every value within `reach` of the true z."""
    lower, upper = curvature_range_over(block, z, reach)
    return torch.maximum(lower.abs(), upper.abs())


def curvature_range_over(block: Block, z: Computed, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Enclose phi'', or the slopes of phi', over every value within `reach` of the true z."""
    width = inflate(reach + z.error, gamma(4))
    return second_derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))


def _term(
    part: Reached,
    block: Block,
    behind: Covectors,
    L: Tensor,
    pushed: Pushed | None,
    gradient: GradientBound,
    problem: Problem,
) -> Tensor:
    assert part.z is not None
    assert part.reach is not None
    norms, p = problem.norms, problem.p
    low, high = curvature_range_over(block, part.z, part.reach)
    c, one = torch.maximum(low.abs(), high.abs()), torch.ones_like(low)
    _, drift = activation_gradients(block, behind, problem)
    u = block.G.adjoint(behind.value)
    off = image_error(block.G.T, behind.value) + 2 * UNIT_ROUNDOFF * u.abs()
    at_centre = Interval(u - off, u + off).bent(low.unsqueeze(1), high.unsqueeze(1), problem.side)
    at_point = weighted_bilinear(block.W, one, at_centre, p, norms)
    rows = norms.row_norms(block.W, conjugate(p))
    spread = norms.norm(block.W, p, p) * inflate(c * rows, 0.0).flatten(1).amax(dim=1)
    if p == 2:
        spread = torch.minimum(spread, c.flatten(1).amax(dim=1) * norms.hadamard(block.W))
    if math.isinf(p):
        spread = torch.minimum(spread, inflate(c * rows.square(), gamma(4)).flatten(1).amax(dim=1))
    first, second = at_point * L[:, None] * L[:, None], (spread * L * L)[:, None]
    if pushed is not None:
        with_jacobians = _with_jacobian(pushed, c.flatten(1), at_centre.flatten(2))
        first, second = torch.minimum(first, with_jacobians[0]), torch.minimum(second, with_jacobians[1])
    apart = first + drift * second
    # All at once, with each gradient within the drift of its value at the centre, and within its global bounds.
    width = inflate(off + drift.reshape(*drift.shape, *(1,) * (u.dim() - 2)), gamma(4)) + 2 * UNIT_ROUNDOFF * u.abs()
    within = Interval(
        torch.maximum(u - width, gradient.interval.lower), torch.minimum(u + width, gradient.interval.upper)
    )
    all_over = within.bent(low.unsqueeze(1), high.unsqueeze(1), problem.side)
    together = weighted_bilinear(block.W, one, all_over, p, norms) * L[:, None] * L[:, None]
    if pushed is not None:
        together = torch.minimum(together, _with_jacobian(pushed, c.flatten(1), all_over.flatten(2))[0])
    return inflate(torch.minimum(apart, together), gamma(16))


def _with_jacobian(pushed: Pushed, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    r"""Bound both parts of a term with the Jacobian at the centre, :math:`\|J(x') - \hat J\| \le E`.

    .. math::
        \|\mathrm{diag}(h)^{1/2} J\|^2 \le \big(\|\mathrm{diag}(h)^{1/2} \hat J\| + \sqrt{\max h}\, E\big)^2, \qquad
        \sup_{a,b} \|c \circ Ja \circ Jb\|_2 \le (\|\hat J\| + E) \max_l c_l (\|\hat J_l\| + E).
    """
    E = pushed.drift[:, None]
    root = pushed.squared_norms(h).sqrt() + h.amax(dim=2).sqrt() * E
    size = pushed.weighted_norm(torch.ones_like(c)) + pushed.drift
    spread = size * (c * (pushed.rows + E)).amax(dim=1)
    return inflate(root.square(), gamma(16)), inflate(spread, gamma(16))[:, None]
