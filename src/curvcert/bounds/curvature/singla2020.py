r"""The rival: curvature bounds and certificates of Singla and Feizi (ICML 2020), CRC.

For a scalar output of a feed-forward network in l2,

.. math:: \lambda_{max}(\nabla^2 f) \le \sum_k r_{k-1}^2\, \lambda_{max}(W_k^T \mathrm{diag}(S_k) W_k), \qquad
          r_k = \prod_{j \le k} b\|W_j\|,

with b the largest slope and :math:`S_{kl} = \max(u_{kl} \phi'', 0)` over an interval of the gradient u, carried back
through the layers by interval arithmetic; the least eigenvalue likewise.  Their paper has
:math:`\max_l S_{kl} \|W_k\|^2` in place of the eigenvalues, their released code these.  The certificate solves

.. math:: \max_{0 \le \eta < 1/M} \min_x \tfrac12 \|x - x_0\|^2 - \eta f(x),

whose inner problem is convex, and whose value at *any* point, less :math:`\|\nabla\|^2 / (2(1 - \eta M))`, is below
half the squared distance to the boundary: so an unfinished search only costs radius, never soundness.

Reference: Singla and Feizi, "Second-Order Provable Defenses against Adversarial Attacks", ICML 2020.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_points
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import SIDES, Bound, Global, LayerTerm
from curvcert.errors import InvalidInput, UnsupportedBlock
from curvcert.network import Block, Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.operators import AbstractLinearMap
from curvcert.operators.chains import tracked_matrix
from curvcert.operators.magnitudes import image_error
from curvcert.operators.rows import basis_vectors
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.propagation.gradient_intervals import GradientIntervals, Interval
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, norm_upper_bound_of_vectors, total

_EIGEN_SIZE = 4096


def reason_to_skip_crc(problem: Problem) -> str | None:
    """Say why CRC does not apply, or None."""
    if not problem.scalars:
        return "crc: needs a scalar output, a pair or a logit"
    if problem.p != 2:
        return "crc: needs p = 2"
    if not problem.network.is_chain:
        return "crc: needs a chain of blocks"
    plain = all(unit.activated is not None and not unit.is_residual for unit in problem.network.units)
    return None if plain else "crc: needs a feed-forward network"


def crc_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs as Singla and Feizi do."""
    lower, upper, per_layer = crc_eigenvalue_bounds(problem)
    sides = {"both": torch.maximum(-lower, upper), "above": upper, "below": -lower}
    value = problem.shaped(sides[problem.side])
    bound = problem.norms.result(value, 2, problem.q, Global(), "crc", per_layer, problem.network.assumes)
    return replace(bound, side=problem.side)


def crc_eigenvalue_bounds(problem: Problem) -> tuple[Tensor, Tensor, tuple[LayerTerm, ...]]:
    """Bound the Hessian's eigenvalues from below and above, one pair for each output."""
    reason = reason_to_skip_crc(problem)
    if reason is not None:
        raise UnsupportedBlock(f"{reason}.")
    blocks = [unit.block for unit in problem.network.activated]
    if len(blocks) == 1:
        return _one_hidden_layer(blocks[0], problem)
    norms, r = problem.norms, Upper(torch.ones((), dtype=torch.float64, device=problem.network.device))
    gradients = _gradients(problem)
    lowers, uppers, per_layer, before = list[Tensor](), list[Tensor](), list[LayerTerm](), None
    for k, block in enumerate(blocks):
        link = block.W if before is None else block.W @ before
        size, act = norms.spectral(link), block.activation
        bent = [(Upper(gradients[k].weights(act, side)) * act.curvature_c).bound for side in SIDES[1:]]
        top, bottom = ((Upper(_least_form(link, weights, size, problem)) * r * r).bound for weights in bent)
        lowers.append(bottom)
        uppers.append(top)
        per_layer.append(LayerTerm(block.name, "term", torch.maximum(top, bottom), "crc"))
        r, before = r * size * max(map(abs, act.slope)), block.G
    return -total(lowers).bound, total(uppers).bound, tuple(per_layer)


def _least_form(W: AbstractLinearMap, weights: Tensor, size: Tensor, problem: Problem) -> Tensor:
    """Bound the largest eigenvalue of W' diag(w) W for each row of weights: by the largest of them, and by itself."""
    by_largest = Upper(weights.flatten(1).amax(dim=1)) * size * size
    return torch.minimum(by_largest.bound, problem.norms.bilinear(W, weights, 2))


def _gradients(problem: Problem) -> list[Interval]:
    """Return intervals of the gradients with respect to every block's activations, by nothing but interval sums."""
    network = problem.network
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    eye = eye.reshape(network.outputs, *network.out_shape)
    found = GradientIntervals({}, (), lambda A: problem.norms.row_norms(A.T, 2)).sweep(
        network.nodes, Interval(eye, eye)
    )
    return [found[unit.hidden] for unit in network.activated]


def _read_out_rows(G: AbstractLinearMap) -> tuple[Tensor, Tensor]:
    basis = basis_vectors(G.out_shape, 0, G.out_size, G)
    return G.adjoint(basis), image_error(G.T, basis)


def _one_hidden_layer(block: Block, problem: Problem) -> tuple[Tensor, Tensor, tuple[LayerTerm, ...]]:
    r"""Bound both sides by eigenvalues of :math:`W^T \mathrm{diag}(P) W`, :math:`P_l = \max v_l \phi''`."""
    v, error = _read_out_rows(block.G)
    low, high = block.activation.curvature or (0.0, 0.0)
    corners = torch.stack([(v + s * error) * h for s in (-1.0, 1.0) for h in (low, high)]).flatten(2)
    slack = 4 * UNIT_ROUNDOFF * corners.abs().amax(dim=0)
    upper = _weighted_eigenvalues(block.W, corners.amax(dim=0) + slack, problem)
    lower = -_weighted_eigenvalues(block.W, -(corners.amin(dim=0) - slack), problem)
    return lower, upper, (LayerTerm(block.name, "term", torch.maximum(-lower, upper), "crc"),)


