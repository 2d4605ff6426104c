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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from curvcert.bounds.curvature.blocks import block_curvature, scalar_block_forms
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.growth import Growth
from curvcert.bounds.lipschitz.liplt import growth, loop_transformed
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.network import Block
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.operators import AbstractLinearMap
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.propagation.slopes import stacked_size
from curvcert.rounding import Upper


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

    transformed = outer(parts.linear) + parts.rho * outer(parts.G) * norms.norm(parts.W, problem.p, problem.p)
    return torch.minimum(product, transformed)
