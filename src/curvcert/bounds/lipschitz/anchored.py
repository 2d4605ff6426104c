r"""Anchored Lipschitz constants: one point fixed, the other anywhere, one value per sample.

Each activation is as steep as seen from its own value at x, so
:math:`L_h(x) = \|H\| + \|G\| \|\mathrm{diag}(L_\Phi(z)) W\|`.  The least of this recursion, of LipLT with these slopes
(`anchored_paths.py`) and of the global constant counts, prefix by prefix.
Reference: Entesari et al. (ICML 2024), appendix "Calculation of Anchored Lipschitz".
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from curvcert.activations import anchored_slope_range
from curvcert.bounds.lipschitz.anchored_paths import path_constants
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import Slopes, block_growth, composed, last_growth
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
    evaluation = evaluate_with_error(network, problem.anchor, norms)
    constants = anchored_constants_of_values(
        problem, {unit.z: evaluation.values[unit.z] for unit in network.units if unit.z is not None}, inside=False
    )
    per_layer = tuple(
        LayerTerm(unit.block.name, "prefix", constants[unit.output], "anchored") for unit in network.units
    )
    value = problem.shaped(constants[network.units[-1].output])
    return norms.result(value, problem.p, problem.q, problem.scope, "anchored", per_layer, network.assumes)


def anchored_constants_of_values(
    problem: Problem, points: Mapping[int | None, Computed | None], inside: bool = True
) -> dict[int, Tensor]:
    """Return anchored constants of x -> v for every value that a unit ends in, one per sample; the last final.

    `points` holds the computed pre-activations by their numbers.  Those of the last value are the best, and of the
    others as well with `inside`.
    """
    x, units, everywhere = problem.anchor, problem.network.units, value_constants(problem)
    slopes: dict[int | None, Slopes] = {
        unit.hidden: anchored_slopes(unit.block, z)
        for unit in units
        if isinstance(unit.block, Block) and unit.hidden is not None and (z := points.get(unit.z)) is not None
    }
    by_paths = path_constants(problem, slopes, [unit.output for unit in units] if inside else [])
    found = {0: torch.ones(len(x), dtype=torch.float64, device=x.device)}
    for unit in units:
        last, read = unit is units[-1], [found[source] for source in unit.sources]
        L = composed(unit, read, _growth(unit.block, slopes.get(unit.hidden), problem, last), problem, last)
        L = torch.minimum(L, everywhere[unit.output])
        found[unit.output] = torch.minimum(L, by_paths[unit.output]) if unit.output in by_paths else L
    return found


def _growth(block: AbstractBlock, slopes: Slopes | None, problem: Problem, last: bool) -> Tensor:
    if isinstance(block, Block) and slopes is not None:
        return last_growth(block, slopes, problem) if last else block_growth(block, slopes, problem)
    return block_product(block, problem, problem.norms, last)
