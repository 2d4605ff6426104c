r"""How far above the truth: K of every method over the largest Hessian found, against depth.

Claim: for one pair of classes, "auto" is the tightest of the sound methods at every depth, and well below the
paper's bound; over a ball of radius 36/255 the local bound is well below the global one.
Hardware: whatever it runs on; the record says which.
Trials: one tanh network for each kind (MLP, conv), training (none, standard, curvature-regularised) and
depth 2 to 10, from SEED, on the embedded digits.  The Hessian's norm is found by gradient ascent with Lanczos-like
power steps from test images and noise: it is attained, so every ratio is at least the true looseness's lower side,
K / truth <= K / found.

    python -m benchmarks.curvature_tightness            # trains, measures, writes the record and the plots
    python -m benchmarks.curvature_tightness --plots    # only the plots, from the record
"""

import argparse
import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from rich.console import Console
from torch import Tensor, nn

import curvcert
from benchmarks.drawing import grid, legend_below
from benchmarks.harness import ROOT, figures_of, write_record
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from curvcert.bounds.curvature import Compositional
from curvcert.data import load_digits
from curvcert.picture_files import write_figure

SEED = 0
DEPTHS = (2, 3, 4, 5, 6, 8, 10)
PAIR = (3, 8)
RADIUS = 36 / 255
SMALL_RADIUS = 9 / 255
IMAGES = ROOT / "docs" / "images"

Kind = Literal["mlp", "conv"]
Training = Literal["random", "standard", "regularised"]
KINDS: tuple[Kind, ...] = ("mlp", "conv")
TRAININGS: tuple[Training, ...] = ("random", "standard", "regularised")

METHODS: dict[str, tuple[str, Any]] = {
    "paper": ("#999999", None),
    "CRC": ("#b07aa1", "crc"),
    "product": ("#e15759", Compositional(["product"])),
    "SDP": ("#f28e2b", Compositional(["sdp"])),
    "Hadamard": ("#59a14f", Compositional(["hadamard"])),
    "unrolled": ("#4e79a7", "unrolled"),
}
"""The lines of the plot, their colours, and what `curvature` is asked for."""


@dataclass(frozen=True)
class Case:
    """One network to measure."""

    kind: Kind
    training: Training
    depth: int


def architecture(kind: Kind, depth: int) -> nn.Sequential:
    """Return `depth` layers with weights, tanh between them."""
    layers: list[nn.Module] = []
    if kind == "mlp":
        widths = [64, *[32] * (depth - 1), 10]
        layers.append(nn.Flatten())
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*layers[:-1])
    channels = 1
    for k in range(depth - 1):
        layers += [nn.Conv2d(channels, 6, 3, 2 if k == 0 else 1, 1), nn.Tanh()]
        channels = 6
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16, 10))


def curvature_surrogate(model: nn.Sequential) -> Tensor:
    r"""Return a differentiable stand-in for K: :math:`\sum_k` (largest row) (norms up to k) (norms)."""
    layers = [m for m in model if isinstance(m, nn.Linear | nn.Conv2d)]
    norms = [torch.linalg.matrix_norm(m.weight.flatten(1), 2) for m in layers]
    rows = [m.weight.flatten(1).norm(dim=1).amax() for m in layers]
    total: Tensor = norms[0].new_zeros(())
    for k in range(len(layers) - 1):
        prefix = torch.stack([*norms[:k], norms[0].new_ones(())]).prod()
        total = total + rows[k] * norms[k] * prefix * prefix * torch.stack(norms[k + 1 :]).prod()
    return total


def train(case: Case, steps: int) -> nn.Sequential:
    """Return the case's network, trained on the digits as it asks."""
    torch.manual_seed(SEED)
    model = architecture(case.kind, case.depth)
    if case.training == "random":
        return model
    digits = load_digits()
    x, y = digits.as_float64().float(), digits.labels
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        pick = torch.arange(step * 128, (step + 1) * 128) % len(x)
        loss = F.cross_entropy(model(x[pick]), y[pick])
        if case.training == "regularised":
            loss = loss + 0.01 * curvature_surrogate(model)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model


