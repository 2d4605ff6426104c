"""CRC against CCRC: the curvature bounds of Singla and Feizi (2020), of the paper and of ours, by CRC's own optimiser.

Claim: on a curvature-trained 6-layer MNIST network the paper's bound gives larger radii than CRC's, and ours larger
still, sample by sample.
Hardware: one accelerator; the record says which.
Trials: one network, all test images.  Every radius is by CRC's dual search, so that only the bounds differ.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.drawing import BLUE, GREEN, GREY, ORANGE, bars, finish, panels
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
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from curvcert.bounds.curvature import curvature
from curvcert.bounds.curvature.singla2020 import CRCOptions, crc_eigenvalue_bounds, crc_radii
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.certificates.constants import pair_table
from curvcert.network import Network
from curvcert.results import Record
from curvcert.training import Recipe

NAME = "crc-vs-ccrc"
BOUNDS = ("crc", "paper", "ours")
_BATCH = 1500
_SHOWN = 200
_TIE = 1e-9
"""Radii that differ by less, relatively, are the same but for rounding: both searches end at the same point."""


def run(options: Options) -> Record:
    """Certify every correct test image by the three bounds."""
    measured = _subject(options)
    search = CRCOptions(4, 4) if options.quick else CRCOptions()
    correct = measured.network(measured.x).argmax(dim=1) == measured.y
    radii = radii_of_bounds(measured, search, options)
    arrays = {name: value.cpu().numpy() for name, value in radii.items()} | {"correct": correct.cpu().numpy()}
    save_arrays(options.out / f"{NAME}.npz", arrays)
    config = {"outer": search.outer, "inner": search.inner, "bounds": list(BOUNDS)}
    return make_record(NAME, options, config, _summary(arrays))


def _subject(options: Options) -> Subject:
    if options.quick:
        return small_dense(3, options)
    return subject(with_options(experiment_recipe("mnist-6f-ccrc"), options), options)


def models(record: Record) -> dict[str, Recipe]:
    """Return the network that a record was measured on; a quick run's is not kept."""
    if record.config["quick"]:
        return {}
    return {f"MNIST-6F-ccrc-seed{record.seed}": recipe_behind("mnist-6f-ccrc", record)}


def radii_of_bounds(measured: Subject, search: CRCOptions, options: Options) -> dict[str, Tensor]:
    """Return the radius of every sample by each bound, 0 where it is misclassified."""
    network = measured.network
    paper = paper_pair_curvature(PaperBounds(network))
    ours = pair_table(curvature(network, pair="all").value, network)
    found = {name: torch.zeros(len(measured.x), dtype=torch.float64, device=measured.x.device) for name in BOUNDS}
    for label in measured.y.unique().tolist():
        options.say(f"class {label}")
        pairs, others = against(network, label)
        lower, upper, _ = crc_eigenvalue_bounds(Problem(pairs, 2, 2, Global(), scalars=True))
        K = ours[label, others]
        sides = {"crc": (lower, upper), "paper": (-paper.expand_as(K), paper.expand_as(K)), "ours": (-K, K)}
        for index in (measured.y == label).nonzero().flatten().split(_BATCH):
            for name, (low, high) in sides.items():
                found[name][index] = crc_radii(pairs, measured.x[index], low, high, search).amin(dim=1)
    return found


def against(network: Network, label: int) -> tuple[Network, Tensor]:
    """Return the network of the scalars f_i - f_label, and the classes i."""
    others = torch.tensor([i for i in range(network.outputs) if i != label], device=network.device)
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    return network.read_out(eye[others] - eye[label]), others


def _summary(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    correct = arrays["correct"]
    radii = {name: arrays[name][correct] for name in BOUNDS}
    order = np.argsort(radii["crc"], kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(_SHOWN, len(order))).round().astype(int)]
    gains = {name: radii[name] - radii["crc"] for name in ("paper", "ours")}
    top = float(max(value.max(initial=0.0) for value in radii.values())) or 1.0
    return {
        "samples": len(correct),
        "correct": int(correct.sum()),
        "clean": percent(float(correct.mean())),
        "median_radius": {name: float(np.median(value)) for name, value in radii.items()},
        "mean_radius": {name: float(value.mean()) for name, value in radii.items()},
        "improved_over_crc": {name: _share_larger(radii[name], radii["crc"]) for name in ("paper", "ours")},
        "ours_over_paper": _share_larger(radii["ours"], radii["paper"]),
        "improvement": {name: histogram(gain, span=common_span(*gains.values())) for name, gain in gains.items()},
        "radii": {name: histogram(value, span=(0.0, top)) for name, value in radii.items()},
        "sorted_by_crc": {name: value[shown].tolist() for name, value in radii.items()},
    }


def _share_larger(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return of how many samples, in percent, the first radius is larger by more than rounding.

    >>> _share_larger(np.array([1.0, 2.0]), np.array([1.0 - 1e-15, 1.0]))
    50.0
    """
    return percent(float((first > second * (1 + _TIE)).mean()))


def draw(record: Record, path: Path) -> None:
    """Draw the radii's histogram, the improvement over CRC, and the radii sorted by CRC's."""
    figures = record.figures
    colours = {"crc": GREY, "paper": ORANGE, "ours": BLUE}
    called = {"crc": "CRC's bound", "paper": "the paper's bound", "ours": "our bound"}
    figure, axes = panels(3, width=4.6)
    for name in BOUNDS:
        bars(axes[0], figures["radii"][name], colours[name], called[name])
        axes[2].plot(figures["sorted_by_crc"][name], ".", color=colours[name], ms=3, label=called[name])
    for name in ("paper", "ours"):
        bars(axes[1], figures["improvement"][name], colours[name], f"{called[name]} over CRC's")
    axes[1].axvline(0, color=GREEN, lw=1)
    for axis, label in zip(
        axes, ("certified radius", "gain of the radius", "correct samples, sorted by CRC's radius"), strict=True
    ):
        axis.set_xlabel(label)
    axes[0].set_ylabel("samples")
    axes[2].set_ylabel("certified radius")
    finish(figure, axes, path)


CRC_VS_CCRC = Experiment(
    NAME,
    "The compositional bound certifies larger radii than CRC's, and ours larger still.",
    ("fig:certified_radius", "fig:persampleImprovement"),
    run,
    draw,
    models,
)
