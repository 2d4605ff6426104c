"""Lanczos iteration: guesses are below the largest eigenvalue, close to it, and bounds built on them are tight."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators import Conv2d
from curvcert.operators.lanczos import largest_eigenvalue_guesses
from curvcert.operators.verified import (
    _iterated_shifts,
    _largest_eigenvalue_estimates,
    _verify,
    largest_eigenvalues_upper_bound,
)
from tests.operators.cases import F64, randn, smooth_kernel

ROUNDING = 1e-13


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    Q = torch.linalg.qr(randn(len(values), len(values), seed=seed))[0]
    S = (Q * values) @ Q.T
    return (S + S.T) / 2


def convolution_gram() -> Tensor:
    conv = Conv2d(smooth_kernel(4, 3, 3), (3, 12, 12), padding=((1, 1), (1, 1)))
    A = conv.as_matrix()
    gram = A.T @ A
    return gram / gram.abs().amax()


SPECTRA = {
    "1x1": lambda: torch.full((1, 1), 0.7, dtype=F64),
    "1x1 negative": lambda: torch.full((1, 1), -0.7, dtype=F64),
    "2x2": lambda: torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64),
    "zeros": lambda: torch.zeros(300, 300, dtype=F64),
    "identity": lambda: torch.eye(300, dtype=F64),
    "ones": lambda: torch.ones(300, 300, dtype=F64),
    "rank one": lambda: torch.outer(randn(400), randn(400)) / 16,
    "gaussian": lambda: randn(300, 400) @ randn(300, 400).T / 400,
    "flat": lambda: torch.linspace(0, 1, 300, dtype=F64).diag(),
    "double top": lambda: with_spectrum(torch.cat([torch.linspace(0, 0.9, 298), torch.ones(2)]).to(F64)),
    "clustered top": lambda: with_spectrum(torch.cat([torch.linspace(0, 1, 290), 1 + 1e-9 * torch.arange(10)]).to(F64)),
    "close pair": lambda: with_spectrum(torch.cat([torch.linspace(0, 0.5, 298), torch.tensor([1 - 1e-7, 1])]).to(F64)),
    "projection": lambda: with_spectrum((torch.arange(300) < 150).to(F64)),
    "negative definite": lambda: with_spectrum(-torch.linspace(0.5, 1, 300).to(F64)),
    "graded": lambda: with_spectrum(10.0 ** -torch.arange(0.0, 30.0, 0.1, dtype=F64)),
    "indefinite": lambda: with_spectrum(torch.linspace(-1, 0.3, 300).to(F64)),
    "convolution": convolution_gram,
    "decoupled": lambda: torch.block_diag(
        torch.eye(150, dtype=F64) * 0.5, with_spectrum(torch.linspace(0, 0.97, 150).to(F64))
    ),
}


@pytest.mark.parametrize("name", SPECTRA)
class TestHardSpectra:
    def test_guesses_come_from_below_and_near(self, name: str) -> None:
        S = SPECTRA[name]()
        truth, size = float(torch.linalg.eigvalsh(S)[-1]), max(1.0, float(torch.linalg.eigvalsh(S).abs().amax()))
        for steps, near in ((32, 1e-2), (64, 2e-3), (160, 1e-4)):
            guess, below = (float(part) for part in largest_eigenvalue_guesses(S[None], steps))
            assert truth - near * size <= guess <= truth + ROUNDING * size
            assert 0 <= below < math.inf

    def test_bounds_are_tight_wherever_a_guess_is_taken(self, name: str) -> None:
        S = SPECTRA[name]()
        truth = float(torch.linalg.eigvalsh(S)[-1])
        bounds = (_verify(S, shift) for shift in _iterated_shifts(S[None]))
        found = next((float(bound) for bound in bounds if bound is not None), None)
        if found is not None and truth > 0:
            assert truth * (1 - 1e-14) <= found <= truth * (1 + 1e-9)
        if name in ("1x1", "identity", "ones", "rank one", "gaussian", "double top", "graded", "2x2", "close pair"):
            assert found is not None

    def test_a_batch_is_as_good_as_one_by_one(self, name: str) -> None:
        S = SPECTRA[name]()
        others = torch.stack([S, 0.5 * S, torch.zeros_like(S), torch.eye(len(S), dtype=F64)])
        guesses, _ = largest_eigenvalue_guesses(others, 32)
        for matrix, guess in zip(others, guesses, strict=True):
            alone, _ = largest_eigenvalue_guesses(matrix[None], 32)
            torch.testing.assert_close(alone[0], guess, rtol=1e-8, atol=1e-8)


@given(st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1.0, 1e-8, 1e-200]))
def test_as_many_steps_as_dimensions_find_the_truth(n: int, seed: int, scale: float) -> None:
    S = randn(n, n, seed=seed)
    S = (S + S.T) / (2 * S.abs().amax())
    guess, below = (float(part) for part in largest_eigenvalue_guesses(S[None], 64))
    assert guess == pytest.approx(float(torch.linalg.eigvalsh(S)[-1]), abs=1e-12)
    assert below < 1e-6
    bound = largest_eigenvalues_upper_bound(scale * (S @ S)[None], torch.zeros(1, dtype=F64))
    truth = float(torch.linalg.eigvalsh(S @ S)[-1]) * scale
    assert truth * (1 - 1e-13) <= float(bound) <= truth * (1 + 1e-9)


def test_large_matrices_of_a_batch_have_bounds_near_the_truth() -> None:
    W = randn(4, 300, 500)
    S = W @ W.mT
    S[1] = 1e-150 * S[1]
    S[2] = convolution_gram()[:300, :300]
    S[3] = 0.0
    truth = torch.linalg.eigvalsh(S).amax(dim=1)
    bounds = largest_eigenvalues_upper_bound(S, torch.zeros(4, dtype=F64))
    assert bool((bounds >= truth * (1 - 1e-14)).all())
    assert bool((bounds[:3] <= truth[:3] * (1 + 1e-6)).all())
    assert 0 <= float(bounds[3]) < 1e-30
    guess, below = _largest_eigenvalue_estimates(S)
    assert guess.shape == below.shape == (4,)


def test_numbers_that_are_not_finite_are_refused() -> None:
    S = torch.full((2, 300, 300), math.nan, dtype=F64)
    with pytest.raises(InvalidInput, match="overflow"):
        largest_eigenvalues_upper_bound(S, torch.zeros(2, dtype=F64))