def accuracy(model: nn.Sequential) -> float:
    """Return the fraction of test digits that are classified correctly."""
    digits = load_digits("test")
    with torch.no_grad():
        return float((model(digits.as_float64().float()).argmax(dim=1) == digits.labels).double().mean())


def largest_hessian(network: curvcert.Network, starts: Tensor, steps: int) -> float:
    """Return the largest |v' H(x) v| that ascent in x, with power steps for v, finds for a scalar network."""
    x = starts
    v = F.normalize(torch.randn(len(x), math.prod(network.in_shape), dtype=torch.float64), dim=1)
    best = 0.0
    for step in range(steps):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        for _ in range(2):
            (hv,) = torch.autograd.grad((g.flatten(1) * v).sum(), x, retain_graph=True)
            v = F.normalize(hv.flatten(1), dim=1)
        (hv,) = torch.autograd.grad((g.flatten(1) * v).sum(), x, create_graph=True)
        size = torch.linalg.vector_norm(hv.flatten(1), dim=1)
        best = max(best, float(size.detach().max()))
        (ascent,) = torch.autograd.grad(size.sum(), x)
        length = 0.5 * 0.97**step
        x = x.detach() + length * F.normalize(ascent.flatten(1), dim=1).reshape(x.shape)
    return best


def measure(case: Case, steps: int, ascent: int) -> dict[str, Any]:
    """Return every ratio of one network."""
    model = train(case, steps)
    test = load_digits("test").as_float64()
    network = curvcert.trace(model.eval(), torch.zeros(1, 1, 8, 8))
    starts = torch.cat([test[:24], torch.randn(24, 1, 8, 8, dtype=torch.float64)])
    found = largest_hessian(network.difference(*PAIR), starts, ascent)
    bounds = {
        name: float(curvcert.curvature(network, pair=PAIR, method=method))
        for name, (_, method) in METHODS.items()
        if method is not None
    }
    bounds["paper"] = float(paper_pair_curvature(PaperBounds(network)))
    best = curvcert.curvature(network, pair=PAIR)
    local = curvcert.curvature(network, pair=PAIR, at=test[:64], radius=RADIUS)
    small = curvcert.curvature(network, pair=PAIR, at=test[:64], radius=SMALL_RADIUS)
    anchored = curvcert.curvature(network, pair=PAIR, at=test[:64])
    return {
        "kind": case.kind,
        "training": case.training,
        "depth": case.depth,
        "accuracy": accuracy(model),
        "largest_hessian_found": found,
        "bounds": bounds,
        "over_found": {name: value / found for name, value in bounds.items()},
        "auto_over_found": float(best) / found,
        "paper_over_auto": bounds["paper"] / float(best),
        "local_over_global": float(local.value.median()) / float(best),
        "small_local_over_global": float(small.value.median()) / float(best),
        "anchored_over_global": float(anchored.value.median()) / float(best),
        "per_layer": [
            {"layer": term.layer, "share": float(term.value) / float(best), "by": term.method}
            for term in best.per_layer
        ],
    }


