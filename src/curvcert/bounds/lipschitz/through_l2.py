r"""Bounds by way of l2, where more methods apply and norms are exact: what the change of norms costs is paid.

.. math:: \|x\|_2 \le n^{(1/2 - 1/p)_+} \|x\|_p, \qquad \|y\|_q \le m^{(1/q - 1/2)_+} \|y\|_2

for n inputs and m outputs, so a p-ball lies in the 2-ball with its radius times the first factor.  A Lipschitz constant
takes one input, a second derivative two: each takes the first factor once.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from curvcert.bounds.lipschitz.method import AbstractMethod, Step, steps
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Ball, Bound, Global
from curvcert.rounding import UNIT_ROUNDOFF, Upper


def through_l2(methods: Iterable[AbstractMethod], problem: Problem, floor: float, order: int) -> list[Step]:
    """Return every method that applies in l2, for derivatives of that order; none where l2 is what was asked for."""
    if problem.p == 2 and (problem.q == 2 or problem.scalars):
        return []
    n, m = torch.Size(problem.network.in_shape).numel(), problem.network.outputs
    into = n ** max(0.0, 0.5 - 1.0 / problem.p) * (1 + 16 * UNIT_ROUNDOFF)
    out = 1.0 if problem.scalars else m ** max(0.0, 1.0 / problem.q - 0.5) * (1 + 16 * UNIT_ROUNDOFF)
    factor, scope = into**order * out * (1 + 4 * UNIT_ROUNDOFF), problem.scope
    wider = Ball(scope.x, (Upper(scope.r) * into).bound) if isinstance(scope, Ball) else scope

    def carried(work: Callable[[], Bound | None]) -> Bound | None:
        bound = work()
        return bound and replace(
            bound,
            value=(Upper(bound.value) * factor).bound,
            p=problem.p,
            q=problem.q,
            scope=bound.scope if isinstance(bound.scope, Global) else scope,
            method=f"{bound.method} through l2",
            methods=(*bound.methods, "through l2"),
        )

    in_l2 = steps(methods, replace(problem, p=2.0, q=2.0, scope=wider), floor)
    return [(f"{name} through l2", partial(carried, work)) for name, work in in_l2]
