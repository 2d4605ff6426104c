"""Seconds on a laptop: what constants and first certificates cost, beside 1,000 ten-row Jacobians of the same network.

Claim: constants within the time of 1,000 ten-row Jacobians, and five certified samples within three times that.
Hardware: whatever it runs on; the record says which.  Each network in a process of its own, one thread, all times those
of the processor, so that what else runs there does not count.
Trials: networks with random weights (the embedded ones as they are) and random images; what is not done after
`--limit` seconds stays open.

    python -m benchmarks.laptop [--networks NAME ...] [--limit 200]
    python -m benchmarks.laptop --plot

Networks that are not named keep their figures; `before` are the ratios of the first record.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.drawing import BLUE, GREY, ORANGE, grid, legend_below
from benchmarks.harness import ROOT, figures_of, read_record, write_record
from benchmarks.networks import peak_gib, six_c_two_f, six_f
from curvcert.certificates import certifier
from curvcert.data import load_demo_network, load_mnist_network
from curvcert.network import trace
from curvcert.picture_files import write_figure

NAME, JACOBIANS, MEASURED, SAMPLES = "laptop", 1000, 128, 5
STAGES = ("jacobians", "constants", "five samples")
MUSTS = {"constants": 1.0, "five samples": 3.0}
"""What each stage may take, in units of 1,000 ten-row Jacobians."""


class Joined(nn.Module):
    """What two branches make of one input, added up."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        summed: Tensor = self.first(x) + self.second(x)
        return summed


def lenet() -> nn.Sequential:
    """Return LeNet-5 with tanh."""
    pooled = (
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
    )
    dense = (nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))
    return nn.Sequential(*pooled, nn.Flatten(), *dense)


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def vgg() -> nn.Sequential:
    """Return six convolutions with batch norm and SiLU, of 16 to 64 channels, and two dense layers."""
    layers, inputs = list[nn.Module](), 3
    for outputs, stride in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2)):
        layers += [*_normed(inputs, outputs, 3, stride), nn.SiLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 128), nn.SiLU(), nn.Linear(128, 10))


def resnet() -> nn.Sequential:
    """Return a network of the shape of ResNet-18, 16 channels wide, with SiLU."""
    layers, inputs = [*_normed(3, 16, 3), nn.SiLU()], 16
    for stage in range(4):
        for block in range(2):
            outputs, stride = 16 * 2**stage, 2 if stage and not block else 1
            branch = nn.Sequential(*_normed(inputs, outputs, 3, stride), nn.SiLU(), *_normed(outputs, outputs, 3))
            skip = nn.Identity() if inputs == outputs else nn.Sequential(*_normed(inputs, outputs, 1, stride))
            layers += [Joined(branch, skip), nn.SiLU()]
            inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(inputs, 10))


def mobilenet() -> nn.Sequential:
    """Return three depthwise separable convolutions behind an ordinary one."""
    layers, inputs = [*_normed(3, 16, 3, 2), nn.SiLU()], 16
    for outputs, stride in ((32, 1), (64, 2), (64, 1)):
        layers += [*_normed(inputs, inputs, 3, stride, inputs), nn.SiLU(), *_normed(inputs, outputs, 1), nn.SiLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(inputs, 10))


