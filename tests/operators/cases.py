"""Linear maps as data: every case inherits the conformance suite and the norm tests."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from curvcert.operators import (
    AbstractLinearMap,
    AveragePool2d,
    Conv2d,
    Dense,
    Diagonal,
    Identity,
    Reshape,
    Zero,
    batch_norm_in_eval,
)
from curvcert.operators.circuit import Circuit
from curvcert.operators.gather import Gather, gather_along
from curvcert.operators.permutation import Flip, Permutation
from curvcert.operators.segments import Segment, on_top_of_each_other, side_by_side
from curvcert.operators.slices import Slice, slice_along

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A named map."""

    name: str
    make: Callable[[], AbstractLinearMap]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def smooth_kernel(outputs: int, inputs: int, k: int, seed: int = 0) -> Tensor:
    """A kernel of nearly equal positive taps: the hardest for the zero-padding embedding."""
    bump = torch.exp(-(torch.linspace(-1, 1, k, dtype=F64) ** 2))
    return (1 + 0.1 * randn(outputs, inputs, 1, 1, seed=seed)) * bump[:, None] * bump[None, :]


def residual() -> AbstractLinearMap:
    return Identity((5,)) + 0.5 * (Dense(randn(5, 7)) @ Dense(randn(7, 5, seed=1)))


def circuit() -> AbstractLinearMap:
    """Values that two later ones read each, and one that nothing reads."""
    A, B, C = (Dense(randn(3, 3, seed=seed)) for seed in (6, 7, 8))
    first, second = ((0, A),), ((0, Identity((3,))), (1, B))
    return Circuit((first, second, ((1, C), (2, 0.5 * A)), ((1, A),), ((2, B), (3, C))))


def conv_chain() -> AbstractLinearMap:
    first = Conv2d(randn(4, 2, 3, 3), (2, 6, 6), padding=((1, 1), (1, 1)))
    second = Conv2d(randn(3, 4, 4, 4, seed=1), (4, 6, 6), stride=(2, 2), padding=((1, 1), (1, 1)))
    return Dense(randn(5, 27, seed=2)) @ Reshape((3, 3, 3), (27,)) @ second @ (0.5 * first)


def isometries() -> AbstractLinearMap:
    mixing = torch.linalg.qr(randn(4, 4)).Q[:, :, None, None]
    padding = torch.eye(4, 2, dtype=F64)[:, :, None, None]
    order = Permutation((4, 3, 3), (0, 2, 1))
    return Conv2d(mixing, (4, 3, 3)) @ order @ Conv2d(padding, (2, 3, 3))


