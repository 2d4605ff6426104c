"""Lipschitz bounds of 6F and 6C2F: time, peak memory and value; small networks against LipSDP and ECLipsE.

Claim: LipLT with the norms of all its sub-products (every prefix) takes under 30 s for 6F and under 10 min for
6C2F on two cores, in under 8 GiB; the closed-form recursion is not far above LipSDP's optimum on small networks.
Hardware: whatever it runs on; the record says which.
Trials: one network of each architecture with PyTorch's default initialisation from SEED; each method once, on a
fresh cache of norms, one process for the lot: the peak is that of the process up to the end of the method.

LipSDP is solved by cvxpy with Clarabel (the extra `sdp`), with one multiplier a neuron (LipSDP-Neuron); its
value is what the solver returns, within its tolerance of the optimum on an unknown side, and no bound.
ECLipsE-Fast is that of the package eclipse-nn, in ordinary floating point (its ECLipsE falls back to it here).
What is not installed is skipped, with a line that says so.
"""

import argparse
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
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
from curvcert.network import Block, Network

SEED = 0
METHODS = ("product", "liplt", "lipsdp-recursion")
DEMO_IMAGES, DEMO_PAIR = 20, (3, 8)
SMALL_WIDTHS = ((8, 16, 8), (10, 20, 20, 5), (16, 32, 32, 32, 10))

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


def lipsdp(weights: list[torch.Tensor], alpha: float = 0.0, beta: float = 1.0) -> float:
    """Return the value of LipSDP-Neuron for slopes in [alpha, beta], by cvxpy and Clarabel."""
    cp: Any = importlib.import_module("cvxpy")
    W = [weight.numpy() for weight in weights]
    hidden = sum(len(weight) for weight in W[:-1])
    inputs = W[0].shape[1]
    # A x = the inputs of all activations, B x = their outputs, x = (input, activations).
    A = np.zeros((hidden, inputs + hidden))
    row, column = 0, 0
    for weight in W[:-1]:
        A[row : row + weight.shape[0], column : column + weight.shape[1]] = weight
        row, column = row + weight.shape[0], column + weight.shape[1]
    B = np.concatenate([np.zeros((hidden, inputs)), np.eye(hidden)], axis=1)
    T, rho = cp.diag(cp.Variable(hidden, nonneg=True)), cp.Variable(nonneg=True)
    first, last = np.zeros((inputs + hidden,) * 2), np.zeros((inputs + hidden,) * 2)
    first[:inputs, :inputs] = np.eye(inputs)
    last[-W[-1].shape[1] :, -W[-1].shape[1] :] = W[-1].T @ W[-1]
    sector = -2 * alpha * beta * A.T @ T @ A + (alpha + beta) * (A.T @ T @ B + B.T @ T @ A) - 2 * B.T @ T @ B
    matrix = sector + last - rho * first
    problem = cp.Problem(cp.Minimize(rho), [(matrix + matrix.T) / 2 << 0])
    problem.solve(solver=cp.CLARABEL)
    return math.sqrt(float(rho.value))


def eclipse(weights: list[torch.Tensor], method: str) -> float:
    """Return the value of ECLipsE or ECLipsE-Fast (Xu and Sivaranjani, NeurIPS 2024) for slopes in [0, 1]."""
    estimator: Any = importlib.import_module("eclipse_nn.LipConstEstimator").LipConstEstimator(weights=weights)
    return float(estimator.estimate(method))


def weights_of(network: Network) -> list[torch.Tensor]:
    """Return the matrices of a feed-forward network, first to last."""
    blocks = [block for block in network.blocks if isinstance(block, Block)]
    return [block.W.as_matrix() for block in blocks] + [blocks[-1].G.as_matrix()]


