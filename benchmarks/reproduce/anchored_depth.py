"""Global against anchored Lipschitz and curvature constants, over depth.

Claim: on MNIST networks of 3 to 6 layers the anchored constants, averaged over the test set, are well below the
global ones.
Hardware: one accelerator; the record says which.
Trials: one network a depth; every test image is an anchor.
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
from curvcert.bounds.curvature import Compositional, curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.results import Record
from curvcert.training import Recipe

NAME = "anchored-depth"
DEPTHS = (3, 4, 5, 6)
_BATCH = 250


def run(options: Options) -> Record:
    """Measure every depth."""
    depths = DEPTHS[:2] if options.quick else DEPTHS
    found: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for depth in depths:
        measured = _subject(depth, options)
        options.say(f"bounding {depth} layers")
        L, K = anchored_constants(measured)
        arrays |= {f"lipschitz_{depth}": L.cpu().numpy(), f"curvature_{depth}": K.cpu().numpy()}
        found.append({"depth": depth, **_summary(measured, arrays[f"lipschitz_{depth}"], arrays[f"curvature_{depth}"])})
    save_arrays(options.out / f"{NAME}.npz", arrays)
    config = {"depths": list(depths), "lipschitz": "liplt", "curvature": "compositional, block bound sdp", "of": "f"}
    return make_record(NAME, options, config, {"networks": found})


def anchored_constants(measured: Subject) -> tuple[Tensor, Tensor]:
    """Return the anchored Lipschitz and curvature bounds of the vector f, one per sample."""
    batches = measured.x.split(_BATCH)
    L = torch.cat([lipschitz(measured.network, method="anchored", at=x).value for x in batches])
    K = torch.cat([curvature(measured.network, method="anchored", at=x).value for x in batches])
    return L, K


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


def _summary(measured: Subject, L: NDArray[Any], K: NDArray[Any]) -> dict[str, Any]:
    network = measured.network
    correct = network(measured.x).argmax(dim=1) == measured.y
    return {
        "samples": len(measured.x),
        "clean": percent(float(correct.double().mean())),
        "lipschitz": {"global": float(lipschitz(network, method="liplt")), **_moments(L)},
        "curvature": {"global": float(curvature(network, method=Compositional(["sdp"]))), **_moments(K)},
    }


def _moments(values: NDArray[Any]) -> dict[str, float]:
    return {
        "anchored_mean": float(values.mean()),
        "anchored_deviation": float(values.std()),
        "anchored_least": float(values.min()),
        "anchored_largest": float(values.max()),
    }


def draw(record: Record, path: Path) -> None:
    """Draw both constants against depth, the anchored ones with a band of one deviation."""
    networks = record.figures["networks"]
    depths = [n["depth"] for n in networks]
    figure, axes = panels(2)
    for axis, name in zip(axes, ("lipschitz", "curvature"), strict=True):
        mean = np.array([n[name]["anchored_mean"] for n in networks])
        deviation = np.array([n[name]["anchored_deviation"] for n in networks])
        axis.plot(depths, [n[name]["global"] for n in networks], "o-", color=ORANGE, label="global")
        axis.plot(depths, mean, "o-", color=BLUE, label="anchored, mean over the test set")
        low, high = np.maximum(mean - deviation, mean / 100), mean + deviation
        axis.fill_between(depths, low, high, color=BLUE, alpha=0.2, lw=0, label="one deviation around it")
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
