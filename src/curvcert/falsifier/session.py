"""One network of an audit: bounds, certificates and intervals are asked for, and each is attacked."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from curvcert.bounds.curvature import CURVATURE_METHODS, curvature
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.bounds.lipschitz.problem import Pair, make_problem
from curvcert.bounds.outputs import output_bounds
from curvcert.bounds.types import Anchor, Ball, Bound, Global, Scope, Side
from curvcert.boxes import BoxSides
from curvcert.certificates import certify
from curvcert.certificates.methods import CERTIFICATE_METHODS
from curvcert.errors import (
    OutOfRange,
    UnsupportedActivation,
    UnsupportedBlock,
    UnsupportedModule,
    UnsupportedNorm,
    UnsupportedOperator,
)
from curvcert.falsifier.audited import Audit, Effort
from curvcert.falsifier.bound_search import BoundKind, BoundSearch, Target
from curvcert.falsifier.findings import Findings
from curvcert.falsifier.outputs import falsify_outputs
from curvcert.falsifier.radii import falsify
from curvcert.network import Network

REFUSALS = (
    OutOfRange,
    UnsupportedActivation,
    UnsupportedBlock,
    UnsupportedModule,
    UnsupportedNorm,
    UnsupportedOperator,
)
"""The errors that decline a network.  The rest say that the question was wrong, and the audit asked it."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Asked:
    """What is asked of `lipschitz` or `curvature`, but for method and scope."""

    kind: BoundKind
    p: float = 2.0
    q: float = 2.0
    pair: Pair = None
    logit: int | None = None
    side: Side = "both"

    @property
    def label(self) -> str:
        """The kind and its side."""
        return self.kind if self.side == "both" else f"{self.kind} from {self.side}"


@dataclass(frozen=True, eq=False)
class Session:
    """One network, and the choices that are made while it is attacked.

    Attributes:
        network: the network.
        name: what counterexamples call it.
        pick: of the searches' seeds, and of how often "auto" is asked.
        effort: how much is asked.
        refusals: what was refused, by reason.
    """

    network: Network
    name: str
    pick: random.Random
    effort: Effort
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def smooth(self) -> bool:
        """Whether curvature can be asked for."""
        try:
            self.network.require_smooth()
        except (UnsupportedActivation, UnsupportedModule):
            return False
        return True

    def bounds(self, asked: Asked, x: Tensor, r: Tensor) -> Iterator[Audit]:
        """Attack the bounds of every method: globally, and anchored at points and over balls about them.

        A network without a largest slope has bounds over balls alone.
        """
        everywhere: dict[str, Bound] = {}
        if self.network.for_bounds.has_constants:
            everywhere = self._all_methods(asked, None, None)
            yield from self._attacked(asked, Global(), everywhere, {})
            yield from self._attacked(asked, Anchor(x), everywhere, {"at": x}) if len(x) else ()
        if not len(x):
            return
        yield from self._attacked(asked, Ball(x, r), everywhere, {"at": x, "radius": r})

    def _attacked(
        self, asked: Asked, scope: Scope, everywhere: dict[str, Bound], where: dict[str, Tensor]
    ) -> Iterator[Audit]:
        effort, pick = self.effort, self.pick
        # A global bound serves every scope: it is asked for once.
        bounds = everywhere | (self._all_methods(asked, **where, only_of_scope=True) if where else {})
        if pick.random() < effort.best:
            bounds = bounds | self._bounds(asked, ["auto"], **where)
        if not bounds:
            return
        target = Target.of(self.network, asked.pair, asked.logit)
        about = (self.network, asked.kind, asked.p, asked.q, target, scope)
        search = BoundSearch(*about, effort.ascents, effort.steps, pick.getrandbits(30), asked.side)
        searches = search.run()
        yield Audit(0, findings=Findings(searches={each.name: len(each.ascended.value) for each in searches}))
        for method, bound in bounds.items():
            label = f"{asked.label} {method}, {type(scope).__name__.lower()}, l{asked.p:g}"
            found = search.compare(bound.value, searches, f"{label} -> l{asked.q:g}, {self.name}")
            yield Audit(0, findings=found, cells={label: found.total})

    def _all_methods(
        self, asked: Asked, at: Tensor | None, radius: Tensor | None = None, only_of_scope: bool = False
    ) -> dict[str, Bound]:
        """Return the bounds of every method that applies; on request only of those that use the scope."""
        problem = make_problem(self.network, asked.p, asked.q, at, radius, asked.pair, asked.logit, asked.side)
        methods = LIPSCHITZ_METHODS if asked.kind == "lipschitz" else CURVATURE_METHODS
        names = [name for name, method in methods.items() if method.reason_to_skip(problem) is None]
        if only_of_scope:
            names = [name for name in names if name in ("anchored", "local")]
        return self._bounds(asked, names, at, radius)

    def _bounds(
        self, asked: Asked, names: list[str], at: Tensor | None = None, radius: Tensor | None = None
    ) -> dict[str, Bound]:
        """Return the bounds by these methods, but for those that are refused."""
        ask: Callable[..., Bound] = lipschitz if asked.kind == "lipschitz" else partial(curvature, side=asked.side)
        each = (
            (name, partial(ask, self.network, asked.p, asked.q, name, at, radius, asked.pair, asked.logit))
            for name in names
        )
        answers = ((name, self._answer(one)) for name, one in each)
        return {name: bound for name, bound in answers if bound is not None}

    def certificate(
        self, method: str, p: float, x: Tensor, y: Tensor | None, box: BoxSides | None = None, inside: bool = False
    ) -> Iterator[Audit]:
        """Certify by a method, and attack every radius and witness."""
        cert = self._answer(partial(certify, self.network, x, y, p, method, box, inside, progress=False))
        if cert is None:
            return
        effort, seed = self.effort, self.pick.getrandbits(30)
        found = falsify(self.network, x, y, cert, effort.restarts, effort.steps, seed)
        named = (replace(e, source=f"{e.source}, by certify({method}), {self.name}") for e in found.counterexamples)
        found = replace(found, counterexamples=tuple(named))
        yield Audit(0, findings=found, cells={f"certify {method}, l{p:g}{', inside a box' * inside}": found.total})

    def applicable(self, p: float, dear: bool) -> list[str]:
        """Return the methods of `certify` that apply to this network, the dear ones or the others."""
        problem = make_problem(self.network, p, None, None, None, "all", None)
        methods = [method for method in CERTIFICATE_METHODS.values() if method.dear == dear]
        return ["auto"] * dear + [method.name for method in methods if method.reason_to_skip(problem) is None]

    def outputs(self, label: str, where: Mapping[str, Any]) -> Iterator[Audit]:
        """Bound the outputs, and climb them where they are bounded."""
        interval = self._answer(partial(output_bounds, self.network, **where))
        if interval is None:
            return
        effort, seed = self.effort, self.pick.getrandbits(30)
        restarts, steps = effort.restarts, effort.steps
        found = falsify_outputs(interval, self.network, **where, restarts=restarts, steps=steps, seed=seed)
        named = (replace(e, source=f"{e.source}, {self.name}") for e in found.counterexamples)
        found = replace(found, counterexamples=tuple(named))
        yield Audit(0, findings=found, cells={f"outputs, {label}": found.total})

    def _answer(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Return what is asked for, or None where it is refused, and count the reason."""
        try:
            return ask()
        except REFUSALS as error:
            # Numbers and names come after the first clause, which many networks share.
            clause = re.split(r"[:;,.](?:\s|$)", str(error))[0]
            self.refusals[f"{type(error).__name__}: {clause}"] += 1
            return None
