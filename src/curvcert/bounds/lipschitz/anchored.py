r"""Anchored Lipschitz constants: one point fixed, the other anywhere, one value a sample.

Each activation is as steep as seen from its own value at x, so
:math:`L_h(x) = \|H\| + \|G\| \|\mathrm{diag}(L_\Phi(z)) W\|`, and a prefix never exceeds its global constant.
Reference: Entesari et al. (ICML 2024), appendix "Calculation of Anchored Lipschitz".
"""

import torch
from torch import Tensor

from curvcert.activations import anchored_slope_range
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.product import block_product
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, last_growth
from curvcert.bounds.types import Bound, LayerTerm
from curvcert.network import AbstractBlock, Block
from curvcert.network.evaluation import Computed, evaluate_with_error
from curvcert.rounding import inflate


def anchored_slopes(block: Block, z: Computed) -> Slopes:
    r"""Enclose the slopes seen from z, for every z that the computed one may stand for.

    A quotient moves by at most c/2 for a unit of z, since it is a mean of :math:`\phi'` with weight 1 - t;
    without a Lipschitz derivative the global slopes are used.
    """
    alpha, beta = block.activation.slope
    if block.activation.curvature is None:
        return Slopes(torch.full_like(z.value, alpha), torch.full_like(z.value, beta))
    lower, upper = anchored_slope_range(block.activation, z.value)
    drift = inflate(0.5 * block.activation.curvature_c * z.error, 0.0)
    return Slopes((lower - drift).clamp(min=alpha), (upper + drift).clamp(max=beta))


def anchored_bound(problem: Problem) -> Bound:
    """Bound the anchored Lipschitz constants at a batch of points."""
    network, norms = problem.network, problem.norms
    x = problem.anchor
    evaluation = evaluate_with_error(network, x, norms)
    prefixes = liplt_prefixes(problem, norms)
    total = torch.ones(len(x), dtype=torch.float64, device=x.device)
    per_layer = []
    for k, block in enumerate(network.blocks):
        last, z = k == len(network.blocks) - 1, evaluation.pre_activations[k]
        growth = _growth(block, z, problem, last)
        if last and problem.scalars:
            total = total[:, None]
        total = torch.minimum(total * growth, prefixes[k + 1])
        per_layer.append(LayerTerm(block.name, "prefix", total, "anchored"))
    value = problem.shaped(total)
    return norms.result(value, problem.p, problem.q, problem.scope, "anchored", tuple(per_layer), network.assumes)


def _growth(block: AbstractBlock, z: Computed | None, problem: Problem, last: bool) -> Tensor:
    if isinstance(block, Block) and z is not None:
        slopes = anchored_slopes(block, z)
        return last_growth(block, slopes, problem) if last else block_growth(block, slopes, problem)
    return block_product(block, problem, problem.norms, last)
