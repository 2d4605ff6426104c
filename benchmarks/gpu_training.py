"""Training steps on a GPU, each captured as one CUDA graph: how many a second.

Claim: at batch 256 the paper's loss takes at least 2,000 steps/s on 6F and 500 on 6C2F, the certified-margin loss 800
and 200 (one NVIDIA H200), without augmentation; the plain captured step is measured beside them.
Hardware: one CUDA device; the record says which.
Trials: 3 runs of 500 steps, timed by CUDA events; the median counts.

The pieces of a step are compiled, and the step captured; a step that could not be fails the benchmark.

    python -m benchmarks.gpu_training [--quick] [--profile] [--eager] [--models 6F 6C2F]
"""

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import require_known_code, write_record
from curvcert.data import LabelledImages
from curvcert.training import Recipe, SideBySide, Trainer
from curvcert.training.recipe import Loss

SEED = 0
BATCH = 256
LOSSES: tuple[Loss, ...] = ("standard", "curvature", "certified-margin")
AUGMENTED = {"crop": 4, "flip": True}


def random_images(count: int = 4096) -> LabelledImages:
    """Return images of CIFAR-10's shape; the speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return LabelledImages(images, torch.randint(0, 10, (count,), generator=generator), 255)


def recipe(model: str, loss: Loss, augmented: bool) -> Recipe:
    """Return what a measured step trains."""
    gradients = "all" if model == "6F" else "runner-up"
    chosen: dict[str, Any] = {"gradients": gradients, **(AUGMENTED if augmented else {})}
    return Recipe(
        data="cifar10", architecture=model, loss=loss, tau=0.25, batch_size=BATCH, epochs=1000, seed=SEED, **chosen
    )


def steps_per_second(trainer: Trainer | SideBySide, steps: int, runs: int = 3) -> list[float]:
    """Return the speed of each run."""
    found = []
    for _ in range(runs + 1):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            trainer.advance()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * steps / start.elapsed_time(end))
    return found[1:]


def kernels(trainer: Trainer, steps: int = 20, rows: int = 12) -> tuple[dict[str, float], int]:
    """Return the microseconds a step of the kernels that take the most time, and how many kernels a step launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            trainer.advance()
        torch.cuda.synchronize()
    events = profile.key_averages()
    ordered = sorted(events, key=lambda event: event.self_device_time_total, reverse=True)[:rows]
    longest = {event.key[:100]: round(event.self_device_time_total / steps, 2) for event in ordered}
    return longest, sum(event.count for event in events) // steps


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, and no record")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--eager", action="store_true", help="captured without being compiled")
    parser.add_argument("--models", nargs="+", default=["6F", "6C2F"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and there is none here.")
    if not options.quick:
        require_known_code()
    console, data, figures = Console(width=160), random_images(), {}
    for model in options.models:
        for loss in LOSSES:
            for augmented in (False, True):
                trainer = Trainer(recipe(model, loss, augmented), data, "cuda", compiled=not options.eager)
                if trainer.not_captured or (trainer.not_compiled and not options.eager):
                    reason = trainer.not_captured or trainer.not_compiled
                    raise SystemExit(f"{model}, {loss}: the step was not captured, or not compiled: {reason}.")
                runs = steps_per_second(trainer, 100 if options.quick else 500)
                name = f"{model}, {loss}{', augmented' if augmented else ''}"
                figures[name] = {"median": statistics.median(runs), "runs": runs}
                console.print(f"{name:45s} {statistics.median(runs):8.0f} steps/s")
                if options.profile and not augmented:
                    longest, count = kernels(trainer)
                    figures[name]["kernels a step"] = count
                    figures[name]["most time"] = longest
                    console.print(f"{count} kernels a step")
                    console.print(longest)
    if not options.quick:
        config = {"batch": BATCH, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_record("gpu_training", "python -m benchmarks.gpu_training", SEED, config, {"steps per second": figures})


if __name__ == "__main__":
    main()
