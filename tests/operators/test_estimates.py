"""Power iteration: close, cheap, differentiable, and of a type that no certificate takes."""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from curvcert.activations import TANH
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz.liplt import liplt_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound, Estimate, Global
from curvcert.network import Block, Network
from curvcert.operators import Conv2d, Dense, Identity, NormBounds, Zero, norm_upper_bound
from curvcert.operators.estimates import NormEstimates, PowerIteration, norm_estimate
from tests.operators.cases import CASES, F64, IDS, Case, randn


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_estimates_come_close_from_below(case: Case) -> None:
    op = case.make()
    estimate, bound = norm_estimate(op, steps=300), norm_upper_bound(op)
    assert isinstance(estimate, Estimate)
    assert not isinstance(estimate, Bound)
    # Its own rounding may lift it an ulp or two above what is exact.
    assert 0.95 * float(bound) - 1e-12 <= float(estimate) <= float(bound) * (1 + 1e-15)


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


class TestNormEstimates:
    """The norms of a recursion, estimated: one recursion gives a Bound or an Estimate."""

    def network(self, scale: float = 1.0) -> tuple[Network, list[torch.Tensor]]:
        weights = [scale * randn(*shape, seed=k) for k, shape in enumerate([(7, 5), (6, 7), (3, 6)])]
        for weight in weights:
            weight.requires_grad_()
        W1, W2, W3 = (Dense(weight) for weight in weights)
        first = Block(Zero((5,), (7,)), Identity((7,)), W1, torch.zeros(7, dtype=F64), torch.zeros(7, dtype=F64), TANH)
        last = Block(Zero((7,), (3,)), W3, W2, torch.zeros(6, dtype=F64), torch.zeros(3, dtype=F64), TANH)
        return Network.of_blocks((first, last)), weights

    @pytest.mark.parametrize("names", [["product"], ["vectorised"], ["sdp"], ["hadamard"], None])
    @pytest.mark.parametrize("scalars", [False, True])
    def test_the_curvature_recursion_gives_an_estimate_near_its_bound(self, names: list[str] | None, scalars: bool):
        network, weights = self.network()
        problem = Problem(network, 2, 2, Global(), scalars=scalars)
        norms = NormEstimates(steps=300)
        estimate = compositional_bound(problem, norms, names)
        bound = compositional_bound(problem, NormBounds(), names)
        assert isinstance(estimate, Estimate)
        assert isinstance(bound, Bound)
        torch.testing.assert_close(estimate.value, bound.value, rtol=1e-3, atol=0)
        estimate.value.sum().backward()
        assert all(w.grad is not None and bool(torch.isfinite(w.grad).all()) for w in weights)

    def test_the_gradient_is_that_of_the_bound(self) -> None:
        network, weights = self.network()
        problem = Problem(network, 2, 2, Global())
        compositional_bound(problem, NormEstimates(steps=1000), ["product"]).value.backward()
        direction = [randn(*w.shape, seed=50 + k) for k, w in enumerate(weights)]
        slope = sum(float((w.grad * d).sum()) for w, d in zip(weights, direction, strict=True))
        h, values = 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                for w, d in zip(weights, direction, strict=True):
                    w += sign * h * d
                values.append(float(compositional_bound(problem, NormBounds(), ["product"]).value))
                for w, d in zip(weights, direction, strict=True):
                    w -= sign * h * d
        assert math.isclose(slope, (values[0] - values[1]) / (2 * h), rel_tol=1e-4)

    @pytest.mark.parametrize("names", [["product"], ["vectorised"], ["sdp"], ["hadamard"], None])
    def test_zero_weights_have_finite_gradients(self, names: list[str] | None) -> None:
        network, weights = self.network(scale=0.0)
        for scalars in (False, True):
            problem = Problem(network, 2, 2, Global(), scalars=scalars)
            compositional_bound(problem, NormEstimates(), names).value.sum().backward()
        assert all(w.grad is not None and bool(torch.isfinite(w.grad).all()) for w in weights)

    def test_warm_starts_resume_in_order_and_are_in_the_state_dict(self) -> None:
        network, _ = self.network()
        norms = NormEstimates(steps=1)
        problem = Problem(network, 2, 2, Global())
        for _ in range(200):
            norms.start_step()
            estimate = liplt_bound(problem, norms)
        count = len(norms.iterations)
        assert count == len({name.split(".")[1] for name in norms.state_dict()})
        assert math.isclose(float(estimate), float(liplt_bound(problem, NormBounds())), rel_tol=1e-4)

    @pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, math.inf), (math.inf, math.inf), (3, 3), (math.inf, 2)])
    def test_other_norms_come_from_rows_and_columns(self, p: float, q: float) -> None:
        op = Dense(randn(4, 6))
        estimate, bound = float(NormEstimates().norm(op, p, q)), float(norm_upper_bound(op, p, q))
        if p == 1 or math.isinf(q):
            assert math.isclose(estimate, bound, rel_tol=1e-9)
        else:
            assert 0.9 * bound <= estimate <= 2 * bound


def test_no_certificate_takes_an_estimate() -> None:
    """The types are unrelated, and the import contract is in pyproject.toml."""
    assert not issubclass(Estimate, Bound)
    assert not issubclass(Bound, Estimate)
    contracts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["importlinter"]
    forbidden = [c for c in contracts["contracts"] if c["type"] == "forbidden"]
    assert any("curvcert.operators.estimates" in contract["forbidden_modules"] for contract in forbidden)
    assert any("curvcert.operators.norm_bounds" in contract["source_modules"] for contract in forbidden)
