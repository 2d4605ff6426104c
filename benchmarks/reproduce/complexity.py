r"""The time of each bound against depth and width, beside the multiplications that the paper's appendix counts.

Claim: the compositional bound's cost grows no worse than quadratically with depth.
Hardware: whatever it runs on; the record says which.
Trials: random tanh networks of equal widths; the median of five runs, after one that does not count.

The appendix counts multiplications with one power iteration a norm; for K layers of width n without residuals, the
constants of all prefixes take :math:`n^2 K(K+1)(K+2)/6`, up to a constant.  Ours are proven norms, by eigenvalues:
cubic in n.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, finish, legend_below, panels
from benchmarks.harness import time_interleaved
from benchmarks.reproduce.experiment import Experiment, Options, make_record, save_arrays
from curvcert.bounds.curvature import Compositional, curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.network import Network, trace
from curvcert.nn.architectures import dense
from curvcert.results import Record

NAME = "complexity"
DEPTHS, WIDTHS = (2, 4, 8, 16, 32), (32, 64, 128, 256, 512)
QUICK_DEPTHS, QUICK_WIDTHS = (2, 3), (8, 16)
WIDTH, DEPTH = 64, 6
INPUTS = 64

BOUNDS: dict[str, tuple[str, Callable[[Network], object]]] = {
    "LipLT": (GREY, lambda net: lipschitz(net, method="liplt", pair="all")),
    "compositional, of f": (ORANGE, lambda net: curvature(net, method=Compositional(["sdp"]))),
    "compositional": (GREEN, lambda net: curvature(net, method="compositional", pair="all")),
    "unrolled": (BLUE, lambda net: curvature(net, method="unrolled", pair="all")),
    "CRC": (PURPLE, lambda net: curvature(net, method="crc", pair="all")),
}
"""What is timed: the colour of its line, and the call."""


def run(options: Options) -> Record:
    """Time every bound over depths at one width, and over widths at one depth."""
    depths, widths = (QUICK_DEPTHS, QUICK_WIDTHS) if options.quick else (DEPTHS, WIDTHS)
    width, depth = (8, 2) if options.quick else (WIDTH, DEPTH)
    repeats = 1 if options.quick else 5
    over_depth = [_timed(k, width, repeats, options) for k in depths]
    over_width = [_timed(depth, n, repeats, options) for n in widths]
    arrays = {
        f"{axis}_{name}": torch.tensor([entry["seconds"][name] for entry in entries]).numpy()
        for axis, entries in (("depth", over_depth), ("width", over_width))
        for name in BOUNDS
    }
    save_arrays(options.out / f"{NAME}.npz", arrays)
    figures = {
        "over_depth": over_depth,
        "over_width": over_width,
        "growth_with_depth": {name: growth(depths, arrays[f"depth_{name}"].tolist()) for name in BOUNDS},
        "growth_with_width": {name: growth(widths, arrays[f"width_{name}"].tolist()) for name in BOUNDS},
    }
    return make_record(NAME, options, {"width": width, "depth": depth, "inputs": INPUTS, "repeats": repeats}, figures)


def multiplications(depth: int, width: int) -> int:
    r"""Return the appendix's count for all prefixes of a network without residuals: :math:`\sum_k \sum_{j \le k}`.

    Every :math:`\overline L_{k+1}` takes a pass over the layers from each j to k.

    >>> multiplications(1, 10), multiplications(2, 10)
    (100, 400)
    """
    return sum(width * width * (k - j + 1) for k in range(depth) for j in range(k + 1))


def growth(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the exponent of the best power law, by least squares on logarithms over the upper half of the sizes.

    >>> round(growth((1, 2, 4, 8), [1.0, 4.0, 16.0, 64.0]), 9)
    2.0
    """
    half = len(sizes) // 2 if len(sizes) > 2 else 0
    x, y = [math.log(n) for n in sizes[half:]], [math.log(max(t, 1e-9)) for t in seconds[half:]]
    return statistics.linear_regression(x, y).slope


def _timed(depth: int, width: int, repeats: int, options: Options) -> dict[str, Any]:
    options.say(f"timing {depth} layers of {width}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = dense(INPUTS, (width,) * (depth - 1)).requires_grad_(False).eval().to(options.device)
    network = trace(model, torch.zeros(1, INPUTS, device=options.device))
    calls = {name: partial(call, network) for name, (_, call) in BOUNDS.items()}
    timings = time_interleaved(calls, repeats, warmup=1, synchronise=partial(_wait, network))
    seconds = {name: timing.median for name, timing in timings.items()}
    return {"depth": depth, "width": width, "seconds": seconds, "multiplications": multiplications(depth, width)}


def _wait(network: Network) -> None:
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)


def draw(record: Record, path: Path) -> None:
    """Draw seconds against depth and against width, with the appendix's count scaled to the first point."""
    figure, axes = panels(2, height=3.8)
    for axis, key, name in zip(axes, ("over_depth", "over_width"), ("depth", "width"), strict=True):
        entries = record.figures[key]
        sizes = [entry[name] for entry in entries]
        for bound, (colour, _) in BOUNDS.items():
            axis.plot(sizes, [entry["seconds"][bound] for entry in entries], "o-", ms=3, color=colour, label=bound)
        scale = entries[0]["seconds"]["compositional, of f"] / entries[0]["multiplications"]
        axis.plot(
            sizes, [scale * entry["multiplications"] for entry in entries], "k:", lw=1, label="the appendix's count"
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size}" for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.set_title(f"over {name}", fontsize=10)
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
