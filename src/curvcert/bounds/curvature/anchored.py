r"""Anchored curvature: one point fixed, the other anywhere, one value a sample.

With anchored constants of :math:`\phi'` at the point, two recursions hold step by step, and the lesser counts:

.. math::
    K_{k+1}(x) &\le L_{h_k} K_k(x) + \|Dx_k(x)\| \, \omega_k(x_k) L_k(x), \\
    K_{k+1}(x) &\le \|Dh_k(x_k)\| K_k(x) + L_k \, \omega_k(x_k) L_k(x),

:math:`L_{h_k}` and :math:`L_k` *global* (an anchored one there is unsound, 5.08 times too small on
tanh(w2 tanh(w1 x + b1) + b2)), :math:`L_k(x)` anchored.  For scalar outputs the second, unrolled, weighs each
layer with the very gradient at x:

.. math:: K(x) \le \sum_k L_k L_k(x) \sup_{a,b} \sum_l c_l(z_k) |u_{kl}(x)| |W_l a| |W_l b|.

Reference: Entesari et al. (ICML 2024), theorem `prop:anchoredIterativeJacobian` (the first), with p-operator
norms in place of p*-operator norms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import anchored_curvature_range, second_derivative_range
from curvcert.bounds.curvature.batching import JACOBIAN_ROWS, in_pieces
from curvcert.bounds.curvature.compositional import block_lipschitz
from curvcert.bounds.lipschitz.anchored import anchored_slopes
from curvcert.bounds.lipschitz.drift import Reached, activation_gradients, carry_ball, carry_gradients
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import block_growth
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.network import Block, Network
from curvcert.network.evaluation import Computed
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.rounding import gamma, inflate, next_down, next_up

_BATCHED_GRAM = 128
"""Largest layer with one eigenvalue problem a sample and output."""


def anchored_curvature_bound(problem: Problem) -> Bound:
    """Bound the anchored curvature at a batch of points."""
    problem.network.require_smooth()
    return in_pieces(_bound, problem)


def _bound(problem: Problem) -> Bound:
    x, norms, network = problem.anchor, problem.norms, problem.network
    point = Ball(x, torch.zeros(len(x), dtype=torch.float64, device=x.device))
    reached = carry_ball(problem, point, liplt_prefixes(problem, norms))
    steps = _steps(problem, reached)
    K = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    per_layer = []
    for step in steps:
        if step.last and problem.scalars:
            K = K[:, None]
        reach = step.omega * _column(step.anchored, step.omega)
        first = step.lipschitz * K + _column(step.jacobian, step.omega) * reach
        second = step.growth * K + step.prefix * reach
        K = inflate(torch.minimum(first, second), gamma(16))
        per_layer.append(LayerTerm(step.name, "prefix", K, "anchored"))
    weighed = _weighed_by_gradient(problem, reached, steps) if problem.scalars else None
    K = K if weighed is None else torch.minimum(K, weighed)
    value = problem.shaped(K)
    return norms.result(value, problem.p, problem.q, problem.scope, "anchored", tuple(per_layer), network.assumes)


@dataclass(frozen=True, eq=False)
class Step:
    """What the recursions need of one block: global, anchored and pointwise constants."""

    name: str
    last: bool
    lipschitz: Tensor
    growth: Tensor
    prefix: Tensor
    anchored: Tensor
    jacobian: Tensor
    omega: Tensor
    constants: Tensor | None


def _steps(problem: Problem, reached: list[Reached]) -> list[Step]:
    norms = problem.norms
    prefixes = liplt_prefixes(problem, norms)
    anchored = _anchored_prefixes(problem, reached, prefixes)
    steps = []
    for k, part in enumerate(reached):
        last = k == len(reached) - 1
        jacobian = torch.minimum(anchored[k], _prefix_jacobian_norms(problem, k))
        lipschitz = block_lipschitz(part.block, problem, norms, last)
        if isinstance(part.block, Block) and part.z is not None:
            constants = anchored_constants(part.block, part.z)
            omega = _anchored_block_curvature(part.block, constants, problem, last)
        else:
            constants, omega = None, torch.zeros_like(part.constant)
        steps.append(
            Step(part.block.name, last, lipschitz, part.constant, prefixes[k], anchored[k], jacobian, omega, constants)
        )
    return steps


def _anchored_prefixes(problem: Problem, reached: list[Reached], prefixes: list[Tensor]) -> list[Tensor]:
    """Return anchored Lipschitz constants of x -> x_k, for every block's input."""
    found = [torch.ones(len(problem.anchor), dtype=torch.float64, device=problem.anchor.device)]
    for k, part in enumerate(reached[:-1]):
        growth = part.constant
        if isinstance(part.block, Block) and part.z is not None:
            growth = block_growth(part.block, anchored_slopes(part.block, part.z), problem)
        found.append(inflate(torch.minimum(found[-1] * growth, prefixes[k + 1]), gamma(4)))
    return found


def _column(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *(1,) * (like.dim() - 1))


