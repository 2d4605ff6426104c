r"""The time of each bound against depth and width, beside the multiplications that the paper's appendix counts.

Claim: the compositional bound's cost grows no worse than quadratically with depth.
Hardware: whatever it runs on; the record says which.
Trials: random tanh networks of equal widths, feed-forward, residual and 1-Lipschitz; the median of five runs, after one
that does not count.

The appendix counts multiplications with one power iteration a norm; for K layers of width n without residuals, the
constants of all prefixes take :math:`n^2 K(K+1)(K+2)/6`, up to a constant.  With residuals each step of a path has
three products, and for 1-Lipschitz blocks only the curvatures of the blocks are left.  Ours are proven norms, by
eigenvalues: cubic in n.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.baseline_networks import Residual
from benchmarks.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, finish, legend_below, panels
from benchmarks.harness import time_interleaved
from benchmarks.reproduce.experiment import Experiment, Options, make_record, save_arrays
from benchmarks.reproduce.paper_bounds import PaperBounds
from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.network import Network, trace
from curvcert.nn import SLLDense
from curvcert.nn.architectures import dense
from curvcert.results import Record

NAME = "complexity"
DEPTHS, WIDTHS = (2, 4, 8, 16, 32), (32, 64, 128, 256, 512)
QUICK_DEPTHS, QUICK_WIDTHS = (2, 3), (8, 16)
WIDTH, DEPTH = 64, 6
INPUTS, QUICK_INPUTS = 64, 4

BOUNDS: dict[str, tuple[str, Callable[[Network], object]]] = {
    "LipLT": (GREY, lambda net: lipschitz(net, method="liplt", pair="all")),
    "compositional, of f": (ORANGE, lambda net: PaperBounds(net).curvature),
    "compositional": (GREEN, lambda net: curvature(net, method="compositional", pair="all")),
    "unrolled": (BLUE, lambda net: curvature(net, method="unrolled", pair="all")),
    "CRC": (PURPLE, lambda net: curvature(net, method="crc", pair="all")),
}
"""What is timed: the colour of its line, and the call."""

PLAIN = "feed-forward"
FAMILIES = (PLAIN, "residual", "1-Lipschitz")
"""The kinds of networks; only the first is measured over widths, and has a bound by CRC."""


def run(options: Options) -> Record:
    """Time every bound over depths at one width, and over widths at one depth."""
    depths, widths = (QUICK_DEPTHS, QUICK_WIDTHS) if options.quick else (DEPTHS, WIDTHS)
    width, depth = (8, 2) if options.quick else (WIDTH, DEPTH)
    repeats = 1 if options.quick else 5
    measured = {kind: [_timed(kind, k, width, repeats, options) for k in depths] for kind in FAMILIES}
    measured["width"] = [_timed(PLAIN, depth, n, repeats, options) for n in widths]
    seconds = {
        (axis, name): torch.tensor([entry["seconds"][name] for entry in entries])
        for axis, entries in measured.items()
        for name in entries[0]["seconds"]
    }
    save_arrays(options.out / f"{NAME}.npz", {f"{axis}_{name}": t.numpy() for (axis, name), t in seconds.items()})

    def exponents(of: str, sizes: tuple[int, ...]) -> dict[str, float]:
        return {name: growth(sizes, found.tolist()) for (axis, name), found in seconds.items() if axis == of}

    figures = {
        "over_depth": measured[PLAIN],
        "over_width": measured["width"],
        "growth_with_depth": exponents(PLAIN, depths),
        "growth_with_width": exponents("width", widths),
        "families": {
            kind: {"over_depth": measured[kind], "growth_with_depth": exponents(kind, depths)}
            for kind in FAMILIES
            if kind != PLAIN
        },
    }
    return make_record(NAME, options, {"width": width, "depth": depth, "inputs": INPUTS, "repeats": repeats}, figures)


def multiplications(depth: int, width: int, kind: str = PLAIN) -> int:
    r"""Return the appendix's count for the constants that the curvature of a network takes, all layers of one width.

    Every :math:`\overline L_{k+1}` takes a pass over the layers from each j to k.

    >>> multiplications(1, 10), multiplications(2, 10)
    (100, 400)
    >>> multiplications(2, 10, "residual"), multiplications(2, 10, "1-Lipschitz")
    (1800, 600)
    """
    n = width * width
    if kind == "1-Lipschitz":
        return 3 * n * depth
    if kind == "residual":
        return sum(n * (sum(2 + 3 * (k - j) for j in range(k + 1)) + 3 * (k + 1)) for k in range(depth))
    return sum(n * (k - j + 1) for k in range(depth) for j in range(k + 1))


def growth(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the exponent of the best power law, by least squares on logarithms over the upper half of the sizes.

    >>> round(growth((1, 2, 4, 8), [1.0, 4.0, 16.0, 64.0]), 9)
    2.0
    """
    half = len(sizes) // 2 if len(sizes) > 2 else 0
    x, y = [math.log(n) for n in sizes[half:]], [math.log(max(t, 1e-9)) for t in seconds[half:]]
    return statistics.linear_regression(x, y).slope


