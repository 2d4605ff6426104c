"""Certified l2 norms of layers, against a dense SVD and against power iteration: tightness and time.

Claim: a certified norm is never below the reference; how far above it, and at what cost against the
reference and against power iteration (which may be below), is what this measures.
Hardware: whatever it runs on; the record says which.
Trials: one layer for each shape and kind of weight, drawn from SEED; the calls take turns.

The layers are those of 6F and 6C2F on CIFAR-10.  Where a layer's matrix has more than
MAX_DENSE_ENTRIES entries, the reference is a converged Lanczos iteration instead of the dense SVD:
it approaches the norm from below, so the excess reported there is at most that much too large.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.sparse.linalg import LinearOperator, svds

from benchmarks.harness import Candidates, ratios, time_interleaved, write_record
from curvcert.operators import Conv2d, Dense, norm_upper_bound
from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.estimates import norm_estimate

SEED = 0
MAX_DENSE_ENTRIES = 2**24

Weights = Literal["random", "orthogonal"]


@dataclass(frozen=True)
class DenseCase:
    """A dense layer of 6F."""

    outputs: int
    inputs: int
    weights: Weights

    def operator(self) -> AbstractLinearMap:
        """Return the layer, its weights drawn from torch's generator."""
        return Dense(draw((self.outputs, self.inputs), self.weights))


@dataclass(frozen=True)
class ConvCase:
    """A convolution of 6C2F, padded by one pixel, on square images."""

    outputs: int
    inputs: int
    kernel: int
    stride: int
    image: int
    weights: Weights

    def operator(self) -> AbstractLinearMap:
        """Return the layer, its weights drawn from torch's generator."""
        kernel = draw((self.outputs, self.inputs, self.kernel, self.kernel), self.weights)
        return Conv2d(
            kernel,
            (self.inputs, self.image, self.image),
            stride=(self.stride, self.stride),
            padding=((1, 1), (1, 1)),
        )


Case = DenseCase | ConvCase

DENSE_SHAPES = ((1024, 3072), (512, 1024), (256, 512), (256, 256), (128, 256), (10, 128))
CONV_SHAPES = ((32, 3, 3, 1, 32), (32, 32, 4, 2, 32), (64, 64, 3, 1, 8), (64, 64, 4, 2, 8))
QUICK_CASES = (
    DenseCase(128, 256, "random"),
    DenseCase(10, 128, "orthogonal"),
    ConvCase(8, 3, 3, 1, 8, "random"),
)


def cases(quick: bool) -> tuple[Case, ...]:
    """Return the layers to measure; the quick ones only show that everything runs."""
    if quick:
        return QUICK_CASES
    kinds: tuple[Weights, ...] = ("random", "orthogonal")
    dense = [DenseCase(*shape, kind) for shape in DENSE_SHAPES for kind in kinds]
    convolutions = [ConvCase(*shape, "random") for shape in CONV_SHAPES]
    return (*dense, *convolutions)


def draw(shape: tuple[int, ...], kind: Weights) -> torch.Tensor:
    """Return float64 weights: normal with variance 1/fan-in, or with orthonormal rows or columns."""
    weight = torch.empty(shape, dtype=torch.float64)
    if kind == "orthogonal":
        return torch.nn.init.orthogonal_(weight)
    return weight.normal_(std=1 / math.sqrt(math.prod(shape[1:])))


def dense_norm(op: AbstractLinearMap) -> float:
    """Return the largest singular value of the explicit matrix."""
    return float(torch.linalg.matrix_norm(op.as_matrix(), 2))


def lanczos_norm(op: AbstractLinearMap) -> float:
    """Return the largest singular value by implicitly restarted Lanczos, to machine precision."""

    def apply(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return op.apply(torch.from_numpy(x.copy()).reshape(op.in_shape)).flatten().numpy()

    def adjoint(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return op.adjoint(torch.from_numpy(y.copy()).reshape(op.out_shape)).flatten().numpy()

    linear = LinearOperator((op.out_size, op.in_size), matvec=apply, rmatvec=adjoint, dtype=np.float64)
    return float(svds(linear, k=1, tol=0, return_singular_vectors=False, random_state=SEED)[0])


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Return the figures of one layer: norms, relative errors and times."""
    op = case.operator()
    is_dense = op.out_size * op.in_size <= MAX_DENSE_ENTRIES
    reference = "dense SVD" if is_dense else "Lanczos"
    bound, estimate = norm_upper_bound(op, p=2), norm_estimate(op)
    exact = dense_norm(op) if is_dense else lanczos_norm(op)
    candidates: Candidates = {
        "certified": lambda: norm_upper_bound(op, p=2),
        "estimated": lambda: norm_estimate(op),
        reference: lambda: dense_norm(op) if is_dense else lanczos_norm(op),
    }
    timings = time_interleaved(candidates, repeats=repeats, warmup=0)  # each has run once already
    return {
        "layer": {"kind": type(case).__name__, **asdict(case)},
        "method": bound.method,
        "reference": reference,
        "certified": float(bound),
        "estimated": float(estimate),
        "exact": exact,
        "certified_excess": float(bound) / exact - 1,
        "estimated_excess": float(estimate) / exact - 1,
        "times": {name: timing.as_figures() for name, timing in timings.items()},
        "time_against_reference": ratios(timings, against=reference)["certified"],
        "time_against_estimate": ratios(timings, against="estimated")["certified"],
    }


def describe(figure: dict[str, Any]) -> str:
    """Return a short name of a layer, with a star where the reference is not a dense SVD."""
    layer = figure["layer"]
    star = "" if figure["reference"] == "dense SVD" else " *"
    if layer["kind"] == "DenseCase":
        return f"{layer['outputs']} x {layer['inputs']} {layer['weights']}{star}"
    kernel = f"{layer['inputs']}->{layer['outputs']} k{layer['kernel']} s{layer['stride']}"
    return f"conv {kernel} on {layer['image']}{star}"


def table_of(figures: list[dict[str, Any]]) -> Table:
    """Return the printed table, one row per layer."""
    table = Table(
        title="l2 norms: excess over the reference; time of the bound",
        caption="reference: dense SVD, or (*) Lanczos",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("layer", no_wrap=True)
    for heading in ("bound", "estimate", "seconds", "/ ref.", "/ est."):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(
            describe(figure),
            f"{figure['certified_excess']:+.1e}",
            f"{figure['estimated_excess']:+.1e}",
            f"{figure['times']['certified']['median_s']:.4f}",
            f"{figure['time_against_reference']:.2f}",
            f"{figure['time_against_estimate']:.2f}",
        )
    return table


def main() -> None:
    """Measure every layer, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norm_bounds", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three small layers; writes no record")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds for each layer (default 3)")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    chosen = cases(arguments.quick)
    figures = [measure(case, arguments.repeats) for case in track(chosen, description="Measuring layers")]

    console = Console()
    console.print(table_of(figures))
    if not arguments.quick:
        config = {"repeats": arguments.repeats, "threads": torch.get_num_threads()}
        command = f"python -m benchmarks.norm_bounds --repeats {arguments.repeats}"
        path = write_record("norm_bounds", command, SEED, config, {"layers": figures})
        console.print(f"Wrote results/{path.name}")


if __name__ == "__main__":
    main()
