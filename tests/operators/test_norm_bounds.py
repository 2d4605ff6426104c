"""Norm bounds: never below the dense float64 truth, within the stated slack, clear on bad input."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvcert.bounds.types import Bound
from curvcert.errors import InvalidInput, UnsupportedOperator
from curvcert.norms import conjugate, steepest_direction, vector_norm
from curvcert.operators import (
    AbstractLinearMap,
    AveragePool2d,
    Conv2d,
    Dense,
    Diagonal,
    NormBounds,
    Reshape,
    chains,
    column_norms_upper_bound,
    gram_norm_upper_bound,
    norm_upper_bound,
    row_norms_upper_bound,
    scale,
)
from curvcert.operators.fourier import covers, fourier_norm_upper_bound
from curvcert.operators.norm_bounds import spectral_norm_upper_bound
from curvcert.operators.verified import (
    dominating_factor,
    largest_eigenvalue_upper_bound,
    spectral_norm_of_matrix_upper_bound,
)
from tests.operators.cases import (
    CASES,
    F64,
    IDS,
    Case,
    convolutions,
    exponents,
    matrices,
    randn,
    smooth_kernel,
)

# LAPACK's own singular values are off by a few roundoffs.
LAPACK = 1e-14


def svd_norm(op: AbstractLinearMap) -> float:
    return float(torch.linalg.svdvals(op.as_matrix()).amax())


def test_a_product_of_norms_is_taken_where_it_is_attained_and_only_there() -> None:
    def chain(least: float) -> AbstractLinearMap:
        first, second = (torch.linalg.qr(randn(6, 6, seed=k)).Q for k in range(2))
        return Dense(first * torch.linspace(least, 1.0, 6, dtype=F64)) @ Dense(second)

    assert norm_upper_bound(chain(1.0)).method == "product of norms, attained"
    found = norm_upper_bound(chain(0.99))
    assert found.method == "matrix of the chain"
    assert 1.0 <= float(found) < 1 + 1e-8


def norm_from_below(matrix: Tensor, p: float, q: float, starts: int = 8) -> float:
    """Ascend ||Ax||_q over ||x||_p = 1 by Boyd's power method from several starts: a lower bound."""
    scale = float(matrix.abs().max()) or 1.0  # so that nothing underflows in the search itself
    matrix, x, best = matrix / scale, randn(starts, matrix.shape[1]), 0.0
    for _ in range(60):
        x = x / vector_norm(x, p, dim=-1).clamp(min=1e-300)[:, None]
        y = x @ matrix.T
        best = max(best, float(vector_norm(y, q, dim=-1).amax()))
        x = steepest_direction(steepest_direction(y, conjugate(q)) @ matrix, p)
    return best * scale


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_spectral_norm_of_every_map(case: Case) -> None:
    op = case.make()
    bound, truth = norm_upper_bound(op), svd_norm(op)
    assert isinstance(bound, Bound)
    assert float(bound) >= truth * (1 - LAPACK)
    assert float(bound) <= truth * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_closed_forms_are_exact(case: Case) -> None:
    op = case.make()
    matrix = op.as_matrix()
    for p, q in ((1, 1), (1, 2), (1, 3), (2, math.inf), (math.inf, math.inf), (1.5, math.inf)):
        if p == 1:
            truth = float(vector_norm(matrix, q, dim=0).amax())
        else:
            truth = float(vector_norm(matrix, conjugate(p), dim=1).amax())
        bound = float(norm_upper_bound(op, p, q))
        assert truth * (1 - LAPACK) <= bound, (p, q)
        whole_kernel = conjugate(p) > 4 or q > 4  # large exponents of a convolution ignore its border
        if not whole_kernel:
            assert bound <= truth * (1 + 1e-10) + 1e-12, (p, q)


@given(st.sampled_from(CASES), exponents, exponents)
def test_every_norm_of_every_map_is_above_a_search(case: Case, p: float, q: float) -> None:
    op = case.make()
    assert float(norm_upper_bound(op, p, q)) >= norm_from_below(op.as_matrix(), p, q) * (1 - 1e-13)


