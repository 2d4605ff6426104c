"""Methods as objects: how one is chosen, run and checked, and how the least of several is taken.

Shared by Lipschitz and curvature bounds.  The runner does not believe a method: what it returns must be a
`Bound`, in the norms and the scope that were asked for.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from curvcert.activations import power
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.underflow import require_room_for_products
from curvcert.bounds.types import Ball, Bound, Global
from curvcert.budget import Budget, OutOfTime
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedModule, meant
from curvcert.network import Network
from curvcert.network.nodes import ElementwiseNode
from curvcert.progress import at_work


class AbstractMethod(ABC):
    """A way to bound a constant of a network: `checkable` says whether the independent checker reaches it."""

    name: str
    checkable: bool = True

    @abstractmethod
    def reason_to_skip(self, problem: Problem) -> str | None:
        """Say why the method does not apply to the problem, or None."""

    def can_win(self, problem: Problem) -> bool:
        """Whether "auto" runs it, given that it applies: not where another method that applies is never above it."""
        return True

    @abstractmethod
    def bound(self, problem: Problem) -> Bound:
        """Bound the constant."""


class AbstractLipschitzMethod(AbstractMethod):
    """A way to bound a Lipschitz constant."""


class AbstractCurvatureMethod(AbstractMethod):
    """A way to bound the Lipschitz constant of a network's Jacobian."""


def without_constants(network: Network) -> UnsupportedModule:
    """Return the error for a question about all inputs, where an activation, or a product, has no largest slope."""
    nodes = (node for node in network.nodes if isinstance(node, ElementwiseNode))
    node = next(node for node in nodes if not node.activation.is_bounded)
    what = "A product of values without ends" if node.activation.name == "power(2)" else node.activation.name
    return UnsupportedModule(
        f"{what} has no largest slope, so that no constant over all inputs is known (at {node.name!r}). Ask for one "
        "over a ball: at=x, radius=r."
    )


_LOG = logging.getLogger(__name__)

_OVER_ALL_INPUTS = (
    "the network multiplies values, each of which counts with all that it can ever be: a constant over a ball (at=x, "
    "radius=r) may be smaller by orders of magnitude."
)


def notices(problem: Problem) -> tuple[str, ...]:
    """Return what to know of a constant before use."""
    nodes = (node for node in problem.network.nodes if isinstance(node, ElementwiseNode))
    multiplies = any(node.activation.name == power(2.0).name for node in nodes)
    return (_OVER_ALL_INPUTS,) if multiplies and not isinstance(problem.scope, Ball) else ()


M = TypeVar("M", bound=AbstractMethod)


def chosen(method: str | M, known: Mapping[str, M], kind: type) -> M | None:
    """Return the method that is meant: an object of that kind, one known by its name, or None for "auto"."""
    if not isinstance(method, str) and isinstance(method, kind):
        return method
    if isinstance(method, str) and method == "auto":
        return None
    if not isinstance(method, str) or method not in known:
        names = ("auto", *known)
        raise InvalidInput(f"Unknown method {method!r}. Choose one of: {', '.join(names)}.{meant(str(method), names)}")
    return known[method]


def run(method: AbstractMethod, problem: Problem, floor: float) -> Bound:
    """Run one method and check its result; a global bound serves every sample of a narrower scope, one from both sides
    either of them.

    Values are raised to `floor`: a product below the smallest float would round to 0, which is no upper bound.  A
    network in which that could happen on the way is refused.
    """
    reason = method.reason_to_skip(problem)
    if reason is not None:
        raise InvalidInput(f"The method does not apply: {reason}. Use method='auto' for the best that does.")
    require_room_for_products(problem)
    started = time.monotonic()
    bound = method.bound(problem)
    _LOG.debug("%s: %r in %.2f s", method.name, bound, time.monotonic() - started)
    _require_what_was_asked(bound, problem)
    value = bound.value.clamp(min=floor)
    value = problem.over_samples(value) if isinstance(bound.scope, Global) else value
    return replace(bound, value=value, side=problem.side, notes=notices(problem))


