r"""Anchored Lipschitz constants: one point fixed, the other anywhere, one value per sample.

Each activation is as steep as seen from its own value at x, so
:math:`L_h(x) = \|H\| + \|G\| \|\mathrm{diag}(L_\Phi(z)) W\|`.  The least of this recursion, of LipLT with these slopes
(`anchored_paths.py`) and of the global constant counts, prefix by prefix.
Reference: Entesari et al. (ICML 2024), appendix "Calculation of Anchored Lipschitz".
"""

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_anchor
from curvcert.bounds.lipschitz.anchored_paths import path_constants
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed, sloped_growth
from curvcert.bounds.types import Bound, LayerTerm
from curvcert.propagation.analysis import AtPoints


def anchored_bound(problem: Problem) -> Bound:
    """Bound the anchored Lipschitz constants at a batch of points."""
    network = problem.network
    constants = anchored_constants_of_values(problem, at_anchor(problem), inside=False)
    per_layer = tuple(
        LayerTerm(unit.block.name, "prefix", constants[unit.output], "anchored") for unit in network.units
    )
    value = problem.shaped(constants[network.units[-1].output])
    return problem.norms.result(value, problem.p, problem.q, problem.scope, "anchored", per_layer, network.assumes)


def anchored_constants_of_values(problem: Problem, points: AtPoints, inside: bool = True) -> dict[int, Tensor]:
    """Return anchored constants of x -> v for every value that a unit ends in, one per sample; the last final.

    Those of the last value are the best, and of the others as well with `inside`.
    """
    x, units, everywhere = problem.anchor, problem.network.units, value_constants(problem)
    by_paths = path_constants(problem, points.seen, [unit.output for unit in units] if inside else [])
    found = {0: torch.ones(len(x), dtype=torch.float64, device=x.device)}
    for unit in units:
        last, bent, read = unit is units[-1], unit.activated, [found[source] for source in unit.sources]
        if bent is not None:
            growth = sloped_growth(bent.block, points.seen[bent.hidden], problem, last)
        else:
            growth = block_product(unit.block, problem, problem.norms, last)
        L = torch.minimum(composed(unit, read, growth, problem, last), everywhere[unit.output])
        found[unit.output] = torch.minimum(L, by_paths[unit.output]) if unit.output in by_paths else L
    return found
