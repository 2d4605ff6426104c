"""Every bound and radius of fixed networks, beside what a record says they were: nothing may get worse.

"Nothing gets worse" means, for every value of the record: it is still there; a bound (a Lipschitz or a curvature
constant, or the distance of a witness) is not higher; a certified radius is not lower.  A relative 1e-6 is allowed, or
1e-4 at the places that `ITERATIVE` names, where the first guess of a norm, which is then verified, is by iteration.
Bounds are proven whatever they are: this guards how tight they are.  What got better is told too, and `--write` keeps
it.

A value that is deliberately given up stands in `GIVEN_UP`, with the reason and what replaces it, and under the same
heading in CHANGELOG.md; `--write` refuses to record anything else that is worse, or gone.

Claim: nothing is worse than in `results/baseline.json`; with `--speed`, no ratio of times is a quarter above that of
`results/baseline_speed.json`.
Hardware: any for the values; for the ratios whatever it runs on, and the record says which.
Trials: the networks of `benchmarks.baseline_networks`, by every method that the package lists, for p = 1, 2 and inf,
in every scope, as a vector, a logit and a pair; certificates by every method, at two points of each network.

    python -m benchmarks.baseline [--networks NAME ...] [--workers 2] [--write]
    python -m benchmarks.baseline --speed [--write]
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar, final

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import harness
from benchmarks.baseline_networks import SUBJECTS, Subject
from benchmarks.baseline_speed import ALLOWED, measured_ratios
from curvcert.bounds.curvature import BLOCK_BOUNDS, CURVATURE_METHODS, Compositional, curvature
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.bounds.lipschitz.method import AbstractMethod
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.bounds.types import Bound
from curvcert.certificates import Certificate, certify
from curvcert.certificates.methods import CERTIFICATE_METHODS
from curvcert.errors import CurvcertError, SoundnessError
from curvcert.network import Network
from curvcert.results import Record

NAME, SPEED_NAME = "baseline", "baseline_speed"
COMMAND = "python -m benchmarks.baseline"

TOLERANCE, ITERATIVE_TOLERANCE, SEARCHED_TOLERANCE = 1e-6, 1e-4, 2e-3

ITERATIVE: Mapping[str, tuple[str, ...]] = {
    "operators.verified, a bound for each of many matrices over 96, or 256 where they have nothing in common": (
        "digits-embedded/*",
    ),
    "bounds.lipschitz.multipliers, a search for the multipliers of LipSDP": (
        "*/lipschitz/lipsdp/*",
        "*/lipschitz/auto/p=2/*",
    ),
}
"""Where a guess by iteration decides how tight a value is, and the values that it may reach, as patterns of keys."""

SEARCHED = ("*/radius/linear/*", "*/radius/quadratic/*", "*/radius/norms/*")
"""Radii that a search finds: it ends a little below the largest that is proven."""

RADII_OF_BALLS = {1.0: 0.3, 2.0: 0.1, math.inf: 0.02}
"""The norms, and the radius of local bounds in each."""

OUTPUTS: Mapping[str, Mapping[str, Any]] = {"vector": {}, "logit(0)": {"logit": 0}, "pair(0,1)": {"pair": (0, 1)}}

FIELDS = ("lipschitz_radius", "curvature_radius", "local_radius", "attack_radius")
"""What a certificate by "auto" tells beside its radius."""

RADIUS_METHODS = ("auto", *CERTIFICATE_METHODS)

BOUND_METHODS: Mapping[str, Mapping[str, AbstractMethod]] = {
    "lipschitz": LIPSCHITZ_METHODS,
    "curvature": {
        **CURVATURE_METHODS,
        **{f"compositional({name})": Compositional([name]) for name in BLOCK_BOUNDS},
    },
}
"""The package's own lists, and the recursion by each single block bound."""

Values = dict[str, float]
T = TypeVar("T")


@final
@dataclass(frozen=True)
class GivenUp:
    """Values that were deliberately given up: a heading that CHANGELOG.md has too, patterns of their keys, and why."""

    heading: str
    keys: tuple[str, ...]
    reason: str
    replacement: str


