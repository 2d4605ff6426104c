r"""Lipschitz constants over a ball: both points in it, slopes from the interval that each neuron can reach.

Two kinds of bounds, and the least counts: the product of the units' constants over the balls that the ball becomes on
its way (`drift.py`), summed over what a unit reads, and the gradients at x with a bound on how far they drift, which is
exact as r goes to 0 for a scalar, for q = inf and for p = q = 2.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.drift import (
    Covectors,
    Reached,
    carry_ball,
    carry_gradients,
    covector_size,
)
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import composed
from curvcert.bounds.types import Ball, Bound, LayerTerm
from curvcert.errors import InvalidInput
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.rounding import gamma, inflate, norm_upper_bound_of_vectors


def local_bound(problem: Problem) -> Bound:
    """Bound the Lipschitz constants over balls about a batch of points."""
    if not isinstance(problem.scope, Ball):
        raise InvalidInput("The local bound needs a ball: pass at=x and radius=r.")
    reached = carry_ball(problem, problem.scope)
    constants = constants_over_ball(problem, reached)
    total = constants[reached[-1].unit.output]
    per_layer = [LayerTerm(part.block.name, "prefix", constants[part.unit.output], "local") for part in reached]
    for drifted in _drifted_bounds(problem, reached):
        total = torch.minimum(total, drifted)
    value = problem.shaped(inflate(total, gamma(64)))
    return problem.norms.result(
        value, problem.p, problem.q, problem.scope, "local", tuple(per_layer), problem.network.assumes
    )


def constants_over_ball(problem: Problem, reached: list[Reached]) -> dict[int, Tensor]:
    """Return Lipschitz constants over the ball of x -> v for every value that a unit ends in; the last final."""
    everywhere, like = value_constants(problem), reached[0].constant
    found = {0: torch.ones(len(like), dtype=like.dtype, device=like.device)}
    for part in reached:
        unit, last = part.unit, part is reached[-1]
        read = [found[source] for source in unit.sources]
        L = composed(unit, read, part.constant, problem, last)
        found[unit.output] = torch.minimum(L, everywhere[unit.output])
    return found


def _drifted_bounds(problem: Problem, reached: list[Reached]) -> Iterator[Tensor]:
    r"""Yield bounds from the gradients at the centre and their drift; none if a unit has no slopes.

    The constants :math:`L_i` of the outputs give the vector's: :math:`\|f(x) - f(y)\|_q \le \|(L_i)\|_q \|x - y\|_p`.
    """
    each = replace(problem, scalars=True)
    covectors = carry_gradients(each, reached)
    if covectors is None:
        return
    rows = _constants(covectors[0], each)
    yield rows if problem.scalars else norm_upper_bound_of_vectors(rows, problem.q, 1)
    if problem.p == problem.q == 2 and not problem.scalars:
        together = carry_gradients(problem, reached)
        if together is not None:
            yield inflate(_spectral(together[0].value.flatten(2)) + together[0].drift[:, 0], gamma(4))


def _constants(gradients: Covectors, problem: Problem) -> Tensor:
    return inflate(covector_size(gradients.value, problem) + gradients.drift, gamma(4))


def _spectral(J: Tensor) -> Tensor:
    """Bound the spectral norm of each of a batch of matrices with few rows."""
    error = gamma(J.shape[2] + 2) * inflate(J.square().sum(dim=(1, 2)), gamma(J[0].numel() + 2))
    return inflate(largest_eigenvalues_upper_bound(J @ J.mT, error).sqrt(), 0.0)
