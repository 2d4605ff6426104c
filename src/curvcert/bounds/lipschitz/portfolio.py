"""`curvcert.lipschitz`: one entry to every Lipschitz bound."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.anchored import anchored_bound
from curvcert.bounds.lipschitz.liplt import liplt_bound
from curvcert.bounds.lipschitz.lipsdp_recursion import lipsdp_recursion_bound, reason_to_skip_lipsdp
from curvcert.bounds.lipschitz.local import local_bound
from curvcert.bounds.lipschitz.problem import Pair, Problem, make_problem
from curvcert.bounds.lipschitz.product import product_bound
from curvcert.bounds.types import Anchor, Ball, Bound, Global
from curvcert.errors import InvalidInput, SoundnessError
from curvcert.network import Network
from curvcert.rounding import TINY, UNIT_ROUNDOFF, inflate


class AbstractLipschitzMethod(ABC):
    """A way to bound a Lipschitz constant."""

    name: str

    @abstractmethod
    def reason_to_skip(self, problem: Problem) -> str | None:
        """Say why the method does not apply to the problem, or None."""

    @abstractmethod
    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""


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
    method.name: method for method in (Product(), LipLT(), LipSDPRecursion(), Anchored(), Local())
}


def lipschitz(
    network: Network,
    p: float = 2,
    q: float | None = None,
    method: str | AbstractLipschitzMethod = "auto",
    at: Tensor | None = None,
    radius: float | Tensor | None = None,
    pair: Pair = None,
    logit: int | None = None,
) -> Bound:
    r"""Bound a network's Lipschitz constant: :math:`\|f(x) - f(y)\|_q \le L \|x - y\|_p`.

    Args:
        network: what `curvcert.trace` returned.
        p: norm of the inputs, 1 <= p <= inf.
        q: norm of the outputs; p by default.
        method: "product", "liplt", "lipsdp-recursion", "anchored", "local", a method object, or "auto", the
            least of all that apply, in p -> q or by way of l2; `Bound.method` tells which won, `Bound.skipped`
            which did not apply.
        at: a batch of points: *anchored*, one point fixed there and the other free, one value a sample.
        radius: with `at`, *local*: both points in the closed ball of that radius.
        pair: (i, j) for the scalar f_i - f_j, or "all" for all of them in the order of
            `itertools.combinations`.
        logit: i for the scalar f_i.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> net = trace(nn.Linear(2, 1, bias=False).requires_grad_(False).eval(), torch.zeros(1, 2))
    >>> weight = net.blocks[0].H.as_matrix()
    >>> bound = lipschitz(net)
    >>> 0 <= float(bound) - float(torch.linalg.vector_norm(weight)) < 1e-9
    True
    """
    problem = make_problem(network, p, q, at, radius, pair, logit)
    if isinstance(method, AbstractLipschitzMethod):
        return _apply(method, problem)
    if isinstance(method, str) and method == "auto":
        return _least(problem)
    if not isinstance(method, str) or method not in LIPSCHITZ_METHODS:
        raise InvalidInput(f"Unknown method {method!r}. Choose one of: auto, {', '.join(LIPSCHITZ_METHODS)}.")
    return _apply(LIPSCHITZ_METHODS[method], problem)


def _apply(method: AbstractLipschitzMethod, problem: Problem) -> Bound:
    """Run one method; a global bound serves every sample of a narrower scope."""
    reason = method.reason_to_skip(problem)
    if reason is not None:
        raise InvalidInput(f"The method does not apply: {reason}. Use method='auto' for the best that does.")
    bound = _rechecked(method.bound(problem), problem)
    if isinstance(bound.scope, Global):
        return replace(bound, value=problem.over_samples(bound.value))
    return bound


def _rechecked(bound: Bound, problem: Problem) -> Bound:
    """Raise unless a method's result is a bound for what was asked: its type, its norms and its scope."""
    if not isinstance(bound, Bound):
        raise SoundnessError(f"A Lipschitz method must return a Bound, got {type(bound).__name__}.")
    if (bound.p, bound.q) != (problem.p, problem.q):
        raise SoundnessError(
            f"The method bounded l{bound.p:g} -> l{bound.q:g}, asked for was l{problem.p:g} -> l{problem.q:g}."
        )
    if not isinstance(bound.scope, Global) and bound.scope is not problem.scope:
        raise SoundnessError(
            f"The method's bound holds for {type(bound.scope).__name__}, asked for was "
            f"{type(problem.scope).__name__}. Only a global bound serves another scope."
        )
    # A product below the smallest float would round to 0, and 0 is no upper bound on it.
    return replace(bound, value=bound.value.clamp(min=TINY))


def _least(problem: Problem) -> Bound:
    """Return the least bound, sample by sample and pair by pair."""
    reasons = [method.reason_to_skip(problem) for method in LIPSCHITZ_METHODS.values()]
    bounds = _all_that_apply(problem)
    if problem.p != 2 or (problem.q != 2 and not problem.scalars):
        bounds += _through_l2(problem)
    values = torch.stack([bound.value for bound in bounds])
    winners = values.argmin(dim=0).flatten()
    counts = torch.bincount(winners, minlength=len(bounds)).tolist()
    names = [bound.method for bound, count in zip(bounds, counts, strict=True) if count]
    best = bounds[counts.index(max(counts))]
    skipped = tuple(reason for reason in reasons if reason is not None)
    scope = Global() if all(isinstance(b.scope, Global) for b in bounds) else problem.scope
    return replace(best, value=values.amin(dim=0), scope=scope, method=" / ".join(names), skipped=skipped)


def _all_that_apply(problem: Problem) -> list[Bound]:
    methods = LIPSCHITZ_METHODS.values()
    return [_apply(method, problem) for method in methods if method.reason_to_skip(problem) is None]


def _through_l2(problem: Problem) -> list[Bound]:
    r"""Bound in l2, where more methods apply and norms are exact, and pay for the change of norms.

    .. math:: \|x\|_2 \le n^{(1/2 - 1/p)_+} \|x\|_p, \qquad \|y\|_q \le m^{(1/q - 1/2)_+} \|y\|_2

    for n inputs and m outputs; a p-ball lies in the 2-ball with its radius times the first factor.
    """
    n, m = torch.Size(problem.network.in_shape).numel(), problem.network.outputs
    into = n ** max(0.0, 0.5 - 1.0 / problem.p) * (1 + 16 * UNIT_ROUNDOFF)
    out = 1.0 if problem.scalars else m ** max(0.0, 1.0 / problem.q - 0.5) * (1 + 16 * UNIT_ROUNDOFF)
    scope = problem.scope
    wider = Ball(scope.x, inflate(into * scope.r, 0.0)) if isinstance(scope, Ball) else scope
    return [
        replace(
            bound,
            value=inflate(into * out * bound.value, 0.0),
            p=problem.p,
            q=problem.q,
            scope=bound.scope if isinstance(bound.scope, Global) else scope,
            method=f"{bound.method} through l2",
        )
        for bound in _all_that_apply(replace(problem, p=2.0, q=2.0, scope=wider))
    ]
