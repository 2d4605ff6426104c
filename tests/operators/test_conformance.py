"""One suite that every linear map inherits: apply, adjoint and as_matrix agree in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from curvcert.errors import InvalidInput
from curvcert.operators import (
    AveragePool2d,
    Composition,
    Conv2d,
    Dense,
    Diagonal,
    Identity,
    Reshape,
    Scaled,
    Zero,
)
from curvcert.operators.conv import folded_adjoint, scattered_adjoint, ungrouped_kernel
from curvcert.operators.magnitudes import absolute_row_sums_upper_bound, magnitude, rounding_length
from curvcert.operators.rows import basis_vectors
from curvcert.rounding import gamma
from tests.operators.cases import CASES, F64, IDS, Case, convolutions, randn

EPS = 1e-12


@pytest.mark.parametrize("case", CASES, ids=IDS)
class TestConformance:
    def test_apply_is_the_matrix(self, case: Case) -> None:
        op = case.make()
        x = randn(3, *op.in_shape, seed=9)
        expected = x.flatten(1) @ op.as_matrix().T
        torch.testing.assert_close(op.apply(x).flatten(1), expected, rtol=EPS, atol=EPS)

    def test_adjoint_is_the_transposed_matrix(self, case: Case) -> None:
        op = case.make()
        y = randn(3, *op.out_shape, seed=9)
        torch.testing.assert_close(op.adjoint(y).flatten(1), y.flatten(1) @ op.as_matrix(), rtol=EPS, atol=EPS)
        torch.testing.assert_close(op.T.as_matrix(), op.as_matrix().T, rtol=EPS, atol=EPS)

    def test_any_number_of_leading_dimensions(self, case: Case) -> None:
        op = case.make()
        x = randn(2, 3, *op.in_shape)
        assert op.apply(x).shape == (2, 3, *op.out_shape)
        torch.testing.assert_close(op.apply(x[0, 0]), op.apply(x)[0, 0], rtol=EPS, atol=EPS)

    def test_moves_between_dtypes(self, case: Case) -> None:
        op = case.make().to(torch.float32)
        assert op.dtype == torch.float32
        assert op.apply(torch.ones(2, *op.in_shape)).dtype == torch.float32
        assert op.to(F64).dtype == F64

    def test_magnitude_dominates(self, case: Case) -> None:
        op = case.make()
        assert bool((magnitude(op).as_matrix() >= op.as_matrix().abs() * (1 - 1e-14)).all())
        sums = op.as_matrix().abs().sum(dim=1)
        assert bool((absolute_row_sums_upper_bound(op).flatten() >= sums * (1 - 1e-14)).all())

    def test_refuses_a_wrong_shape_and_dtype(self, case: Case) -> None:
        op = case.make()
        with pytest.raises(InvalidInput, match="expected a tensor of shape"):
            op.apply(torch.zeros(2, *op.in_shape, 13, dtype=F64))
        with pytest.raises(InvalidInput, match="Convert"):
            op.apply(torch.zeros(2, *op.in_shape, dtype=torch.float32))


@given(convolutions(), st.integers(0, 1000))
def test_convolution_is_torchs(conv: Conv2d, seed: int) -> None:
    x = randn(2, *conv.in_shape, seed=seed)
    (top, bottom), (left, right) = conv.padding
    mode = "constant" if conv.padding_mode == "zeros" else "circular"
    padded = F.pad(x, (left, right, top, bottom), mode=mode)
    expected = F.conv2d(padded, conv.weight, None, conv.stride, 0, conv.dilation, conv.groups)
    torch.testing.assert_close(conv.apply(x), expected, rtol=EPS, atol=EPS)
    torch.testing.assert_close(x.flatten(1) @ conv.as_matrix().T, expected.flatten(1), rtol=EPS, atol=EPS)
    y = randn(2, *conv.out_shape, seed=seed + 1)
    torch.testing.assert_close((conv.apply(x) * y).sum(), (x * conv.adjoint(y)).sum(), rtol=1e-10, atol=1e-10)


@given(convolutions(), st.integers(0, 1000), st.sampled_from([1, 300, 2**26]))
def test_both_ways_to_the_adjoint_agree(conv: Conv2d, seed: int, elements: int) -> None:
    conv = replace(conv, weight=ungrouped_kernel(conv), groups=1)
    x, y = randn(3, *conv.in_shape, seed=seed), randn(3, *conv.out_shape, seed=seed + 1)
    folded, scattered = folded_adjoint(conv, y, elements), scattered_adjoint(conv, y)
    size = gamma(2 * rounding_length(conv)) * scattered_adjoint(magnitude(conv), y.abs())
    assert folded.shape == scattered.shape == x.shape
    assert bool(((folded - scattered).abs() <= 1.001 * size).all())
    torch.testing.assert_close((conv.apply(x) * y).sum(), (x * folded).sum(), rtol=1e-10, atol=1e-10)


@given(convolutions(), st.integers(0, 1000))
def test_the_gradients_of_both_adjoints_agree(conv: Conv2d, seed: int) -> None:
    conv = replace(conv, weight=ungrouped_kernel(conv), groups=1)
    y, found = randn(2, *conv.out_shape, seed=seed), []
    for adjoint in (folded_adjoint, scattered_adjoint):
        weight = conv.weight.clone().requires_grad_()
        adjoint(replace(conv, weight=weight), y).square().sum().backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stop", [3, 7, 12])
def test_basis_vectors_are_rows_of_the_identity(stop: int) -> None:
    basis = basis_vectors((3, 2, 2), 2, stop, Identity((3, 2, 2)))
    torch.testing.assert_close(basis.flatten(1), torch.eye(12, dtype=F64)[2:stop], rtol=0, atol=0)


def test_average_pooling_is_torchs() -> None:
    op = AveragePool2d((2, 7, 6), (3, 2), (2, 2), (1, 1))
    x = randn(2, 2, 7, 6)
    torch.testing.assert_close(op.apply(x), F.avg_pool2d(x, (3, 2), (2, 2), (1, 1)), rtol=0, atol=0)


class TestAlgebra:
    def test_products_are_flat_and_drop_identities(self) -> None:
        op = Dense(randn(2, 3)) @ (Identity((3,)) @ (Dense(randn(3, 4)) @ Dense(randn(4, 5))))
        assert isinstance(op, Composition)
        assert len(op.factors) == 3

    def test_zero_absorbs(self) -> None:
        op = Dense(randn(2, 3)) @ Zero((5,), (3,))
        assert isinstance(op, Zero)
        assert (op.in_shape, op.out_shape) == ((5,), (2,))
        assert isinstance(op + Dense(randn(2, 5)), Dense)

    def test_scalars_come_to_the_front_only_if_exact(self) -> None:
        op = (0.5 * Dense(randn(2, 3))) @ (0.25 * Dense(randn(3, 2)))
        assert isinstance(op, Scaled)
        assert op.factor == 0.125
        inexact = 0.1 * (0.3 * Dense(randn(2, 3)))
        assert isinstance(inexact, Scaled)
        assert isinstance(inexact.map, Scaled)

    def test_reshapes_merge_and_vanish(self) -> None:
        assert isinstance(Reshape((6,), (2, 3)) @ Reshape((2, 3), (6,)), Identity)

    def test_transposes_cancel(self) -> None:
        op = Dense(randn(2, 3))
        assert op.T.T is op

    @pytest.mark.parametrize(
        "build",
        [
            lambda: Dense(randn(2, 3)) @ Dense(randn(2, 3)),
            lambda: Dense(randn(2, 3)) + Dense(randn(3, 2)),
            lambda: Dense(randn(2, 3)) @ Dense(randn(3, 2).float()),
            lambda: float("nan") * Dense(randn(2, 3)),
            lambda: Dense(torch.ones(2, 3, dtype=torch.int64)),
            lambda: Dense(torch.ones(2, 3, dtype=torch.complex128)),
            lambda: Dense(torch.ones(3)),
            lambda: Conv2d(randn(2, 3, 3, 3), (2, 5, 5)),
            lambda: Conv2d(randn(2, 3, 3, 3), (3, 1, 1)),
            lambda: Conv2d(randn(2, 3, 3, 3), (3, 5, 5), stride=(0, 1)),
            lambda: Conv2d(randn(2, 3, 3, 3), (3, 5, 5), padding=((-1, 0), (0, 0))),
            lambda: Conv2d(randn(2, 3, 3, 3), (3, 5, 5), padding_mode="reflect"),  # type: ignore[arg-type]
            lambda: Diagonal(randn(3), (2,)),
            lambda: Reshape((2, 3), (5,)),
            lambda: Dense(randn(2, 3)).to(torch.int32),
        ],
    )
    def test_refuses_what_does_not_fit(self, build) -> None:
        with pytest.raises(InvalidInput):
            build()
