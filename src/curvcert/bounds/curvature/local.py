r"""Curvature over a ball: of a scalar, the sum of what the units add to it there (`propagation/hessians.py`).

No unit's term exceeds that of the unrolled bound, and no gradient a global bound on it.  The constants :math:`K_i` of
the outputs give the vector's: :math:`\|(Df(x) - Df(y)) v\|_q \le \|(K_i)\|_q \|x - y\|_p \|v\|_p`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.bounds.curvature.gradients import GradientBound, gradient_bounds
from curvcert.bounds.curvature.unrolled import bends_unevenly, unrolled_terms
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.batching import in_pieces
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import SIDES, Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.propagation.analysis import JACOBIAN_ROWS, OverBalls
from curvcert.propagation.gradient_intervals import Interval
from curvcert.propagation.hessians import curvature_term
from curvcert.rounding import norm_upper_bound_of_vectors, total


def local_curvature_bound(problem: Problem) -> Bound:
    """Bound the curvature over balls about a batch of points."""
    problem.network.require_smooth()
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    if not problem.scalars:
        each = local_curvature_bound(replace(problem, scalars=True))
        return replace(each, value=norm_upper_bound_of_vectors(each.value, problem.q, 1))
    bound = _from_side(problem)
    uneven = not problem.network.has_constants or bends_unevenly(problem)
    if problem.side != "both" or problem.p != 2 or not uneven:
        return bound
    # In l2 the norm of a second derivative is the larger of its two sides.
    sides = [_from_side(replace(problem, side=side)).value for side in SIDES[1:]]
    return replace(bound, value=torch.minimum(bound.value, torch.maximum(*sides)))


def _from_side(problem: Problem) -> Bound:
    everywhere: dict[int, Tensor] = {}
    gradients: dict[int, GradientBound] = {}
    if problem.network.has_constants:
        everywhere = {hidden: term.value for hidden, term in unrolled_terms(problem).items()}
        gradients = gradient_bounds(problem, problem.norms)
    return in_pieces(lambda part: _bound(part, everywhere, gradients), problem)


def _bound(problem: Problem, everywhere: dict[int, Tensor], gradients: dict[int, GradientBound]) -> Bound:
    balls = over_balls(problem)
    covectors = balls.gradients_of()
    if covectors is None:
        raise InvalidInput("The local curvature bound needs a derivative of every block.")
    prefixes = _prefixes(problem, balls)
    terms, per_layer = [torch.zeros_like(covectors[0].drift)], []
    inf = torch.full((), torch.inf).to(terms[0])
    for unit in problem.network.activated:
        known, term = gradients.get(unit.hidden), everywhere.get(unit.hidden, inf)
        most = Interval(-inf, inf) if known is None else known.interval
        here = curvature_term(balls, unit, prefixes.__getitem__, covectors[unit.output], most, problem.side)
        value = torch.minimum(here, term)
        terms.append(value)
        per_layer.append(LayerTerm(unit.block.name, "term", value, "local"))
    K, network = problem.shaped(total(terms).bound), problem.network
    found = problem.norms.result(K, problem.p, problem.q, problem.scope, "local", tuple(per_layer), network.assumes)
    return replace(found, side=problem.side)


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