def _require_what_was_asked(bound: object, problem: Problem) -> None:
    if not isinstance(bound, Bound):
        raise SoundnessError(f"A method must return a Bound, got {type(bound).__name__}.")
    if (bound.p, bound.q) != (problem.p, problem.q):
        raise SoundnessError(
            f"The method bounded l{bound.p:g} -> l{bound.q:g}, asked for was l{problem.p:g} -> l{problem.q:g}."
        )
    if bound.side not in ("both", problem.side):
        raise SoundnessError(f"The method's bound holds from {bound.side}, asked for was {problem.side}.")
    if not isinstance(bound.scope, Global) and bound.scope is not problem.scope:
        raise SoundnessError(
            f"The method's bound holds for {type(bound.scope).__name__}, asked for was "
            f"{type(problem.scope).__name__}. Only a global bound serves another scope."
        )


def applying(methods: Iterable[M], problem: Problem, local: str) -> list[M]:
    """Return the methods to choose from: where an activation has no largest slope, only what looks at a ball alone.

    Raises:
        UnsupportedModule: if the question is not about a ball.
    """
    if problem.network.has_constants:
        return list(methods)
    if not isinstance(problem.scope, Ball):
        raise without_constants(problem.network)
    return [method for method in methods if method.name == local]


Step = tuple[str, Callable[[], Bound | None]]
"""The name of a method, and how it is run: None where it cannot be the best."""


def steps(methods: Iterable[AbstractMethod], problem: Problem, floor: float) -> list[Step]:
    """Return a step for every method that applies, in the table's order: the cheapest first."""
    applying = [method for method in methods if method.reason_to_skip(problem) is None]
    return [(method.name, partial(_run_if_it_can_win, method, problem, floor)) for method in applying]


def _run_if_it_can_win(method: AbstractMethod, problem: Problem, floor: float) -> Bound | None:
    return run(method, problem, floor) if method.can_win(problem) else None


def within(budget: Budget | None, plan: Sequence[Step]) -> tuple[list[Bound], tuple[str, ...]]:
    """Run a plan: its first step to the end, each next one while time is left; and say what was left out."""
    found, cut = list[Bound](), list[str]()
    for k, (name, work) in enumerate(plan):
        try:
            with at_work(name), nullcontext() if budget is None or k == 0 else budget.limits():
                bound = work()
                found += [] if bound is None else [bound]
        except OutOfTime:
            if budget is None or k == 0:
                raise  # a budget around this one is spent
            cut.append(f"{name}: the budget of {budget.seconds:g} s was spent")
    return found, tuple(cut)


def least(bounds: list[Bound], methods: Iterable[AbstractMethod], problem: Problem, cut: Iterable[str] = ()) -> Bound:
    """Return the least of several bounds, sample by sample and pair by pair.

    `method` and `methods` name the winners, `per_layer` is that of the most frequent one, and `skipped` says which
    methods did not apply, and why, and which were cut short.
    """
    values = torch.stack([bound.value for bound in bounds])
    counts = torch.bincount(values.argmin(dim=0).flatten(), minlength=len(bounds)).tolist()
    winners = [bound for bound, count in zip(bounds, counts, strict=True) if count]
    best = bounds[counts.index(max(counts))]
    reasons = (method.reason_to_skip(problem) for method in methods)
    skipped = tuple(reason for reason in reasons if reason is not None)
    scope = Global() if all(isinstance(b.scope, Global) for b in bounds) else problem.scope
    return replace(
        best,
        value=values.amin(dim=0),
        scope=scope,
        method=" / ".join(bound.method for bound in winners),
        methods=tuple(dict.fromkeys(name for bound in winners for name in bound.methods)),
        skipped=(*skipped, *cut),
    )
