"""Networks for the quadratic certificate: what the weight of the global bound in their loss leaves of them.

Claim: the less of the global curvature bound a 6C2F is trained with, the more of it is left by its linear limit,
margin over gradient, which no certificate exceeds by much and the quadratic certificate reaches at 36/255.
Hardware: one accelerator; the record says which.
Trials: each setting with its seeds, side by side, on all of CIFAR-10's training images; judged on its 10,000 test
images, alone and beside its mirror image.

    python -m benchmarks.image_training --data DIR --out FOLDER [--scales 0.25 0.1] [--seeds 0 1]
    python -m benchmarks.image_training --page      # writes the table of docs/linear-and-quadratic.md from the record
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import ROOT, figures_of, require_known_code, write_record
from benchmarks.pages import table, with_parts
from benchmarks.settings import linear_limits
from curvcert.data import LabelledImages, load
from curvcert.training import Recipe, SideBySide, save_model
from curvcert.training.kept import file_digest
from curvcert.training.model_file import finished

SETTINGS = {0.25: (0.19, 163), 0.15: (0.17, 163), 0.1: (0.17, 200)}
"""The radius in the loss, and the epochs, by the share of the global curvature bound in the loss."""

KINDS = ("alone", "with its mirror image")

PAGE = ROOT / "docs" / "linear-and-quadratic.md"


def recipe(scale: float, seed: int) -> Recipe:
    """Return one setting."""
    epsilon, epochs = SETTINGS[scale]
    return Recipe(
        data="cifar10",
        architecture="6C2F",
        mean_shift=True,
        certificate="quadratic",
        gradients="runner-up",
        global_scale=scale,
        local_scale=0.0,
        epsilon=epsilon,
        tau=0.35,
        optimiser="muon",
        learning_rate=0.01,
        clip=1.0,
        weight_average=0.999,
        crop=4,
        flip=True,
        epochs=epochs,
        evaluate_every=20,
        checkpoint_every=20,
        seed=seed,
    )


def name_of(chosen: Recipe) -> str:
    """Return the name under which the weights are kept."""
    return f"6C2F-quadratic-{chosen.global_scale:g}-seed{chosen.seed}"


def trained(recipes: list[Recipe], data: LabelledImages, device: str) -> list[nn.Sequential]:
    """Train side by side, and return the averaged weights as they are kept: in float16, read as float32."""
    runs = SideBySide(recipes, data, device)
    while runs.trainers[0].step < runs.trainers[0].total_steps:
        runs.advance()
    return [trainer.trained.eval().half().float() for trainer in runs.trainers]


def shares(limits: Tensor, radii: tuple[float, ...]) -> list[float]:
    """Return clean accuracy and the share of limits that reach each radius, in percent."""
    return [round(100 * float((limits > 0).double().mean()), 2)] + [
        round(100 * float((limits >= r).double().mean()), 2) for r in radii
    ]


def judged(model: nn.Sequential, chosen: Recipe, test: LabelledImages, device: str) -> dict[str, Any]:
    """Return what is left of a model, alone and beside its mirror image."""
    whole = finished(model, Recipe(**{**chosen.as_dict(), "epsilons": chosen.epsilons, "mirror": True})).to(device)
    return {
        "network": name_of(chosen),
        "global_scale": chosen.global_scale,
        "epsilon": chosen.epsilon,
        "epochs": chosen.epochs,
        "seed": chosen.seed,
        KINDS[0]: shares(linear_limits(model, test, device), chosen.epsilons),
        KINDS[1]: shares(linear_limits(whole, test, device), chosen.epsilons),
    }


def page_table() -> str:
    """Return what is left of every network, in percent."""
    lines = [
        [
            f"{run['global_scale']}",
            f"{run['epochs']}",
            f"{run['seed']}",
            *(" / ".join(map(str, run[kind])) for kind in KINDS),
        ]
        for run in figures_of("image_training")["runs"]
    ]
    return table(("share of the global bound", "epochs", "seed", *KINDS), lines)


def main() -> None:
    """Train, keep the weights below --out, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that holds CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs/image_training"))
    parser.add_argument("--scales", type=float, nargs="+", choices=sorted(SETTINGS), default=sorted(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page", action="store_true", help="write the page's table from the record instead")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(with_parts(PAGE, {"image networks": page_table}), encoding="utf-8")
        return
    if options.data is None:
        parser.error("--data is needed: the folder that holds CIFAR-10")
    require_known_code()
    options.out.mkdir(parents=True, exist_ok=True)
    train, test = (load("cifar10", part, options.data) for part in ("train", "test"))
    found, weights = [], {}
    for scale in options.scales:
        recipes = [recipe(scale, seed) for seed in options.seeds]
        for chosen, model in zip(recipes, trained(recipes, train, options.device), strict=True):
            path = options.out / f"{name_of(chosen)}.safetensors"
            save_model(path, model.half(), chosen)
            weights[name_of(chosen)] = {"sha256": file_digest(path), "file": f"weights/{path.name}"}
            found.append(judged(model.float(), chosen, test, options.device))
            print(found[-1], flush=True)
    config: dict[str, Any] = {"device": torch.cuda.get_device_name() if options.device == "cuda" else options.device}
    config["weights"] = weights
    write_record("image_training", "python -m benchmarks.image_training --data DIR", 0, config, {"runs": found})


if __name__ == "__main__":
    main()
