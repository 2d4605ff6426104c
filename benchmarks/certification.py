"""Certified radii from global bounds, against the ten-row Jacobian alone: what a certificate costs.

Claim: once a network's constants are known, certifying points takes at most three times as long as computing
the Jacobians of their ten logits.
Hardware: whatever it runs on; the record says which.
Trials: random networks of the shapes 6F and 6C2F, points drawn from SEED; the calls take turns.

    python -m benchmarks.certification [--quick] [--device cuda] [--points 10000]
"""

import argparse
import time
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import ratios, require_known_code, time_interleaved, write_record
from benchmarks.networks import six_c_two_f, six_f
from curvcert.certificates import Certifier, certifier
from curvcert.network import Network, trace

SEED = 0


def measure(name: str, model: nn.Sequential, points: int, device: str, console: Console) -> dict[str, object]:
    """Time both on the same points."""
    torch.manual_seed(SEED)
    network = trace(model.eval(), torch.zeros(1, 3, 32, 32)).to(device)
    x = torch.rand(points, 3, 32, 32, dtype=torch.float64, device=device)
    for _ in range(1 if device == "cpu" else 2):  # the first call on an accelerator loads its libraries
        begun = time.perf_counter()
        ready = certifier(network, method="compositional")
        _wait(device)
        constants = time.perf_counter() - begun
    timings = time_interleaved(
        {"jacobian": partial(jacobians, network, x, device), "certificate": lambda: _certified(ready, x, device)},
        repeats=3,
    )
    found = ratios(timings, against="jacobian")
    console.print(f"{name}: certificate / Jacobian = {found['certificate']:.2f} on {points} points")
    return {
        "network": name,
        "points": points,
        "constants_seconds": constants,
        "timings": {key: timing.as_figures() for key, timing in timings.items()},
        "ratio": found["certificate"],
    }


def jacobians(network: Network, x: Tensor, device: str = "cpu") -> None:
    """Compute the Jacobian of all logits at every point, in batches."""
    for part in x.split(256 if device == "cpu" else 1024):
        network.jacobian(part)
    _wait(device)


def device_name(device: str) -> str:
    """Return the accelerator's own name, or the device as it was asked for."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def _certified(ready: Certifier, x: Tensor, device: str) -> None:
    ready(x, progress=False)
    _wait(device)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few points of 6F only, and no record")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=256)
    parser.add_argument("--networks", nargs="+", default=["6F"], choices=["6F", "6C2F"])
    options = parser.parse_args()
    if options.device != "cpu" and not options.quick:
        require_known_code()
    console = Console()
    builders = {"6F": six_f, "6C2F": six_c_two_f}
    points, names = (32, ["6F"]) if options.quick else (options.points, options.networks)
    torch.manual_seed(SEED)
    figures = [measure(name, builders[name](), points, options.device, console) for name in names]
    if not options.quick:
        arguments = f"--device {options.device} --points {points} --networks {' '.join(names)}"
        command = f"python -m benchmarks.certification {arguments}"
        path = write_record(
            f"certification_{options.device}",
            command,
            SEED,
            {"device": device_name(options.device)},
            {"measurements": figures},
        )
        console.print(f"recorded in {path}")


if __name__ == "__main__":
    main()
