"""Norms on a torus against dense float64 references, over random networks of stencils."""

import random

import pytest
import torch

from curvcert.operators import AbstractLinearMap, AveragePool2d, Conv2d, Diagonal, Identity, NormBounds, Reshape, add
from curvcert.operators.base import Shape
from curvcert.operators.circuit import Circuit
from curvcert.operators.hermitian import largest_singular_value_upper_bound
from curvcert.operators.images import EXPLICIT_SIZE, large_norm_upper_bound
from curvcert.operators.planes import CROP, Planes, Unplanar, Use, Value, planes_of
from curvcert.operators.stencils import Reach, folded, stencil_of
from curvcert.operators.torus import tori_of, torus_norm_upper_bound
from tests.operators.cases import F64, randn

LAPACK = 1e-12
"""How far a singular value that LAPACK computes may be off, relatively."""


def svd_norm(op: AbstractLinearMap) -> float:
    return float(torch.linalg.matrix_norm(op.as_matrix(), 2))


def drawn_conv(shape: Shape, rng: random.Random) -> Conv2d:
    """A convolution that fits, with any stride, dilation, groups and sides of padding."""
    while True:
        channels = shape[0]
        groups = rng.choice([g for g in (1, 2, 3) if channels % g == 0])
        outputs = groups * rng.randint(1, 3)
        taps, stride, dilation = (
            (rng.choice(choice), rng.choice(choice)) for choice in ((1, 2, 3, 4), (1, 1, 2, 3), (1, 1, 2))
        )
        padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) if rng.random() < 0.7 else (0, 0) for _ in range(2))
        if all(n + sum(side) > d * (k - 1) for n, side, d, k in zip(shape[1:], padding, dilation, taps, strict=True)):
            weight = randn(outputs, channels // groups, *taps, seed=rng.randrange(2**31))
            return Conv2d(weight, shape, stride, (padding[0], padding[1]), dilation, groups)


def same_conv(shape: Shape, rng: random.Random) -> Conv2d:
    return Conv2d(randn(shape[0], shape[0], 3, 3, seed=rng.randrange(2**31)), shape, padding=((1, 1), (1, 1)))


def drawn_map(shape: Shape, rng: random.Random) -> AbstractLinearMap:
    match rng.randrange(8):
        case 0 if min(shape[1:]) >= 3:
            return AveragePool2d(shape, (2, 3), rng.choice([(2, 3), (1, 2)]), rng.choice([(0, 0), (1, 1)]))
        case 1:
            return Diagonal(randn(shape[0], 1, 1, seed=rng.randrange(2**31)), shape)
        case 2:
            return add(Identity(shape), 0.3 * same_conv(shape, rng))
        case 3:
            return same_conv(shape, rng).T
        case 4:
            A, B = same_conv(shape, rng), same_conv(shape, rng)
            return Circuit((((0, A),), ((0, B), (1, 0.5 * Identity(shape))), ((1, B), (2, A))))
        case _:
            return drawn_conv(shape, rng)


def drawn_path(seed: int, most: int = 3) -> AbstractLinearMap:
    rng = random.Random(seed)
    op = drawn_map((rng.randint(1, 3), rng.randint(2, 8), rng.randint(2, 8)), rng)
    for _ in range(rng.randrange(most)):
        op = drawn_map(op.out_shape, rng) @ op
    return op


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_never_below_the_dense_norm(start: int) -> None:
    for seed in range(start, start + 20):
        op = drawn_path(seed)
        if max(op.in_size, op.out_size) <= 500:
            bound, _ = torus_norm_upper_bound(op)
            assert float(bound) >= svd_norm(op) * (1 - LAPACK), seed


def near(shape: Shape, seed: int) -> list[AbstractLinearMap]:
    """Maps and paths of two whose taps are few beside their images, and that need no crop."""
    rng = random.Random(seed)
    conv = same_conv(shape, rng)
    pool = AveragePool2d(shape, (2, 2), (2, 2))
    strided = Conv2d(randn(4, shape[0], 3, 3, seed=seed), shape, (2, 2), ((1, 0), (0, 1)))
    scale = Diagonal(randn(shape[0], 1, 1, seed=seed), shape)
    one = Conv2d(randn(3, shape[0], 1, 1, seed=seed), shape)
    behind = Conv2d(randn(2, shape[0], 2, 2, seed=seed), pool.out_shape, padding=((1, 0), (0, 1)))
    return [conv, scale @ conv, conv @ scale, strided, strided @ scale, pool @ conv, one @ conv, behind @ pool, conv.T]


@pytest.mark.slow
@pytest.mark.parametrize("side", [10, 12, 16])
def test_within_a_tenth_of_the_dense_norm_where_taps_are_few(side: int) -> None:
    for op in near((2, side, side), side):
        bound, crops = torus_norm_upper_bound(op)
        assert crops == 0
        assert svd_norm(op) * (1 - LAPACK) <= float(bound) <= 1.10 * svd_norm(op)


def test_a_torus_that_is_too_small_is_below_the_norm() -> None:
    """What the length of circles is for: without a gap the taps wrap around onto the image."""
    op = Conv2d(torch.tensor([[[[1.0, 0.0, -1.0]]]], dtype=F64), (1, 1, 2), padding=((0, 0), (1, 1)))
    stencil = stencil_of(op)
    assert stencil is not None and [axis.need for axis in stencil.reach] == [1, 3]
    bound, _ = torus_norm_upper_bound(op)
    assert float(bound) >= svd_norm(op) * (1 - LAPACK)


def test_two_padded_convolutions_in_a_row_take_a_crop() -> None:
    first = Conv2d(randn(2, 1, 3, 3), (1, 6, 6), padding=((1, 1), (1, 1)))
    second = Conv2d(randn(1, 2, 3, 3, seed=1), first.out_shape, padding=((1, 1), (1, 1)))
    bound, crops = torus_norm_upper_bound(second @ first)
    (one, _), (other, _) = torus_norm_upper_bound(first), torus_norm_upper_bound(second)
    assert crops == 1
    assert svd_norm(second @ first) <= float(bound) <= float(one * other) * 1.05


@pytest.mark.parametrize("shape", [(1, 1, 80), (1, 70, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_coarse_grid_covers_what_is_between_its_points(shape: Shape, stride: int) -> None:
    for seed in range(8):
        weight = randn(2, 1, *(min(3, n) for n in shape[1:]), seed=seed)
        op = Conv2d(weight, shape, (1, stride) if shape[2] > 1 else (stride, 1), ((0, 0), (0, 0)))
        bound, _ = torus_norm_upper_bound(op)
        assert svd_norm(op) * (1 - LAPACK) <= float(bound) <= 1.05 * svd_norm(op)


def test_slopes_bound_what_activations_do() -> None:
    """A network conv, tanh, conv: no secant of random pairs is above the growth."""
    first, second = same_conv((2, 5, 5), random.Random(0)), same_conv((2, 5, 5), random.Random(1))
    planes = Planes((2, 5, 5))
    z = planes.image(first, 0)
    planes.add(Value((2, 5, 5), (Use(z),), CROP))
    end = planes.image(second, len(planes.values) - 1)
    growth = tori_of(planes.values, (end,))[0].growth((end,))[end]
    x, step = randn(500, 2, 5, 5, seed=2), 1e-3 * randn(500, 2, 5, 5, seed=3)
    moved = second.apply(first.apply(x + step).tanh()) - second.apply(first.apply(x).tanh())
    secants = torch.linalg.vector_norm(moved.flatten(1), dim=1) / torch.linalg.vector_norm(step.flatten(1), dim=1)
    assert float(secants.max()) <= float(growth) <= svd_norm(first) * svd_norm(second) * 1.2


def test_a_gap_is_clean_where_nothing_of_the_image_is_read() -> None:
    assert Reach(6, 6, 1, (0,)).leaves_gap_clean(9)
    assert Reach(6, 3, 2, (0, 1)).leaves_gap_clean(8)
    assert not Reach(7, 3, 2, (0, 1)).leaves_gap_clean(8)
    assert not Reach(6, 6, 1, (-1, 0, 1)).leaves_gap_clean(7)


def test_what_is_no_stencil_is_refused() -> None:
    circular = Conv2d(randn(1, 1, 3, 3), (1, 4, 4), padding=((1, 1), (1, 1)), padding_mode="circular")
    strided = Conv2d(randn(1, 1, 2, 2), (1, 4, 4), (2, 2))
    image = Diagonal(randn(1, 4, 4), (1, 4, 4))
    for op in (circular, strided.T, image, Reshape((1, 4, 4), (16,))):
        with pytest.raises(Unplanar):
            planes_of(op)


def test_scales_fold_into_the_stencil_beside_them() -> None:
    conv = Conv2d(randn(6, 1, 2, 2), (3, 4, 4), groups=3)
    outer, inner = (Diagonal(randn(c, 1, 1, seed=c), s) for c, s in ((6, conv.out_shape), (3, conv.in_shape)))
    whole = stencil_of(conv)
    first, last = stencil_of(inner), stencil_of(outer)
    assert whole is not None and first is not None and last is not None
    for op, both in ((outer @ conv, folded(last, whole)), (conv @ inner, folded(whole, first))):
        assert both is not None
        assert folded(both, both) is None
        weight = both.kernel.flatten(0, 1)
        assert torch.allclose(Conv2d(weight, (3, 4, 4), groups=3).as_matrix(), op.as_matrix(), rtol=1e-14)


@pytest.mark.parametrize(("n", "m", "batch"), [(1, 1, 1), (3, 5, 30), (7, 2, 40)])
def test_the_largest_singular_value_of_a_batch(n: int, m: int, batch: int) -> None:
    blocks = torch.complex(randn(batch, n, m), randn(batch, n, m, seed=1))
    truth = float(torch.linalg.svdvals(blocks).amax())
    assert truth * (1 - 1e-14) <= float(largest_singular_value_upper_bound(blocks)) <= truth * (1 + 1e-10)
    assert float(largest_singular_value_upper_bound(torch.zeros_like(blocks))) <= 1e-100


def test_large_maps_between_images_take_the_torus_and_small_ones_the_gram_matrix() -> None:
    norms = NormBounds()
    conv = Conv2d(randn(8, 8, 3, 3), (8, 16, 16), padding=((1, 1), (1, 1)))
    scaled = Diagonal(randn(8, 1, 1), conv.out_shape) @ conv
    assert norms.bound(scaled).method == "frequencies of a torus"
    assert norms.bound(Reshape(conv.out_shape, (conv.out_size,)) @ scaled).method == "frequencies of a torus"
    assert large_norm_upper_bound(conv @ conv) is None  # a crop, and a Gram matrix that is not too large
    small = Conv2d(randn(4, 1, 3, 3), (1, 16, 16), padding=((1, 1), (1, 1)))
    assert (
        small.in_size <= EXPLICIT_SIZE
        and large_norm_upper_bound(Diagonal(randn(4, 1, 1), small.out_shape) @ small) is None
    )