GIVEN_UP: tuple[GivenUp, ...] = (
    GivenUp(
        "Shells of a wider grid",
        tuple(
            f"{network}/{name}/p={p}/x?"
            for network in ("deep-tanh", "dense-4-centred_softplus", "dense-4-gelu", "dense-4-silu", "mixed")
            for name in ("local_radius/auto", "radius/auto", "radius/local")
            for p in ("1", "inf")
        ),
        "The grid of shells ends at 16 times the radius by global constants, which grew by half and more: the shells "
        "are wider, and radii in l1 and linf up to 0.22% smaller.",
        "The same certificate on the wider grid.",
    ),
    GivenUp(
        "Orthogonal layers and folds",
        ("orthogonal-fold/*",),
        "No recorded result was better by orthogonal layers between shifts of channels: they are gone.",
        "SLL layers, which are 1-Lipschitz and smooth.",
    ),
    GivenUp(
        "Norms of large convolutions, frequency by frequency",
        tuple(
            f"6C2F-ours-seed0/{name}"
            for name in ("lipschitz/product/p=2/global/*", "radius/product/p=2/x?", "lipschitz_radius/product/p=2/x?")
        ),
        "Maps of more than 4,096 rows and columns are bounded on a torus, within 10% of the norm that an explicit Gram "
        "matrix gave, and found much faster: the product of all norms of 6C2F is 2.8% larger.",
        'The constants by "auto", none of which is larger.',
    ),
    GivenUp(
        "Shells by smaller constants",
        tuple(f"dense-4-gelu/{name}/p={p}/x1" for name in ("local_radius/auto", "radius/shell") for p in ("1", "2")),
        "Radii by global constants, which the grid of shells follows, grew by half and more: up to 0.85% of a shell's "
        "radius lies between two shells.",
        'The radius by "auto", which is three times as large there.',
    ),
    GivenUp(
        "Dearer methods where cheaper ones reach the attack",
        ("residual-centred_softplus/local_radius/auto/p=2/x0",),
        "A sample whose radius nothing can raise is left out by the methods that follow: NaN says that it was not run.",
        'The radius by "auto", which is larger, or the same method by its name.',
    ),
)
"""Each serves one `--write`: the record names those that it has taken in, and holds the values from then on."""


@final
@dataclass(frozen=True)
class Worse:
    """A value that got worse; `after` is None where there is none any more.

    >>> Worse("net/radius/auto/p=2/x0", 0.5, 0.4)
    Worse(net/radius/auto/p=2/x0: 0.5 -> 0.4, 20% lower)
    >>> Worse("net/lipschitz/product/p=2/global/vector", 3.0, None)
    Worse(net/lipschitz/product/p=2/global/vector: 3 -> nothing)
    """

    key: str
    before: float
    after: float | None

    def __repr__(self) -> str:
        if self.after is None:
            return f"Worse({self.key}: {self.before:.8g} -> nothing)"
        by = abs(self.after - self.before) / self.before if self.before else math.inf
        side = "lower" if self.after < self.before else "higher"
        return f"Worse({self.key}: {self.before:.8g} -> {self.after:.8g}, {100 * by:.3g}% {side})"


def measured(subject: Subject) -> Values:
    """Return every value that is asked of one network, by key: NETWORK/QUANTITY/METHOD/p=P/..."""
    network, x = subject.network(), subject.points()
    found = {**_bounds(subject, network, x), **_radii(subject, network, x)}
    return {f"{subject.name}/{key}": float(f"{value:.12g}") for key, value in found.items() if not math.isnan(value)}


def _bounds(subject: Subject, network: Network, x: Tensor) -> Values:
    found: Values = {}
    for quantity, methods in BOUND_METHODS.items():
        for p, scope, output, method in _questions(subject, network, x, methods):
            bound = _unless_refused(partial(asked, network, quantity, p, scope, output, method, x))
            if bound is not None:
                key = f"{quantity}/{method}/p={p:g}/{scope}/{output}"
                values = bound.value.flatten().tolist()
                found |= {key: values[0]} if scope == "global" else {f"{key}/x{k}": v for k, v in enumerate(values)}
    return found


def asked(network: Network, quantity: str, p: float, scope: str, output: str, method: str, x: Tensor) -> Bound:
    """Ask for a bound as a user does."""
    ask: Callable[..., Bound] = lipschitz if quantity == "lipschitz" else curvature
    by = "auto" if method == "auto" else BOUND_METHODS[quantity][method]
    return ask(network, p, method=by, **_scope(p, scope, x), **OUTPUTS[output])


def _scope(p: float, scope: str, x: Tensor) -> dict[str, Any]:
    scopes: dict[str, dict[str, Any]] = {
        "global": {},
        "anchor": {"at": x},
        "ball": {"at": x, "radius": RADII_OF_BALLS[p]},
    }
    return scopes[scope]


def _questions(
    subject: Subject, network: Network, x: Tensor, methods: Mapping[str, AbstractMethod]
) -> Iterator[tuple[float, str, str, str]]:
    """Yield norms, scopes, outputs and methods: narrower scopes only for methods that have no global bound to give.

    A method that has one gives the same in every scope, and "auto" is asked in all of them.
    """
    for p in subject.norms:
        for output, arguments in OUTPUTS.items():
            if "pair" in arguments and network.outputs < 2:
                continue
            everywhere = _applicable(network, p, "global", output, x, methods)
            asked_for = {"global": [*everywhere, "auto"]}
            for scope in ("anchor", "ball"):
                here = _applicable(network, p, scope, output, x, methods)
                asked_for[scope] = [name for name in (*here, "auto") if name not in everywhere]
            for scope, names in asked_for.items():
                yield from ((p, scope, output, name) for name in names if subject.asks(name))


