"""Norms of Khatri-Rao products and weighted forms: above the dense truth, and near it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvcert.errors import InvalidInput
from curvcert.operators import Conv2d, Dense, Diagonal, Identity, NormBounds, weighted
from curvcert.operators.khatri_rao import conv_hadamard_norm_upper_bound
from curvcert.operators.verified import spectral_norms_of_matrices_upper_bound
from curvcert.operators.weighted import bilinear_upper_bound, congruent_eigenvalues, weighted_norm_upper_bound

INF = math.inf
F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def hadamard_root(W: torch.Tensor) -> float:
    return float(torch.linalg.eigvalsh((W @ W.T).square()).max().sqrt())


@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (7, 4), (30, 30)], ids=str)
def test_hadamard_is_exact_for_matrices(shape) -> None:
    W = randn(*shape)
    exact = hadamard_root(W)
    assert exact * (1 - 1e-13) <= float(NormBounds().hadamard(Dense(W))) <= exact * (1 + 1e-9)
    assert float(NormBounds().hadamard(-3.0 * Dense(W))) == pytest.approx(9 * exact, rel=1e-9)


def test_hadamard_of_zero_is_zero_or_next_to_it() -> None:
    assert 0 <= float(NormBounds().hadamard(Dense(torch.zeros(3, 4, dtype=F64)))) < 1e-15


def test_hadamard_over_the_memory_budget_is_still_above() -> None:
    W = randn(300, 300)
    small = NormBounds(2**20)
    assert not small.gram_fits(300)
    assert hadamard_root(W) <= float(small.hadamard(Dense(W)))
    G = Dense(randn(5, 300, seed=1))
    assert float(NormBounds().vectorised(G, Dense(W))) <= float(small.vectorised(G, Dense(W))) * (1 + 1e-9)
    assert small.scaled_vectorised(G, Dense(W)) is None


@given(
    channels=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    image=st.tuples(st.integers(3, 6), st.integers(3, 6)),
    seed=st.integers(0, 10**6),
)
def test_the_closed_form_of_a_convolution_is_above_the_dense_value(
    channels, groups, kernel, stride, dilation, padding, image, seed
) -> None:
    weight = randn(groups * channels[1], channels[0], *kernel, seed=seed)
    try:
        conv = Conv2d(weight, (groups * channels[0], *image), stride, padding, dilation, groups)
    except InvalidInput:
        return
    assert hadamard_root(conv.as_matrix()) <= float(conv_hadamard_norm_upper_bound(conv)) * (1 + 1e-13)


@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_the_closed_form_is_near_on_a_large_image(stride, dilation, groups) -> None:
    conv = Conv2d(
        randn(4, 4 // groups, 3, 3), (4, 14, 14), (stride, stride), ((1, 1), (1, 1)), (dilation, dilation), groups
    )
    exact, closed = hadamard_root(conv.as_matrix()), float(conv_hadamard_norm_upper_bound(conv))
    assert exact <= closed <= 1.1 * exact


def test_a_stride_leaves_out_lags() -> None:
    # A stride of the kernel's size leaves rows that do not overlap: the largest row's squared norm.
    weight = randn(1, 2, 3, 3)
    conv = Conv2d(weight, (2, 9, 9), (3, 3))
    assert float(conv_hadamard_norm_upper_bound(conv)) == pytest.approx(float(weight.square().sum()), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_vectorised_norms_are_those_of_the_explicit_khatri_rao_product(seed) -> None:
    G, W = randn(3, 6, seed=seed), randn(6, 4, seed=seed + 10)
    A = torch.stack([torch.outer(G[:, k], W[k]).flatten() for k in range(6)], dim=1)
    exact = float(torch.linalg.matrix_norm(A, 2))
    assert exact * (1 - 1e-13) <= float(NormBounds().vectorised(Dense(G), Dense(W))) <= exact * (1 + 1e-9)
    d = G.norm(dim=0) * W.norm(dim=1)
    scaled = float(torch.linalg.matrix_norm(A / d, 2) * torch.linalg.matrix_norm(d[:, None] * W, 2))
    assert float(NormBounds().scaled_vectorised(Dense(G), Dense(W))) == pytest.approx(scaled, rel=1e-9)


def test_vectorised_norm_of_the_identity_is_the_largest_row() -> None:
    W = randn(5, 3)
    assert float(NormBounds().vectorised(Identity((5,)), Dense(W))) == pytest.approx(
        float(W.norm(dim=1).max()), rel=1e-12
    )


def test_scaled_vectorised_with_a_dead_neuron() -> None:
    G, W = randn(3, 4), randn(4, 3, seed=1)
    W[2] = 0.0
    assert math.isfinite(float(NormBounds().scaled_vectorised(Dense(G), Dense(W))))


def largest_form(W: torch.Tensor, d: torch.Tensor, p: float) -> float:
    """Return the largest sum of d_l (W_l a)^2 over many a of p-norm 1; by Cauchy and Schwarz b = a is the worst."""
    a = torch.cat(
        [randn(2000, W.shape[1], seed=3), randn(200, W.shape[1], seed=4).sign(), torch.eye(W.shape[1], dtype=F64)]
    )
    a = a / torch.linalg.vector_norm(a, p, dim=1, keepdim=True)
    return float(((a @ W.T).square() @ d).max())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, INF])
@pytest.mark.parametrize("shape", [(4, 3), (3, 6), (1, 1)], ids=str)
def test_bilinear_forms_are_above_what_is_sampled(p, shape) -> None:
    W, d = randn(*shape), torch.rand(5, shape[0], dtype=F64)
    values = bilinear_upper_bound(Dense(W), d, p, NormBounds())
    for value, weights in zip(values, d, strict=True):
        assert largest_form(W, weights, p) <= float(value)


def test_bilinear_forms_are_exact_where_there_is_a_closed_form() -> None:
    W, d = randn(5, 3), torch.rand(2, 5, dtype=F64)
    norms = NormBounds()
    for row, two, one in zip(d, norms.bilinear(Dense(W), d, 2), norms.bilinear(Dense(W), d, 1), strict=True):
        M = W.T @ torch.diag(row) @ W
        assert float(two) == pytest.approx(float(torch.linalg.eigvalsh(M).max()), rel=1e-9)
        assert float(one) == pytest.approx(float(M.abs().max()), rel=1e-9)


def test_bilinear_forms_of_large_layers_fall_back() -> None:
    W, d = randn(40, 30), torch.rand(3, 40, dtype=F64)
    exact, coarse = NormBounds().bilinear(Dense(W), d, 2), NormBounds().bilinear(Dense(W), d, 2, 10)
    assert bool((exact <= coarse * (1 + 1e-9)).all())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, INF])
def test_weighted_norms_are_those_of_the_scaled_map(p) -> None:
    W, s = randn(5, 4), torch.rand(3, 5, dtype=F64)
    s[1, 2] = 0.0
    values = weighted_norm_upper_bound(Dense(W), s, p, NormBounds())
    a = randn(500, 4, seed=1)
    a = a / torch.linalg.vector_norm(a, p, dim=1, keepdim=True)
    for value, weights in zip(values, s, strict=True):
        scaled = torch.diag(weights) @ W
        found = float(torch.linalg.vector_norm(a @ scaled.T, p, dim=1).max())
        exact = {1.0: 1, 2.0: 2, INF: INF}.get(p)
        assert found <= float(value)
        if exact is not None:
            assert float(value) == pytest.approx(float(torch.linalg.matrix_norm(scaled, exact)), rel=1e-9)
        assert float(value) <= float(NormBounds().norm(Diagonal(weights, (5,)) @ Dense(W), p, p)) * (1 + 1e-6) or p in (
            1.5,
            4.0,
        )


def test_no_matrix_is_factorised_that_cannot_give_less_than_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    B, s = randn(4, 6), torch.rand(7, 4, dtype=F64)
    B = B @ B.T
    zero = torch.zeros((), dtype=F64)
    exact = torch.linalg.eigvalsh(s[:, :, None] * B * s[:, None, :]).amax(dim=1)
    known = exact * torch.tensor([0.5, 2.0, 0.9, 1.1, 0.99, 1.5, 0.1], dtype=F64)
    taken: list[int] = []
    factorise = weighted.congruent_eigenvalues_upper_bound

    def counted(B: torch.Tensor, error: torch.Tensor, s: torch.Tensor, at_once: int) -> torch.Tensor:
        taken.append(len(s))
        return factorise(B, error, s, at_once)

    monkeypatch.setattr(weighted, "congruent_eigenvalues_upper_bound", counted)
    found = congruent_eigenvalues(B, zero, s, known)
    assert sum(taken) == 3
    below = torch.where(known > exact, exact, torch.inf)
    assert found.tolist() == pytest.approx(below.tolist(), rel=1e-9)


def test_congruent_eigenvalues_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    B, s = randn(4, 6), torch.rand(7, 4, dtype=F64)
    B = B @ B.T
    zero = torch.zeros((), dtype=F64)
    nothing = torch.full((7,), torch.inf, dtype=F64)
    whole = congruent_eigenvalues(B, zero, s, nothing)
    monkeypatch.setattr(weighted, "_CHUNK_ELEMENTS", 16)
    assert torch.equal(whole, congruent_eigenvalues(B, zero, s, nothing))
    exact = torch.linalg.eigvalsh(s[:, :, None] * B * s[:, None, :]).amax(dim=1)
    assert bool(((whole >= exact * (1 - 1e-14)) & (whole <= exact * (1 + 1e-9))).all())


@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e100])
def test_congruent_eigenvalues_of_larger_matrices_hold_and_are_tight(scale: float) -> None:
    W, s = randn(150, 40), torch.rand(5, 150, dtype=F64).square()
    s[0, 10:] = 0.0  # most of the matrix is of no weight
    s[1] = 0.0
    B = scale * (W @ W.T + 1e-3 * torch.eye(150, dtype=F64))
    found = congruent_eigenvalues(B, torch.zeros((), dtype=F64), s, torch.full((5,), torch.inf, dtype=F64))
    exact = torch.linalg.eigvalsh(s[:, :, None] * (B / scale) * s[:, None, :]).amax(dim=1) * scale
    assert bool((found[2:] <= exact[2:] * (1 + 1e-8)).all())
    assert bool((found >= exact * (1 - 1e-13)).all())
    assert float(found[1]) <= 1e-9 * scale
    raised = congruent_eigenvalues(B, torch.tensor(0.5 * scale, dtype=F64), s, torch.full((5,), torch.inf, dtype=F64))
    shifted = torch.linalg.eigvalsh(s[:, :, None] * (B / scale + 0.5 * torch.eye(150, dtype=F64)) * s[:, None, :])
    assert bool((raised >= shifted.amax(dim=1) * scale * (1 - 1e-13)).all())


@pytest.mark.parametrize("shape", [(3, 70, 90), (3, 90, 70), (2, 70, 70)])
def test_norms_of_single_matrices_hold_and_are_tight(shape: tuple[int, int, int]) -> None:
    matrices = torch.stack([randn(*shape[1:]) * 10.0 ** (100 * k) for k in range(shape[0])])
    matrices[1] = torch.linalg.qr(matrices[1]).Q if shape[1] == shape[2] else 0.0
    found = spectral_norms_of_matrices_upper_bound(matrices)
    exact = torch.linalg.matrix_norm(matrices, 2)
    assert bool(((found >= exact * (1 - 1e-14)) & (found <= exact * (1 + 1e-3) + 1e-8)).all())
    matrices[0, 3, 3] = torch.inf
    found = spectral_norms_of_matrices_upper_bound(matrices)
    assert bool(found[0].isinf()) and bool((found[1:] >= exact[1:]).all())
