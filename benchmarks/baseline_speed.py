"""Ratios of times that must not grow: certificates, constants and a training step, each against its own yardstick.

A certificate of 50 points is measured in Jacobians of the same points, the constants of a network in Jacobians of
1,000 points, a training step with a regulariser in plain steps.  What is compared takes turns within one run, and a
ratio is that of the medians: it depends on the machine far less than seconds do.  All of it runs on one thread: on two,
ratios depend on what else the machine does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.certification import jacobians
from benchmarks.harness import ratios, time_interleaved
from benchmarks.training_step import steps
from curvcert.certificates import certifier
from curvcert.data import load_demo_network, load_digits, load_mnist_network, load_mnist_sample
from curvcert.network import trace
from curvcert.nn import SLLDense

ALLOWED = 0.25
"""How far a ratio may be above the record's, relatively: repeated runs differ by less."""

POINTS, MANY_POINTS = 50, 1_000
PASSES = MANY_POINTS // POINTS
"""Passes over the points that make one turn of the yardstick: long enough to time beside a certificate of seconds."""

REPEATS = {"compositional": 15, "auto": 3}
"""How often a certificate by each method has its turn."""

CONSTANTS_REPEATS = 11

STEP_WIDTHS, STEP_BATCH, STEP_REPEATS = (784, *(100,) * 5, 10), 256, 50
THREADS = 1


def _contracting() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), SLLDense(64, 64), SLLDense(64, 64), nn.Linear(64, 10)).eval()


def _mnist() -> Tensor:
    return load_mnist_sample().as_float64()


def _digits() -> Tensor:
    return load_digits("test").as_float64()


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mnist-embedded": (load_mnist_network, _mnist),
    "digits-embedded": (load_demo_network, _digits),
    "sll": (_contracting, _digits),
}


def measured_ratios(say: Callable[[str], object]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the ratios, and what they depend on; `say` is told of each as soon as it is there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        found: dict[str, float] = {}
        for name, method in product(NETWORKS, REPEATS):
            found |= _said(_of_network(name, method), say)
        timings = time_interleaved(steps(STEP_WIDTHS, STEP_BATCH), repeats=STEP_REPEATS, warmup=3)
    finally:
        torch.set_num_threads(threads)
    took = ratios(timings, "plain")
    found |= _said({f"training-step/{key}": ratio for key, ratio in took.items() if key != "plain"}, say)
    config = {
        "threads": THREADS,
        "repeats": REPEATS,
        "constants_repeats": CONSTANTS_REPEATS,
        "points": POINTS,
        "many_points": MANY_POINTS,
        "allowed": ALLOWED,
    }
    return found, config | {"step_widths": list(STEP_WIDTHS), "step_batch": STEP_BATCH, "step_repeats": STEP_REPEATS}


def _said(found: dict[str, float], say: Callable[[str], object]) -> dict[str, float]:
    for key, ratio in found.items():
        say(f"{key}: {ratio:.4g}")
    return found


def _of_network(name: str, method: str) -> dict[str, float]:
    """Return how long certificates and constants of one network take by a method."""
    make, points = NETWORKS[name]
    x = points()[:POINTS]
    network = trace(make(), x[:1].float())

    def yardstick() -> None:
        for _ in range(PASSES):
            jacobians(network, x)

    def in_yardsticks(call: Callable[[], object], repeats: int) -> float:
        # Without a warm-up: the certifier below was one, and a median leaves out a slow first turn.
        timings = time_interleaved({"jacobian": yardstick, "call": call}, repeats, warmup=0)
        return ratios(timings, "jacobian")["call"]

    certificate = partial(certifier(network, method=method), x, progress=False)
    # The yardstick is as many Jacobians as constants are compared with, and PASSES times those of the points.
    return {
        f"{name}/certificate/{method}": PASSES * in_yardsticks(certificate, REPEATS[method]),
        f"{name}/constants/{method}": in_yardsticks(partial(certifier, network, method=method), CONSTANTS_REPEATS),
    }