def summary(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over depths, one line for each kind and training."""
    lines = {}
    for kind in KINDS:
        for training in TRAININGS:
            chosen = [n for n in networks if n["kind"] == kind and n["training"] == training]
            if chosen:
                lines[f"{kind}, {training}"] = {
                    key: statistics.median(n[key] for n in chosen)
                    for key in (
                        "auto_over_found",
                        "paper_over_auto",
                        "local_over_global",
                        "small_local_over_global",
                        "anchored_over_global",
                    )
                }
    return lines


def plot_ratios(networks: list[dict[str, Any]]) -> None:
    """Draw K / largest Hessian found against depth: a row for each kind, a column for each training."""
    figure, axes = grid(2, 3, (10, 5.6), sharex=True, sharey=True)
    for axis, (kind, training) in zip(axes.flat, [(k, t) for k in KINDS for t in TRAININGS], strict=True):
        chosen = [n for n in networks if n["kind"] == kind and n["training"] == training]
        for name, (colour, _) in METHODS.items():
            ratios = [n["over_found"][name] for n in chosen]
            axis.plot([n["depth"] for n in chosen], ratios, "o-", color=colour, label=name, ms=3, lw=1.4)
        axis.set_yscale("log")
        axis.axhline(1, color="black", lw=0.8)
        axis.grid(True, which="major", alpha=0.25)
        axis.set_title(f"{'MLP' if kind == 'mlp' else 'conv'}, {training}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("layers")
    for axis in axes[:, 0]:
        axis.set_ylabel("K / largest Hessian found")
    legend_below(figure, axes.flat, columns=len(METHODS), size=10)
    write_figure(figure, IMAGES / "curvature-tightness.svg")


def plot_breakdown(networks: list[dict[str, Any]], depth: int = 6) -> None:
    """Draw each layer's share of the unrolled bound, for the MLPs of one depth."""
    chosen = [n for n in networks if n["kind"] == "mlp" and n["depth"] == depth]
    figure, ((axis,),) = grid(1, 1, (7.5, 2.6))
    colours = colormaps["viridis"]
    for row, network in enumerate(chosen):
        left = 0.0
        terms = network["per_layer"]
        for k, term in enumerate(terms):
            axis.barh(
                row, term["share"], left=left, color=colours(0.15 + 0.75 * k / max(1, len(terms) - 1)), height=0.6
            )
            if term["share"] > 0.05:
                dark = k < len(terms) / 2
                axis.text(
                    left + term["share"] / 2,
                    row,
                    f"{k + 1}",
                    ha="center",
                    va="center",
                    color="w" if dark else "k",
                    fontsize=9,
                )
            left += term["share"]
    axis.set_yticks(range(len(chosen)), [n["training"] for n in chosen])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel(f"share of K by layer (1 is the first), MLP of {depth} layers")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    write_figure(figure, IMAGES / "curvature-per-layer.svg")


def main() -> None:
    """Measure every network, write the record, draw the plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curvature_tightness", description=__doc__)
    parser.add_argument("--plots", action="store_true", help="draw the plots again from the record")
    parser.add_argument("--quick", action="store_true", help="depth 2 and 3, short; writes no record and no plots")
    arguments = parser.parse_args()
    console = Console()
    if arguments.plots:
        networks = figures_of("curvature_tightness")["networks"]
    else:
        depths, steps, ascent = ((2, 3), 30, 10) if arguments.quick else (DEPTHS, 400, 60)
        networks = []
        for case in (Case(kind, training, depth) for kind in KINDS for training in TRAININGS for depth in depths):
            networks.append(measure(case, steps, ascent))
            last = networks[-1]
            console.print(
                f"{case.kind}, {case.training}, {case.depth} layers: accuracy {last['accuracy']:.3f}, "
                f"auto / found {last['auto_over_found']:.2f}, paper / auto {last['paper_over_auto']:.2f}, "
                f"local / global {last['local_over_global']:.3f}"
            )
        if arguments.quick:
            return
        config = {"depths": list(DEPTHS), "steps": steps, "ascent": ascent, "pair": list(PAIR)}
        config |= {"radius": RADIUS, "small_radius": SMALL_RADIUS, "test_images": 64}
        figures = {"medians": summary(networks), "networks": networks}
        write_record("curvature_tightness", "python -m benchmarks.curvature_tightness", SEED, config, figures)
    plot_ratios(networks)
    plot_breakdown(networks)
    console.print(f"Wrote curvature-tightness.svg and curvature-per-layer.svg under {IMAGES.name}")


if __name__ == "__main__":
    main()
