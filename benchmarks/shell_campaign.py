"""A campaign against the local certificate: ascended gradients and margins on fresh random networks.

Claim: no violation among the cases, over every smooth activation, dense, residual and convolutional networks, with
Jacobians and without, in l1, l2 and linf.
Hardware: whatever it runs on; the record says which.
Trials: fresh weights and points from SEED until CASES are reached; a case is one pair of classes in one ball whose
gradient was climbed, or one sample whose margin was attacked at 0.999 of its certified radius.

    python -m benchmarks.shell_campaign [--cases 10000] [--quick]
"""

import argparse
import math
import time
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import write_record
from benchmarks.shell_search import KINDS, SMOOTH, Bounded
from curvcert.attacks import pgd
from curvcert.certificates import certify
from curvcert.network import Network

SEED = 0
POINTS = 16
RADII = (1e-3, 0.03, 0.2, 0.7, 2.0)
NORMS = (2.0, 1.0, math.inf)


def gradients(network: Network, p: float, generator: torch.Generator) -> tuple[int, int, float]:
    """Climb gradients in balls of many sizes; return cases, violations and the largest quotient found / bound."""
    x = torch.randn(POINTS, *network.in_shape, dtype=torch.float64, generator=generator)
    t = torch.tensor([RADII[k % len(RADII)] for k in range(POINTS)], dtype=torch.float64)
    bounded = Bounded.at(network, x, t, p)
    found = bounded.found(seed=int(torch.randint(2**31, (), generator=generator)))
    cases = violations = 0
    largest = 0.0
    for layers in bounded.variants():
        for change in (bounded.change(layers), bounded.change_one_by_one(layers)):
            bound = change.saturated
            cases, violations = cases + found.numel(), violations + int((found > bound).sum())
            largest = max(largest, float((found / bound.clamp(min=1e-300)).amax()))
    return cases, violations, largest


def margins(network: Network, p: float, generator: torch.Generator) -> tuple[int, int]:
    """Attack margins at 0.999 of the certified radii; return cases and violations."""
    x = torch.randn(POINTS, *network.in_shape, dtype=torch.float64, generator=generator)
    cert = certify(network, x, p=p, method="shell", progress=False)
    attack = pgd(network, x, cert.label, 0.999 * cert.radius, p=p, steps=20, restarts=2)
    return int(cert.correct.sum()), int((attack.broken & cert.correct).sum())


def campaign(cases: int, console: Console) -> dict[str, Any]:
    """Go round the table until there are enough ascended cases."""
    generator, rounds, begun = torch.Generator().manual_seed(SEED), 0, time.perf_counter()
    total = {"gradient_cases": 0, "gradient_violations": 0, "margin_cases": 0, "margin_violations": 0}
    largest = {f"{kind}, {name}": 0.0 for kind in KINDS for name in SMOOTH}
    while total["gradient_cases"] + total["margin_cases"] < cases:
        p = NORMS[rounds % len(NORMS)]
        for kind, make in KINDS.items():
            for name, activation in SMOOTH.items():
                network = make(activation, generator)
                found = gradients(network, p, generator)
                attacked = margins(network, p, generator)
                for key, count in zip(total, (*found[:2], *attacked), strict=True):
                    total[key] += count
                largest[f"{kind}, {name}"] = max(largest[f"{kind}, {name}"], found[2])
        rounds += 1
        console.print(f"round {rounds} (p = {p:g}): {total}")
    return {
        **total,
        "rounds": rounds,
        "seconds": time.perf_counter() - begun,
        "largest_found_over_bound": max(largest.values()),
        "by_table": largest,
    }


def main() -> None:
    """Search and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="one round of the table, and no record")
    options = parser.parse_args()
    console = Console()
    figures = campaign(1 if options.quick else options.cases, console)
    console.print({key: value for key, value in figures.items() if key != "by_table"})
    if not options.quick:
        config = {"cases": options.cases, "points": POINTS, "radii": list(RADII), "norms": [1, 2, "inf"]}
        command = f"python -m benchmarks.shell_campaign --cases {options.cases}"
        console.print(f"recorded in {write_record('shell_campaign', command, SEED, config, figures)}")


if __name__ == "__main__":
    main()
