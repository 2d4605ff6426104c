"""Curvature bounds of all 45 pairs of 6F and 6C2F: time and peak memory of every method and of "auto".

Claim: on 2 cores, "auto" takes about a minute and under 6 GiB for 6F, under 15 minutes and 8 GiB for 6C2F.
Hardware: whatever it runs on; the record says which.
Trials: one network of each kind with PyTorch's default initialisation, drawn from SEED; one run of each
method, each in a process of its own, so that the peak of one does not hide that of the next and nothing that one
method computed is there for another.

    python -m benchmarks.curvature                # 6F: about two minutes
    python -m benchmarks.curvature --conv         # and 6C2F: up to an hour
"""

import argparse
import multiprocessing
import resource
import time
from itertools import pairwise
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import curvcert
from benchmarks.harness import write_record

SEED = 0
DENSE_METHODS = ("compositional", "unrolled", "crc", "auto")
CONV_METHODS = ("auto",)
WIDTHS_6F = (3072, 1024, 512, 256, 256, 128, 10)
CONVS_6C2F = ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1))
WIDTHS_QUICK = (64, 16, 16, 10)


def dense(widths: tuple[int, ...]) -> curvcert.Network:
    """Return a tanh network of linear layers, such as 6F."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return curvcert.trace(nn.Sequential(*layers[:-1]).eval(), torch.zeros(1, widths[0]))


def convolutional() -> curvcert.Network:
    """Return 6C2F: C(channels, kernel, stride, padding) six times, then 512 and 10 units, on 32 x 32 x 3."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    channels = 3
    for outputs, kernel, stride, padding in CONVS_6C2F:
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding), nn.Tanh()]
        channels = outputs
    layers += [nn.Flatten(), nn.Linear(64 * 4 * 4, 512), nn.Tanh(), nn.Linear(512, 10)]
    return curvcert.trace(nn.Sequential(*layers).eval(), torch.zeros(1, 3, 32, 32))


def network_called(name: str) -> curvcert.Network:
    """Return one of the networks that are measured."""
    if name == "6C2F":
        return convolutional()
    return dense(WIDTHS_6F if name == "6F" else WIDTHS_QUICK)


def peak_gib() -> float:
    """Return the largest resident memory of this process so far, in GiB (on Linux, where it is counted in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str, method: str) -> dict[str, Any]:
    """Return time, memory and values of one method on one network."""
    network = network_called(name)
    before, start, processor = peak_gib(), time.perf_counter(), time.process_time()
    bound = curvcert.curvature(network, pair="all", method=method)
    return {
        "network": name,
        "method": method,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "peak_gib": peak_gib(),
        "peak_gib_before": before,
        "won": bound.method,
        "pairs": bound.value.numel(),
        "median_bound": float(bound.value.median()),
        "largest_bound": float(bound.value.max()),
    }


def measured_apart(name: str, method: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, method))


def table_of(figures: list[dict[str, Any]]) -> Table:
    """Return the printed table, one row per method."""
    table = Table(title="Curvature of all pairs: time and memory", box=box.SIMPLE_HEAD)
    for heading in ("network", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("seconds", "CPU s", "peak GiB", "median K"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        numbers = (figure["seconds"], figure["processor_seconds"], figure["peak_gib"])
        row = [f"{number:.2f}" for number in numbers]
        table.add_row(figure["network"], figure["method"], *row, f"{figure['median_bound']:.4g}")
    return table


def main() -> None:
    """Measure every method, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curvature", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small network; writes no record")
    parser.add_argument("--conv", action="store_true", help="6C2F as well")
    arguments = parser.parse_args()

    console = Console()
    runs = [("quick" if arguments.quick else "6F", method) for method in DENSE_METHODS]
    runs += [("6C2F", method) for method in CONV_METHODS if arguments.conv]
    figures = []
    for name, method in runs:
        console.print(f"{name}, {method} ...")
        figures.append(measured_apart(name, method))
    console.print(table_of(figures))
    if not arguments.quick:
        command = "python -m benchmarks.curvature" + (" --conv" if arguments.conv else "")
        path = write_record("curvature", command, SEED, {"threads": torch.get_num_threads()}, {"runs": figures})
        console.print(f"Wrote results/{path.name}")


if __name__ == "__main__":
    main()
