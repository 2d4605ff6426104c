"""What recipes certify: clean and soundly certified accuracy of each, after `curvcert train`.

Claim: at every radius of its recipe the network of `digits` certifies more than that of plain training
(`digits-standard`); on MNIST the certified-margin loss and the paper's regulariser are compared on one architecture.
Hardware: whatever it runs on; the record says which.
Trials: one seed a recipe.

    python -m benchmarks.training_results [RECIPE ...] [--data DIR] [--device cuda]

Records of recipes that are not named are kept.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import read_record, write_record
from curvcert.training import load_recipe, train

NAME = "training"


def measured(recipe: str, data: Path | None, device: str) -> dict[str, Any]:
    """Train by a recipe, certify on the whole test set, and return what came out."""
    chosen, begun = load_recipe(recipe), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = train(chosen, Path(folder) / "run", device=device, data_folder=data)
    return {
        "recipe": chosen.as_dict(),
        "samples": len(result.certificate),
        "clean": result.accuracy,
        "certified": {f"{eps:g}": result.certificate.certified_accuracy(eps) for eps in chosen.epsilons},
        "seconds": time.perf_counter() - begun,
        "device": device,
    }


def main() -> None:
    """Train, certify and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["digits", "digits-standard"])
    parser.add_argument("--data", type=Path, help="the folder that holds MNIST")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    known = read_record(NAME)
    figures = known.figures if known else {}
    for recipe in options.recipes:
        figures[recipe] = measured(recipe, options.data, options.device)
        Console().print(recipe, figures[recipe]["clean"], figures[recipe]["certified"])
        write_record(NAME, "python -m benchmarks.training_results", 0, {"recipes": sorted(figures)}, figures)


if __name__ == "__main__":
    main()
