r"""The unrolled bound: one term for each activation, weighed by the gradient that reaches it.

For a scalar f, :math:`\nabla^2 f = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k` with
:math:`J_k = \partial z_k/\partial x = W_k Dx_k`, :math:`x_k` the values that the layer reads, and
:math:`u_k = \partial f/\partial a_k`: on every graph.  With :math:`|u_k| \le \bar u_k`,
:math:`\|u_k\|_{p^*} \le \gamma_k`, constants :math:`L_k` of :math:`x_k` and :math:`Z_k` of :math:`z_k`, a term is at
most the least of

.. math::
    c\, \gamma_k L_k^2 \sup_{a, b} \|Wa \circ Wb\|_p, \qquad c L_k^2 \sup_{a, b} \sum_l \bar u_{kl} |W_l a| |W_l b|,
    \qquad c\, \|\bar u_k\|_r Z_k^2,

1/r = (1 - 2/p)+, and on chains at p = 2, with the LipSDP recursion's :math:`S_k = W_k X_k^{-1} W_k^T`,
:math:`c\,\gamma_k \sqrt{\lambda_{max}(S_k^{\circ 2})}` and
:math:`c\,\lambda_{max}(\bar U^{1/2} S_k \bar U^{1/2})`.  Where a search for LipSDP's best multipliers is asked for, the
last also has their :math:`S_k`, found for these very weights, on every graph.  A block A (x - W' D phi(Wx + b)) of a
network with skips has its own form (`block_contraction.py`), which the gradient behind the block weighs instead of u.
From one side :math:`\max(\pm u_{kl} \phi'', 0)`, over all that both can be, takes the place of
:math:`c \bar u_{kl}`.
For feed-forward
networks with G = I inside, never above the compositional bound with the read-out folded.  Where :math:`\phi''` does
not exist everywhere the same holds for differences of gradients, since :math:`\phi'` is Lipschitz.

Outputs that are one vector have :math:`\|Df(x) - Df(y)\|_{p \to q}`, the largest of all :math:`w \cdot f` with
:math:`\|w\|_{q^*} \le 1`.  For all of these at once :math:`\|u_k\|_{p^*} \le \|\partial f/\partial a_k\|_{p \to q}`,
and :math:`\bar u_{kl}` is the q-norm of its bounds for the single outputs.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_contraction import contraction_form
from curvcert.bounds.curvature.blocks import block_curvature
from curvcert.bounds.curvature.compositional import last_block_forms
from curvcert.bounds.curvature.gradients import GradientBound, gradient_bounds
from curvcert.bounds.lipschitz.liplt import growth
from curvcert.bounds.lipschitz.lipsdp import weighted_reaches
from curvcert.bounds.lipschitz.lipsdp_on_torus import ImageCongruence
from curvcert.bounds.lipschitz.lipsdp_recursion import (
    Metric,
    has_room,
    known_congruence,
    lipsdp_metrics,
    reason_to_skip_lipsdp,
    recursion_of_images,
)
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import SIDES, Bound, Global, LayerTerm, Side
from curvcert.network import Block
from curvcert.network.nodes import ElementwiseNode
from curvcert.network.rewriting.units import ActivatedUnit
from curvcert.operators import AbstractLinearMap, Identity, Reshape
from curvcert.operators.khatri_rao import root_of_product
from curvcert.operators.weighted import GRAM_SIZE, congruent_eigenvalues
from curvcert.progress import working_on
from curvcert.propagation.slopes import stacked_size
from curvcert.rounding import TINY, Upper, inflate, least, norm_upper_bound_of_vectors, total

_ROOM = 1e-12
"""A quotient of known bounds is raised by this, relatively."""

CANDIDATES = (
    "gradient norm",
    "gradient entries",
    "gradient, pre-activations",
    "gradient norm, lipsdp",
    "gradient entries, lipsdp",
    "gradient behind the block",
    "last block",
)
"""The bounds on a term, of which the least counts."""

_BY_MULTIPLIERS = "gradient entries, multipliers"
"""One more, where it is asked for."""

_WORTH = 0.005
"""The share of the sum over layers that a search for multipliers must be able to save: what it is near the optimum."""


def unrolled_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs, or of all as one vector, by a sum over layers."""
    problem.network.require_smooth()
    sides: tuple[Side, ...] = SIDES[1:] if decided_by_sides(problem) else (problem.side,)
    total = torch.stack([_total(problem.seen_from(side)) for side in sides]).amax(dim=0)
    per_layer = tuple(unrolled_terms(problem).values())
    bound = problem.norms.result(
        problem.shaped(total), problem.p, problem.q, Global(), "unrolled", per_layer, problem.network.assumes
    )
    return replace(bound, side=problem.side)


