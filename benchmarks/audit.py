"""A large audit: every bound and certificate attacked on fresh random networks.

Claim: no violation among at least 10^6 checks, among them 2,000 networks, 10^5 ascended Hessians and 2 x 10^5 attacked
radii.  A check is one value of a bound, or one radius or witness, compared with one ascended or attacked
value; a radius counts as attacked once, whatever the number of starts.
Hardware: whatever it runs on; the record says which.  Each process takes one core.
Trials: networks 0, 1, 2 ... of the seed until the budget is reached; with `--graphs` those of them that are drawn as
graphs of nodes (nested residual, densely joined, U-shaped, ...), in a record of their own.

    python -m benchmarks.audit [--networks 2000] [--checks 1000000] [--seed 0] [--workers 2] [--graphs] [--quick]
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import count, islice, repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.harness import write_record
from curvcert.falsifier import Audit, Effort, audit, audit_network, save_counterexample
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_graphs import GRAPHS
from curvcert.falsifier.random_networks import random_network


def _one(seed: int, index: int, effort: Effort) -> Audit:
    torch.set_num_threads(1)
    return audit_network(seed, index, effort)


def is_graph(seed: int, index: int) -> bool:
    """Whether a network of an audit is drawn as a graph of nodes."""
    return random_network(Draw.of(seed, index)).family in GRAPHS


def in_parallel(seed: int, networks: int, checks: int, effort: Effort, workers: int, graphs: bool = False) -> Audit:
    """Audit networks in several processes, until there were enough of them and of checks."""
    result, drawn = Audit(seed), (k for k in count() if not graphs or is_graph(seed, k))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        while result.networks < networks or result.findings.total < checks:
            indices = list(islice(drawn, max(networks - result.networks, 100)))
            for part in track(pool.map(_one, repeat(seed), indices, repeat(effort), chunksize=5), total=len(indices)):
                result = result + part
    return result


def main() -> None:
    """Attack and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=2_000)
    parser.add_argument("--checks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes; the networks are the same for any number")
    parser.add_argument("--counterexamples", type=Path, default=Path("counterexamples"))
    parser.add_argument("--graphs", action="store_true", help="only networks that are drawn as graphs of nodes")
    parser.add_argument("--quick", action="store_true", help="20 networks, and no record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    effort, console = Effort(), Console(soft_wrap=True)
    if options.quick:
        result = audit(options.seed, networks=20, effort=effort)
    else:
        result = in_parallel(options.seed, options.networks, options.checks, effort, options.workers, options.graphs)
    for k, example in enumerate(result.findings.counterexamples):
        options.counterexamples.mkdir(parents=True, exist_ok=True)
        console.print(save_counterexample(example, options.counterexamples / f"{example.kind}-{k}.safetensors"))
    figures = result.to_dict()
    console.print({key: value for key, value in figures.items() if key != "checks_by_cell"})
    if not options.quick:
        graphs = " --graphs" if options.graphs else ""
        command = f"python -m benchmarks.audit --networks {options.networks} --checks {options.checks}{graphs}"
        config = {"networks": options.networks, "checks": options.checks, "effort": asdict(effort), "threads": 1}
        name = "audit_graphs" if options.graphs else "audit"
        console.print(f"recorded in {write_record(name, command, options.seed, config, figures)}")
    raise SystemExit(1 if result.findings else 0)


if __name__ == "__main__":
    main()