def rivals() -> tuple[dict[str, Callable[[list[torch.Tensor]], float]], list[str]]:
    """Return the outside methods that are installed, and why the others are left out."""
    found: dict[str, Callable[[list[torch.Tensor]], float]] = {}
    skipped = []
    if importlib.util.find_spec("cvxpy") and importlib.util.find_spec("clarabel"):
        found["LipSDP-Neuron (cvxpy)"] = lipsdp
    else:
        skipped.append("LipSDP: cvxpy and clarabel are not installed (pip install 'curvcert[sdp]')")
    if importlib.util.find_spec("eclipse_nn"):
        found["ECLipsE-Fast (eclipse-nn)"] = partial(eclipse, method="ECLipsE_Fast")
    else:
        skipped.append("ECLipsE: eclipse-nn is not installed (pip install eclipse-nn)")
    return found, skipped


def compare(widths: tuple[int, ...]) -> list[Figures]:
    """Return value and seconds of ours and of the others on one small dense network."""
    torch.manual_seed(SEED)
    network = curvcert.trace(dense(*widths).double().eval(), torch.zeros(1, widths[0], dtype=torch.float64))
    name = "-".join(map(str, widths))
    weights, others = weights_of(network), rivals()[0]
    ours = {method: partial(value_of, network, method) for method in METHODS}
    theirs = {rival: partial(call, weights) for rival, call in others.items()}
    return measure_calls(name, {**ours, **theirs})


def value_of(network: Network, method: str) -> float:
    """Return our bound by one method."""
    return float(curvcert.lipschitz(network, method=method))


def measure_calls(name: str, calls: Mapping[str, Callable[[], float]]) -> list[Figures]:
    """Return value and seconds of each call; one that fails says so."""
    figures = []
    for method, call in calls.items():
        start = time.perf_counter()
        try:
            value: float | None = call()
        except Exception as error:
            print(f"{method} failed on {name}: {error}")
            value = None
        figures.append({"network": name, "method": method, "value": value, "seconds": time.perf_counter() - start})
    return figures


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
                figures += measure_calls(f"l{p:g} {scope}", {name: call})
    return figures


def demo_scopes(x: torch.Tensor, p: float) -> dict[str, dict[str, Any]]:
    """Return the scopes of the comparison: everywhere, anchored at the images, and balls about them."""
    radii = (0.0, 0.001, 0.01, 0.1) if p == 2 else (0.0, 0.0001, 0.001, 0.01)
    return {"global": {}, "anchored": {"at": x}, **{f"ball {r:g}": {"at": x, "radius": r} for r in radii}}


def applies(method: AbstractLipschitzMethod, network: Network, p: float, arguments: dict[str, Any]) -> bool:
    """Tell whether a method applies to a scope of the demo."""
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
        value = "failed" if figure["value"] is None else f"{figure['value']:.6g}"
        peak = f"{figure['peak_gib']:.2f}" if "peak_gib" in figure else ""
        table.add_row(figure["network"], figure["method"], value, f"{figure['seconds']:.2f}", peak)
    return table


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lipschitz", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small network; writes no record")
    parser.add_argument(
        "--network", choices=("6F", "6C2F", "small", "demo"), default="6F", help="what to measure (default 6F)"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all three")
    arguments = parser.parse_args()

    console = Console()
    if arguments.quick:
        figures = measure("quick") + compare(SMALL_WIDTHS[0])
    elif arguments.network == "small":
        figures = [figure for widths in SMALL_WIDTHS for figure in compare(widths)]
    elif arguments.network == "demo":
        figures = demo()
    else:
        figures = measure(arguments.network, tuple(arguments.methods))
    console.print(table_of(figures))
    for reason in rivals()[1] if arguments.quick or arguments.network == "small" else ():
        console.print(f"Skipped {reason}")
    if not arguments.quick:
        config = {"threads": torch.get_num_threads(), "network": arguments.network, "methods": list(arguments.methods)}
        chosen = "" if tuple(arguments.methods) == METHODS else f" --methods {' '.join(arguments.methods)}"
        command = f"python -m benchmarks.lipschitz --network {arguments.network}{chosen}"
        path = write_record(f"lipschitz_{arguments.network.lower()}", command, SEED, config, {"bounds": figures})
        console.print(f"Wrote results/{path.name}")


if __name__ == "__main__":
    main()