@given(matrices(), exponents, exponents)
def test_every_norm_of_every_matrix_is_above_a_search(op: Dense, p: float, q: float) -> None:
    assert float(norm_upper_bound(op, p, q)) >= norm_from_below(op.as_matrix(), p, q) * (1 - 1e-13)


@given(matrices())
def test_dense_spectral_norm_is_tight(op: Dense) -> None:
    bound, truth = float(norm_upper_bound(op)), svd_norm(op)
    assert truth * (1 - LAPACK) <= bound <= truth * (1 + 1e-8)


@given(matrices(), st.integers(1, 12))
def test_gram_iteration_is_above_and_as_tight_as_stated(op: Dense, iterations: int) -> None:
    bound, truth = float(gram_norm_upper_bound(op.weight, iterations)), svd_norm(op)
    rank = min(op.weight.shape)
    assert truth * (1 - LAPACK) <= bound <= truth * rank ** (2.0 ** -(iterations + 1)) * (1 + 1e-8)


def test_gram_iteration_has_the_singular_pair_as_its_gradient() -> None:
    W = randn(5, 7).requires_grad_()
    gram_norm_upper_bound(W, 12).backward()
    U, _, V = torch.linalg.svd(W.detach())
    torch.testing.assert_close(W.grad, torch.outer(U[:, 0], V[0]), rtol=1e-6, atol=1e-6)


def test_gram_iteration_is_finite_at_zero() -> None:
    W = torch.zeros(3, 4, dtype=F64, requires_grad=True)
    bound = gram_norm_upper_bound(W)
    bound.backward()
    assert W.grad is not None
    assert float(bound.detach()) == 0.0
    assert bool(torch.isfinite(W.grad).all())


@given(convolutions())
def test_fourier_bound_is_never_below(conv: Conv2d) -> None:
    truth = svd_norm(conv)
    if covers(conv):
        bound = float(fourier_norm_upper_bound(conv))
        assert bound >= truth * (1 - LAPACK)
        whole = all(m * s == n for m, s, n in zip(conv.out_shape[1:], conv.stride, conv.in_shape[1:], strict=True))
        if conv.padding_mode == "circular" and whole:
            assert bound <= truth * (1 + 1e-10) + 1e-12
    assert truth * (1 - LAPACK) <= float(norm_upper_bound(conv)) <= truth * (1 + 1e-8) + 1e-13


