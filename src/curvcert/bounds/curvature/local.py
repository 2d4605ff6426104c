r"""Curvature of scalar outputs over a ball: the sum of what the units add to it there (`propagation/hessians.py`).

No unit's term exceeds that of the unrolled bound, and no gradient a global bound on it.
"""

import math

import torch
from torch import Tensor

from curvcert.bounds.curvature.gradients import GradientBound, gradient_bounds
from curvcert.bounds.curvature.unrolled import unrolled_terms
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.batching import in_pieces
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.propagation.analysis import JACOBIAN_ROWS, OverBalls
from curvcert.propagation.hessians import curvature_term, terms_of
from curvcert.rounding import gamma, inflate


def local_curvature_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs over balls about a batch of points."""
    problem.network.require_smooth()
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    everywhere = {hidden: term.value for hidden, term in unrolled_terms(problem).items()}
    gradients = gradient_bounds(problem, problem.norms)
    return in_pieces(lambda part: _bound(part, everywhere, gradients), problem)


def _bound(problem: Problem, everywhere: dict[int, Tensor], gradients: dict[int, GradientBound]) -> Bound:
    balls = over_balls(problem)
    covectors = balls.gradients_of()
    if covectors is None:
        raise InvalidInput("The local curvature bound needs a derivative of every block.")
    prefixes = _prefixes(problem, balls)
    total, per_layer = torch.zeros_like(covectors[0].drift), []
    for term in terms_of(problem.network):
        behind, most = covectors[term.unit.output], gradients[term.hidden].entries
        value = torch.minimum(curvature_term(balls, term, prefixes.__getitem__, behind, most), everywhere[term.hidden])
        total = total + value
        per_layer.append(LayerTerm(term.block.name, "term", value, "local"))
    K, network = problem.shaped(inflate(total, gamma(8 * len(problem.network.units)))), problem.network
    return problem.norms.result(K, problem.p, problem.q, problem.scope, "local", tuple(per_layer), network.assumes)


def _prefixes(problem: Problem, balls: OverBalls) -> dict[int, Tensor]:
    """Return Lipschitz constants over the balls of x -> v, for every value that a unit may read.

    A network that ends in one value may be simpler than all of what leads there: affine maps that no other value needs
    are one.  Jacobians know that already, and in a chain there are none.
    """
    found, network, p = {value: balls.prefix(value) for value in balls.prefixes}, problem.network, problem.p
    if balls.jacobians or network.is_chain:
        return found
    for value in found:
        if value > 0 and math.prod(network.nodes[value].shape) <= JACOBIAN_ROWS:
            alone = local_bound(Problem(network.up_to(value), p, p, problem.scope, norms=problem.norms))
            found[value] = torch.minimum(found[value], alone.value)
    return found
