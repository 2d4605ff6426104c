"""phi, phi', phi'': against torch's modules, against autograd, and finite everywhere."""

import pytest
import torch
from torch import nn

from curvcert.activations import from_module
from tests.activations.cases import ROWS, as_tensor

MODULES = [
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Softplus(),
    nn.Softplus(beta=3.0, threshold=15.0),
    nn.ELU(),
    nn.ELU(0.4),
    nn.CELU(1.7),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Softsign(),
    nn.ReLU(),
    nn.LeakyReLU(0.2),
    nn.ReLU6(),
    nn.Hardtanh(-2.0, 0.5),
    nn.SELU(),
]
Z = torch.linspace(-40.0, 40.0, 2003, dtype=torch.float64)
EXTREME = as_tensor(0.0, 1e-300, -1e-300, 30.0, -30.0, 800.0, -800.0, 1e160, -1e160, 1e300, -1e300)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_value_is_that_of_the_module(module: nn.Module):
    act = from_module(module)
    error = (act.value(Z) - module(Z)).abs()
    assert float((error - 1e-14 * (1 + Z.abs())).max()) <= act.deviation


@pytest.mark.parametrize("name", ROWS)
def test_derivatives_are_those_of_autograd(name: str):
    act = ROWS[name]
    z = Z.clone().requires_grad_(True)
    scale = max(1.0, *map(abs, act.curvature or (0.0, 0.0)))
    (slope,) = torch.autograd.grad(act.value(z).sum(), z)
    assert torch.allclose(slope, act.derivative(z), rtol=0, atol=1e-14 * scale)
    if act.second_derivative is not None:
        (bend,) = torch.autograd.grad(act.derivative(z).sum(), z)
        assert torch.allclose(bend, act.second_derivative(z), rtol=0, atol=1e-13 * scale)


@pytest.mark.parametrize("name", ROWS)
def test_gradcheck(name: str):
    act = ROWS[name]
    z = as_tensor(-3.3, -1.1, -0.21, 0.17, 0.9, 1.2, 4.2).requires_grad_(True)
    assert torch.autograd.gradcheck(act.value, z)
    if act.second_derivative is not None:
        assert torch.autograd.gradcheck(act.derivative, z)
        assert torch.autograd.gradcheck(act.second_derivative, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_finite_at_every_magnitude(name: str, dtype: torch.dtype):
    act = ROWS[name]
    extreme = EXTREME if dtype == torch.float64 else EXTREME.clamp(-1e37, 1e37).to(dtype)
    for function in (act.value, act.derivative, act.second_derivative):
        if function is None:
            continue
        z = extreme.clone().requires_grad_(True)
        out = function(z)
        assert out.dtype == dtype
        (gradient,) = (
            torch.autograd.grad(out.sum(), z, allow_unused=True, materialize_grads=True) if out.requires_grad else (z,)
        )
        assert bool(out.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_nan_at_the_largest_floats(name: str):
    act = ROWS[name]
    z = as_tensor(1.7e308, -1.7e308)
    for function in (act.value, act.derivative, act.second_derivative):
        assert function is None or not bool(function(z).isnan().any())


@pytest.mark.parametrize("name", ["tanh", "gelu", "silu", "mish", "softplus(1)"])
def test_gradient_at_zero_is_right(name: str):
    act = ROWS[name]
    z = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(act.value(z), z)
    (bend,) = torch.autograd.grad(act.derivative(z), z)
    assert torch.allclose(slope, act.derivative(z)) and torch.allclose(bend, act.second_derivative(z))
