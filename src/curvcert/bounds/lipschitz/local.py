r"""Lipschitz constants over a ball: both points in it, slopes from the interval that each neuron can reach.

Four kinds of bounds, and the least counts: the product of the units' constants over the balls that the ball becomes on
its way, summed over what a unit reads; the gradients at x with a bound on how far they drift
(`propagation/analysis.py`), which is exact as r goes to 0 for a scalar, for q = inf and for p = q = 2; for scalars
:math:`\|\nabla f(x)\|_{p^*} + K r`, K a curvature over the ball; and constants that hold everywhere.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.batching import in_pieces
from curvcert.bounds.lipschitz.block_constants import block_product, known
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed, sloped_growth
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.propagation.analysis import AtPoints, OverBalls
from curvcert.propagation.hessians import total_curvature
from curvcert.propagation.jacobians import Jacobian
from curvcert.rounding import Upper, norm_upper_bound_of_vectors


def local_bound(problem: Problem) -> Bound:
    """Bound the Lipschitz constants over balls about a batch of points."""
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    return in_pieces(_bound, problem)


def _bound(problem: Problem) -> Bound:
    balls = over_balls(problem)
    last = balls.facts.last
    total = _composed(problem, balls)
    constants = balls.prefixes | {last.output: total}
    per_layer = tuple(
        LayerTerm(unit.block.name, "prefix", constants[unit.output], "local") for unit in problem.network.units
    )
    for by_gradients in _by_gradients(problem, balls):
        total = torch.minimum(total, by_gradients)
    value = problem.shaped(total)
    return problem.norms.result(value, problem.p, problem.q, problem.scope, "local", per_layer, problem.network.assumes)


def _composed(problem: Problem, balls: OverBalls) -> Tensor:
    """Return the constants by those of what the last unit reads; no more than those that hold everywhere."""
    last, norms = balls.facts.last, problem.norms
    growth = known(block_product(last.block, problem, norms, True))
    growth = growth.expand(len(balls.radius), *growth.shape)
    if (bent := last.activated) is not None:
        growth = torch.minimum(growth, sloped_growth(bent.block, balls.slopes[bent.hidden], problem, last=True))
    L = composed(last, [balls.prefixes[source] for source in last.sources], growth, problem, last=True)
    return torch.minimum(L, value_constants(problem)[last.output])


def _by_gradients(problem: Problem, balls: OverBalls) -> Iterator[Tensor]:
    r"""Yield bounds from the gradients at the centre and their drift; none if a unit has no slopes.

    The constants :math:`L_i` of the outputs give the vector's: :math:`\|f(x) - f(y)\|_q \le \|(L_i)\|_q \|x - y\|_p`.
    """
    covectors = balls.gradients_of()
    if covectors is None:
        return
    rows = covectors[0].largest(problem.p)
    yield rows if problem.scalars else norm_upper_bound_of_vectors(rows, problem.q, 1)
    if problem.scalars and bool((balls.radius > 0).any()) and problem.network.is_smooth:
        at_centre = AtPoints(balls.facts, balls.evaluation).gradients
        if at_centre is not None:
            change = Upper(total_curvature(balls, covectors)) * balls.radius[:, None]
            yield (change + at_centre[0].largest(problem.p)).bound
    if problem.p == problem.q == 2 and not problem.scalars:
        together = balls.gradients_of(together=True)
        if together is not None:
            yield Jacobian(together[0].value.flatten(2), together[0].drift[:, 0]).norm