def network_of(kind: str, depth: int, width: int, inputs: int = INPUTS) -> nn.Sequential:
    """Return a random network: layers, or blocks beside a skip, of one width.

    >>> len(network_of("1-Lipschitz", 3, 8))
    3
    """
    if kind == "1-Lipschitz":
        return nn.Sequential(*(SLLDense(inputs, width) for _ in range(depth)))
    if kind == "residual":
        blocks = [(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, inputs)) for _ in range(depth)]
        return nn.Sequential(*(Residual(nn.Sequential(*block)) for block in blocks))
    return dense(inputs, (width,) * (depth - 1))


def _timed(kind: str, depth: int, width: int, repeats: int, options: Options) -> dict[str, Any]:
    options.say(f"timing {depth} layers of {width}, {kind}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        inputs = QUICK_INPUTS if options.quick else INPUTS
        model = network_of(kind, depth, width, inputs).requires_grad_(False).eval().to(options.device)
    network = trace(model, torch.zeros(1, inputs, device=options.device))
    bounds = {name: call for name, (_, call) in BOUNDS.items() if name != "CRC" or kind == PLAIN}
    calls = {name: partial(call, network) for name, call in bounds.items()}
    timings = time_interleaved(calls, repeats, warmup=0 if options.quick else 1, synchronise=partial(_wait, network))
    seconds = {name: timing.median for name, timing in timings.items()}
    return {"depth": depth, "width": width, "seconds": seconds, "multiplications": multiplications(depth, width, kind)}


def _wait(network: Network) -> None:
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)


def draw(record: Record, path: Path) -> None:
    """Draw seconds against depth and against width, with the appendix's count scaled to the first point."""
    drawn = [(PLAIN, "depth", record.figures["over_depth"]), (PLAIN, "width", record.figures["over_width"])]
    drawn += [(kind, "depth", found["over_depth"]) for kind, found in record.figures.get("families", {}).items()]
    figure, axes = panels(len(drawn), height=3.8)
    for axis, (kind, name, entries) in zip(axes, drawn, strict=True):
        sizes = [entry[name] for entry in entries]
        for bound in entries[0]["seconds"]:
            seconds = [entry["seconds"][bound] for entry in entries]
            axis.plot(sizes, seconds, "o-", ms=3, color=BOUNDS[bound][0], label=bound)
        scale = entries[0]["seconds"]["compositional, of f"] / entries[0]["multiplications"]
        axis.plot(
            sizes, [scale * entry["multiplications"] for entry in entries], "k:", lw=1, label="the appendix's count"
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size}" for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.set_title(f"{kind}, over {name}", fontsize=10)
    axes[0].set_ylabel("seconds")
    legend_below(figure, axes, 3)
    finish(figure, axes, path)


COMPLEXITY = Experiment(
    NAME,
    "The compositional bound's time grows no worse than quadratically with depth.",
    (),
    run,
    draw,
)