def is_never_above_the_recursion(problem: Problem) -> bool:
    """Whether the compositional bound of a scalar has no factor that is smaller here, nor CRC's of several layers.

    So it is where nothing linear stands between an activation and what reads it: the forms are the same, and the
    constants of prefixes and the gradients are at most the products of norms, the intervals within CRC's.
    """
    if not problem.scalars or not problem.network.is_chain:
        return False
    units = problem.network.activated
    plain = len(units) == len(problem.network.units) and not any(unit.is_residual for unit in units)
    return plain and all(isinstance(unit.block.G, Identity | Reshape) for unit in units[:-1])


def decided_by_sides(problem: Problem) -> bool:
    """Whether the sides of a scalar say more than both: in l2 the norm of a second derivative is the larger of them.

    Neither exceeds what bounds both together, layer by layer.
    """
    return problem.scalars and problem.side == "both" and problem.p == 2 and bends_unevenly(problem)


def bends_unevenly(problem: Problem) -> bool:
    """Whether an activation bends further to one side than to the other: only then a side alone says more."""
    nodes = [node for node in problem.network.nodes if isinstance(node, ElementwiseNode)]
    ranges = [node.activation.curvature or (0.0, 0.0) for node in nodes]
    return any(abs(low + high) > 1e-6 * max(-low, high) for low, high in ranges)


def _total(problem: Problem) -> Tensor:
    nothing = torch.zeros(
        problem.network.outputs if problem.scalars else 1, dtype=torch.float64, device=problem.network.device
    )
    found = total([nothing, *(term.value for term in unrolled_terms(problem).values())]).bound
    return found if problem.scalars else found[0]


def unrolled_terms(problem: Problem) -> dict[int, LayerTerm]:
    """Return the term of every activation by its number, one value per output, and the bound that won most.

    Each bounds what one layer adds, at every input: so it may be replaced by any other bound on the same.
    """
    return problem.once(f"unrolled, {problem.side}", lambda: _terms(problem))


def _terms(problem: Problem) -> dict[int, LayerTerm]:
    if not decided_by_sides(problem):
        return _searched(problem, _found_alone(problem))
    above, below = (unrolled_terms(problem.seen_from(side)) for side in SIDES[1:])
    return {k: replace(term, value=torch.maximum(term.value, below[k].value)) for k, term in above.items()}


def _least_term(term: LayerTerm, other: LayerTerm) -> LayerTerm:
    """Return the lesser for each output, named after the one that won most of them."""
    lower = other.value < term.value
    winner = other if int(lower.sum()) * 2 > lower.numel() else term
    return replace(winner, value=torch.where(lower, other.value, term.value))


