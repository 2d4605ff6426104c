"""Jacobians pushed forward with their drift: nothing in the ball leaves the enclosure."""

import pytest
import torch

from curvcert import curvature
from curvcert.activations import TANH
from curvcert.bounds.lipschitz.analyses import over_balls, unit_facts
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.network import Network
from curvcert.propagation import analysis, jacobians
from tests.bounds.cases import feed_forward, randn
from tests.bounds.curvature.cases import CASES, IDS

F64 = torch.float64


def jacobian_of_neurons(network: Network, k: int, x: torch.Tensor) -> torch.Tensor:
    """Return the Jacobian of block k's pre-activations by autograd: (batch, neurons, inputs)."""

    def neurons(y: torch.Tensor) -> torch.Tensor:
        return network.blocks[k].pre_activation(network.prefix(k)(y) if k else y).flatten(1).sum(dim=0)

    J = torch.autograd.functional.jacobian(neurons, x)
    return J.flatten(2).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_nothing_leaves_the_enclosure(case) -> None:
    network = case.make()
    x, r = 0.5 * randn(2, *network.in_shape, seed=1), torch.tensor([0.05, 0.6], dtype=F64)
    balls = over_balls(make_problem(network, 2, None, x, r, None, None))
    steps = randn(40, 2, *network.in_shape, seed=2)
    steps = steps / torch.linalg.vector_norm(steps.flatten(2), dim=2).reshape(40, 2, *(1,) * len(network.in_shape))
    for k, unit in enumerate(network.units):
        if unit.activated is None:
            continue
        found, reach = balls.jacobians[unit.z], balls.reaches[unit.z]
        centre = unit.block.pre_activation(network.prefix(k)(x) if k else x)
        for step in steps:
            y = x + step * r.reshape(-1, *(1,) * len(network.in_shape)) * (1 - 1e-12)
            drift = torch.linalg.matrix_norm(jacobian_of_neurons(network, k, y) - found.J, 2)
            assert bool((drift <= found.drift * (1 + 1e-12) + 1e-13).all())
            moved = unit.block.pre_activation(network.prefix(k)(y) if k else y) - centre
            assert bool((-reach.fall * (1 + 1e-12) - 1e-13 <= moved).all())
            assert bool((moved <= reach.rise * (1 + 1e-12) + 1e-13).all())


def test_a_single_layer_is_exact_at_the_centre() -> None:
    network, x = feed_forward((4, 6, 1), TANH, seed=3), randn(3, 4, seed=4)
    block = network.blocks[0]
    z, W, g = block.pre_activation(x), block.W.as_matrix(), block.G.as_matrix()[0]
    second = -2 * torch.tanh(z) * (1 - torch.tanh(z) ** 2)
    exact = torch.linalg.eigvalsh(W.T @ ((g * second).abs()[:, :, None] * W)).amax(dim=1)
    torch.testing.assert_close(curvature(network, at=x, radius=0.0).value, exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", [CASES[k] for k in (1, 5, 8)], ids=lambda case: case.name)
def test_jacobians_only_help_and_the_unrolled_bound_is_never_exceeded(case, monkeypatch: pytest.MonkeyPatch) -> None:
    network = case.make()
    x, r = randn(4, *network.in_shape, seed=5), torch.tensor([0.01, 0.1, 1.0, 30.0], dtype=F64)
    with_them = curvature(network, method="local", pair="all", at=x, radius=r).value
    everywhere = curvature(network, method="unrolled", pair="all").value
    assert bool((with_them <= everywhere * (1 + 1e-9)).all())
    monkeypatch.setattr(analysis, "JACOBIAN_ELEMENTS", 0)
    without = curvature(network, method="local", pair="all", at=x, radius=r).value
    assert bool((with_them <= without * (1 + 1e-9)).all())
    assert bool((with_them[0] < without[0]).any())


def test_only_in_l2_and_where_they_fit() -> None:
    network = feed_forward((4, 6, 3), TANH)
    assert unit_facts(make_problem(network, 2, None, None, None, None, None)).jacobians_fit
    assert not unit_facts(make_problem(network, 1, None, None, None, None, None)).jacobians_fit


def test_wide_layers_use_sums_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = feed_forward((3, 5, 5, 2), TANH), randn(2, 3, seed=6)
    fine = curvature(network, method="local", pair="all", at=x, radius=0.1).value
    monkeypatch.setattr(jacobians, "GRAM_SIZE", 2)
    assert bool((fine <= curvature(network, method="local", pair="all", at=x, radius=0.1).value * (1 + 1e-9)).all())
