"""`curvcert.curvature`: one entry to every curvature bound."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.curvature.anchored import anchored_curvature_bound
from curvcert.bounds.curvature.compositional import compositional_bound, glimpsed_recursion
from curvcert.bounds.curvature.local import local_curvature_bound
from curvcert.bounds.curvature.singla2020 import crc_bound, reason_to_skip_crc
from curvcert.bounds.curvature.unrolled import decided_by_sides, is_never_above_the_recursion, unrolled_bound
from curvcert.bounds.lipschitz.growth import Growth, quick
from curvcert.bounds.lipschitz.method import AbstractCurvatureMethod, applying, chosen, least, run, steps, within
from curvcert.bounds.lipschitz.problem import Pair, Problem, make_problem
from curvcert.bounds.lipschitz.through_l2 import through_l2
from curvcert.bounds.types import Anchor, Ball, Bound, Side
from curvcert.budget import Budget, budget_of
from curvcert.network import Network
from curvcert.network.nodes import ElementwiseNode
from curvcert.rounding import TINY


@final
@dataclass(frozen=True)
class Compositional(AbstractCurvatureMethod):
    """The paper's recursion; `block_bounds` names the block bounds to choose from, all by default.

    Without `paths` the Lipschitz constants in it are products.
    """

    block_bounds: Sequence[str] | None = None
    paths: bool = True
    name: str = "compositional"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply always."""
        return None

    def can_win(self, problem: Problem) -> bool:
        """Whether it may be below the unrolled bound: not where its own steps, seen from below, add up to more."""
        if is_never_above_the_recursion(problem):
            return False
        glimpsed = glimpsed_recursion(problem)
        return glimpsed is None or bool((problem.shaped(glimpsed) < unrolled_bound(problem).value).any())

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        norms, prefixes = problem.norms, None
        if not self.paths:
            norms = problem.once("quick norms", lambda: quick(problem.norms))
            prefixes = Growth(problem, problem.norms, paths=False)
        bound = compositional_bound(problem, norms, self.block_bounds, prefixes)
        return replace(bound, methods=(self.name,))


@final
@dataclass(frozen=True)
class Unrolled(AbstractCurvatureMethod):
    """One term per layer, weighed by the gradient that reaches it."""

    name: str = "unrolled"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply always."""
        return None

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return unrolled_bound(problem)


@final
@dataclass(frozen=True)
class CRC(AbstractCurvatureMethod):
    """The bound of Singla and Feizi (2020), the rival."""

    name: str = "crc"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to scalar outputs of feed-forward networks in l2."""
        return reason_to_skip_crc(problem)

    def can_win(self, problem: Problem) -> bool:
        """Whether it may be below the unrolled bound: with one hidden layer it has eigenvalues of its own."""
        return len(problem.network.blocks) == 1 or not is_never_above_the_recursion(problem)

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return crc_bound(problem)


@final
@dataclass(frozen=True)
class AnchoredCurvature(AbstractCurvatureMethod):
    """Constants as seen from a point."""

    name: str = "anchored"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply where the point is fixed: an anchored bound never stands for a ball."""
        return None if isinstance(problem.scope, Anchor) else "anchored: needs at=x and no radius"

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        # Of differences of gradients from x on neither side says more than both do: the global constants may.
        both = problem if problem.side == "both" else problem.seen_from("both")
        bound = anchored_curvature_bound(both)
        crc = CRC()
        everywhere = [crc_bound(problem)] if crc.reason_to_skip(problem) is None and crc.can_win(problem) else []
        # Those of scalars from both sides are in it, term by term; not so the larger of the two sides' sums.
        in_it = both is problem and problem.scalars and not decided_by_sides(problem)
        everywhere += [] if in_it else [unrolled_bound(problem)]
        everywhere += [] if both is problem else [compositional_bound(problem, problem.norms)]
        value = torch.stack([bound.value, *(one.value.expand_as(bound.value) for one in everywhere)]).amin(dim=0)
        return replace(bound, value=value, side=problem.side)


@final
@dataclass(frozen=True)
class LocalCurvature(AbstractCurvatureMethod):
    """Ranges over a ball."""

    name: str = "local"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to a ball."""
        return None if isinstance(problem.scope, Ball) else "local: needs at=x and radius=r"

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return local_curvature_bound(problem)


