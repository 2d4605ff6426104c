"""A training step with the paper's curvature regulariser, against a plain one: what estimated norms cost.

Claim: on a CPU a step of 6F at batch 256 with the regulariser takes at most 1.5 times as long as one without.
Hardware: whatever it runs on; the record says which.
Trials: the same batch and weights; the steps take turns.

The regulariser is the paper's Algorithm 1 with LipLT constants, every norm a warm-started power iteration. It is
differentiated in a pass of its own, as curvcert's loop does; summed into one loss it costs more. The
certified-margin loss, which also differentiates gradients, is timed beside it.

    python -m benchmarks.training_step [--quick]
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch import nn

from benchmarks.harness import ratios, time_interleaved, write_record
from benchmarks.networks import dense
from curvcert.losses import AbstractObjective, CertifiedMargin, Constants, CurvatureRegularised, Standard

SEED = 0
WEIGHT = 1e-4


def steps(widths: tuple[int, ...], batch: int) -> dict[str, Callable[[], None]]:
    """Return training steps of models with the same weights: plain, regularised, and by the certified-margin loss."""
    torch.manual_seed(SEED)
    start = dense(*widths)
    x, y = torch.rand(batch, widths[0]), torch.randint(widths[-1], (batch,))

    def step(make: Callable[[nn.Module], AbstractObjective]) -> Callable[[], None]:
        model = dense(*widths)
        model.load_state_dict(start.state_dict())
        objective = make(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

        def run() -> None:
            optimiser.zero_grad(set_to_none=True)
            objective(model, x, y, weight=WEIGHT).backward()
            optimiser.step()

        return run

    return {
        "plain": step(lambda model: Standard()),
        "regularised": step(lambda model: CurvatureRegularised(Constants(model, x[:1]))),
        "certified-margin, runner-up": step(
            lambda model: CertifiedMargin(Constants(model, x[:1]), epsilon=0.1, gradients="runner-up")
        ),
    }


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small network, and no record")
    options = parser.parse_args()
    widths = (64, 32, 32, 10) if options.quick else (3072, 1024, 512, 256, 256, 128, 10)
    timings = time_interleaved(steps(widths, 256), repeats=3 if options.quick else 30, warmup=3)
    found = ratios(timings, against="plain")
    for name, ratio in found.items():
        Console().print(f"{name} / plain = {ratio:.2f}")
    if not options.quick:
        figures = {
            "ratio": found["regularised"],
            "ratios": found,
            "timings": {name: timing.as_figures() for name, timing in timings.items()},
        }
        config = {"widths": list(widths), "batch": 256, "threads": torch.get_num_threads()}
        write_record("training_step", "python -m benchmarks.training_step", SEED, config, figures)


if __name__ == "__main__":
    main()
