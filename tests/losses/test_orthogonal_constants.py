"""The constants of orthogonal layers: those that are proven, and no curvature."""

import math

import pytest
import torch
from torch import nn

import curvcert
import curvcert.nn as cnn
from curvcert.errors import UnsupportedActivation
from curvcert.losses import Constants, CurvatureRegularised, LipschitzMargin
from curvcert.losses.orthogonal_constants import OrthogonalConstants

EXAMPLE = torch.zeros(1, 3, 8, 8)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [cnn.PadChannels(9), cnn.OrthogonalStack(9, 1), cnn.OrthogonalDownsample(9, 12), nn.Flatten()]
    return nn.Sequential(cnn.Normalise([0.5] * 3, [1.0] * 3), *layers, cnn.OrthonormalLinear(12 * 16, 10))


def test_they_are_what_is_proven() -> None:
    model = small()
    now = Constants(model, EXAMPLE)()
    network = curvcert.trace(model.eval(), EXAMPLE)
    proven = curvcert.lipschitz(network, method="product", pair="all").value
    i, j = torch.combinations(torch.arange(10)).T
    torch.testing.assert_close(now.pair_lipschitz[i, j].double(), proven, rtol=1e-5, atol=0)
    assert float(now.lipschitz) == 1.0
    assert not now.pair_lipschitz.diagonal().any()


def test_a_normalisation_counts() -> None:
    model = nn.Sequential(cnn.Normalise([0.5] * 3, [0.5, 0.25, 1.0]), nn.Flatten(), cnn.OrthonormalLinear(12, 4))
    constants = OrthogonalConstants.of(model)
    assert constants is not None
    assert float(constants.lipschitz) == 4.0
    assert math.isclose(float(constants.pair_lipschitz[0, 1]), 4 * math.sqrt(2), rel_tol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), cnn.OrthonormalLinear(4, 2)),
        nn.Sequential(cnn.OrthogonalStack(2, 1), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Flatten(), cnn.OrthonormalLinear(4, 5)),
    ],
    ids=["a linear layer before", "a linear layer last", "more outputs than inputs"],
)
def test_other_modules_have_none(model: nn.Module) -> None:
    assert OrthogonalConstants.of(model) is None


def test_a_curvature_is_refused_by_name() -> None:
    model, x, y = small(), torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    objective = CurvatureRegularised(Constants(model, EXAMPLE))
    with pytest.raises(UnsupportedActivation, match=r"leaky_relu\(-1\)"):
        objective(model, x, y)


def test_the_margin_of_the_loss_is_that_of_the_constants() -> None:
    model, x, y = small(), torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    found = LipschitzMargin(Constants(model, EXAMPLE), tau=0.25, nu=0.5)(model, x, y)
    shifted = found.logits - 0.5 * math.sqrt(2) * nn.functional.one_hot(y, 10)
    expected = 0.25 * nn.functional.cross_entropy(shifted / 0.25, y)
    torch.testing.assert_close(found.loss, expected)
    found.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
