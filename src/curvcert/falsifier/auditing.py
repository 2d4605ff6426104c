"""`curvcert.audit`: our own bounds and certificates, attacked on fresh random networks.

Every network draws its own cell of the table: a family, activations, norms, a target (the outputs as a vector, one
logit, all pairs), points and radii.  Then every Lipschitz and curvature method that applies is asked over all three
scopes, a few methods of `certify` are asked for radii, and all of it is attacked.

An answer may be refused: an activation that a method does not cover, weights that float64 has no room for.  A refusal
claims nothing, so there is nothing to attack; it is counted by its reason, and the audit goes on.  Any other error is a
fault, and ends it.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor

from curvcert.bounds.curvature import CURVATURE_METHODS, curvature
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.bounds.lipschitz.problem import Pair, make_problem
from curvcert.bounds.outputs import output_bounds
from curvcert.bounds.types import SIDES, Anchor, Ball, Bound, Global, Scope, Side
from curvcert.certificates import certify
from curvcert.errors import (
    CurvcertError,
    InvalidInput,
    OutOfRange,
    SoundnessError,
    UnsupportedActivation,
    UnsupportedBlock,
    UnsupportedModule,
    UnsupportedNorm,
    UnsupportedOperator,
)
from curvcert.falsifier.bound_search import BoundKind, BoundSearch, Target
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.findings import Findings
from curvcert.falsifier.outputs import falsify_outputs
from curvcert.falsifier.radii import falsify
from curvcert.falsifier.random_networks import RandomNetwork, random_network
from curvcert.network import Network

NETWORKS = 20
"""How many networks an audit is about if no budget is given."""
NORMS = (2.0, 2.0, 2.0, math.inf, math.inf, 1.0, 3.0, 1.5)
"""The norms, each as often as it is drawn."""
BOX = (-3.0, 3.0)

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
_CHEAP = (
    *("lipschitz", "product", "liplt", "lipsdp-recursion", "anchored-lipschitz"),
    *("compositional", "unrolled", "crc", "anchored"),
)
_DEAR = ("auto", "shell", "line", "linear", "quadratic", "norms")
_CURVED = ("compositional", "unrolled", "crc", "anchored", "shell", "line", "quadratic")


@dataclass(frozen=True)
class Effort:
    """How much is asked of one network.

    Attributes:
        anchors: points for anchored bounds, and balls for local ones.
        samples: inputs for each certificate.
        ascents: ascents of every sort, at least.
        steps: of each ascent.
        restarts: starts of each attack on a radius.
        dear: how often a method of `certify` that costs more is asked, beside a cheap one.
        best: how often "auto" is asked, beside all single methods.
    """

    anchors: int = 8
    samples: int = 128
    ascents: int = 48
    steps: int = 14
    restarts: int = 2
    dear: float = 0.5
    best: float = 0.2

    def __post_init__(self) -> None:
        if min(self.anchors, self.samples, self.ascents, self.steps, self.restarts) < 1:
            raise InvalidInput(f"An audit needs at least one of everything, got {self}.")

    def scaled(self, share: float) -> "Effort":
        """Return that share of the counts, at least one of each.

        >>> Effort().scaled(0.01).samples
        1
        """
        names = ("anchors", "samples", "ascents", "steps", "restarts")
        return replace(self, **{name: max(1, round(share * getattr(self, name))) for name in names})


@final
@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What an audit did: findings, and how often each cell of the table was met.

    Attributes:
        seed: of the audit; network k of it is `audit_network(seed, k)`.
        networks: how many there were.
        seconds: how long it took.
        findings: counts by kind, and counterexamples.
        cells: checks by kind, method, scope and norm.
        families: networks by family.
        activations: networks by activation.
        refused_networks: those of which something was refused.
        refusals: bounds and certificates that were refused, by reason.
    """

    seed: int
    networks: int = 0
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)
    cells: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)
    activations: Mapping[str, int] = field(default_factory=dict)
    refused_networks: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.seed,
            self.networks + other.networks,
            self.seconds + other.seconds,
            self.findings + other.findings,
            dict(Counter(self.cells) + Counter(other.cells)),
            dict(Counter(self.families) + Counter(other.families)),
            dict(Counter(self.activations) + Counter(other.activations)),
            self.refused_networks + other.refused_networks,
            dict(Counter(self.refusals) + Counter(other.refusals)),
        )

    def __repr__(self) -> str:
        return f"Audit(seed {self.seed}, {self.networks} networks: {self.findings})"

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as what JSON can hold."""
        searches = self.findings.searches
        return {
            "seed": self.seed,
            "networks": self.networks,
            "checks": self.findings.total,
            "checks_by_kind": dict(sorted(self.findings.checks.items())),
            "violations": len(self.findings.counterexamples),
            "unconfirmed": self.findings.unconfirmed,
            "refused_networks": self.refused_networks,
            "refusals": dict(sorted(self.refusals.items())),
            "closest": {kind: round(share, 12) for kind, share in sorted(self.findings.closest.items())},
            "ascended_hessians": searches.get("hessian", 0),
            "attacked_radii": searches.get("attacked radius", 0),
            "searches": dict(sorted(searches.items())),
            "families": dict(sorted(self.families.items())),
            "activations": dict(sorted(self.activations.items())),
            "checks_by_cell": dict(sorted(self.cells.items())),
            "seconds": round(self.seconds, 1),
        }


def audit(
    seed: int = 0,
    networks: int | None = None,
    minutes: float | None = None,
    checks: int | None = None,
    effort: Effort | None = None,
    progress: bool | None = None,
) -> Audit:
    """Attack every bound and certificate on fresh random networks, until a budget is spent.

    Args:
        seed: of the audit: the same seed meets the same networks, points and attacks.
        networks: how many networks; `NETWORKS` if no budget is given at all.
        minutes: how long; the network that is under way is finished.
        checks: how many checks, at least.
        effort: how much is asked of each network.
        progress: show a bar; by default on a terminal.

    The audit ends once *every* one of `networks` and `checks` that was given is reached, or the minutes are over.

    >>> result = audit(seed=5, networks=1, effort=Effort(samples=4, ascents=8, steps=3))
    >>> result.networks, len(result.findings.counterexamples)
    (1, 0)
    """
    if any(limit is not None and not limit > 0 for limit in (networks, minutes, checks)):
        raise InvalidInput(f"Budgets are positive, got networks={networks}, minutes={minutes}, checks={checks}.")
    if networks is None and minutes is None and checks is None:
        networks = NETWORKS
    chosen, result, begun = effort or Effort(), Audit(seed), time.perf_counter()
    for advance in _shown(progress, networks, checks, minutes):
        result = result + audit_network(seed, result.networks, chosen)
        spent = time.perf_counter() - begun
        reached = (networks is not None or checks is not None) and (
            result.networks >= (networks or 0) and result.findings.total >= (checks or 0)
        )
        advance(result, spent)
        if reached or (minutes is not None and spent >= 60 * minutes):
            break
    return result


def _shown(
    progress: bool | None, networks: int | None, checks: int | None, minutes: float | None
) -> Iterator[Callable[[Audit, float], None]]:
    """Yield, for ever, a function that shows how far the audit has come."""
    console = Console(stderr=True)
    shown = progress if progress is not None else console.is_terminal
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("auditing", total=1.0, note="")

        def advance(result: Audit, spent: float) -> None:
            shares = [
                count / limit
                for count, limit in ((result.networks, networks), (result.findings.total, checks))
                if limit
            ]
            share = max(min(shares, default=0.0), spent / (60 * minutes) if minutes else 0.0)
            found = result.findings
            note = f"{result.networks} networks, {found.total} checks, {len(found.counterexamples)} violations"
            bar.update(task, completed=min(1.0, share), note=note)

        while True:
            yield advance


def audit_network(seed: int, index: int, effort: Effort | None = None) -> Audit:
    """Audit the network with that index of an audit: the same one whenever it is called.

    Raises:
        RuntimeError: the audit made something that curvcert does not take; this is a fault of curvcert's own.

    >>> audit_network(5, 0, Effort(samples=4, ascents=8, steps=3)).networks
    1
    """
    begun, draw, name = time.perf_counter(), Draw.of(seed, index), f"network {index} of seed {seed}"
    try:
        drawn = random_network(draw)
        session = _Session(drawn, draw, effort or Effort(), f"{name} ({drawn.family})")
        total = sum((*session.bounds(), *session.certificates(), *session.outputs()), Audit(seed))
    except SoundnessError as error:
        error.add_note(f"Met in {name} of an audit.")
        raise
    except CurvcertError as error:
        # Nobody gave this network: a person's command is not at fault, as these errors would say.
        raise RuntimeError(f"{name} of an audit: {type(error).__name__}: {error}") from error
    return total + Audit(
        seed,
        1,
        time.perf_counter() - begun,
        families={drawn.family: 1},
        activations=dict.fromkeys(drawn.activations, 1),
        refused_networks=int(bool(session.refusals)),
        refusals=dict(session.refusals),
    )


@dataclass(frozen=True, eq=False)
class _Session:
    """One network, and the choices that are made about it."""

    drawn: RandomNetwork
    draw: Draw
    effort: Effort
    name: str
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def network(self) -> Network:
        return self.drawn.network

    def bounds(self) -> Iterator[Audit]:
        """Attack every bound, of both kinds, over every scope."""
        pick, network = self.draw.pick, self.network
        p = pick.choice(NORMS)
        q = p if pick.random() < 0.7 else pick.choice(NORMS)
        pair, logit = self._target()
        x = self._points(self.effort.anchors)
        r = torch.tensor([0.0 if k == 0 else 10 ** pick.uniform(-2.5, 0.5) for k in range(len(x))], dtype=torch.float64)
        kinds: tuple[BoundKind, ...] = ("lipschitz", "curvature") if _is_smooth(network) else ("lipschitz",)
        for kind in kinds:
            scalar = pair is not None or logit is not None or network.outputs == 1
            side = pick.choice(SIDES) if kind == "curvature" and scalar else "both"
            asked = _Asked(network, kind, p, q, pair, logit, side, self.refusals)
            everywhere = asked.all_methods(None, None)
            yield from self._attacked(asked, Global(), everywhere, {})
            yield from self._attacked(asked, Anchor(x), everywhere, {"at": x})
            yield from self._attacked(asked, Ball(x, r), everywhere, {"at": x, "radius": r})

    def _target(self) -> tuple[Pair, int | None]:
        n, pick = self.network.outputs, self.draw.pick
        if n == 1:
            return None, None
        choices: tuple[tuple[Pair, int | None], ...] = (
            (None, None),
            ("all", None),
            ("all", None),
            (None, pick.randrange(n)),
        )
        return pick.choice(choices)

    def _points(self, count: int) -> Tensor:
        noise = self.draw.normal(count, *self.network.in_shape)
        return noise * 10 ** self.draw.pick.uniform(-0.7, 0.4)

    def _attacked(
        self, asked: "_Asked", scope: Scope, everywhere: dict[str, Bound], where: dict[str, Tensor]
    ) -> Iterator[Audit]:
        effort, pick = self.effort, self.draw.pick
        # A global bound serves every scope: it is asked for once.
        bounds = everywhere | (asked.all_methods(**where, only_of_scope=True) if where else {})
        if pick.random() < effort.best:
            bounds = bounds | asked.bounds(["auto"], **where)
        if not bounds:
            return
        target = Target.of(self.network, asked.pair, asked.logit)
        search = BoundSearch(
            self.network,
            asked.kind,
            asked.p,
            asked.q,
            target,
            scope,
            effort.ascents,
            effort.steps,
            pick.getrandbits(30),
            asked.side,
        )
        searches = search.run()
        yield Audit(0, findings=Findings(searches={each.name: len(each.ascended.value) for each in searches}))
        for method, bound in bounds.items():
            from_side = "" if asked.side == "both" else f" from {asked.side}"
            label = f"{asked.kind}{from_side} {method}, {type(scope).__name__.lower()}, l{asked.p:g}"
            found = search.compare(bound.value, searches, f"{label} -> l{asked.q:g}, {self.name}")
            yield Audit(0, findings=found, cells={label: found.total})

    def certificates(self) -> Iterator[Audit]:
        """Certify by a cheap method and perhaps by a dear one, and attack every radius and witness."""
        network, pick = self.network, self.draw.pick
        if network.outputs < 2:
            return
        p = pick.choice(NORMS)
        boxed = pick.random() < 0.2
        inside = boxed and pick.random() < 0.5
        x = self._points(self.effort.samples)
        x = x.clamp(*BOX) if boxed else x
        y = torch.tensor([pick.randrange(network.outputs) for _ in x]) if pick.random() < 0.1 else None
        cheap, dear = (self._applicable(names, p) for names in (_CHEAP, _DEAR))
        methods = [pick.choice(cheap)]
        if dear and pick.random() < self.effort.dear:
            methods.append(pick.choice(dear))
        for method in methods:
            ask = partial(certify, network, x, y, p, method, BOX if boxed else None, inside, progress=False)
            cert = _answer(ask, self.refusals)
            if cert is None:
                continue
            found = falsify(network, x, y, cert, self.effort.restarts, self.effort.steps, pick.getrandbits(30))
            named = (replace(e, source=f"{e.source}, by certify({method}), {self.name}") for e in found.counterexamples)
            found = replace(found, counterexamples=tuple(named))
            yield Audit(0, findings=found, cells={f"certify {method}, l{p:g}{', inside a box' * inside}": found.total})

    def outputs(self) -> Iterator[Audit]:
        """Bound the outputs, or combinations of them, over balls, boxes or their cuts, and climb them there."""
        network, pick, draw = self.network, self.draw.pick, self.draw
        p, x = pick.choice(NORMS), self._points(self.effort.anchors)
        where: dict[str, Any] = {"p": p}
        shape = pick.choice(("ball", "box", "cut"))
        if shape != "ball":
            sides = (10 ** pick.uniform(-2.5, 0.3) * draw.normal(*x.shape).abs() for _ in range(2))
            where["box"] = (x - next(sides), x + next(sides))
        if shape != "box":
            where |= {"at": x, "radius": 10 ** pick.uniform(-2.5, 0.5)}
        if pick.random() < 0.5:
            rows = draw.normal(pick.randint(1, 3), network.outputs)
            where |= {"C": rows, "c": draw.normal(len(rows))}
        interval = _answer(partial(output_bounds, network, **where), self.refusals)
        if interval is not None:
            effort, seed = self.effort, pick.getrandbits(30)
            found = falsify_outputs(interval, network, **where, restarts=effort.restarts, steps=effort.steps, seed=seed)
            named = (replace(e, source=f"{e.source}, {self.name}") for e in found.counterexamples)
            found = replace(found, counterexamples=tuple(named))
            yield Audit(0, findings=found, cells={f"outputs, {shape}, l{p:g}": found.total})

    def _applicable(self, names: tuple[str, ...], p: float) -> list[str]:
        """Return the methods of `certify` that apply to this network."""
        problem = make_problem(self.network, p, None, None, None, "all", None)
        known = {**CURVATURE_METHODS, **LIPSCHITZ_METHODS}
        smooth = _is_smooth(self.network)
        return [
            name
            for name in names
            if (smooth or name not in _CURVED)
            and (p == 2 or name != "line")
            and (name == "anchored" or name not in known or known[name].reason_to_skip(problem) is None)
        ]


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is asked of `lipschitz` or `curvature`, but for method and scope."""

    network: Network
    kind: BoundKind
    p: float
    q: float
    pair: Pair
    logit: int | None
    side: Side
    refusals: Counter[str]

    def all_methods(
        self, at: Tensor | None, radius: Tensor | None = None, only_of_scope: bool = False
    ) -> dict[str, Bound]:
        """Return the bounds of every method that applies; on request only of those that use the scope."""
        problem = make_problem(self.network, self.p, self.q, at, radius, self.pair, self.logit, self.side)
        methods = LIPSCHITZ_METHODS if self.kind == "lipschitz" else CURVATURE_METHODS
        names = [name for name, method in methods.items() if method.reason_to_skip(problem) is None]
        if only_of_scope:
            names = [name for name in names if name in ("anchored", "local")]
        return self.bounds(names, at, radius)

    def bounds(self, names: list[str], at: Tensor | None = None, radius: Tensor | None = None) -> dict[str, Bound]:
        """Return the bounds by these methods, but for those that are refused."""
        ask: Callable[..., Bound] = lipschitz if self.kind == "lipschitz" else partial(curvature, side=self.side)
        asked = (
            (name, partial(ask, self.network, self.p, self.q, name, at, radius, self.pair, self.logit))
            for name in names
        )
        answers = ((name, _answer(each, self.refusals)) for name, each in asked)
        return {name: bound for name, bound in answers if bound is not None}


def _answer(ask: Callable[[], _Answer], refusals: Counter[str]) -> _Answer | None:
    """Return what is asked for, or None where it is refused, and count the reason."""
    try:
        return ask()
    except REFUSALS as error:
        # Numbers and names come after the first clause, which many networks share.
        clause = re.split(r"[:;,.](?:\s|$)", str(error))[0]
        refusals[f"{type(error).__name__}: {clause}"] += 1
        return None


def _is_smooth(network: Network) -> bool:
    try:
        network.require_smooth()
    except (UnsupportedActivation, UnsupportedModule):
        return False
    return True
