"""`curvcert.audit`: our own bounds and certificates, attacked on networks that are aimed at them, and on random ones.

An aimed network (`falsifier/aimed.py`) makes claims that are nearly attained, so that a wrong term shows.  Every random
one draws its own cell of the table: a family, activations, norms, a target (the outputs as a vector, one logit, all
pairs), points and radii.  Then every Lipschitz and curvature method that applies is asked over all three scopes,
methods of `certify` are asked for radii (of an aimed network all, of a random one a few), and all of it is attacked.

An answer may be refused: an activation that a method does not cover, weights that float64 has no room for.  A refusal
claims nothing, so there is nothing to attack; it is counted by its reason, and the audit goes on.  Any other error is a
fault, and ends it.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Pair
from curvcert.bounds.types import SIDES
from curvcert.errors import CurvcertError, InvalidInput, SoundnessError
from curvcert.falsifier.aimed import Aim
from curvcert.falsifier.audited import Audit, Effort
from curvcert.falsifier.bound_search import BoundKind
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_networks import random_network
from curvcert.falsifier.session import Asked, Session
from curvcert.network import Network

NETWORKS = 20
"""How many random networks an audit is about if no budget is given."""
NORMS = (2.0, 2.0, 2.0, math.inf, math.inf, 1.0, 3.0, 1.5)
"""The norms, each as often as it is drawn."""
BOX = (-3.0, 3.0)


def audit(
    seed: int = 0,
    networks: int | None = None,
    minutes: float | None = None,
    checks: int | None = None,
    effort: Effort | None = None,
    progress: bool | None = None,
    aims: Sequence[Aim] = (),
    first: bool = False,
) -> Audit:
    """Attack every bound and certificate, until a budget is spent: on aimed networks, then on fresh random ones.

    Args:
        seed: of the audit: the same seed meets the same networks, points and attacks.
        networks: how many random networks; `NETWORKS` if no budget is given at all.
        minutes: how long; the network that is under way is finished.
        checks: how many checks, at least.
        effort: how much is asked of each network.
        progress: show a bar; by default on a terminal.
        aims: the aimed networks; `curvcert audit` takes `AIMS`, which is all of them.
        first: end with the first network on which a violation was found.

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
    left = list(aims)
    for advance in _shown(progress, networks, checks, minutes):
        step = audit_aim(left.pop(0), seed, chosen) if left else audit_network(seed, result.networks, chosen)
        result = result + step
        spent = time.perf_counter() - begun
        reached = (networks is not None or checks is not None) and (
            result.networks >= (networks or 0) and result.findings.total >= (checks or 0)
        )
        advance(result, spent)
        if (reached and not left) or (minutes is not None and spent >= 60 * minutes) or (first and result.findings):
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
            met = result.networks + result.aimed
            note = f"{met} networks, {found.total} checks, {len(found.counterexamples)} violations"
            bar.update(task, completed=min(1.0, share), note=note)

        while True:
            yield advance


def audit_network(seed: int, index: int, effort: Effort | None = None) -> Audit:
    """Audit the random network with that index of an audit: the same one whenever it is called.

    Raises:
        RuntimeError: the audit made something that curvcert does not take; this is a fault of curvcert's own.

    >>> audit_network(5, 0, Effort(samples=4, ascents=8, steps=3)).networks
    1
    """
    begun, draw, called = time.perf_counter(), Draw.of(seed, index), f"network {index} of seed {seed}"
    with _blamed(called):
        drawn = random_network(draw)
        session = Session(drawn.network, f"{called} ({drawn.family})", draw.pick, effort or Effort())
        attack = _RandomAttack(session, draw)
        parts = {"bounds": attack.bounds, "certificates": attack.certificates, "outputs": attack.outputs}
        total = sum((one for name in session.effort.parts for one in parts[name]()), Audit(seed))
    return total + Audit(
        seed,
        1,
        time.perf_counter() - begun,
        families={drawn.family: 1},
        compared={drawn.family: total.findings.total},
        activations=dict.fromkeys(drawn.activations, 1),
        refused_networks=int(bool(session.refusals)),
        refusals=dict(session.refusals),
    )


def audit_aim(aim: Aim, seed: int = 0, effort: Effort | None = None) -> Audit:
    """Audit an aimed network.

    >>> from curvcert.falsifier.aimed import AIMS
    >>> audit_aim(AIMS[0], effort=Effort(ascents=8, steps=3)).aimed
    1
    """
    begun, name = time.perf_counter(), f"the aimed network {aim.name!r}"
    with _blamed(name):
        wanted = replace(effort or Effort(), best=1.0)
        session = Session(aim.network(), name, random.Random(f"{seed}/{aim.name}"), wanted)
        total = sum(aim.attacks(session), Audit(seed))
    return total + Audit(seed, 0, time.perf_counter() - begun, aimed=1)


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Say in which network an error was met: of one that the audit made itself, it is curvcert's own fault."""
    try:
        yield
    except SoundnessError as error:
        error.add_note(f"Met in {name} of an audit.")
        raise
    except CurvcertError as error:
        # Nobody gave this network: a person's command is not at fault, as these errors would say.
        raise RuntimeError(f"{name} of an audit: {type(error).__name__}: {error}") from error


class _RandomAttack:
    """What is asked about a random network."""

    def __init__(self, session: Session, draw: Draw) -> None:
        self.session, self.draw = session, draw
        self.network: Network = session.network
        self.effort = session.effort

    def bounds(self) -> Iterator[Audit]:
        """Attack every bound, of both kinds, over every scope."""
        pick, network = self.draw.pick, self.network
        p = pick.choice(NORMS)
        q = p if pick.random() < 0.7 else pick.choice(NORMS)
        pair, logit = self._target()
        x = self._points(self.effort.anchors)
        r = torch.tensor([0.0 if k == 0 else 10 ** pick.uniform(-2.5, 0.5) for k in range(len(x))], dtype=torch.float64)
        kinds: tuple[BoundKind, ...] = ("lipschitz", "curvature") if self.session.smooth else ("lipschitz",)
        for kind in kinds:
            scalar = pair is not None or logit is not None or network.outputs == 1
            side = pick.choice(SIDES) if kind == "curvature" and scalar else "both"
            yield from self.session.bounds(Asked(kind, p, q, pair, logit, side), x, r)

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

    def certificates(self) -> Iterator[Audit]:
        """Certify by a cheap method and perhaps by a dear one, and attack every radius and witness."""
        network, pick, session = self.network, self.draw.pick, self.session
        if network.outputs < 2:
            return
        p = pick.choice(NORMS)
        boxed = pick.random() < self.effort.boxed
        inside = boxed and pick.random() < 0.5
        x = self._points(self.effort.samples)
        x = x.clamp(*BOX) if boxed else x
        y = torch.tensor([pick.randrange(network.outputs) for _ in x]) if pick.random() < 0.1 else None
        cheap, dear = (session.applicable(p, dear) for dear in (False, True))
        methods = [pick.choice(cheap)] if self.effort.dear < 1 else []
        if dear and pick.random() < self.effort.dear:
            methods.append(pick.choice(dear))
        for method in methods:
            yield from session.certificate(method, p, x, y, BOX if boxed else None, inside)

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
        yield from self.session.outputs(f"{shape}, l{p:g}", where)