@pytest.mark.parametrize("r", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("size", [6, 7], ids=["whole windows", "a border that no window reads"])
def test_rows_and_columns_of_products_with_pools_and_diagonals(r: float, size: int) -> None:
    torch.manual_seed(size)
    pool = AveragePool2d((2, size, size), (2, 2), (2, 2))
    conv = Conv2d(torch.randn(3, 2, 2, 2, dtype=torch.float64), pool.out_shape, padding=((1, 1), (1, 1)))
    scaled = Diagonal(torch.randn(3, 1, 1, dtype=torch.float64), conv.out_shape) @ conv @ pool
    for op in (conv @ pool, scaled, Reshape(scaled.out_shape, (scaled.out_size,)) @ scaled):
        rows, columns = (vector_norm(op.as_matrix(), r, dim=dim) for dim in (1, 0))
        torch.testing.assert_close(row_norms_upper_bound(op, r).flatten(), rows, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(column_norms_upper_bound(op, r).flatten(), columns, rtol=1e-10, atol=1e-12)
        assert bool((row_norms_upper_bound(op, r).flatten() >= rows * (1 - LAPACK)).all())


@given(convolutions(), st.sampled_from([1.0, 1.5, 2.0, 3.0, 6.0, math.inf]))
def test_convolution_rows_and_columns(conv: Conv2d, r: float) -> None:
    matrix = conv.as_matrix()
    rows, columns = vector_norm(matrix, r, dim=1), vector_norm(matrix, r, dim=0)
    assert bool((row_norms_upper_bound(conv, r).flatten() >= rows * (1 - LAPACK)).all())
    assert bool((column_norms_upper_bound(conv, r).flatten() >= columns * (1 - LAPACK)).all())
    if r <= 4:
        torch.testing.assert_close(row_norms_upper_bound(conv, r).flatten(), rows, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(column_norms_upper_bound(conv, r).flatten(), columns, rtol=1e-10, atol=1e-12)


SHAPES_OF_6C2F = [(3, 32, 3, 1, 32), (32, 32, 4, 2, 32), (64, 64, 3, 1, 8), (64, 64, 4, 2, 8)]


def truth_from_below(conv: Conv2d, steps: int = 300) -> float:
    v = randn(*conv.in_shape, seed=1)
    for _ in range(steps):
        v = conv.adjoint(conv.apply(v))
        v = v / v.norm()
    return float(conv.apply(v).norm())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES_OF_6C2F)
@pytest.mark.parametrize("kind", ["random", "smooth"])
def test_convolutions_of_6c2f_are_within_ten_percent(shape: tuple[int, ...], kind: str) -> None:
    inputs, outputs, k, s, n = shape
    weight = randn(outputs, inputs, k, k) if kind == "random" else smooth_kernel(outputs, inputs, k)
    conv = Conv2d(weight, (inputs, n, n), (s, s), ((1, 1), (1, 1)))
    truth = truth_from_below(conv)
    for bound in (float(fourier_norm_upper_bound(conv)), float(NormBounds(2**28).bound(conv))):
        assert truth * (1 - 1e-12) <= bound <= 1.10 * truth


@pytest.mark.parametrize(("groups", "dilation"), [(2, 1), (1, 2), (4, 2)])
def test_grouped_and_dilated_convolutions_are_within_ten_percent(groups: int, dilation: int) -> None:
    conv = Conv2d(
        randn(8, 8 // groups, 3, 3),
        (8, 24, 24),
        padding=((dilation,) * 2,) * 2,
        dilation=(dilation,) * 2,
        groups=groups,
    )
    truth = truth_from_below(conv)
    assert truth * (1 - 1e-12) <= float(fourier_norm_upper_bound(conv)) <= 1.10 * truth


class TestChains:
    """Products of maps, with less and less memory."""

    def chain(self) -> AbstractLinearMap:
        conv = Conv2d(randn(4, 2, 3, 3), (2, 12, 12), (1, 1), ((1, 1), (1, 1)))
        narrow = Conv2d(randn(1, 4, 4, 4), (4, 12, 12), (2, 2), ((1, 1), (1, 1)))
        return Dense(randn(400, 36)) @ Reshape((1, 6, 6), (36,)) @ narrow @ conv

    @pytest.mark.parametrize("budget", [2**32, 2**21, 2**20])
    def test_is_exact_while_a_gram_matrix_fits(self, budget: int) -> None:
        op = self.chain()
        bound, truth = float(norm_upper_bound(op, memory_budget=budget)), svd_norm(op)
        assert truth * (1 - LAPACK) <= bound <= truth * (1 + 1e-8)

    def test_falls_back_to_the_best_split(self) -> None:
        wide = Dense(randn(300, 300)) @ Dense(randn(300, 300, seed=1)) @ Dense(randn(300, 300, seed=2))
        bound = norm_upper_bound(wide, memory_budget=2**20)
        assert "split" in bound.method
        assert float(bound) >= svd_norm(wide)

    def test_a_matrix_over_the_budget_says_so(self) -> None:
        bound = norm_upper_bound(Dense(randn(300, 300)), memory_budget=2**20)
        assert "over the memory budget" in bound.method
        assert float(bound) >= svd_norm(Dense(randn(300, 300)))

    def test_deep_products_keep_their_digits(self) -> None:
        op = Dense(randn(60, 60))
        for seed in range(7):
            op = Dense(randn(60, 60, seed=seed + 1)) @ op
        bound, truth = float(norm_upper_bound(op)), svd_norm(op)
        assert truth * (1 - 1e-10) <= bound <= truth * (1 + 1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("held", [True, False])
    @pytest.mark.parametrize("p, q", [(2, 2), (1, 1), (math.inf, math.inf), (3, 1.5)])
    def test_small_factors_are_bounded_or_refused(
        self, p: float, q: float, held: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Scaling by powers of two changes a norm exactly, whatever the factors in between."""
        if not held:
            monkeypatch.setattr(chains, "MATRIX_ELEMENTS", 0)
        parts = [randn(3, 3, seed=seed) for seed in range(3)]
        whole = float(norm_upper_bound(Dense(parts[0]) @ Dense(parts[1]) @ Dense(parts[2]), p, q))
        refused = []
        for powers in itertools.product((-700, -430, -220, 0, 300), repeat=3):
            a, b, c = (Dense(part * 2.0**k) for part, k in zip(parts, powers, strict=True))
            try:
                bound = float(norm_upper_bound(a @ b @ c, p, q))
            except InvalidInput as error:
                assert re.search("too small|overflow|finite", str(error))
                refused.append(powers)
            else:
                assert math.ldexp(bound, -sum(powers)) >= whole * (1 - 1e-9), powers
        assert (-700, -430, 300) in refused and (0, 0, -700) not in refused

    def test_a_sum_of_small_maps_is_bounded_or_refused(self) -> None:
        def total(k: int) -> AbstractLinearMap:
            return Dense(randn(3, 3) * 2.0**k) + Dense(randn(3, 3, seed=1) * 2.0**k) @ Dense(randn(3, 3, seed=2))

        assert math.ldexp(float(norm_upper_bound(total(-430))), 430) >= svd_norm(total(0)) * (1 - LAPACK)
        with pytest.raises(InvalidInput, match="too small for norms in float64"):
            norm_upper_bound(total(-950))

    def test_no_part_may_hide_another_that_underflows(self) -> None:
        tiny, huge = Dense(randn(3, 3) * 2.0**-600), Dense(randn(3, 3) * 2.0**600)
        for op in (
            Dense(randn(3, 3)) + tiny @ tiny @ huge @ huge,
            scale(2.0**-600, tiny),
            scale(0.5, tiny @ tiny),
            (tiny @ tiny).T,
        ):
            for norm in (lambda norms, op=op: norms.norm(op, 2, 2), lambda norms, op=op: norms.row_norms(op, 1.0)):
                with pytest.raises(InvalidInput, match="too small for norms in float64"):
                    norm(NormBounds())

    @pytest.mark.parametrize("power", range(-900, -480, 6))
    def test_squares_that_underflow_are_counted(self, power: int) -> None:
        left, right = Dense(randn(40, 4)), Dense(randn(4, 50, seed=1) * 2.0**power)
        small, whole = left @ right, float(norm_upper_bound(left @ Dense(randn(4, 50, seed=1))))
        norms = NormBounds()
        for bound in (
            chains.gram_norm_of_chain_upper_bound(small, norms.quick_spectral),
            chains.middle_gram_norm_upper_bound(left, right, norms.quick_spectral),
            norms.spectral(small),
        ):
            assert math.ldexp(float(bound), -power) >= whole * (1 - 1e-9)


class TestVerified:
    def test_a_batch_takes_the_largest(self) -> None:
        batch = torch.stack([randn(4, 6), 3 * randn(4, 6, seed=1)])
        truth = float(torch.linalg.svdvals(batch).amax())
        assert truth <= float(spectral_norm_of_matrix_upper_bound(batch)) <= truth * (1 + 1e-10)

    def test_indefinite_matrices(self) -> None:
        S = randn(6, 6)
        S = S + S.T
        truth = float(torch.linalg.eigvalsh(S)[-1])
        assert truth * (1 - LAPACK) <= float(largest_eigenvalue_upper_bound(S)) <= truth * (1 + 1e-10)

    def test_the_error_term_counts(self) -> None:
        S = torch.eye(3, dtype=F64)
        assert float(largest_eigenvalue_upper_bound(S, error=0.5)) >= 1.5

    def test_large_matrices_use_lanczos(self) -> None:
        W = randn(1600, 40)
        S = W @ W.T
        truth = float(torch.linalg.svdvals(W)[0]) ** 2
        assert truth * (1 - 1e-13) <= float(largest_eigenvalue_upper_bound(S)) <= truth * (1 + 1e-9)

    def test_nan_is_refused(self) -> None:
        with pytest.raises(InvalidInput):
            largest_eigenvalue_upper_bound(torch.full((3, 3), math.nan, dtype=F64))

    def test_the_dominating_factor_dominates(self) -> None:
        W = randn(8, 3)
        S = W @ W.T  # singular
        R = dominating_factor(S, error=1e-14)
        assert float(torch.linalg.eigvalsh(R @ R.T - S)[0]) >= 0


class TestBadInput:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_weights_that_are_not_numbers(self, value: float) -> None:
        W = randn(3, 3)
        W[1, 1] = value
        with pytest.raises(InvalidInput, match="NaN or infinite"):
            norm_upper_bound(Dense(W) @ Dense(randn(3, 3)))

    @pytest.mark.parametrize("p", [0.5, 0, -1, math.nan, "two"])
    def test_exponents_that_are_not_norms(self, p: float) -> None:
        with pytest.raises(InvalidInput, match="must"):
            norm_upper_bound(Dense(randn(3, 3)), p=p)

    def test_an_overflowing_norm(self) -> None:
        with pytest.raises(InvalidInput, match="overflows"):
            norm_upper_bound(Dense(torch.full((4, 4), 1e308, dtype=F64)))

    def test_a_map_without_a_rule(self) -> None:
        with pytest.raises(UnsupportedOperator, match="Register"):
            spectral_norm_upper_bound.dispatch(AbstractLinearMap)(Dense(randn(2, 2)), NormBounds())

    def test_a_budget_too_small_to_be_bytes(self) -> None:
        with pytest.raises(InvalidInput, match="bytes"):
            norm_upper_bound(Dense(randn(3, 3)), memory_budget=4)


def test_float32_weights_count_as_the_numbers_they_hold() -> None:
    W = randn(20, 30).float()
    assert float(norm_upper_bound(Dense(W))) >= svd_norm(Dense(W.double())) * (1 - LAPACK)


@pytest.mark.parametrize(("taps", "mode"), [((1.0, -1.0), "circular"), ((-1.0, 2.0, -1.0), "zeros")])
@pytest.mark.parametrize("side", [1, 3, 4, 8])
def test_the_fourier_bound_of_what_alternates(side: int, taps: tuple[float, ...], mode: str) -> None:
    """Differences are largest at the highest frequency, and between those of a torus without room for the padding."""
    kernel = torch.tensor(taps, dtype=F64).reshape(1, 1, -1, 1)
    before = len(taps) - 2
    conv = Conv2d(kernel, (1, side, 1), padding=((before, 1), (0, 0)), padding_mode=mode)
    assert float(fourier_norm_upper_bound(conv)) >= svd_norm(conv) * (1 - LAPACK)


def test_a_convolution_without_padding_is_more_than_its_kernel_where_windows_meet_or_groups_differ() -> None:
    ones = torch.ones(1, 1, 3, 3, dtype=F64)
    groups = torch.tensor([1.0, 3.0, 2.0], dtype=F64).reshape(3, 1, 1, 1)
    for conv in (Conv2d(ones, (1, 5, 5), (2, 2)), Conv2d(ones, (1, 7, 7), (3, 2)), Conv2d(groups, (3, 2, 2), groups=3)):
        assert float(norm_upper_bound(conv)) >= svd_norm(conv) * (1 - LAPACK)


def test_the_memory_tells_norms_and_maps_apart() -> None:
    norms, maps = NormBounds(), (Dense(randn(3, 4)), Dense(randn(3, 4, seed=1)), Dense(randn(4, 3)).T)
    for p, q in itertools.product((1, 2, math.inf), repeat=2):
        for op in (*maps, 2.0 * maps[0], maps[0] @ maps[2].T):
            assert float(norms.bound(op, p, q)) == float(norm_upper_bound(op, p, q))
