"""`curvcert.lipschitz`: one entry to every Lipschitz bound."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from torch import Tensor

from curvcert.bounds.lipschitz.anchored import anchored_bound
from curvcert.bounds.lipschitz.liplt import liplt_bound
from curvcert.bounds.lipschitz.lipsdp import lipsdp_bound, reason_to_skip_search
from curvcert.bounds.lipschitz.lipsdp_recursion import lipsdp_recursion_bound, reason_to_skip_lipsdp
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.method import AbstractLipschitzMethod, applying, chosen, least, run, steps, within
from curvcert.bounds.lipschitz.problem import Pair, Problem, make_problem
from curvcert.bounds.lipschitz.product import product_bound
from curvcert.bounds.lipschitz.through_l2 import through_l2
from curvcert.bounds.types import Anchor, Ball, Bound
from curvcert.budget import Budget, budget_of
from curvcert.network import Network
from curvcert.rounding import TINY


@final
@dataclass(frozen=True)
class Product(AbstractLipschitzMethod):
    """The product of the blocks' constants."""

    name: str = "product"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply always."""
        return None

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return product_bound(problem, problem.norms)


@final
@dataclass(frozen=True)
class LipLT(AbstractLipschitzMethod):
    """The loop transformation, unrolled."""

    name: str = "liplt"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply always."""
        return None

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return liplt_bound(problem, problem.norms)


@final
@dataclass(frozen=True)
class LipSDPRecursion(AbstractLipschitzMethod):
    """A feasible point of LipSDP, layer by layer."""

    name: str = "lipsdp-recursion"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to feed-forward networks in l2."""
        return reason_to_skip_lipsdp(problem)

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return lipsdp_recursion_bound(problem)


@final
@dataclass(frozen=True)
class LipSDP(AbstractLipschitzMethod):
    """LipSDP with a multiplier for each neuron, near its optimum.

    `most_work` is how much it may take on: the number of problems times the cube of their size.  There is one problem
    for each scalar output and sample, or for each sample where the outputs are one vector.
    """

    most_work: float = math.inf
    name: str = "lipsdp"
    checkable: bool = False

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply in l2 to activations of any slopes, in any scope."""
        return reason_to_skip_search(problem, self.most_work)

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return lipsdp_bound(problem)


@final
@dataclass(frozen=True)
class Anchored(AbstractLipschitzMethod):
    """Slopes as seen from a point."""

    name: str = "anchored"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply where the point is fixed: an anchored bound never stands for a ball."""
        return None if isinstance(problem.scope, Anchor) else "anchored: needs at=x and no radius"

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return anchored_bound(problem)


@final
@dataclass(frozen=True)
class Local(AbstractLipschitzMethod):
    """Slopes over a ball."""

    name: str = "local"

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to a ball."""
        return None if isinstance(problem.scope, Ball) else "local: needs at=x and radius=r"

    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""
        return local_bound(problem)


LIPSCHITZ_METHODS: dict[str, AbstractLipschitzMethod] = {
    method.name: method for method in (Product(), LipLT(), LipSDPRecursion(), LipSDP(), Anchored(), Local())
}


AUTO_METHODS: dict[str, AbstractLipschitzMethod] = {**LIPSCHITZ_METHODS, "lipsdp": LipSDP(most_work=5e7)}
"""What "auto" tries: LipSDP up to a problem of some 360 neurons and inputs, or 45 of them of 100, a second or two."""


def lipschitz(
    network: Network,
    p: float = 2,
    q: float | None = None,
    method: str | AbstractLipschitzMethod = "auto",
    at: Tensor | None = None,
    radius: float | Tensor | None = None,
    pair: Pair = None,
    logit: int | None = None,
    budget: float | Budget | None = None,
) -> Bound:
    r"""Bound a network's Lipschitz constant: :math:`\|f(x) - f(y)\|_q \le L \|x - y\|_p`.

    Args:
        network: what `curvcert.trace` returned.
        p: norm of the inputs, 1 <= p <= inf.
        q: norm of the outputs; p by default.
        method: "product", "liplt", "lipsdp-recursion", "lipsdp", "anchored", "local", a method object, or "auto", the
            least of all that apply, in p -> q or by way of l2; `Bound.method` tells which won, `Bound.skipped`
            which did not apply.
        at: a batch of points: *anchored*, one point fixed there and the other free, one value per sample.
        radius: with `at`, *local*: both points in the closed ball of that radius.
        pair: (i, j) for the scalar f_i - f_j, or "all" for all of them in the order of
            `itertools.combinations`.
        logit: i for the scalar f_i.
        budget: seconds.  The cheapest method of "auto" is always run, each next one while time is left; `Bound.skipped`
            names those that were left out.

    >>> import torch
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> net = trace(nn.Linear(2, 1, bias=False).requires_grad_(False).eval(), torch.zeros(1, 2))
    >>> weight = net.blocks[0].H.as_matrix()
    >>> bound = lipschitz(net)
    >>> 0 <= float(bound) - float(torch.linalg.vector_norm(weight)) < 1e-9
    True
    """
    limit = budget_of(budget)
    return lipschitz_of(make_problem(network, p, q, at, radius, pair, logit), method, budget=limit)


def lipschitz_of(
    problem: Problem,
    method: str | AbstractLipschitzMethod = "auto",
    among: Collection[AbstractLipschitzMethod] = tuple(AUTO_METHODS.values()),
    budget: Budget | None = None,
) -> Bound:
    """Answer a question that was made before: norms that it knows from others are not computed again.

    `among` are the methods of which "auto" is the best, `budget` cuts their list short.
    """
    among = applying(among, problem, Local.name)
    one = chosen(method, LIPSCHITZ_METHODS, AbstractLipschitzMethod)
    if one is not None:
        return run(one, problem, TINY)
    plan = [*steps(among, problem, TINY), *through_l2(among, problem, TINY, order=1)]
    bounds, cut = within(budget, plan)
    return least(bounds, among, problem, cut)