def _applicable(
    network: Network, p: float, scope: str, output: str, x: Tensor, methods: Mapping[str, AbstractMethod]
) -> list[str]:
    within, of = {"at": None, "radius": None} | _scope(p, scope, x), {"pair": None, "logit": None} | {**OUTPUTS[output]}
    problem = make_problem(network, p, None, within["at"], within["radius"], of["pair"], of["logit"])
    return [name for name, method in methods.items() if method.reason_to_skip(problem) is None]


def _radii(subject: Subject, network: Network, x: Tensor) -> Values:
    found: Values = {}
    for p in subject.norms:
        for method in filter(subject.asks, RADIUS_METHODS):
            found |= _radii_by(network, x, p, method)
    return found


def _radii_by(network: Network, x: Tensor, p: float, method: str) -> Values:
    certificate: Certificate | None = _unless_refused(partial(certify, network, x, p=p, method=method, progress=False))
    if certificate is None:
        return {}
    return {
        f"{field}/{method}/p={p:g}/x{k}": value
        for field in ("radius", *(FIELDS if method == "auto" else ()))
        for k, value in enumerate(getattr(certificate, field).tolist())
    }


def _unless_refused(compute: Callable[[], T]) -> T | None:
    """Return a result, or None where the package refuses: a refusal of what once had a value counts as worse."""
    try:
        return compute()
    except SoundnessError:
        raise
    except CurvcertError:
        return None


def tolerance(key: str) -> float:
    """Return how much worse a value may be, relatively.

    >>> tolerance("mnist-embedded/radius/auto/p=2/x0"), tolerance("digits-embedded/radius/auto/p=2/x0")
    (1e-06, 0.0001)
    """
    if any(fnmatchcase(key, pattern) for pattern in SEARCHED):
        return SEARCHED_TOLERANCE
    iterative = any(fnmatchcase(key, pattern) for patterns in ITERATIVE.values() for pattern in patterns)
    return ITERATIVE_TOLERANCE if iterative else TOLERANCE


def should_be_high(key: str) -> bool:
    """Whether a value is a certified radius; all others are upper bounds, the distance of a witness too."""
    quantity = key.split("/")[1]
    return quantity.endswith("radius") and quantity != "attack_radius"


def worse_than(record: Mapping[str, float], found: Mapping[str, float]) -> list[Worse]:
    """Return what of the record is gone or got worse.

    >>> worse_than({"net/radius/auto/p=2/x0": 0.5}, {"net/radius/auto/p=2/x0": 0.5 * (1 - 1e-5)})
    [Worse(net/radius/auto/p=2/x0: 0.5 -> 0.499995, 0.001% lower)]
    >>> worse_than({"net/lipschitz/auto/p=2/global/vector": 0.5}, {"net/lipschitz/auto/p=2/global/vector": 0.4})
    []
    """
    return [
        Worse(key, before, found.get(key))
        for key, before in record.items()
        if key not in found or _is_worse(key, before, found[key])
    ]


def _is_worse(key: str, before: float, after: float) -> bool:
    if should_be_high(key):
        return after < before * (1 - tolerance(key))
    return after > before * (1 + tolerance(key))


def better_than(record: Mapping[str, float], found: Mapping[str, float]) -> list[str]:
    """Return the keys of values that are better than those of the record, or that it does not have."""
    return [key for key, value in found.items() if key not in record or _is_worse(key, value, record[key])]


def methods_without_values(record: Mapping[str, float]) -> list[str]:
    """Return the methods of the package that the record has no value of, as QUANTITY/METHOD."""
    known = {tuple(key.split("/")[1:3]) for key in record}
    listed = [(quantity, name) for quantity, methods in BOUND_METHODS.items() for name in (*methods, "auto")]
    listed += [("radius", name) for name in RADIUS_METHODS]
    return ["/".join(method) for method in listed if method not in known]


def recorded(name: str = NAME) -> Record:
    """Return the record of the baseline, or with the name of it that of the speed."""
    return Record.read(harness.RESULTS / f"{name}.json")


def of_networks(values: Mapping[str, float], names: Iterable[str]) -> Values:
    """Return the values of some networks."""
    wanted = set(names)
    return {key: value for key, value in values.items() if key.split("/")[0] in wanted}