CASES = [
    Case("dense", lambda: Dense(randn(4, 6))),
    Case("dense tall", lambda: Dense(randn(9, 3))),
    Case("dense rank one", lambda: Dense(torch.outer(randn(5), randn(6, seed=1)))),
    Case("dense zero", lambda: Dense(torch.zeros(3, 4, dtype=F64))),
    Case("dense 1x1", lambda: Dense(torch.full((1, 1), -2.5, dtype=F64))),
    Case("conv", lambda: Conv2d(randn(3, 2, 3, 3), (2, 5, 6))),
    Case("conv padded", lambda: Conv2d(randn(3, 2, 3, 3), (2, 5, 6), padding=((1, 1), (1, 1)))),
    Case("conv strided", lambda: Conv2d(randn(3, 2, 4, 4), (2, 7, 8), (2, 2), ((1, 1), (1, 1)))),
    Case("conv stride over kernel", lambda: Conv2d(randn(3, 2, 2, 2), (2, 8, 9), (3, 4))),
    Case("conv asymmetric", lambda: Conv2d(randn(2, 2, 3, 2), (2, 5, 5), (1, 2), ((0, 2), (1, 0)))),
    Case("conv dilated", lambda: Conv2d(randn(2, 3, 3, 3), (3, 7, 7), (1, 1), ((2, 2), (2, 2)), (2, 2))),
    Case("conv grouped", lambda: Conv2d(randn(6, 2, 3, 3), (4, 5, 5), (2, 1), ((1, 1), (1, 1)), groups=2)),
    Case("conv depthwise", lambda: Conv2d(randn(4, 1, 3, 3), (4, 5, 5), groups=4)),
    Case("conv wide padding", lambda: Conv2d(randn(2, 1, 2, 2), (1, 3, 3), (1, 1), ((3, 3), (2, 4)))),
    Case(
        "conv circular",
        lambda: Conv2d(randn(2, 2, 3, 3), (2, 4, 4), padding=((1, 1), (1, 1)), padding_mode="circular"),
    ),
    Case(
        "conv circular, taps meet",
        lambda: Conv2d(randn(2, 2, 3, 3), (2, 2, 4), padding=((1, 1), (1, 1)), padding_mode="circular"),
    ),
    Case(
        "conv circular strided",
        lambda: Conv2d(randn(2, 1, 3, 3), (1, 5, 6), (2, 2), ((1, 1), (1, 1)), padding_mode="circular"),
    ),
    Case("conv on one pixel", lambda: Conv2d(randn(3, 2, 3, 3), (2, 1, 1), padding=((1, 1), (1, 1)))),
    Case("conv smooth", lambda: Conv2d(smooth_kernel(3, 2, 3), (2, 6, 6), padding=((1, 1), (1, 1)))),
    Case("average pool", lambda: AveragePool2d((2, 6, 6), (3, 3), (2, 2), (1, 1))),
    Case("average pool exact", lambda: AveragePool2d((2, 4, 6), (2, 2), (2, 2))),
    Case("diagonal", lambda: Diagonal(randn(3, 1, 1), (3, 2, 2))),
    Case(
        "batch norm",
        lambda: batch_norm_in_eval((3, 2, 2), randn(3), randn(3, seed=1).abs(), 1e-5, randn(3, seed=2))[0],
    ),
    Case("reshape", lambda: Reshape((2, 3), (3, 2, 1))),
    Case("permutation", lambda: Permutation((2, 3, 2), (2, 0, 1))),
    Case("permuted conv", lambda: Permutation((3, 3, 4), (1, 2, 0)) @ Conv2d(randn(3, 2, 3, 3), (2, 5, 6))),
    Case("conv of disjoint windows", lambda: Conv2d(randn(3, 2, 2, 3), (2, 5, 7), (2, 3))),
    Case("conv of disjoint windows in groups", lambda: Conv2d(randn(4, 2, 2, 2), (4, 4, 6), (2, 2), groups=2)),
    Case("chain of isometries", isometries),
    Case("identity", lambda: Identity((2, 3))),
    Case("zero", lambda: Zero((3,), (2, 2))),
    Case("transposed conv", lambda: Conv2d(randn(3, 2, 4, 4), (2, 8, 8), (2, 2), ((1, 1), (1, 1))).T),
    Case("scaled", lambda: -0.3 * Dense(randn(4, 6))),
    Case("sum", lambda: Dense(randn(4, 6)) + Dense(randn(4, 6, seed=1)) - Dense(randn(4, 6, seed=2))),
    Case("sum transposed", lambda: (Dense(randn(4, 6)) + 0.1 * Dense(randn(4, 6, seed=1))).T),
    Case("residual", residual),
    Case("narrow middle", lambda: Dense(randn(9, 2)) @ Dense(randn(2, 8, seed=1))),
    Case("conv chain", conv_chain),
    Case("conv chain transposed", lambda: conv_chain().T),
    Case("flip", lambda: Flip((2, 3, 4), (0, 2))),
    Case("flipped conv", lambda: Flip((3, 3, 4), (2,)) @ Conv2d(randn(3, 2, 3, 3), (2, 5, 6)) @ Flip((2, 5, 6), (1,))),
    Case("slice", lambda: Slice((3, 5, 4), (1, 0, 3), (1, 2, 1), (2, 3, 1))),
    Case("embedding", lambda: slice_along((3, 5), 1, 1, 2, 3).T),
    Case("conv of channels", lambda: Conv2d(randn(3, 4, 3, 3), (4, 5, 5)) @ slice_along((4, 5, 5), 0, 1, 2).T),
    Case("gather", lambda: Gather((3, 4), ((2, 0, 0, 1, 0), (1, 3, 1)))),
    Case("gather of some", lambda: Gather((3, 4), ((0, 1, 2), (3, 1)))),
    Case(
        "conv behind a mirror",
        lambda: Conv2d(randn(2, 2, 3, 1), (2, 6, 3)) @ gather_along((2, 4, 3), {1: (1, 0, 1, 2, 3, 2)}),
    ),
    Case("segment", lambda: Segment(7, 2, (2, 2))),
    Case("side by side", lambda: side_by_side([Dense(randn(3, 4)), -0.5 * Dense(randn(3, 2, seed=1)), Identity((3,))])),
    Case("on top of each other", lambda: on_top_of_each_other([Dense(randn(2, 4)), Reshape((4,), (2, 2))])),
    Case("circuit", circuit),
    Case("circuit transposed", lambda: circuit().T),
    Case("circuit behind a map", lambda: Dense(randn(2, 3, seed=5)) @ circuit()),
    Case("pool chain", lambda: AveragePool2d((3, 4, 4), (2, 2), (2, 2)) @ Diagonal(randn(3, 1, 1), (3, 4, 4))),
]

