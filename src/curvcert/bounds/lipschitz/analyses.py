"""What problems share at points and over balls: the one analysis of their network (`propagation/analysis.py`)."""

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.block_constants import block_product, known
from curvcert.bounds.lipschitz.liplt import value_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Ball
from curvcert.propagation.analysis import AtPoints, OverBalls, UnitFacts


def unit_facts(problem: Problem) -> UnitFacts:
    """Return what is known of a problem's network over all inputs, found once."""

    def constants() -> dict[int, Tensor]:
        units = problem.network.units[:-1]
        return problem.once(
            "constants of units",
            lambda: {unit.output: known(block_product(unit.block, problem, problem.norms, False)) for unit in units},
        )

    return problem.once(
        "unit facts",
        lambda: UnitFacts(problem.network, problem.p, problem.norms, constants, lambda: value_constants(problem)),
    )


def at_points(problem: Problem, x: Tensor) -> AtPoints:
    """Return what holds at a batch of points."""
    return unit_facts(problem).at(x)


def at_anchor(problem: Problem) -> AtPoints:
    """Return what holds at the points of an anchored or local scope."""
    return AtPoints(unit_facts(problem), problem.evaluation)


def over_balls(problem: Problem) -> OverBalls:
    """Return what holds over the balls of a local scope, or at the points of an anchored one, as balls of radius 0."""
    x = problem.anchor
    radius = problem.scope.r if isinstance(problem.scope, Ball) else torch.zeros(len(x), dtype=x.dtype, device=x.device)
    return OverBalls(unit_facts(problem), problem.evaluation, radius)
