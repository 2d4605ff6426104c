"""Attack certificates beside certificates and PGD: what the experiments about them share.

Every witness is replayed, in float64 and in the model's own arithmetic.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.drawing import BLUE, GREY, ORANGE, bars, finish, panels
from benchmarks.reproduce.certificates_of_the_paper import evaluator
from benchmarks.reproduce.experiment import Options, histogram, make_record, percent, save_arrays
from benchmarks.reproduce.models import Subject, experiment_recipe, recipe_behind, small_dense, subject, with_options
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from benchmarks.reproduce.searching import require_consistent, searched_distances
from curvcert.bounds.curvature import curvature
from curvcert.certificates import certify
from curvcert.certificates.attack_radius import attack_witnesses, replays
from curvcert.certificates.constants import pair_table
from curvcert.results import Record
from curvcert.training import Recipe

RADIUS = 36 / 255
CONSTANTS = ("paper", "ours")
_BATCH = 250


def curvature_trained(options: Options) -> Subject:
    """Return the 6F that was trained by the paper's loss; in a quick run a small network."""
    if options.quick:
        return small_dense(3, options)
    return subject(with_options(experiment_recipe("6f-ccrc"), options), options)


def curvature_trained_model(record: Record) -> dict[str, Recipe]:
    """Return the 6F that a record was measured on; a quick run's is not kept."""
    return {} if record.config["quick"] else {f"6F-ccrc-seed{record.seed}": recipe_behind("6f-ccrc", record)}


def attack_record(name: str, measured: Subject, paper: dict[str, Any], options: Options) -> Record:
    """Find the attack certificates of a network, keep the distances, and return their record."""
    options.say("attack certificates")
    arrays = {key: value.cpu().numpy() for key, value in attacked(measured, options).items()}
    save_arrays(options.out / f"{name}.npz", arrays)
    recipe = measured.recipe.as_dict() if measured.recipe else {}
    config = {"recipe": recipe, "radius": RADIUS}
    return make_record(name, options, config, {**_summary(arrays), "paper_reports": paper})


def attacked(measured: Subject, options: Options) -> dict[str, Tensor]:
    """Return certified radii, and the distances of witnesses (by the paper's K and ours) and of PGD's points."""
    certificate = certify(measured.network, measured.x, measured.y, epsilons=(RADIUS,), progress=False)
    steps, restarts = (5, 1) if options.quick else (50, 2)
    distance = searched_distances(measured, [RADIUS], steps, restarts, options.seed)
    require_consistent(certificate.radius, certificate.correct, distance)
    found = {"correct": certificate.correct, "radius": certificate.radius, "pgd_distance": distance}
    for name in CONSTANTS:
        found[f"{name}_witness_distance"], found[f"{name}_replayed"] = witnesses(measured, name)
        require_consistent(certificate.radius, certificate.correct, found[f"{name}_witness_distance"])
    return found


@torch.no_grad()
def witnesses(measured: Subject, constants: str) -> tuple[Tensor, Tensor]:
    """Return the distance of every sample's witness (inf where none), and whether it replays once more."""
    network, evaluate, n = measured.network, evaluator(measured.network), measured.network.outputs
    if constants == "paper":
        K = paper_pair_curvature(PaperBounds(network)).expand(n, n)
    else:
        K = pair_table(curvature(network, pair="all").value, network)
    distances, replayed = [], []
    for x, y in zip(measured.x.split(_BATCH), measured.y.split(_BATCH), strict=True):
        points = evaluate(x, y)
        distance, witness = attack_witnesses(network, x, points, K[y], 2, None)
        claimed = distance.isfinite() & points.correct
        at = torch.where(claimed.reshape(-1, *(1,) * (x.dim() - 1)), witness, x)
        distances.append(torch.where(points.correct, distance, 0.0))
        replayed.append(claimed & replays(network, at, y))
    return torch.cat(distances), torch.cat(replayed)


def _summary(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    correct = arrays["correct"]
    figures: dict[str, Any] = {
        "samples": len(correct),
        "correct": int(correct.sum()),
        "clean": percent(float(correct.mean())),
        "certified": percent(float((correct & (arrays["radius"] >= RADIUS)).mean())),
        "pgd": percent(float((correct & (arrays["pgd_distance"] > RADIUS)).mean())),
    }
    known = [arrays[f"{name}_witness_distance"] for name in CONSTANTS]
    furthest = max(RADIUS, *(float(distance[np.isfinite(distance)].max(initial=0.0)) for distance in known))
    for name, distance in zip(CONSTANTS, known, strict=True):
        claimed = correct & np.isfinite(distance)
        figures[name] = {
            "attack_certificates": int(claimed.sum()),
            "within": int((claimed & (distance <= RADIUS)).sum()),
            "replayed": int(arrays[f"{name}_replayed"].sum()),
            "at_most": percent(float((correct & (distance > RADIUS)).mean())),
            "largest": float(distance[claimed].max(initial=0.0)),
            "histogram": histogram(distance[claimed], span=(0.0, furthest)),
        }
    return figures


def draw_histogram(record: Record, path: Path) -> None:
    """Draw the histogram of attack radii."""
    figure, (axis,) = panels(1)
    for name, colour in (("ours", BLUE), ("paper", ORANGE)):
        found = record.figures[name]
        whose = "the paper's K" if name == "paper" else "our K"
        bars(axis, found["histogram"], colour, f"{found['attack_certificates']} by {whose}")
    axis.axvline(RADIUS, color=GREY, ls="--", lw=1, label="36/255")
    axis.set_xlabel("certified attack radius (l2)")
    axis.set_ylabel("samples")
    finish(figure, (axis,), path)
