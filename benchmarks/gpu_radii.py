"""Certified radii on a GPU: how long 1,000 samples of the embedded MNIST networks take, by all methods together.

Claim: none but the figures: seconds, absolute, constants included, in l2, linf and l1; the largest radii, and one
radius decided, the median of CROWN where `results/peers.json` has one.
Hardware: one CUDA device; the record says which.
Trials: one run after one on a few samples, which loads libraries; the 500 embedded test images, and the same moved by a
pixel.

    python -m benchmarks.gpu_radii [--samples 1000] [--networks "embedded MNIST" ...] [--device cuda]
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness import read_record, require_known_code, write_record
from benchmarks.peer_networks import PEERS, mnist
from benchmarks.peers import NORMS
from curvcert.certificates import certify
from curvcert.network import Network, trace

NETWORKS = ("embedded MNIST", "MNIST-6F standard", "MNIST-6F CCRC")


def samples_of_mnist(count: int) -> tuple[Tensor, Tensor]:
    """Return the embedded images, and the same moved by a pixel."""
    images, labels = mnist()
    return torch.cat([images, images.roll(1, dims=-1)])[:count], torch.cat([labels, labels])[:count]


def measured(net: Network, x: Tensor, y: Tensor, p: float, decided: float | None) -> dict[str, Any]:
    """Time one norm: the largest radii, and one radius decided."""
    begun = time.perf_counter()
    found = certify(net, x, y, p, progress=False)
    figures: dict[str, Any] = {
        "samples": len(x),
        "correct": int(found.correct.sum()),
        "seconds": time.perf_counter() - begun,
        "median radius": float(found.radius[found.correct].median()),
    }
    if decided is not None:
        begun = time.perf_counter()
        share = certify(net, x, y, p, epsilons=decided, progress=False).certified_accuracy(decided)
        figures |= {"decided": decided, "deciding_s": time.perf_counter() - begun, "share proven": share}
    return figures


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, metavar="NAME", default=list(NETWORKS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    require_known_code()
    console, known = Console(soft_wrap=True), read_record("peers")
    x, y = samples_of_mnist(options.samples)
    x, y = x.to(options.device), y.to(options.device)
    figures: dict[str, dict[str, Any]] = {}
    for name in options.networks:
        net = trace(PEERS[name].model(Path("runs/peers")), x[:1].float().cpu()).to(options.device)
        certify(net, x[:8], y[:8], progress=False)
        figures[name] = {}
        for norm, p in NORMS.items():
            crown = None if known is None else known.figures["networks"].get(name, {}).get(norm, {}).get("CROWN")
            figures[name][norm] = measured(net, x, y, p, crown)
            console.print(f"{name}, {norm}: {figures[name][norm]}", highlight=False, markup=False)
            config = {"device": torch.cuda.get_device_name() if options.device == "cuda" else options.device}
            write_record("gpu_radii", f"python -m benchmarks.gpu_radii --samples {len(x)}", 0, config, figures)


if __name__ == "__main__":
    main()
