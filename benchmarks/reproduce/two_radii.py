"""The certified and the attack radius about one point, and the decision boundary between them.

Claim: the distance to the boundary lies between the certified radius and the attack radius, and a step of the attack's
length along the gradient crosses it.
Hardware: any; it takes a second.
Trials: one network of two inputs, with weights from SEED; nothing else is random.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.drawing import BLUE, GREEN, GREY, ORANGE, finish, panels
from benchmarks.networks import dense
from benchmarks.reproduce.certificates_of_the_paper import evaluator
from benchmarks.reproduce.experiment import Experiment, Options, make_record, save_arrays
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from curvcert.certificates import certify
from curvcert.certificates.radii import attack_radius, curvature_radius
from curvcert.network import Network, trace
from curvcert.results import Record

NAME = "two-radii"
SEED, WIDTH = 8, 8
POINT = (0.25, -0.45)
_STEPS = 60


def run(options: Options) -> Record:
    """Find both radii by the paper's constants and by ours, and the boundary in every direction."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = dense(2, WIDTH, 2).requires_grad_(False).eval()
    network, x = trace(model, torch.zeros(1, 2)), torch.tensor([POINT], dtype=torch.float64)
    label = network(x).argmax(dim=1)
    angles = torch.linspace(0, 2 * math.pi, 73 if options.quick else 721, dtype=torch.float64)
    boundary = distances(network, x[0], int(label), angles)
    points, K = evaluator(network)(x, label), paper_pair_curvature(PaperBounds(network))
    other = 1 - int(label)
    m, g = points.margin[0, other], points.gradient_norm[0, other]
    found = certify(network, x, label, progress=False)
    radii = {
        "paper": {"certified": float(curvature_radius(m, g, K)), "attack": float(attack_radius(m, g, K))},
        "ours": {"certified": float(found.radius), "attack": float(found.attack_radius)},
    }
    least = float(boundary.amin())
    save_arrays(options.out / f"{NAME}.npz", {"angle": angles.numpy(), "boundary": boundary.numpy()})
    every = max(1, len(angles) // 360)
    figures: dict[str, Any] = {
        "radii": radii,
        "distance": least,
        "holds": all(own["certified"] <= least <= own["attack"] for own in radii.values()),
        "point": list(POINT),
        "steepest": float(torch.atan2(*(points.gradient[0, other].flip(0)))) if points.gradient is not None else 0.0,
        "boundary": {
            "angle": angles[::every].tolist(),
            "distance": [None if math.isinf(d) else d for d in boundary[::every].tolist()],
        },
    }
    return make_record(NAME, options, {"weights_seed": SEED, "width": WIDTH, "point": list(POINT)}, figures)


def distances(network: Network, x: Tensor, label: int, angles: Tensor, most: float = 8.0, grid: int = 800) -> Tensor:
    """Return how far the other class is in each direction: the first change on a grid, bisected; inf for none."""
    along = torch.stack([angles.cos(), angles.sin()], dim=1)
    steps = torch.linspace(0, most, grid + 1, dtype=torch.float64)
    wrong = _wrong(network, x, label, along, steps.expand(len(angles), -1))
    first = wrong.double().argmax(dim=1)
    high = steps[first]
    low = steps[(first - 1).clamp(min=0)]
    for _ in range(_STEPS):
        middle = (low + high) / 2
        beyond = _wrong(network, x, label, along, middle[:, None])[:, 0]
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return torch.where(wrong.any(dim=1), high, torch.inf)


def _wrong(network: Network, x: Tensor, label: int, along: Tensor, steps: Tensor) -> Tensor:
    points = x + steps[:, :, None] * along[:, None, :]
    return (network(points.reshape(-1, 2)).argmax(dim=1) != label).reshape(steps.shape)


def draw(record: Record, path: Path) -> None:
    """Draw the boundary about the point, the circle that touches it, and both radii by the paper's constants."""
    f, (figure, (axis,)) = record.figures, panels(1, width=5.6, height=5.2)
    circle = np.linspace(0, 2 * math.pi, 361)
    x, y = f["point"]
    pieces = [(a, math.nan if d is None else d) for a, d in zip(*f["boundary"].values(), strict=True)]
    axis.plot([x + d * math.cos(a) for a, d in pieces], [y + d * math.sin(a) for a, d in pieces], color="black", lw=1.4)
    axis.plot([], [], color="black", lw=1.4, label="decision boundary")
    paper = f["radii"]["paper"]
    for radius, colour, style, name in (
        (paper["certified"], BLUE, "-", f"certified radius {paper['certified']:.3f}"),
        (f["distance"], GREEN, "-", f"distance to the boundary {f['distance']:.3f}"),
        (paper["attack"], ORANGE, "-", f"attack radius {paper['attack']:.3f}"),
        (f["radii"]["ours"]["certified"], BLUE, ":", f"certified, ours {f['radii']['ours']['certified']:.3f}"),
        (f["radii"]["ours"]["attack"], ORANGE, ":", f"attack, ours {f['radii']['ours']['attack']:.3f}"),
    ):
        axis.plot(x + radius * np.cos(circle), y + radius * np.sin(circle), style, color=colour, lw=1.2, label=name)
    length = paper["attack"]
    tip = (x + length * math.cos(f["steepest"]), y + length * math.sin(f["steepest"]))
    axis.annotate("", tip, (x, y), arrowprops={"arrowstyle": "->", "color": GREY})
    axis.plot([x], [y], "o", color=GREY, ms=4)
    size = 1.6 * paper["attack"]
    axis.set_xlim(x - size, x + size)
    axis.set_ylim(y - size, y + size)
    axis.set_aspect("equal")
    finish(figure, (axis,), path)


TWO_RADII = Experiment(
    NAME,
    "The distance to the decision boundary lies between the certified radius and the attack radius.",
    ("fig:certifiedRadiusAttack",),
    run,
    draw,
)
