"""A large audit: every bound and certificate attacked on aimed networks, and on fresh random ones.

Claim: no violation among at least 10^6 comparisons of radii (linear and quadratic certificates, boxes and kinks
included) and 10^5 on graphs that are no chains.  A check is one value of a bound, or one radius or witness, compared
with one ascended or attacked value; a radius counts as attacked once, whatever the number of starts.
Hardware: whatever it runs on; the record says which.  Each process takes one core.
Trials: every aimed network; networks 0, 1, 2 ... of the seed, with everything that is asked of them; then those of the
next seed, of which many samples each are certified by the dear methods, half of them within a box.  With `--graphs`
only those networks of the seed that are drawn as graphs of nodes (nested residual, densely joined, U-shaped, ...), in
a record of their own.

    python -m benchmarks.audit [--networks 60] [--checks 0] [--radii 1000000] [--seed 0] [--workers 1] [--graphs]
        [--minutes M] [--quick]

Every network that is done is noted in --parts.  The same command goes on from there, as long as the code of the library
is the same; with --minutes it ends after so long, and the record holds what there is.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import ROOT, write_record
from curvcert.falsifier import AIMS, Audit, Effort, audit_aim, audit_network, save_counterexample
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_graphs import GRAPHS
from curvcert.falsifier.random_networks import random_network

RADII = Effort(samples=4096, dear=1.0, boxed=0.5, parts=("certificates", "outputs"))
"""What is asked where radii are what counts: many samples of each network, by a dear method."""

Counts = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """One part of the audit: how a network of it is audited, and whether enough was counted in it and in all parts."""

    name: str
    one: Callable[[int], Audit]
    enough: Callable[[Counts, Counts], bool]
    drawn: Callable[[int], bool] = lambda _: True
    limit: int | None = None


def _aimed(k: int, seed: int) -> Audit:
    torch.set_num_threads(1)
    return audit_aim(AIMS[k], seed)


def _random(k: int, seed: int, effort: Effort) -> Audit:
    torch.set_num_threads(1)
    return audit_network(seed, k, effort)


def _compared_radii(counts: Counts) -> int:
    return int(counts.get("checks_by_kind", {}).get("radius", 0))


def phases(seed: int, networks: int, checks: int, radii: int) -> tuple[Phase, ...]:
    """Return the parts of an audit, in the order in which they are done."""
    return (
        Phase("aimed", partial(_aimed, seed=seed), lambda *_: False, limit=len(AIMS)),
        Phase("random", partial(_random, seed=seed, effort=Effort()), _reached(networks, checks)),
        Phase("radii", partial(_random, seed=seed + 1, effort=RADII), lambda _, all_: _compared_radii(all_) >= radii),
    )


def graphs_alone(seed: int, networks: int, checks: int) -> Phase:
    """Return the audit of networks that are drawn as graphs of nodes."""
    one = partial(_random, seed=seed, effort=Effort())
    return Phase("graphs", one, _reached(networks, checks), lambda k: is_graph(seed, k))


def is_graph(seed: int, index: int) -> bool:
    """Whether a network of an audit is drawn as a graph of nodes."""
    return random_network(Draw.of(seed, index)).family in GRAPHS


def _reached(networks: int, checks: int) -> Callable[[Counts, Counts], bool]:
    return lambda own, _: own.get("networks", 0) >= networks and own.get("checks", 0) >= checks


def merged(counts: Iterable[Counts]) -> Counts:
    """Add up counts; of the closest shares the largest counts, and the seed is that of the first.

    >>> merged([{"seed": 3, "checks": 1, "closest": {"a": 0.5}}, {"seed": 4, "checks": 2, "closest": {"a": 0.75}}])
    {'seed': 3, 'checks': 3, 'closest': {'a': 0.75}}
    """
    total: Counts = {}
    for each in counts:
        for key, value in each.items():
            if isinstance(value, dict):
                known = total.setdefault(key, {})
                for name, number in value.items():
                    both = (known.get(name, 0), number)
                    known[name] = max(both) if key == "closest" else sum(both)
            elif key != "seed" or key not in total:
                total[key] = value + (total.get(key, 0) if key != "seed" else 0)
    return {key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in total.items()}


class Parts:
    """What was done so far, a line of JSON for every network; of other code nothing counts."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._code, self._seed = path, _code(), seed
        self.done: dict[tuple[str, int], Counts] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for part in map(json.loads, lines):
            if part["code"] == self._code and part["seed"] == seed:
                self.done[part["phase"], part["index"]] = part["counts"]

    def add(self, phase: str, index: int, counts: Counts) -> None:
        """Note that a network is done."""
        self.done[phase, index] = counts
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"code": self._code, "seed": self._seed, "phase": phase, "index": index, "counts": counts})
                + "\n"
            )

    def of(self, phase: str) -> Counts:
        """Return what a phase has counted."""
        return merged(counts for (name, _), counts in self.done.items() if name == phase)