def convmixer() -> nn.Sequential:
    """Return a ConvMixer of 32 channels and three blocks on patches of 4 x 4."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.BatchNorm2d(32)]
    for _ in range(3):
        depthwise = nn.Sequential(nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.GELU(), nn.BatchNorm2d(32))
        layers += [Joined(depthwise, nn.Identity()), nn.Conv2d(32, 32, 1), nn.GELU(), nn.BatchNorm2d(32)]
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(32, 10))


COLOUR, DIGIT = (3, 32, 32), (1, 28, 28)
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits-embedded": (load_demo_network, (1, 8, 8)),
    "mnist-embedded": (load_mnist_network, DIGIT),
    "LeNet-5": (lenet, DIGIT),
    "6F": (six_f, COLOUR),
    "ConvMixer": (convmixer, COLOUR),
    "MobileNet": (mobilenet, COLOUR),
    "VGG": (vgg, COLOUR),
    "ResNet-18": (resnet, COLOUR),
    "6C2F": (six_c_two_f, COLOUR),
}


def measure(name: str) -> None:
    """Print the seconds of each stage as it ends, a line of JSON each, and the peak of memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().eval()
    network = trace(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    x = torch.rand(MEASURED, *shape, dtype=torch.float64)
    network.jacobian(x[:8])  # what is loaded at the first call does not count
    begun = time.process_time()
    network.jacobian(x)
    _tell("jacobians", (time.process_time() - begun) * JACOBIANS / MEASURED)
    begun = time.process_time()
    ready = certifier(network, progress=False)
    _tell("constants", time.process_time() - begun)
    begun = time.process_time()
    ready(x[:SAMPLES], progress=False)
    _tell("five samples", time.process_time() - begun)


def _tell(stage: str, seconds: float) -> None:
    print(json.dumps({"stage": stage, "seconds": round(seconds, 3), "peak_gib": round(peak_gib(), 2)}), flush=True)


def measured(name: str, limit: int) -> dict[str, Any]:
    """Measure a network in a process of its own; stages that are not done in time are None."""
    command = [sys.executable, "-m", "benchmarks.laptop", "--measure", name]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (limit,) * 2),
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    if not told or (done.returncode and done.returncode > 0):
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    seconds: dict[str, float | None] = dict.fromkeys(STAGES) | {each["stage"]: each["seconds"] for each in told}
    jacobians = seconds["jacobians"]
    assert jacobians
    ratios = {name: None if value is None else round(value / jacobians, 3) for name, value in seconds.items()}
    return {"seconds": seconds, "ratios": ratios, "peak_gib": told[-1]["peak_gib"], "limit_s": limit}


def picture() -> Figure:
    """Return bars of what is recorded, in units of 1,000 ten-row Jacobians, beside what is aimed at."""
    networks = figures_of(NAME)["networks"]
    figure, axes = grid(1, len(MUSTS), (9, 1.3 + 0.42 * len(networks)), sharey=True)
    for axis, (stage, must) in zip(axes[0], MUSTS.items(), strict=True):
        for shift, (colour, label) in ((-0.2, (GREY, "before")), (0.2, (BLUE, "now"))):
            found = [each["ratios"] if label == "now" else each.get("before", {}) for each in networks.values()]
            known = [(row + shift, one[stage]) for row, one in enumerate(found) if one.get(stage) is not None]
            axis.barh([row for row, _ in known], [ratio for _, ratio in known], 0.36, color=colour, label=label)
        axis.axvline(must, color=ORANGE, linestyle="--", label="must")
        axis.set(title=stage, xscale="log", xlabel="times 1,000 ten-row Jacobians")
        axis.grid(axis="x", alpha=0.25)
    axes[0][0].set_yticks(range(len(networks)), list(networks))
    axes[0][0].invert_yaxis()
    legend_below(figure, axes[0])
    return figure


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, metavar="NAME", help="default: all of them")
    parser.add_argument("--limit", type=int, default=200, help="seconds of processor time for each")
    parser.add_argument("--measure", choices=NETWORKS, metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--plot", action="store_true", help="draw what is recorded, and measure nothing")
    options = parser.parse_args()
    if options.plot:
        write_figure(picture(), ROOT / "docs" / "images" / "laptop.svg")
        return
    if options.measure:
        measure(options.measure)
        return
    before, console = read_record(NAME), Console(soft_wrap=True)
    figures = dict(before.figures["networks"]) if before else {}
    for name in options.networks or NETWORKS:
        known = figures.get(name)
        before_that = {} if known is None else {"before": known.get("before", known["ratios"])}
        figures[name] = measured(name, options.limit) | before_that
        console.print(f"{name}: {figures[name]['ratios']}, {figures[name]['peak_gib']} GiB", highlight=False)
        config = {"samples": SAMPLES, "jacobians": JACOBIANS, "threads": 1}
        kept = {name: figures[name] for name in NETWORKS if name in figures}
        write_record(NAME, "python -m benchmarks.laptop", 0, config, {"networks": kept})
    table = Table("network", *STAGES[1:], "GiB", title="in units of 1,000 ten-row Jacobians")
    for name, found in figures.items():
        shown = [found["ratios"][stage] for stage in STAGES[1:]]
        table.add_row(name, *("not done" if one is None else f"{one:.2f}" for one in shown), f"{found['peak_gib']:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
