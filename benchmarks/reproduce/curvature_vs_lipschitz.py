"""Curvature against Lipschitz radii on the curvature-trained 6F.

Claim: trained with the curvature regulariser, curvature certificates are larger than Lipschitz ones for every sample.
Hardware: one accelerator; the record says which.
Trials: one network, all test images; by the paper's constants and by ours, all with sound norms.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.drawing import BLUE, GREY, ORANGE, bars, finish, panels
from benchmarks.reproduce.certificates_of_the_paper import evaluator
from benchmarks.reproduce.experiment import (
    Experiment,
    Options,
    common_span,
    histogram,
    make_record,
    percent,
    save_arrays,
)
from benchmarks.reproduce.models import Subject, experiment_recipe, recipe_behind, small_dense, subject, with_options
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature, paper_pair_lipschitz
from curvcert.certificates import certifier
from curvcert.certificates.constants import Tables, global_constants
from curvcert.certificates.pointwise import Pointwise
from curvcert.certificates.radii import curvature_beats_lipschitz, curvature_radius, lipschitz_radius
from curvcert.results import Record
from curvcert.training import Recipe

NAME = "curvature-vs-lipschitz"
CONSTANTS = ("paper", "ours")
_BATCH = 250


def run(options: Options) -> Record:
    """Compute both radii of every test image, by the paper's constants and by ours."""
    if options.quick:
        measured = small_dense(3, options)
    else:
        measured = subject(with_options(experiment_recipe("6f-ccrc"), options), options)
    arrays = both_radii(measured)
    save_arrays(options.out / f"{NAME}.npz", arrays)
    recipe = measured.recipe.as_dict() if measured.recipe else {}
    return make_record(NAME, options, {"recipe": recipe}, _summary(arrays))


def models(record: Record) -> dict[str, Recipe]:
    """Return the network that a record was measured on; a quick run's is not kept."""
    return {} if record.config["quick"] else {f"6F-ccrc-seed{record.seed}": recipe_behind("6f-ccrc", record)}


def both_radii(measured: Subject) -> dict[str, NDArray[Any]]:
    """Return the Lipschitz and the curvature radius of every sample, and whether `prop:compare` holds for it.

    Each Lipschitz radius is the larger of those by global constants and by constants as seen from the sample.
    """
    network, evaluate = measured.network, evaluator(measured.network)
    paper = PaperBounds(network, evaluate.pairs.norms)
    ours, n = global_constants(network, evaluate.pairs, Tables("auto", "auto", required=False)), network.outputs
    tables = {
        "paper": (paper_pair_lipschitz(paper).expand(n, n), paper_pair_curvature(paper).expand(n, n)),
        "ours": (ours.L, ours.K),
    }
    seen_from = certifier(network, method="anchored-lipschitz", progress=False)

    def by_paper(x: Tensor, y: Tensor, points: Pointwise) -> Tensor:
        radii = lipschitz_radius(points.margin, paper_pair_lipschitz(paper, x)[:, None].expand_as(points.margin))
        return radii.scatter(1, y[:, None], torch.inf).amin(dim=1)

    def by_ours(x: Tensor, y: Tensor, points: Pointwise) -> Tensor:
        return seen_from(x, y, progress=False).radii["anchored-lipschitz"]

    anchored = {"paper": by_paper, "ours": by_ours}
    parts: dict[str, list[Tensor]] = {}
    for x, y in zip(measured.x.split(_BATCH), measured.y.split(_BATCH), strict=True):
        points = evaluate(x, y)
        parts.setdefault("correct", []).append(points.correct)
        for name, (L, K) in tables.items():
            own = points.label[:, None]
            zeroth = lipschitz_radius(points.margin, L[y]).scatter(1, own, torch.inf).amin(dim=1)
            zeroth = torch.maximum(zeroth, anchored[name](x, y, points))
            first = curvature_radius(points.margin, points.gradient_norm, K[y]).scatter(1, own, torch.inf).amin(dim=1)
            wins = curvature_beats_lipschitz(points.margin, points.gradient_norm, K[y], zeroth[:, None])
            wins = wins.scatter(1, own, True).all(dim=1)
            for key, value in (("lipschitz", zeroth), ("curvature", first)):
                parts.setdefault(f"{name}_{key}", []).append(torch.where(points.correct, value, 0.0))
            parts.setdefault(f"{name}_wins", []).append(wins & points.correct)
    return {name: torch.cat(values).cpu().numpy() for name, values in parts.items()}


def _summary(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    correct = arrays["correct"]
    gains = {name: (arrays[f"{name}_curvature"] - arrays[f"{name}_lipschitz"])[correct] for name in CONSTANTS}
    figures: dict[str, Any] = {"samples": len(correct), "clean": percent(float(correct.mean()))}
    for name in CONSTANTS:
        zeroth, first = (arrays[f"{name}_{key}"][correct] for key in ("lipschitz", "curvature"))
        top = float(max(zeroth.max(initial=0.0), first.max(initial=0.0))) or 1.0
        figures[name] = {
            "median_lipschitz_radius": float(np.median(zeroth)),
            "median_curvature_radius": float(np.median(first)),
            "condition_holds": percent(float(arrays[f"{name}_wins"][correct].mean())),
            "curvature_larger": percent(float((first > zeroth).mean())),
            "improvement": histogram(gains[name], span=common_span(*gains.values())),
            "lipschitz_radii": histogram(zeroth, span=(0.0, top)),
            "curvature_radii": histogram(first, span=(0.0, top)),
        }
    return figures


def draw(record: Record, path: Path) -> None:
    """Draw the histogram of improvements and those of the radii, by the paper's constants and by ours."""
    figure, axes = panels(3)
    for name, colour in (("paper", ORANGE), ("ours", BLUE)):
        bars(
            axes[0],
            record.figures[name]["improvement"],
            colour,
            "the paper's constants" if name == "paper" else "our constants",
        )
    for axis, name in zip(axes[1:], CONSTANTS, strict=True):
        bars(axis, record.figures[name]["lipschitz_radii"], GREY, "Lipschitz")
        bars(axis, record.figures[name]["curvature_radii"], BLUE, "curvature")
        axis.set_xlabel("certified radius")
        axis.set_title("the paper's constants" if name == "paper" else "our constants", fontsize=10)
    axes[0].set_xlabel("curvature radius - Lipschitz radius")
    axes[0].set_ylabel("samples")
    finish(figure, axes, path)


CURVATURE_VS_LIPSCHITZ = Experiment(
    NAME,
    "Trained for small curvature, curvature radii exceed Lipschitz radii for every sample.",
    ("fig:curvatureIsBetterThanLipschitz",),
    run,
    draw,
    models,
)