def not_given_up(worse: Iterable[Worse], settled: Iterable[str], given_up: Iterable[GivenUp]) -> list[Worse]:
    """Return what got worse and stands in no entry of the list that is still to be taken in."""
    done = set(settled)
    patterns = [pattern for entry in given_up if entry.heading not in done for pattern in entry.keys]
    return [each for each in worse if not any(fnmatchcase(each.key, pattern) for pattern in patterns)]


def _timed(name: str, methods: Sequence[str] | None) -> tuple[Values, float]:
    """Measure a network on one core; return the values and the seconds of processor time."""
    torch.set_num_threads(1)
    start = time.process_time()
    subject = SUBJECTS[name]
    asked = subject if methods is None else replace(subject, methods=tuple(filter(subject.asks, methods)))
    return measured(asked), time.process_time() - start


def measured_one_by_one(
    names: Sequence[str], workers: int, console: Console, methods: Sequence[str] | None = None
) -> Values:
    """Measure several networks, each on one core; by some methods, or by all."""
    found: Values = {}
    # The trained ones, which come last, take longest: first, so that no process waits for another's.
    names = names[::-1]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        measure = partial(_timed, methods=methods)
        results = map(measure, names) if workers == 1 else pool.map(measure, names)
        for name, (values, seconds) in zip(names, results, strict=True):
            console.print(f"{name}: {len(values)} values in {seconds:.1f} s", highlight=False)
            found |= values
    return dict(sorted(found.items()))


def _compare_values(options: argparse.Namespace, console: Console) -> bool:
    """Measure, compare and, if asked to, record; return whether all is well."""
    names = options.networks or list(SUBJECTS)
    found = measured_one_by_one(names, options.workers, console, options.methods)
    first = options.write and not (harness.RESULTS / f"{NAME}.json").is_file()
    record = None if first else recorded()
    before: Mapping[str, float] = {} if record is None else record.figures["values"]
    settled: list[str] = [] if record is None else record.config["given_up"]
    asked = of_networks(before, options.networks) if options.networks else before
    if options.methods:
        asked = {key: value for key, value in asked.items() if key.split("/")[2] in options.methods}
    worse = worse_than(asked, found)
    better = better_than(before, found)
    for each in worse:
        console.print(each, highlight=False)
    console.print(f"{len(found)} values: {len(worse)} worse, {len(better)} better or new.")
    if not options.write:
        missing = methods_without_values(before)
        for method in missing:
            console.print(f"{method} has no value in the record: measure all with --write")
        return not worse and not missing
    refused = not_given_up(worse, settled, GIVEN_UP)
    if refused:
        console.print(f"Nothing is recorded: {len(refused)} of those that got worse stand in no entry of GIVEN_UP.")
        return False
    _write_values({**before, **found} if options.networks or options.methods else found)
    return True


def _write_values(values: Mapping[str, float]) -> None:
    config = {
        "networks": len({key.split("/")[0] for key in values}),
        "given_up": [entry.heading for entry in GIVEN_UP],
    }
    finite = {key: value for key, value in sorted(values.items()) if math.isfinite(value)}
    harness.write_record(NAME, f"{COMMAND} --write", 0, config, {"values": finite})


def _compare_speed(options: argparse.Namespace, console: Console) -> bool:
    """Time, compare and, if asked to, record; return whether all is well."""
    ratios, config = measured_ratios(partial(console.print, highlight=False))
    if options.write:
        harness.write_record(SPEED_NAME, f"{COMMAND} --speed --write", 0, config, {"ratios": ratios})
        return True
    slower = slower_than(recorded(SPEED_NAME).figures["ratios"], ratios)
    for each in slower:
        console.print(each, highlight=False)
    return not slower


def slower_than(record: Mapping[str, float], found: Mapping[str, float]) -> list[Worse]:
    """Return the ratios of times that are gone, or above those of the record by more than is allowed.

    >>> slower_than({"constants": 2.0}, {"constants": 2.4})
    []
    >>> slower_than({"constants": 2.0}, {"constants": 3.0})
    [Worse(constants: 2 -> 3, 50% higher)]
    """
    return [
        Worse(key, before, found.get(key))
        for key, before in record.items()
        if key not in found or found[key] > before * (1 + ALLOWED)
    ]


def main() -> None:
    """Measure and compare with the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=SUBJECTS, metavar="NAME", help="default: all of them")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all; with --write the others stay")
    parser.add_argument("--workers", type=int, default=2, help="processes; the values are the same for any number")
    parser.add_argument("--speed", action="store_true", help="ratios of times instead of values")
    parser.add_argument("--write", action="store_true", help="replace the record")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    well = _compare_speed(options, console) if options.speed else _compare_values(options, console)
    raise SystemExit(0 if well else 1)


if __name__ == "__main__":
    main()