def _weighted_eigenvalues(W: AbstractLinearMap, weights: Tensor, problem: Problem) -> Tensor:
    """Bound the largest eigenvalue, or 0, of W' diag(weights) W for each row of weights."""
    if W.in_size > _EIGEN_SIZE:
        return problem.norms.bilinear(W, weights.clamp(min=0.0).reshape(-1, *W.out_shape), 2)
    matrix, off = tracked_matrix(W, problem.norms.quick_spectral)
    size = norm_upper_bound_of_vectors(matrix.flatten(), 2, 0)
    # |M' P M - W' P W| for |M - W| <= off, and the two products' own rounding.
    apart = Upper(size) * size * gamma(2 * W.out_size + 4) + Upper(off) * (Upper(2 * size) + off)
    error = (apart * weights.abs().amax(dim=1)).bound
    pieces = [
        largest_eigenvalues_upper_bound((matrix.T @ (row[:, None] * matrix))[None], e[None])
        for row, e in zip(weights, error, strict=True)
    ]
    return torch.cat(pieces)


@dataclass(frozen=True)
class CRCOptions:
    """How long CRC's search runs: steps of bisection on eta, and of descent for each."""

    outer: int = 30
    inner: int = 30


def crc_radii(network: Network, x: Tensor, lower: Tensor, upper: Tensor, options: CRCOptions | None = None) -> Tensor:
    r"""Certify l2 radii within which each scalar output, negative at x, stays at most 0.

    `lower` and `upper` bound the eigenvalues of each output's Hessian, from any method.  Returns a tensor of
    shape (batch, outputs), rounded down; 0 where the output is not negative at x.
    """
    options = options or CRCOptions()
    problem = Problem(network, 2, 2, Global(), scalars=True)
    x = network.require_batch(x)
    if bool((upper < 0).any()) or bool((lower > 0).any()):
        raise InvalidInput("crc_radii expects lower <= 0 <= upper bounds on the eigenvalues.")
    start = x.repeat_interleave(network.outputs, dim=0)
    row = torch.arange(network.outputs, device=x.device).repeat(len(x))
    M, m = upper.clamp(min=1e-30)[row], lower[row]
    limit = (1 - 1e-9) / M
    low, high = torch.zeros_like(limit), limit
    best = torch.zeros_like(limit)
    point = start
    for _ in range(options.outer):
        eta = (low + high) / 2
        point = _inner_minimiser(network, start, point, row, eta, m, options.inner)
        value, f = _dual_lower_bound(problem, start, point, row, eta, M)
        best = torch.maximum(best, value)
        # The dual's derivative is -f at the minimiser: short of the boundary, a larger eta gains.
        low, high = torch.where(f < 0, eta, low), torch.where(f < 0, high, eta)
    at_start = evaluate_with_error(network, x, problem.norms).output
    negative = (at_start.value + at_start.error).flatten(1) < 0
    radii = (2 * best.clamp(min=0.0)).sqrt() * (1 - gamma(8))
    return torch.where(negative, radii.reshape(len(x), network.outputs), 0.0)


def _inner_minimiser(
    network: Network, start: Tensor, point: Tensor, row: Tensor, eta: Tensor, m: Tensor, steps: int
) -> Tensor:
    """Descend 1/2 |x - x0|^2 - eta f(x), whose Hessian is at most 1 - eta m."""
    shape = (-1, *(1,) * (start.dim() - 1))
    step = (1 / (1 - eta * m)).reshape(shape)
    for _ in range(steps):
        point = point - step * (point - start - eta.reshape(shape) * _gradient(network, point, row))
    return point


def _gradient(network: Network, x: Tensor, row: Tensor) -> Tensor:
    """Return the gradient of output row[i] at x[i]."""
    g = torch.eye(network.outputs, dtype=torch.float64, device=x.device)[row]
    return network.pulled_back(network.values(x), g.reshape(len(x), 1, *network.out_shape))[:, 0]


def _dual_lower_bound(
    problem: Problem, start: Tensor, point: Tensor, row: Tensor, eta: Tensor, M: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a lower bound on the dual function at eta, from a point near the minimiser, and f there."""
    points = at_points(problem, point)
    output = points.evaluation.output
    index = torch.arange(len(point), device=point.device)
    f = output.value.flatten(1)[index, row]
    f_above = f + output.error.flatten(1)[index, row]
    covectors = points.gradients
    if covectors is None:
        raise InvalidInput("CRC needs a differentiable network.")
    g, drift = covectors[0].value.flatten(2)[index, row], covectors[0].drift[index, row]
    distance = (point - start).flatten(1)
    slope = distance - eta[:, None] * g
    rounding = (Upper(g.abs()) * eta[:, None] + distance.abs()).sum(1) * (4 * UNIT_ROUNDOFF)
    slope_size = Upper(drift) * eta + norm_upper_bound_of_vectors(slope, 2, 1) + rounding
    squared = 0.5 * distance.square().sum(dim=1) * (1 - gamma(distance.shape[1] + 8))
    # Strong convexity 1 - eta M, rounded down: eta is at most (1 - 1e-9) / M, so that this stays positive.
    convexity = 1 - (Upper(eta) * M).bound - 2 * UNIT_ROUNDOFF
    gain = (slope_size.square() / (2 * convexity)).bound
    value = squared - eta * f_above - gain
    return value - gamma(16) * (squared + (eta * f_above).abs() + gain), f