CURVATURE_METHODS: dict[str, AbstractCurvatureMethod] = {
    method.name: method for method in (Compositional(), Unrolled(), CRC(), AnchoredCurvature(), LocalCurvature())
}


QUICKEST = Compositional(("product",), paths=False)
"""What is always done: it asks for the norms of single maps alone."""

MOST_WORK = 5e7
"""What a search for LipSDP's multipliers may take on: a second or two, see `LipSDP.most_work`."""


def curvature(
    network: Network,
    p: float = 2,
    q: float | None = None,
    method: str | AbstractCurvatureMethod = "auto",
    at: Tensor | None = None,
    radius: float | Tensor | None = None,
    pair: Pair = None,
    logit: int | None = None,
    side: Side = "both",
    budget: float | Budget | None = None,
) -> Bound:
    r"""Bound the Lipschitz constant of a network's Jacobian: :math:`\|Df(x) - Df(y)\|_{p \to q} \le K \|x - y\|_p`.

    Where f is twice differentiable this bounds its second derivative.  For a scalar (a pair or a logit) the
    left-hand side is the dual norm of the difference of gradients.

    Args:
        network: what `curvcert.trace` returned; every activation needs a Lipschitz derivative.
        p: norm of the inputs, 1 <= p <= inf.
        q: norm of the outputs; p by default.
        method: "compositional", "unrolled", "crc", "anchored", "local", a method object (such as
            `Compositional(["sdp"])`), or "auto", the least of all that apply.
        at: a batch of points: *anchored*, one point fixed there and the other free, one value per sample.
        radius: with `at`, *local*: both points in the closed ball of that radius.
        pair: (i, j) for the scalar f_i - f_j, or "all" for all of them in the order of
            `itertools.combinations`.
        logit: i for the scalar f_i.
        side: of a scalar, "above" bounds :math:`(\nabla f(x) - \nabla f(y)) \cdot (x - y) \le K \|x - y\|_p^2`, in l2
            the largest eigenvalue of its second derivative; "below" does so of -f; "both" is all of the above.
        budget: seconds.  A bound by the norms of single maps is always found first, each method of "auto" while time is
            left; `Bound.skipped` names those that were left out.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).eval()
    >>> _ = nn.init.constant_(model[0].weight, 3.0)
    >>> bound = curvature(trace(model, torch.zeros(1, 1)))
    >>> round(float(bound), 9) == round(9 * 4 / 27**0.5, 9)
    True
    """
    limit, problem = budget_of(budget), make_problem(network, p, q, at, radius, pair, logit, side)
    return curvature_of(replace(problem, most_work=MOST_WORK), method, limit)


def curvature_of(
    problem: Problem, method: str | AbstractCurvatureMethod = "auto", budget: Budget | None = None
) -> Bound:
    """Answer a question that was made before: norms that it knows from others are not computed again."""
    problem.network.require_smooth()
    methods = applying(CURVATURE_METHODS.values(), problem, LocalCurvature.name)
    # An affine map's curvature is 0 exactly; any other 0 would be an underflow.
    floor = TINY if any(isinstance(node, ElementwiseNode) for node in problem.network.nodes) else 0.0
    one = chosen(method, CURVATURE_METHODS, AbstractCurvatureMethod)
    if one is not None:
        return run(one, problem, floor)
    plan = [*steps(methods, problem, floor), *through_l2(methods, problem, floor, order=2)]
    if budget is not None and problem.network.has_constants:
        plan.insert(0, (QUICKEST.name, partial(run, QUICKEST, problem, floor)))
    bounds, cut = within(budget, plan)
    return least(bounds, methods, problem, cut)
