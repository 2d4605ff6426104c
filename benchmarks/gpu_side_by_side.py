"""Several seeds of 6F on a GPU, a step of all of them captured as one CUDA graph: how many steps a second in all.

Claim: a small network leaves most of a GPU idle, so that seeds side by side take more steps a second than one alone.
Hardware: one CUDA device; the record says which.
Trials: 3 runs of 300 steps, timed by CUDA events; the median counts.  Captured, not compiled.

    python -m benchmarks.gpu_side_by_side
"""

import statistics
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu_training import BATCH, SEED, random_images, recipe, steps_per_second
from benchmarks.harness import require_known_code, write_record
from curvcert.training import SideBySide
from curvcert.training.recipe import Loss

LOSSES: tuple[Loss, ...] = ("standard", "curvature", "certified-margin")
COUNTS = (1, 2, 4)
STEPS = 300


def main() -> None:
    """Measure and record."""
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and there is none here.")
    require_known_code()
    console, data, figures = Console(width=160), random_images(), dict[str, dict[str, Any]]()
    for loss in LOSSES:
        for count in COUNTS:
            recipes = [replace(recipe("6F", loss, augmented=False), seed=seed) for seed in range(count)]
            runs = SideBySide(recipes, data, "cuda", compiled=False)
            if runs.not_captured:
                raise SystemExit(f"6F, {loss}, {count} side by side: not captured: {runs.not_captured}.")
            found = [count * speed for speed in steps_per_second(runs, STEPS)]
            figures[f"6F, {loss}, {count} seeds"] = {"median": statistics.median(found), "runs": found}
            console.print(f"6F, {loss}, {count} seeds: {statistics.median(found):.0f} steps/s in all")
    config = {"batch": BATCH, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    command = "python -m benchmarks.gpu_side_by_side"
    write_record("gpu_side_by_side", command, SEED, config, {"steps per second": figures})


if __name__ == "__main__":
    main()