def _code() -> str:
    """Return the digest of the library's code that is checked out, marked where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    tree = subprocess.run([*git, "rev-parse", "HEAD:src/curvcert"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", "src"], capture_output=True, text=True, check=True)
    return tree.stdout.strip() + ("-dirty" if changed.stdout else "")


def run(phase: Phase, parts: Parts, workers: int, until: float, keep: Path, console: Console) -> None:
    """Audit the networks of a phase that are not done, until enough was counted or the time is over."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for block in _blocks(phase, parts, workers, until):
            for k, found in zip(block, pool.map(phase.one, block), strict=True):
                parts.add(phase.name, k, found.to_dict())
                for n, example in enumerate(found.findings.counterexamples):
                    keep.mkdir(parents=True, exist_ok=True)
                    path = keep / f"{phase.name}-{k}-{n}-{example.kind}.safetensors"
                    console.print(f"a violation: {save_counterexample(example, path)}", markup=False, style="red")
    so_far = parts.of(phase.name)
    console.print(f"{phase.name}: {so_far.get('checks', 0)} checks, {so_far.get('violations', 0)} violations")


def _blocks(phase: Phase, parts: Parts, workers: int, until: float) -> Iterator[list[int]]:
    numbers = count() if phase.limit is None else range(phase.limit)
    left = (k for k in numbers if (phase.name, k) not in parts.done and phase.drawn(k))
    while time.monotonic() < until and not phase.enough(parts.of(phase.name), merged(parts.done.values())):
        block = list(islice(left, workers))
        if not block:
            return
        yield block


def main() -> None:
    """Attack and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=60, help="random networks of which everything is asked")
    parser.add_argument("--checks", type=int, default=0, help="checks of these networks, at least")
    parser.add_argument("--graphs", action="store_true", help="only networks that are drawn as graphs of nodes")
    parser.add_argument("--radii", type=int, default=1_000_000, help="comparisons of radii, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes; the networks are the same for any number")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so long; go on another time")
    parser.add_argument("--parts", type=Path, default=Path("build/audit.jsonl"), help="where what is done is noted")
    parser.add_argument("--counterexamples", type=Path, default=Path("counterexamples"))
    parser.add_argument("--quick", action="store_true", help="5 random networks, 1,000 radii, and no record")
    options = parser.parse_args()
    networks, radii = (5, 1_000) if options.quick else (options.networks, options.radii)
    console, until = Console(soft_wrap=True), time.monotonic() + 60 * options.minutes
    parts = Parts(options.parts.with_suffix(".quick.jsonl") if options.quick else options.parts, options.seed)
    each = phases(options.seed, networks, options.checks, radii)
    each = (graphs_alone(options.seed, networks, options.checks),) if options.graphs else each
    for phase in each:
        run(phase, parts, options.workers, until, options.counterexamples, console)
    figures = merged(parts.of(phase.name) for phase in each)
    figures["checks_on_graphs"] = sum(figures["checks_by_family"].get(name, 0) for name in GRAPHS)
    figures["phases"] = {phase.name: _summary(parts.of(phase.name)) for phase in each}
    cells = ("checks_by_cell", "checks_by_family", "activations", "refusals", "searches")
    console.print({key: value for key, value in figures.items() if key not in cells})
    if not options.quick:
        asked = f"--networks {networks} --checks {options.checks} --seed {options.seed}"
        command = f"python -m benchmarks.audit {asked} {'--graphs' if options.graphs else f'--radii {radii}'}"
        config = configuration(networks, options.checks, radii)
        name = "audit_graphs" if options.graphs else "audit"
        console.print(f"recorded in {write_record(name, command, options.seed, config, figures)}")
    raise SystemExit(1 if figures["violations"] else 0)


def configuration(networks: int, checks: int, radii: int) -> dict[str, Any]:
    """Return what was asked for, as a record holds it."""
    efforts = {name: {**asdict(one), "parts": [*one.parts]} for name, one in (("random", Effort()), ("radii", RADII))}
    return {"networks": networks, "checks": checks, "radii": radii, "efforts": efforts, "threads": 1}


def _summary(counts: Counts) -> Counts:
    names = ("networks", "aimed_networks", "checks", "checks_by_kind", "violations", "closest", "seconds")
    return {name: counts[name] for name in names if name in counts}


if __name__ == "__main__":
    main()
