"""A large audit: every bound and certificate attacked on fresh random networks.

Claim: no violation among at least 10^6 checks, among them 2,000 networks, 10^5 ascended Hessians and 2 x 10^5 attacked
radii.  A check is one value of a bound, or one radius or witness, compared with one ascended or attacked
value; a radius counts as attacked once, whatever the number of starts.
Hardware: whatever it runs on; the record says which.  One core.
Trials: networks 0, 1, 2 ... of the seed until the budget is reached.

    python -m benchmarks.audit [--networks 2000] [--checks 1000000] [--seed 0] [--quick]
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.harness import write_record
from curvcert.falsifier import Effort, audit, save_counterexample


def main() -> None:
    """Attack and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=2_000)
    parser.add_argument("--checks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counterexamples", type=Path, default=Path("counterexamples"))
    parser.add_argument("--quick", action="store_true", help="20 networks, and no record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    effort, console = Effort(), Console(soft_wrap=True)
    if options.quick:
        result = audit(options.seed, networks=20, effort=effort)
    else:
        result = audit(options.seed, options.networks, checks=options.checks, effort=effort)
    for k, example in enumerate(result.findings.counterexamples):
        options.counterexamples.mkdir(parents=True, exist_ok=True)
        console.print(save_counterexample(example, options.counterexamples / f"{example.kind}-{k}.safetensors"))
    figures = result.to_dict()
    console.print({key: value for key, value in figures.items() if key != "checks_by_cell"})
    if not options.quick:
        command = f"python -m benchmarks.audit --networks {options.networks} --checks {options.checks}"
        config = {"networks": options.networks, "checks": options.checks, "effort": asdict(effort), "threads": 1}
        console.print(f"recorded in {write_record('audit', command, options.seed, config, figures)}")
    raise SystemExit(1 if result.findings else 0)


if __name__ == "__main__":
    main()
