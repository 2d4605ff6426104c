"""The tanh picture: the slope as seen from a point, against the global slope 1.

Claim: the anchored Lipschitz constant of tanh at 2 is less than 0.582.
Hardware: any; it takes a second.
Trials: one; nothing is random.
"""

import math
from pathlib import Path

import torch

from benchmarks.drawing import BLUE, GREY, ORANGE, finish, panels
from benchmarks.reproduce.experiment import Experiment, Options, make_record, save_arrays
from benchmarks.reproduce.paper_numbers import TANH_SLOPE_AT_2
from curvcert.activations import TANH, anchored_curvature_range, anchored_slope_range
from curvcert.results import Record

NAME = "tanh-anchor"
POINT = 2.0
LIMIT = 5.0


def run(options: Options) -> Record:
    """Measure the anchored slopes and curvatures of tanh on a grid."""
    count = 41 if options.quick else 1001
    z = torch.linspace(-LIMIT, LIMIT, count, dtype=torch.float64)
    slope = anchored_slope_range(TANH, z)[1]
    low, high = anchored_curvature_range(TANH, z)
    curvature = torch.maximum(high, -low)
    arrays = {"z": z.numpy(), "slope": slope.numpy(), "curvature": curvature.numpy()}
    save_arrays(options.out / f"{NAME}.npz", arrays)
    at_point = float(anchored_slope_range(TANH, torch.tensor([POINT], dtype=torch.float64))[1])
    every = max(1, count // 200)
    figures = {
        "anchored_slope_at_2": at_point,
        "paper_slope_at_2_below": TANH_SLOPE_AT_2,
        "holds": at_point < TANH_SLOPE_AT_2,
        "global_slope": TANH.slope[1],
        "global_curvature": TANH.curvature_c,
        "curve": {name: value[::every].tolist() for name, value in arrays.items()},
    }
    return make_record(NAME, options, {"point": POINT, "grid": [-LIMIT, LIMIT, count]}, figures)


def draw(record: Record, path: Path) -> None:
    """Draw tanh with the steepest chord from 2, and the anchored constants beside the global ones."""
    curve, slope = record.figures["curve"], record.figures["anchored_slope_at_2"]
    figure, (left, right) = panels(2)
    z = curve["z"]
    left.plot(z, [math.tanh(v) for v in z], color=BLUE, label="tanh")
    line = [math.tanh(POINT) + slope * (v - POINT) for v in z]
    left.plot(z, line, color=ORANGE, label=f"steepest chord from {POINT:g}: slope {slope:.4f}")
    left.plot(z, [math.tanh(POINT) + (v - POINT) for v in z], ":", color=GREY, label="global slope 1")
    left.plot([POINT], [math.tanh(POINT)], "o", color=ORANGE, ms=5)
    left.set_ylim(-1.6, 2.1)
    right.plot(z, curve["slope"], color=BLUE, label="anchored slope")
    right.plot(z, curve["curvature"], color=ORANGE, label="anchored slope of tanh'")
    right.axhline(record.figures["global_slope"], color=BLUE, ls=":", lw=1)
    right.axhline(record.figures["global_curvature"], color=ORANGE, ls=":", lw=1)
    right.set_ylim(0, 1.1)
    for axis, title in ((left, "tanh as seen from 2"), (right, "anchored (lines) and global (dots)")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("x")
    finish(figure, (left, right), path)


TANH_ANCHOR = Experiment(NAME, "The anchored slope of tanh at 2 is less than 0.582.", ("fig:anch",), run, draw)