def _searched(problem: Problem, terms: dict[int, LayerTerm]) -> dict[int, LayerTerm]:
    """Return the terms with those by LipSDP's best multipliers, where a search for these is asked for and pays."""
    if not terms or problem.most_work == 0:
        return terms
    known, weights, c = {}, {}, {}
    for unit in problem.network.activated:
        c[unit.hidden] = unit.block.activation.curvature_c
        known[unit.hidden] = terms[unit.hidden].value
        weights[unit.hidden] = _weights(problem, unit)
    sums = torch.stack([*known.values()]).sum(dim=0)
    # Of sums that overflow nothing is known: there inf - inf stands for inf.
    wanted = {k: ((value - _WORTH * sums) / max(c[k], TINY)).nan_to_num(torch.inf) for k, value in known.items()}
    reaches = weighted_reaches(problem, weights, wanted)
    return {
        k: _least_term(term, replace(term, value=(Upper(reaches[k]) * c[k]).bound, method=_BY_MULTIPLIERS))
        if k in reaches
        else term
        for k, term in terms.items()
    }


def _weights(problem: Problem, unit: ActivatedUnit) -> Tensor:
    gradients = problem.once("gradients", lambda: gradient_bounds(problem, problem.norms))
    return gradients[unit.hidden].interval.weights(unit.block.activation, problem.side)


def _found_alone(problem: Problem) -> dict[int, LayerTerm]:
    norms, units = problem.norms, problem.network.units
    prefixes, metrics = growth(problem, norms), _metrics(problem)
    gradients = problem.once("gradients", lambda: gradient_bounds(problem, norms))
    found = {}
    for unit in problem.network.activated:
        block = unit.block
        working_on(block.name)
        gradient, metric, weights = gradients[unit.hidden], metrics.get(unit.hidden), _weights(problem, unit)
        L = stacked_size([prefixes.of(source) for source in unit.sources], problem.p)
        if metric is not None and metric.of_activations:
            L = torch.minimum(L, Upper(metric.metric.norm).root().bound)
        candidates = _terms_of_pre_activations(gradient.size, weights, prefixes.before(unit.hidden), problem)
        candidates |= _term_of_size(block, gradient.size, L, problem)
        candidates |= _contraction_terms(block, gradient, L, problem)
        # Those that factorise a matrix for each output come last: where they cannot give less, they don't.
        if metric is not None:
            candidates |= _metric_terms(metric, gradient.size, weights, problem, _least(candidates))
        candidates |= _term_of_entries(block, weights, L, problem, unit is units[-1], _least(candidates))
        values = torch.stack([candidates[name] for name in CANDIDATES if name in candidates])
        names = [name for name in CANDIDATES if name in candidates]
        winner = names[int(values.argmin(dim=0).bincount().argmax())]
        term = (Upper(values.amin(dim=0)) * block.activation.curvature_c).bound
        found[unit.hidden] = LayerTerm(block.name, "term", term, winner)
    return found


@dataclass(frozen=True, eq=False)
class _Prefix:
    """What the LipSDP recursion says of what a layer reads, and the map W from there to its pre-activation.

    `of_activations` tells whether the metric is of the values that the layer's block reads, with no map between;
    `layer` is its number.  Of images S is known on a torus, as `image`, and that of what reads the last of them.
    """

    layer: int
    W: AbstractLinearMap
    metric: Metric
    of_activations: bool
    image: ImageCongruence | None
    behind_images: bool


def _metrics(problem: Problem) -> dict[int, _Prefix]:
    """Return the LipSDP recursion's prefixes by the number of each activation; none where it does not apply."""
    if reason_to_skip_lipsdp(problem) is not None:
        return {}
    found, before, images = {}, None, recursion_of_images(problem)
    within = 0 if images is None else len(images.layers)
    for k, (unit, metric) in enumerate(zip(problem.network.activated, lipsdp_metrics(problem), strict=False)):
        W = unit.block.W if before is None else unit.block.W @ before
        image = None if images is None or k == 0 else images.layers.get(unit.hidden)
        found[unit.hidden] = _Prefix(k, W, metric, isinstance(before, Identity | None), image, k == within > 0)
        before = unit.block.G
    return found


def _least(candidates: dict[str, Tensor]) -> Tensor:
    return torch.stack([*candidates.values()]).amin(dim=0)


