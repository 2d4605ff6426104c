"""The local curvature bound over balls of 36/255 against the global one, on networks trained on MNIST.

Claim: over balls of the size that robustness is measured at, the local bound is well below the global one.
Hardware: whatever it runs on; the record says which.
Trials: one 784-100-100-10 tanh network a kind of training, POINTS test images, the pair (3, 8).

The regularised network pays for the paper's bound (Algorithm 1 with estimated norms) beside the cross-entropy.

    python -m benchmarks.local_curvature --data DIR     # DIR/MNIST/raw/*-ubyte, the official files
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import write_record
from benchmarks.networks import dense
from curvcert.bounds.curvature import curvature
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.network import LiveNetwork, trace
from curvcert.operators.estimates import NormEstimates

SEED, POINTS, RADIUS, PAIR, BATCH = 0, 64, 36 / 255, (3, 8), 256
KINDS = {"standard": 0.0, "regularised": 1e-2}


def load(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and labels from the official files."""
    images = np.fromfile(folder / f"{split}-images-idx3-ubyte", dtype=np.uint8)[16:].reshape(-1, 784)
    labels = np.fromfile(folder / f"{split}-labels-idx1-ubyte", dtype=np.uint8)[8:]
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()


def train(x: Tensor, y: Tensor, weight: float, epochs: int) -> nn.Sequential:
    """Train with the curvature's estimate times `weight` in the loss."""
    torch.manual_seed(SEED)
    model, norms = dense(784, 100, 100, 10), NormEstimates()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            if weight:
                norms.start_step()
                problem = Problem(LiveNetwork(model, x[:1])(), 2, 2, Global())
                loss = loss + weight * compositional_bound(problem, norms, ["sdp"]).value.float()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    """Train, bound and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds MNIST/raw")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    folder = options.data / "MNIST" / "raw"
    (x, y), (test_x, test_y) = load(folder, "train"), load(folder, "t10k")
    figures = []
    for kind, weight in KINDS.items():
        model = train(x, y, weight, options.epochs)
        with torch.no_grad():
            accuracy = float((model(test_x).argmax(dim=1) == test_y).double().mean())
        network = trace(model, test_x[:1])
        everywhere = float(curvature(network, pair=PAIR))
        local = curvature(network, pair=PAIR, at=test_x[:POINTS], radius=RADIUS, method="local").value
        figures.append(
            {
                "training": kind,
                "accuracy": accuracy,
                "global": everywhere,
                "local_median": float(local.median()),
                "ratio": float(local.median()) / everywhere,
            }
        )
        Console().print(figures[-1])
    config = {"points": POINTS, "radius": RADIUS, "pair": list(PAIR), "epochs": options.epochs, "weights": KINDS}
    write_record(
        "local_curvature", "python -m benchmarks.local_curvature --data DIR", SEED, config, {"networks": figures}
    )


if __name__ == "__main__":
    main()
