"""Lipschitz bounds of 6F and 6C2F: time, peak memory and value; those of the embedded network in every scope.

Claim: LipLT with the norms of all its sub-products (every prefix) takes under 30 s for 6F and under 10 min for
6C2F on two cores, in under 8 GiB.
Hardware: whatever it runs on; the record says which.
Trials: one network of each architecture with PyTorch's default initialisation from SEED; each method once, on a
fresh cache of norms, one process for the lot: the peak is that of the process up to the end of the method.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import curvcert
from benchmarks.harness import write_record
from benchmarks.networks import SIX_F, dense, peak_gib, six_c_two_f
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, AbstractLipschitzMethod
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.data import load_demo_network, load_digits
from curvcert.data.demo_network import INPUT_SHAPE
from curvcert.network import Network

SEED = 0
METHODS = ("product", "liplt", "lipsdp-recursion")
DEMO_IMAGES, DEMO_PAIR = 20, (3, 8)

Figures = dict[str, Any]


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "6F": (lambda: dense(*SIX_F), (3072,)),
    "6C2F": (six_c_two_f, (3, 32, 32)),
    "quick": (lambda: dense(16, 12, 10, 4), (16,)),
}


def network_of(name: str) -> Network:
    """Return the traced network, its weights drawn from SEED."""
    make, shape = ARCHITECTURES[name]
    torch.manual_seed(SEED)
    return curvcert.trace(make().eval(), torch.zeros(1, *shape))


def measure(name: str, methods: tuple[str, ...] = METHODS) -> list[Figures]:
    """Return value, seconds and peak memory of each method on one architecture."""
    network = network_of(name)
    figures = []
    for method in methods:
        start = time.perf_counter()
        bound = curvcert.lipschitz(network, method=method)
        seconds = time.perf_counter() - start
        prefixes = [float(term.value) for term in bound.per_layer]
        figures.append(
            {
                "network": name, "method": bound.method, "value": float(bound), "seconds": seconds,
                "peak_gib": peak_gib(), "per_layer": prefixes,
            }
        )  # fmt: skip
    return figures


def value_and_seconds(network: str, method: str, call: Callable[[], float]) -> Figures:
    """Return value and seconds of a call."""
    start = time.perf_counter()
    value = call()
    return {"network": network, "method": method, "value": value, "seconds": time.perf_counter() - start}


def demo() -> list[Figures]:
    """Return the bounds of one pair and one batch of test digits on the embedded network, l2 and linf.

    A row is one method in one scope; `value` is the median over the batch.
    """
    network = curvcert.trace(load_demo_network(), torch.zeros(1, *INPUT_SHAPE))
    x = load_digits("test").as_float64()[:DEMO_IMAGES]
    figures = []
    for p in (2.0, math.inf):
        for scope, arguments in demo_scopes(x, p).items():
            names = [name for name, method in LIPSCHITZ_METHODS.items() if applies(method, network, p, arguments)]
            for name in (*names, "auto"):
                call = partial(median_of, network, p, name, arguments)
                figures.append(value_and_seconds(f"l{p:g} {scope}", name, call))
    return figures


def demo_scopes(x: torch.Tensor, p: float) -> dict[str, dict[str, Any]]:
    """Return the scopes of the comparison: everywhere, anchored at the images, and balls about them."""
    radii = (0.0, 0.001, 0.01, 0.1) if p == 2 else (0.0, 0.0001, 0.001, 0.01)
    return {"global": {}, "anchored": {"at": x}, **{f"ball {r:g}": {"at": x, "radius": r} for r in radii}}


def applies(method: AbstractLipschitzMethod, network: Network, p: float, arguments: dict[str, Any]) -> bool:
    """Whether a method applies to a scope of the demo."""
    problem = make_problem(network, p, None, arguments.get("at"), arguments.get("radius"), DEMO_PAIR, None)
    return method.reason_to_skip(problem) is None


def median_of(network: Network, p: float, method: str, arguments: dict[str, Any]) -> float:
    """Return the median over the batch of the bounds of the demo's pair."""
    return float(curvcert.lipschitz(network, p, method=method, pair=DEMO_PAIR, **arguments).value.median())


def table_of(figures: list[Figures]) -> Table:
    """Return the printed table, one row per method."""
    table = Table(title="l2 Lipschitz bounds", box=box.SIMPLE_HEAD)
    table.add_column("network", no_wrap=True)
    table.add_column("method")
    for heading in ("value", "seconds", "peak GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        peak = f"{figure['peak_gib']:.2f}" if "peak_gib" in figure else ""
        table.add_row(figure["network"], figure["method"], f"{figure['value']:.6g}", f"{figure['seconds']:.2f}", peak)
    return table


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lipschitz", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small network; writes no record")
    parser.add_argument("--network", choices=("6F", "6C2F", "demo"), default="6F", help="what to measure (default 6F)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all three")
    arguments = parser.parse_args()

    console = Console()
    if arguments.quick:
        figures = measure("quick")
    elif arguments.network == "demo":
        figures = demo()
    else:
        figures = measure(arguments.network, tuple(arguments.methods))
    console.print(table_of(figures))
    if not arguments.quick:
        config = {"threads": torch.get_num_threads(), "network": arguments.network, "methods": list(arguments.methods)}
        chosen = "" if tuple(arguments.methods) == METHODS else f" --methods {' '.join(arguments.methods)}"
        command = f"python -m benchmarks.lipschitz --network {arguments.network}{chosen}"
        path = write_record(f"lipschitz_{arguments.network.lower()}", command, SEED, config, {"bounds": figures})
        console.print(f"Wrote results/{path.name}")


if __name__ == "__main__":
    main()
