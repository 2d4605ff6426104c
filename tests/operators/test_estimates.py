"""Power iteration: close, cheap, differentiable, and of a type that no certificate takes."""

import math

import pytest
import torch

from curvcert.bounds.types import Bound, Estimate
from curvcert.operators import Conv2d, Dense, norm_upper_bound
from curvcert.operators.estimates import PowerIteration, norm_estimate
from tests.operators.cases import CASES, F64, IDS, Case, randn


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_estimates_come_close_from_below(case: Case) -> None:
    op = case.make()
    estimate, bound = norm_estimate(op, steps=300), norm_upper_bound(op)
    assert isinstance(estimate, Estimate)
    assert not isinstance(estimate, Bound)
    assert 0.95 * float(bound) - 1e-12 <= float(estimate) <= float(bound)


def test_the_gradient_is_the_singular_pair() -> None:
    W = randn(6, 9).requires_grad_()
    norm_estimate(Dense(W), steps=500).value.backward()
    U, _, V = torch.linalg.svd(W.detach())
    torch.testing.assert_close(W.grad, torch.outer(U[:, 0], V[0]), rtol=1e-6, atol=1e-6)


def test_the_gradient_through_a_convolution_and_a_product() -> None:
    K = randn(2, 1, 3, 3).requires_grad_()
    op = Conv2d(K, (1, 5, 5), padding=((1, 1), (1, 1)))
    norm_estimate(op, steps=2000).value.backward()
    dense = K.detach().clone().requires_grad_()
    torch.linalg.matrix_norm(Conv2d(dense, (1, 5, 5), padding=((1, 1), (1, 1))).as_matrix(), 2).backward()
    torch.testing.assert_close(K.grad, dense.grad, rtol=1e-4, atol=1e-4)


def test_a_warm_start_catches_up_with_moving_weights() -> None:
    W = randn(30, 40)
    norm = PowerIteration((40,), dtype=F64)
    for step in range(200):
        W = W + 1e-4 * randn(30, 40, seed=step)
        estimate = norm(Dense(W))
    truth = float(torch.linalg.svdvals(W)[0])
    assert math.isclose(float(estimate), truth, rel_tol=1e-3)


def test_the_state_dict_carries_the_vector() -> None:
    norm = PowerIteration((4,), dtype=F64)
    norm(Dense(randn(3, 4)))
    twin = PowerIteration((4,), dtype=F64)
    twin.load_state_dict(norm.state_dict())
    assert torch.equal(twin.v, norm.v)


def test_zero_weights_have_a_zero_gradient() -> None:
    W = torch.zeros(3, 4, dtype=F64, requires_grad=True)
    norm_estimate(Dense(W)).value.backward()
    assert W.grad is not None
    assert float(W.grad.abs().max()) == 0.0


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    norm_estimate(Dense(randn(3, 4)))
    assert torch.equal(before, torch.random.get_rng_state())
