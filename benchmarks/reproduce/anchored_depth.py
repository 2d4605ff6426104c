"""Global against anchored Lipschitz and curvature constants, over depth.

Claim: on MNIST networks of 3 to 6 layers the anchored constants, averaged over the test set, are well below the
global ones, by the paper's formulas and by ours.
Hardware: whatever it runs on; the record says which.
Trials: one network a depth; every test image is an anchor, or as many as are asked for.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.drawing import BLUE, ORANGE, finish, panels
from benchmarks.reproduce.experiment import Experiment, Options, make_record, percent, save_arrays
from benchmarks.reproduce.models import Subject, experiment_recipe, recipe_behind, small_dense, subject, with_options
from benchmarks.reproduce.paper_bounds import PaperBounds
from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.results import Record
from curvcert.training import Recipe

NAME = "anchored-depth"
DEPTHS = (3, 4, 5, 6)
CONSTANTS = ("lipschitz", "curvature", "our_lipschitz", "our_curvature")
"""The paper's two constants and ours."""

_BATCH = 250


def run(options: Options) -> Record:
    """Measure every depth."""
    depths = DEPTHS[:2] if options.quick else DEPTHS
    found: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for depth in depths:
        measured = _subject(depth, options)
        options.say(f"bounding {depth} layers")
        anchored = anchored_constants(measured)
        arrays |= {f"{name}_{depth}": value.cpu().numpy() for name, value in anchored.items()}
        found.append({"depth": depth, **_summary(measured, {name: arrays[f"{name}_{depth}"] for name in anchored})})
    save_arrays(options.out / f"{NAME}.npz", arrays)
    return make_record(NAME, options, {"depths": list(depths), "of": "f", "as_stated": True}, {"networks": found})


def anchored_constants(measured: Subject) -> dict[str, Tensor]:
    """Return the anchored Lipschitz and curvature bounds of the vector f, one per sample, the paper's and ours."""
    network, paper = measured.network, PaperBounds(measured.network)
    parts: dict[str, list[Tensor]] = {name: [] for name in CONSTANTS}
    for x in measured.x.split(_BATCH):
        L, K = paper.anchored(x)
        ours = (lipschitz(network, method="anchored", at=x), curvature(network, method="anchored", at=x))
        for name, value in zip(CONSTANTS, (L, K, *(bound.value for bound in ours)), strict=True):
            parts[name].append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def _subject(depth: int, options: Options) -> Subject:
    if options.quick:
        return small_dense(depth, options)
    recipe = experiment_recipe("mnist-depth").updated({"architecture": f"MNIST-{depth}F"})
    return subject(with_options(recipe, options), options)


def models(record: Record) -> dict[str, Recipe]:
    """Return the networks that a record was measured on; a quick run's are not kept."""
    if record.config["quick"]:
        return {}
    recipe = recipe_behind("mnist-depth", record)
    depths = {f"MNIST-{depth}F": recipe.updated({"architecture": f"MNIST-{depth}F"}) for depth in DEPTHS}
    return {f"{name}-standard-seed{record.seed}": found for name, found in depths.items()}


def _summary(measured: Subject, anchored: dict[str, NDArray[Any]]) -> dict[str, Any]:
    network, paper = measured.network, PaperBounds(measured.network)
    correct = network(measured.x).argmax(dim=1) == measured.y
    everywhere = (
        paper.prefixes[-1],
        paper.curvature,
        lipschitz(network, method="liplt").value,
        curvature(network).value,
    )
    return {
        "samples": len(measured.x),
        "clean": percent(float(correct.double().mean())),
        **{
            name: {"global": float(value), **_moments(anchored[name])}
            for name, value in zip(CONSTANTS, everywhere, strict=True)
        },
    }


def _moments(values: NDArray[Any]) -> dict[str, float]:
    return {
        "anchored_mean": float(values.mean()),
        "anchored_deviation": float(values.std()),
        "anchored_least": float(values.min()),
        "anchored_largest": float(values.max()),
    }


def draw(record: Record, path: Path) -> None:
    """Draw both constants against depth, the anchored ones with a band of one deviation; ours dotted."""
    networks = record.figures["networks"]
    depths = [n["depth"] for n in networks]
    figure, axes = panels(2)
    for axis, name in zip(axes, ("lipschitz", "curvature"), strict=True):
        for key, style, whose in ((name, "o-", ""), (f"our_{name}", "o:", ", ours")):
            mean = np.array([n[key]["anchored_mean"] for n in networks])
            deviation = np.array([n[key]["anchored_deviation"] for n in networks])
            axis.plot(depths, [n[key]["global"] for n in networks], style, color=ORANGE, ms=3, label=f"global{whose}")
            axis.plot(depths, mean, style, color=BLUE, ms=3, label=f"anchored, mean{whose}")
            low, high = np.maximum(mean - deviation, mean / 100), mean + deviation
            axis.fill_between(depths, low, high, color=BLUE, alpha=0.15, lw=0)
        axis.set_yscale("log")
        axis.set_xticks(depths)
        axis.set_xlabel("layers")
        axis.set_title(f"{name.capitalize()} constant of f", fontsize=10)
    finish(figure, axes, path)


ANCHORED_DEPTH = Experiment(
    NAME,
    "Anchored Lipschitz and curvature constants are well below the global ones.",
    ("fig:AnchoredExperiment",),
    run,
    draw,
    models,
)
