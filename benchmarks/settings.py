"""Short runs of other settings for the rows of Table 1 that are ours: what was tried, and how it did.

Claim: none; it is how the settings of `6c2f-ours.toml` were found.
Hardware: one accelerator; the record says which.
Trials: one short run a setting, trained on the first 45,000 training images of CIFAR-10 and judged on the other 5,000:
clean accuracy, the estimate of `curvcert.training.evaluation.evaluate`, which is no certificate, and the share whose
linear limit m / |grad| reaches each radius.

    python -m benchmarks.settings --data DIR [--only 6C2F-muon-0.015 ...]
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import require_known_code, write_record
from curvcert.data import LabelledImages, load
from curvcert.losses import logits_and_pair_norms
from curvcert.training import Trainer, recipe_from_dict
from curvcert.training.evaluation import evaluate

TRAINED = 45_000
BASES: dict[str, dict[str, Any]] = {
    "6C2F": {
        "certificate": "line",
        "epsilon": 0.2,
        "gradients": "runner-up",
        "epochs": 15,
        "learning_rate": 1e-3,
        "crop": 2,
    },
    "6F": {"epsilon": 0.15, "gradients": "all", "epochs": 25, "learning_rate": 1e-3, "crop": 4},
}
COMMON = {"data": "cifar10", "mean_shift": True, "loss": "certified-margin", "tau": 0.25, "clip": 1.0, "flip": True}
MUON = {"optimiser": "muon"}
SETTINGS: dict[str, dict[str, Any]] = {
    "6C2F-adam": {},
    "6C2F-adam-averages": {"beta1": 0.9, "beta2": 0.99},
    "6C2F-adam-averages-0.002": {"beta1": 0.9, "beta2": 0.99, "learning_rate": 0.002},
    "6C2F-adam-norms-0.002": {"norm_steps": 2, "learning_rate": 0.002},
    "6C2F-adam-batch-128": {"batch_size": 128},
    "6C2F-adam-tau-0.1": {"tau": 0.1},
    "6C2F-adam-sin": {"activation": "sin"},
    "6C2F-adam-silu": {"activation": "silu"},
    "6C2F-adam-centred-softplus": {"activation": "centred_softplus"},
    "6C2F-muon-0.015": MUON | {"learning_rate": 0.015},
    "6C2F-muon-0.03": MUON | {"learning_rate": 0.03},
    "6C2F-muon-0.06": MUON | {"learning_rate": 0.06},
    "6C2F-muon-0.03-sin": MUON | {"learning_rate": 0.03, "activation": "sin"},
    "6C2F-muon-0.03-nearer": MUON | {"learning_rate": 0.03, "epsilon": 0.15},
    "6F-muon-0.01": MUON | {"learning_rate": 0.01},
    "6F-muon-0.03": MUON | {"learning_rate": 0.03},
}
"""What each run changes, by name; a name begins with the architecture."""


def try_setting(name: str, whole: LabelledImages, device: str) -> dict[str, Any]:
    """Train one setting, and return how it did."""
    architecture = name.split("-")[0]
    recipe = recipe_from_dict({"architecture": architecture, **COMMON, **BASES[architecture], **SETTINGS[name]})
    trainer = Trainer(recipe, _part(whole, 0, TRAINED), device)
    while trainer.step < trainer.total_steps:
        trainer.advance()
    judged = _part(whole, TRAINED, len(whole.labels))
    found = evaluate(trainer.trained, judged, recipe.epsilons, len(judged.labels))
    limits = linear_limits(trainer.trained, judged, device)
    percent = [round(100 * value, 1) for value in found.values()]
    return {
        "setting": name,
        "changes": SETTINGS[name],
        "epochs": recipe.epochs,
        "clean": percent[0],
        "estimated": percent[1:],
        "linear_limit": [round(100 * float((limits >= eps).double().mean()), 1) for eps in recipe.epsilons],
    }


def linear_limits(model: nn.Module, data: LabelledImages, device: str) -> Tensor:
    """Return the least m / |grad| of every image, below 0 where it is misclassified."""
    found = []
    for x, y in zip(data.images.split(500), data.labels.split(500), strict=True):
        own = y.to(device)[:, None]
        logits, norms = logits_and_pair_norms(model, x.to(device).float() / data.max_value, own[:, 0])
        limits = (logits.gather(1, own) - logits) / norms.clamp(min=1e-12)
        found.append(limits.detach().scatter(1, own, math.inf).amin(dim=1))
    return torch.cat(found)


def _part(data: LabelledImages, start: int, end: int) -> LabelledImages:
    return LabelledImages(data.images[start:end], data.labels[start:end], data.max_value)


def main() -> None:
    """Try the settings, and record them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds CIFAR-10")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device != "cpu":
        require_known_code()
    whole, console, runs = load("cifar10", "train", options.data), Console(), []
    for name in options.only:
        runs.append(try_setting(name, whole, options.device))
        console.print(runs[-1])
    kind = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    command = f"python -m benchmarks.settings --data DIR --device {options.device}"
    write_record("settings", command, 0, {"device": kind, "bases": BASES, "common": COMMON}, {"runs": runs})


if __name__ == "__main__":
    main()