def _term_of_size(block: Block, size: Tensor, L: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Return the term by the gradient's size."""
    norms, p, W = problem.norms, problem.p, block.W
    omega, row = Upper(torch.full_like(L, torch.inf)), norms.norm(W, p, torch.inf)
    if p == 2:
        omega = Upper(norms.hadamard(W))
    # Schur's inequality: where the form above is exact, the product of norms is no less.
    if p != 2 or norms.may_be_below(W, omega.value / row.clamp(min=TINY)):
        omega = least(omega, Upper(norms.norm(W, p, p)) * row)
    return {"gradient norm": (omega * size * L * L).bound}


def _term_of_entries(
    block: Block, weights: Tensor, L: Tensor, problem: Problem, last: bool, known: Tensor
) -> dict[str, Tensor]:
    """Return the term by the gradient's entries, which for the last block of a scalar are those of G itself."""
    norms, p = problem.norms, problem.p
    if last and problem.scalars:
        form = last_block_forms(block, problem, norms)
    else:
        # No less than what is known, whatever the rounding of the quotient.
        ceiling = inflate(known / (L * L).clamp(min=TINY), _ROOM)
        form = norms.bilinear(block.W, weights, p, known=ceiling)
    terms = {"gradient entries": (Upper(form) * L * L).bound}
    if last and not problem.scalars and block.activation.curvature_c > 0:
        own, _ = block_curvature(block, p, problem.q, norms)
        terms["last block"] = (Upper(own[None]) / block.activation.curvature_c * L * L).bound
    return terms


def _terms_of_pre_activations(size: Tensor, weights: Tensor, Z: Tensor, problem: Problem) -> dict[str, Tensor]:
    r"""Return the terms by the constant of the pre-activations themselves, :math:`\|J_k\| \le Z_k`.

    .. math::
        \sum_l \bar u_l |J_l a| |J_l b| \le \|\bar u\|_r \|Ja\|_p \|Jb\|_p, \qquad 1/r = (1 - 2/p)_+,

    by Hoelder, and :math:`\|\bar u\|_r \le \|\bar u\|_{p^*}` since :math:`r \ge p^*`.
    """
    r = math.inf if problem.p <= 2 else 1 / (1 - 2 / problem.p)
    size = torch.minimum(norm_upper_bound_of_vectors(weights.flatten(1), r, 1), size)
    return {"gradient, pre-activations": (Upper(size) * Z * Z).bound}


def _contraction_terms(block: Block, gradient: GradientBound, L: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Return the block's own form times the gradient behind it, where that is known and the block contracts."""
    if gradient.behind is None or problem.p != 2:
        return {}
    form = contraction_form(block, problem.norms)
    return {} if form is None else {"gradient behind the block": (Upper(gradient.behind) * form * L * L).bound}


def _metric_terms(prefix: _Prefix, size: Tensor, weights: Tensor, problem: Problem, known: Tensor) -> dict[str, Tensor]:
    """Return the terms with the LipSDP recursion's prefix; at the input it is the plain one.

    None where the matrices would not fit the memory budget: W itself, S, and what a Cholesky factorisation takes.
    """
    W, metric = prefix.W, prefix.metric
    if prefix.image is not None:
        terms = {"gradient norm, lipsdp": (Upper(size) * prefix.image.hadamard).bound}
        if W.out_size > GRAM_SIZE:
            return terms
        S, error = prefix.image.matrix
    else:
        if not prefix.behind_images and (metric.matrix is None or not has_room(W, problem.norms)):
            return {}
        S, error = known_congruence(prefix.layer, W, metric, problem)
        terms = {"gradient norm, lipsdp": (Upper(size) * root_of_product(S, error, S, error)).bound}
    if W.out_size <= GRAM_SIZE:
        roots = Upper(weights.flatten(1)).root().bound
        terms["gradient entries, lipsdp"] = congruent_eigenvalues(S, error, roots, known)
    return terms
