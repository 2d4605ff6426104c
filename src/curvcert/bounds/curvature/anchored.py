r"""Anchored curvature: one point fixed, the other anywhere, one value per sample.

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

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import anchored_curvature_range, second_derivative_range
from curvcert.bounds.curvature.compositional import curvature_of_values, unit_lipschitz
from curvcert.bounds.curvature.unrolled import unrolled_terms
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.anchored import anchored_constants_of_values
from curvcert.bounds.lipschitz.batching import in_pieces
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed, sloped_growth
from curvcert.bounds.types import Bound, LayerTerm
from curvcert.network import Block
from curvcert.network.evaluation import Computed
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.propagation.analysis import AtPoints, OverBalls
from curvcert.propagation.covectors import activation_gradients
from curvcert.propagation.hessians import weighted_bilinear
from curvcert.propagation.slopes import stacked_size
from curvcert.rounding import Upper, least, next_down, next_up, total


def anchored_curvature_bound(problem: Problem, terms: Mapping[int, Tensor] | None = None) -> Bound:
    """Bound the anchored curvature at a batch of points, and nothing by more than its global constant.

    `terms` are those of the global sum over layers (`unrolled_terms`), by the number of each activation, where they
    are known already.
    """
    problem.network.require_smooth()
    if terms is None:
        terms = {a: term.value for a, term in unrolled_terms(problem).items()} if problem.scalars else {}
    everywhere, known = curvature_of_values(problem), terms
    return in_pieces(lambda part: _bound(part, everywhere, known), problem)


def _bound(problem: Problem, everywhere: Mapping[int, Tensor], terms: Mapping[int, Tensor]) -> Bound:
    x, norms, network = problem.anchor, problem.norms, problem.network
    points = over_balls(problem)
    steps = _steps(problem, points)
    found = {0: torch.zeros(len(x), dtype=torch.float64, device=x.device)}
    per_layer = []
    for step in steps:
        before = [found[source] for source in step.unit.sources]
        reach = Upper(step.omega) * _column(step.anchored, step.omega)
        grown = [
            composed(step.unit, before, constant, problem, step.last) for constant in (step.lipschitz, step.growth)
        ]
        first = reach * _column(step.jacobian, step.omega) + grown[0]
        second = reach * step.prefix + grown[1]
        # The second recursion is about slopes at x, and may lose to the global constant where a block contracts.
        K = torch.minimum(least(first, second).bound, everywhere[step.unit.output])
        found[step.unit.output] = K
        per_layer.append(LayerTerm(step.unit.block.name, "prefix", K, "anchored"))
    if problem.scalars:
        K = torch.minimum(K, _weighed_by_gradient(problem, points, steps, terms))
    value = problem.shaped(K)
    return norms.result(value, problem.p, problem.q, problem.scope, "anchored", tuple(per_layer), network.assumes)


@dataclass(frozen=True, eq=False)
class Step:
    """What the recursions need of one unit: global, anchored and pointwise constants."""

    unit: AbstractUnit
    last: bool
    lipschitz: Tensor
    growth: Tensor
    prefix: Tensor
    anchored: Tensor
    jacobian: Tensor
    omega: Tensor
    constants: Tensor | None


def _steps(problem: Problem, points: OverBalls) -> list[Step]:
    everywhere, p, norms = value_constants(problem), problem.p, problem.norms
    anchored = anchored_constants_of_values(problem, AtPoints(points.facts, points.evaluation))
    jacobians = {value: torch.minimum(anchored[value], points.prefix(value)) for value in points.prefixes}
    steps = []
    for unit in problem.network.units:
        bent, last = unit.activated, unit is points.facts.last
        prefix, L, jacobian = (_of_stacked(table, unit, p) for table in (everywhere, anchored, jacobians))
        lipschitz, growth = unit_lipschitz(unit, problem, norms, last), points.growths.get(unit.output)
        constants, omega = None, lipschitz.new_zeros(len(L), *lipschitz.shape)
        if bent is not None:
            constants = anchored_constants(bent.block, points.evaluation.values[bent.z])
            omega = _anchored_block_curvature(bent.block, constants, problem, last)
            growth = sloped_growth(bent.block, points.slopes[bent.hidden], problem, last) if growth is None else growth
        growth = lipschitz.expand(omega.shape) if growth is None else growth
        steps.append(Step(unit, last, lipschitz, growth, prefix, L, jacobian, omega, constants))
    return steps


def _of_stacked(table: dict[int, Tensor], unit: AbstractUnit, p: float) -> Tensor:
    """Return the constant of what a unit reads, stacked, from those of the values."""
    return stacked_size([table[source] for source in unit.sources], p)


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
    far = Upper(delta, 1) * (2 * block.activation.curvature_c) + torch.maximum(lower.abs(), upper.abs())
    width = (Upper(delta, 1) + z.error).bound
    near = second_derivative_range(block.activation, next_down(z.value - width), next_up(z.value + width))
    largest = torch.maximum(far.bound, torch.maximum(near[0].abs(), near[1].abs()))
    return largest.clamp(max=block.activation.curvature_c)


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
    weights = (Upper(norms.row_norms(W, conjugate(p))) * constants).bound
    inner = (Upper(norms.norm(W, p, p)) * weights.flatten(1).amax(dim=1)).bound
    if p == 2:
        inner = torch.minimum(inner, weighted_norm_upper_bound(W, weights, 2, norms))
        inner = torch.minimum(inner, _weighted_hadamard(W, constants.flatten(1), norms))
    return (Upper(G) * inner).bound


def _weighted_hadamard(W: AbstractLinearMap, c: Tensor, norms: NormBounds) -> Tensor:
    r"""Bound :math:`\sqrt{\lambda_{max}(C (WW^T)^{\circ 2} C)}` by Collatz and Wielandt.

    For a nonnegative matrix M and any v > 0, :math:`\lambda_{max}(M) \le \max_i (Mv)_i / v_i`.
    """
    plain = (Upper(c.amax(dim=1)) * norms.hadamard(W)).bound
    if not norms.gram_fits(W.out_size) or W.out_size > 4096:
        return plain
    B, error = norms.gram(W)
    M = (Upper(B.abs()) + error).square()
    v = torch.ones_like(c)
    for _ in range(20):
        v = c * ((c * v) @ M.value) + 1e-9
        v = v / v.amax(dim=1, keepdim=True)
    v = v.clamp(min=1e-12)
    quotients = (Upper(c) * v @ M) * c / v
    return torch.minimum(plain, quotients.amax(1).root().bound)


def _rows_of(G: AbstractLinearMap) -> Tensor:
    eye = torch.eye(G.out_size, dtype=torch.float64, device=G.device).reshape(-1, *G.out_shape)
    return (Upper(G.adjoint(eye).abs()) + image_error(G.T, eye)).bound


def _weighed_by_gradient(problem: Problem, points: OverBalls, steps: list[Step], terms: Mapping[int, Tensor]) -> Tensor:
    """Bound the unrolled sum with the gradients at x; each layer by its global term where that is less."""
    covectors = points.gradients_of()
    found = [problem.anchor.new_zeros(len(problem.anchor), problem.network.outputs)]
    for step in steps:
        unit = step.unit.activated
        if unit is None:
            continue
        term, block = terms[unit.hidden], unit.block
        if covectors is not None and step.constants is not None:
            u, drift = activation_gradients(block, covectors[unit.output], problem.p, problem.norms)
            sizes = Upper(u) + drift.reshape(*drift.shape, *(1,) * (u.dim() - 2))
            bilinear = weighted_bilinear(block.W, step.constants, sizes.bound, problem.p, problem.norms)
            term = torch.minimum(term, (Upper(bilinear) * step.prefix * step.anchored[:, None]).bound)
        found.append(term.expand_as(found[0]))
    return total(found).bound
