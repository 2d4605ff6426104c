r"""The paper's recursion: curvature of a composition from that of its blocks.

.. math:: K_{k+1} = \omega_k L_k^2 + L_{h_k} K_k, \qquad K_0 = 0,

with :math:`\omega_k` the block's curvature, :math:`L_{h_k}` its Lipschitz constant and :math:`L_k` the prefix's, all
p -> p, the last block in the norm that is asked for.  On a graph, of what a unit reads, stacked, both constants are at
most the p-norms of those of the parts; and a sum of maps A_i has at most :math:`\sum_i \|A_i\| K_i`.  For a logit or a
pair the read-out is folded into the last block, instead of a factor :math:`2^{1 - 1/p}` outside.

Reference: Entesari et al. (ICML 2024), theorem `prop:recursiveJacobianLipschitz` and Algorithm 1.  Erratum:
the paper has p*-operator norms where p-operator norms belong, which is unsound for p > 2.  Where every
block is 1-Lipschitz the recursion is the sum of the blocks' constants, the paper's shortcut.  What is asked from one
side alone is so of the last block: what is inside may bend either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from curvcert.bounds.curvature.blocks import block_curvature, scalar_block_forms
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.growth import Growth
from curvcert.bounds.lipschitz.liplt import growth, loop_transformed
from curvcert.bounds.lipschitz.monotone import residual_contraction_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.network import Affine, Block
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.operators import AbstractLinearMap
from curvcert.operators.lanczos import glimpsed_norm
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.rows import row_norms_upper_bound
from curvcert.propagation.slopes import moved_through, stacked_size
from curvcert.rounding import TINY, Upper


def compositional_bound(
    problem: Problem,
    norms: AbstractNorms[R],
    block_bounds: Sequence[str] | None = None,
    prefixes: Growth | None = None,
) -> R:
    """Bound the curvature of a network, block by block; `block_bounds` names those to choose from.

    `prefixes` are the Lipschitz constants of values, by LipLT if there are none.
    """
    problem.network.require_smooth()
    found, per_layer = _recursion(problem, norms, block_bounds, prefixes)
    method = "compositional" if block_bounds is None else f"compositional ({', '.join(block_bounds)})"
    value = problem.shaped(found[problem.network.units[-1].output])
    bound = norms.result(value, problem.p, problem.q, Global(), method, tuple(per_layer), problem.network.assumes)
    return replace(bound, side=problem.side) if isinstance(bound, Bound) else bound


def curvature_of_values(problem: Problem) -> dict[int, Tensor]:
    """Return the curvature of x -> v for the input and for every value that a unit ends in; the last final."""
    return problem.once(f"curvatures, {problem.side}", lambda: _recursion(problem, problem.norms, None)[0])


def _recursion(
    problem: Problem, norms: AbstractNorms[R], block_bounds: Sequence[str] | None, prefixes: Growth | None = None
) -> tuple[dict[int, Tensor], list[LayerTerm]]:
    prefixes, units = growth(problem, norms) if prefixes is None else prefixes, problem.network.units
    found = {0: torch.zeros((), dtype=torch.float64, device=problem.network.device)}
    per_layer = []
    for unit in units:
        block, last = unit.block, unit is units[-1]
        L = stacked_size([prefixes.of(source) for source in unit.sources], problem.p)
        if last or norms is not problem.norms or block_bounds is not None:
            omega, name = last_or_inner_curvature(unit, problem, norms, block_bounds, last)
        else:  # the same from every side
            omega, name = problem.once(
                f"inner curvature {unit.output}",
                partial(last_or_inner_curvature, unit, problem, problem.norms, None, False),
            )
        before = [found[source] for source in unit.sources]
        grown = composed(unit, before, unit_lipschitz(unit, problem, norms, last), problem, last, norms)
        K = found[unit.output] = (Upper(omega) * L * L + grown).bound
        per_layer += [LayerTerm(block.name, "block", omega, name), LayerTerm(block.name, "prefix", K, "compositional")]
    return found, per_layer


def glimpsed_recursion(problem: Problem) -> Tensor | None:
    """Return what the recursion in l2 would give with less than every norm in it; None for other norms.

    A block's curvature is no less than a second derivative of one of the functions that its bounds cover.  Blocks with
    constants of their own, which contract, count as nothing.
    """
    if problem.p != 2 or not (problem.scalars or problem.q == 2) or not problem.network.is_smooth:
        return None
    prefixes, units = growth(problem, problem.norms), problem.network.units
    found = {0: torch.zeros((), dtype=torch.float64, device=problem.network.device)}
    for unit in units:
        last, bent = unit is units[-1], unit.activated
        L = stacked_size([prefixes.of(source) for source in unit.sources], 2)
        outer = _glimpses(problem, last)
        omega, constant = torch.zeros_like(L), glimpsed_lipschitz(unit, problem, last)
        if bent is not None and residual_contraction_of(bent.block) is None:
            rows = last and problem.scalars
            form = last_block_forms(bent.block, problem, problem.norms) if rows else _bent_most(bent.block)
            omega = bent.block.activation.curvature_c * form
        before = [found[source].unsqueeze(-1) if last and problem.scalars else found[source] for source in unit.sources]
        found[unit.output] = omega * L * L + moved_through(unit, before, constant, 2, outer)
    return found[units[-1].output]


def glimpsed_lipschitz(unit: AbstractUnit, problem: Problem, last: bool) -> Tensor:
    """Return less than `unit_lipschitz` in l2; 0 for a block with a constant of its own, which contracts."""
    outer = _glimpses(problem, last)
    if isinstance(unit.block, Affine):
        return outer(unit.block.H)
    if unit.activated is None or residual_contraction_of(unit.activated.block) is not None:
        return torch.zeros((), dtype=torch.float64, device=problem.network.device)
    parts = loop_transformed(unit.activated.block)
    return outer(parts.linear) + parts.rho * outer(parts.G) * glimpsed_norm(parts.W)


def _glimpses(problem: Problem, last: bool) -> Callable[[AbstractLinearMap], Tensor]:
    """Return norms as one vector shows them; those of rows as they are bounded."""
    if last and problem.scalars:
        return partial(problem.final_norm, norms=problem.norms)
    return glimpsed_norm


def _bent_most(block: Block) -> Tensor:
    r"""Return :math:`\|G (Wu)^{\circ 2}\|` for the unit vector u along the longest row of W."""
    W = block.W
    rows = row_norms_upper_bound(W, 2).flatten()
    e = torch.zeros_like(rows)
    e[rows.argmax()] = 1.0
    u = W.adjoint(e.reshape(1, *W.out_shape))
    u = u / torch.linalg.vector_norm(u).clamp(min=TINY)
    size: Tensor = torch.linalg.vector_norm(block.G.apply(W.apply(u).square()))
    return size


def last_or_inner_curvature(
    unit: AbstractUnit, problem: Problem, norms: AbstractNorms[R], block_bounds: Sequence[str] | None, last: bool
) -> tuple[Tensor, str]:
    """Return the curvature of a unit's block in the norms of its place in the network, and the bound's name."""
    if unit.activated is None:
        return torch.zeros((), dtype=torch.float64, device=problem.network.device), "affine"
    block = unit.activated.block
    if last and problem.scalars:
        return block.activation.curvature_c * last_block_forms(block, problem, norms), "read-out folded"
    return block_curvature(block, problem.p, problem.q if last else problem.p, norms, block_bounds)


def last_block_forms(block: Block, problem: Problem, norms: AbstractNorms[R]) -> Tensor:
    """Return `scalar_block_forms` of the last block; those in the problem's own norms are computed once."""
    if norms is not problem.norms:
        return scalar_block_forms(block, problem.p, norms)
    return problem.once(
        f"last block, {problem.side}", lambda: [scalar_block_forms(block, problem.p, norms, problem.side)]
    )[0]


def unit_lipschitz(unit: AbstractUnit, problem: Problem, norms: AbstractNorms[R], last: bool) -> Tensor:
    r"""Return the lesser of the product bound of a unit's block and its loop-transformed one.

    .. math:: \|H + \tfrac{\alpha + \beta}{2} GW\| + \tfrac{\beta - \alpha}{2} \|G\| \|W\|

    Reference: Entesari et al. (ICML 2024), equation `eq:LipLT single layer`.
    """
    product = block_product(unit.block, problem, norms, last)
    if unit.activated is None:
        return product
    parts = loop_transformed(unit.activated.block)

    def outer(op: AbstractLinearMap) -> Tensor:
        return problem.final_norm(op, norms) if last else norms.norm(op, problem.p, problem.p)

    transformed = Upper(outer(parts.G)) * parts.rho * norms.norm(parts.W, problem.p, problem.p) + outer(parts.linear)
    return torch.minimum(product, transformed.bound)