def anchored_constants(block: Block, z: Computed) -> Tensor:
    r"""Bound :math:`|\phi'(y) - \phi'(z)| / |y - z|` for all y, for every z that the computed one may stand for.

    With :math:`|\hat z - z| \le e` and :math:`\delta = \sqrt e`: beyond :math:`\delta` the quotient at
    :math:`\hat z` is off
    by at most :math:`2ce/\delta`, and within it :math:`|\phi''|` over the interval bounds the quotient.
    """
    delta = z.error.sqrt()
    lower, upper = anchored_curvature_range(block.activation, z.value)
    far = torch.maximum(lower.abs(), upper.abs()) + 2 * block.activation.curvature_c * delta
    width = inflate(delta + z.error, gamma(8))
    near = second_derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    largest = torch.maximum(inflate(far, gamma(8)), torch.maximum(near[0].abs(), near[1].abs()))
    return largest.clamp(max=block.activation.curvature_c)


def _prefix_jacobian_norms(problem: Problem, k: int) -> Tensor:
    """Bound the p -> p norms of the Jacobians of x -> x_k at the points."""
    x = problem.anchor
    if k == 0:
        return torch.ones(len(x), dtype=torch.float64, device=x.device)
    prefix: Network = problem.network.prefix(k)
    if prefix.outputs > JACOBIAN_ROWS:
        return torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    point = Ball(x, torch.zeros(len(x), dtype=torch.float64, device=x.device))
    return local_bound(Problem(prefix, problem.p, problem.p, point, norms=problem.norms)).value


def _anchored_block_curvature(block: Block, constants: Tensor, problem: Problem, last: bool) -> Tensor:
    r"""Bound :math:`\|Dh(x') - Dh(x)\| / \|x' - x\|` with a constant for each neuron.

    :math:`\|G\| \|W\| \max_l c_l \|W_l\|_{p^*}`; in l2 also :math:`\|G\| \|\mathrm{diag}(c_l \|W_l\|) W\|`
    (the corollary of
    `prop:analyticalSdp`) and :math:`\|G\| \sqrt{\lambda_{max}(C (WW^T)^{\circ 2} C)}`.
    """
    p, norms, W = problem.p, problem.norms, block.W
    if last and problem.scalars:
        return weighted_bilinear(W, constants, _rows_of(block.G), p, norms)
    G = problem.final_norm(block.G, norms) if last else norms.norm(block.G, p, p)
    weights = inflate(constants * norms.row_norms(W, conjugate(p)), 0.0)
    inner = norms.norm(W, p, p) * weights.flatten(1).amax(dim=1)
    if p == 2:
        inner = torch.minimum(inner, weighted_norm_upper_bound(W, weights, 2, norms))
        inner = torch.minimum(inner, _weighted_hadamard(W, constants.flatten(1), norms))
    return inflate(G * inner, gamma(8))


def _weighted_hadamard(W: AbstractLinearMap, c: Tensor, norms: NormBounds) -> Tensor:
    r"""Bound :math:`\sqrt{\lambda_{max}(C (WW^T)^{\circ 2} C)}` by Collatz and Wielandt.

    For a nonnegative matrix M and any v > 0, :math:`\lambda_{max}(M) \le \max_i (Mv)_i / v_i`.
    """
    plain = inflate(c.amax(dim=1) * norms.hadamard(W), 0.0)
    if not norms.gram_fits(W.out_size) or W.out_size > 4096:
        return plain
    B, error = norms.gram(W)
    M = inflate((B.abs() + error).square(), gamma(4))
    v = torch.ones_like(c)
    for _ in range(20):
        v = c * ((c * v) @ M) + 1e-9
        v = v / v.amax(dim=1, keepdim=True)
    v = v.clamp(min=1e-12)
    quotients = c * ((c * v) @ M) / v
    return torch.minimum(plain, inflate(quotients.amax(dim=1), gamma(len(B) + 16)).sqrt())


def _rows_of(G: AbstractLinearMap) -> Tensor:
    eye = torch.eye(G.out_size, dtype=torch.float64, device=G.device).reshape(-1, *G.out_shape)
    return inflate(G.adjoint(eye).abs() + image_error(G.T, eye), gamma(4))


def weighted_bilinear(W: AbstractLinearMap, constants: Tensor, sizes: Tensor, p: float, norms: NormBounds) -> Tensor:
    """Bound the bilinear form with weights c_l |g_l|, for every sample and output."""
    sizes = sizes if sizes.dim() == constants.dim() + 1 else sizes.unsqueeze(0)
    weights = inflate(constants.unsqueeze(1) * sizes, 0.0)
    value = norms.bilinear(W, weights.flatten(0, 1), p, _BATCHED_GRAM)
    return value.reshape(weights.shape[:2])


def _weighed_by_gradient(problem: Problem, reached: list[Reached], steps: list[Step]) -> Tensor | None:
    """Sum over layers, each weighed by the gradient at the point; see the module's docstring."""
    covectors = carry_gradients(problem, reached)
    if covectors is None:
        return None
    total = torch.zeros_like(covectors[0].drift)
    for block, behind, step in zip(problem.network.blocks, covectors[1:], steps, strict=True):
        if isinstance(block, Block) and step.constants is not None:
            u, drift = activation_gradients(block, behind, problem)
            sizes = inflate(u + drift.reshape(*drift.shape, *(1,) * (u.dim() - 2)), 0.0)
            bilinear = weighted_bilinear(block.W, step.constants, sizes, problem.p, problem.norms)
            total = total + bilinear * step.prefix * step.anchored[:, None]
    return inflate(total, gamma(8 * len(steps) + 8))
