r"""Anchored Lipschitz constants: one point fixed, the other anywhere, one value a sample.

Each activation is as steep as seen from its own value at x, so
:math:`L_h(x) = \|H\| + \|G\| \|\mathrm{diag}(L_\Phi(z)) W\|`, and a prefix never exceeds its global constant.
Reference: Entesari et al. (ICML 2024), appendix "Calculation of Anchored Lipschitz".
"""

import torch
from torch import Tensor

from curvcert.activations import anchored_slope_range
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, last_growth
from curvcert.bounds.types import Bound, LayerTerm
from curvcert.network import AbstractBlock, Block
from curvcert.network.evaluation import Computed, Evaluation, evaluate_with_error
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
    prefixes = anchored_prefixes(problem, evaluate_with_error(network, problem.anchor, norms))
    terms = zip(network.blocks, prefixes[1:], strict=True)
    per_layer = tuple(LayerTerm(block.name, "prefix", L, "anchored") for block, L in terms)
    value = problem.shaped(prefixes[-1])
    return norms.result(value, problem.p, problem.q, problem.scope, "anchored", per_layer, network.assumes)


def anchored_prefixes(problem: Problem, evaluation: Evaluation) -> list[Tensor]:
    """Return anchored constants of x -> x_k for k = 0, ..., K, one a sample; the last in the final norm."""
    x, blocks = problem.anchor, problem.network.blocks
    everywhere = liplt_prefixes(problem, problem.norms)
    prefixes = [torch.ones(len(x), dtype=torch.float64, device=x.device)]
    for k, (block, z) in enumerate(zip(blocks, evaluation.pre_activations, strict=True)):
        last, L = k == len(blocks) - 1, prefixes[-1]
        if last and problem.scalars:
            L = L[:, None]
        prefixes.append(torch.minimum(L * _growth(block, z, problem, last), everywhere[k + 1]))
    return prefixes


def _growth(block: AbstractBlock, z: Computed | None, problem: Problem, last: bool) -> Tensor:
    if isinstance(block, Block) and z is not None:
        slopes = anchored_slopes(block, z)
        return last_growth(block, slopes, problem) if last else block_growth(block, slopes, problem)
    return block_product(block, problem, problem.norms, last)