IDS = [case.name for case in CASES]

exponents = st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0, 7.0, math.inf])


@st.composite
def convolutions(draw: st.DrawFn) -> Conv2d:
    """Random convolutions over every option."""
    groups = draw(st.integers(1, 2))
    inputs, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(2))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(2))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(2))
    padding = tuple((draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in range(2))
    size = tuple(
        max(draw(st.integers(1, 7)), d * (k - 1) + 1 - sum(side), 1)
        for k, d, side in zip(kernel, dilation, padding, strict=True)
    )
    mode = draw(st.sampled_from(["zeros", "zeros", "circular"]))
    if mode == "circular":
        padding = tuple((min(a, n), min(b, n)) for (a, b), n in zip(padding, size, strict=True))
        size = tuple(max(n, d * (k - 1) + 1) for n, k, d in zip(size, kernel, dilation, strict=True))
    seed = draw(st.integers(0, 2**20))
    make = smooth_kernel if draw(st.booleans()) and kernel[0] == kernel[1] else None
    weight = (
        make(outputs, inputs // groups, kernel[0], seed)
        if make
        else randn(outputs, inputs // groups, *kernel, seed=seed)
    )
    return Conv2d(weight, (inputs, *size), stride, padding, dilation, groups, mode)  # type: ignore[arg-type]


@st.composite
def matrices(draw: st.DrawFn) -> Dense:
    """Random matrices: Gaussian, low rank, orthogonal, badly scaled."""
    rows, columns, seed = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(0, 2**20))
    matrix = randn(rows, columns, seed=seed)
    kind = draw(st.sampled_from(["gaussian", "low rank", "orthogonal", "graded", "tiny", "huge", "positive"]))
    if kind == "low rank":
        matrix = randn(rows, 1, seed=seed) @ randn(1, columns, seed=seed + 1)
    elif kind == "orthogonal":
        matrix = torch.linalg.qr(randn(12, 12, seed=seed))[0][:rows, :columns]
    elif kind == "graded":
        matrix = matrix * 10.0 ** -torch.arange(rows, dtype=F64)[:, None]
    elif kind in ("tiny", "huge"):
        matrix = matrix * (1e-160 if kind == "tiny" else 1e150)
    elif kind == "positive":
        matrix = matrix.abs()
    return Dense(matrix)
