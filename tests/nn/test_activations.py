"""The modules that torch lacks: their values, and that `trace` knows them."""

import math

import mpmath
import pytest
import torch
from torch import nn

import curvcert
import curvcert.nn as cnn
from curvcert.activations import from_module
from curvcert.errors import InvalidInput

F64 = torch.float64

EXACT = {
    "Sin": (cnn.Sin(), mpmath.sin),
    "Arctan": (cnn.Arctan(), mpmath.atan),
    "Erf": (cnn.Erf(), mpmath.erf),
    "Gaussian": (cnn.Gaussian(), lambda x: mpmath.exp(-x * x)),
    "ISRU": (cnn.ISRU(), lambda x: x / mpmath.sqrt(1 + x * x)),
    "CentredSoftplus": (cnn.CentredSoftplus(), lambda x: mpmath.log((1 + mpmath.exp(x)) / 2)),
    "CentredSoftplus(3)": (cnn.CentredSoftplus(3.0), lambda x: mpmath.log((1 + mpmath.exp(3 * x)) / 2) / 3),
}
POINTS = [0.0, *(s * 10.0**k for k in range(-20, 3) for s in (-3.0, 1.0, 2.5))]


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exact_to_rounding_at_every_magnitude(name: str) -> None:
    module, phi = EXACT[name]
    got = module(torch.tensor(POINTS, dtype=F64)).tolist()
    with mpmath.workdps(60):
        for value, x in zip(got, POINTS, strict=True):
            truth = phi(mpmath.mpf(x))
            assert abs(mpmath.mpf(value) - truth) <= 2**-50 * abs(truth) + 1e-300, x


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_agree_with_the_table(name: str) -> None:
    module, _ = EXACT[name]
    x = torch.tensor([p for p in POINTS if abs(p) < 50], dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.allclose(slope, from_module(module).derivative(x.detach()), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_dtype_is_kept_and_large_numbers_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    module, _ = EXACT[name]
    y = module(torch.tensor([-3e4, 0.0, 3e4], dtype=dtype))
    assert y.dtype == dtype
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("name", EXACT)
def test_trace_knows_them(name: str) -> None:
    module, _ = EXACT[name]
    model = nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2), module).double().eval()
    net, x = curvcert.trace(model, torch.zeros(1, 3)), torch.randn(5, 3, dtype=F64)
    assert torch.allclose(net(x), model(x), atol=1e-13)
    assert net.assumes == ()
    net.require_smooth()
    assert curvcert.trace(module.eval(), torch.zeros(1, 2)).out_shape == (2,)


def test_centred_softplus_is_zero_at_zero_and_has_no_threshold() -> None:
    layer = cnn.CentredSoftplus(2.0)
    assert float(layer(torch.zeros(()))) == 0.0
    x = torch.linspace(5.0, 30.0, 10_001, dtype=F64)
    assert float(layer(x).diff().diff().abs().max()) < 1e-4
    assert torch.allclose(layer(x), nn.functional.softplus(x, 2.0) - math.log(2) / 2, atol=1e-8)
    assert "beta=2.0" in repr(layer)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_centred_softplus_needs_a_positive_beta(beta: float) -> None:
    with pytest.raises(InvalidInput, match="positive beta"):
        cnn.CentredSoftplus(beta)


@pytest.mark.parametrize("shape", [(2,), (2, 5), (2, 3, 4)])
def test_normalise(shape: tuple[int, ...]) -> None:
    mean, std = torch.tensor([0.5, -1.0]), torch.tensor([0.25, 3.0])
    layer = cnn.Normalise(mean, std).eval()
    x = torch.randn(4, *shape)
    per_channel = (1, 2, *(1,) * (len(shape) - 1))
    expected = (x - mean.reshape(per_channel)) / std.reshape(per_channel)
    assert torch.equal(layer(x), expected)
    net = curvcert.trace(layer, x)
    assert torch.allclose(net(x), expected.double(), atol=1e-6)
    assert torch.allclose(net(x), layer.double()(x.double()), atol=1e-15)
    slopes = net.jacobian(x).flatten(2)[0].diagonal()
    assert torch.allclose(slopes, (1 / std.double().reshape(per_channel)).expand(1, *shape).flatten())
    assert set(layer.state_dict()) == {"mean", "std"}
    assert "mean=[0.5, -1.0]" in repr(layer)


def test_normalise_does_not_share_memory_with_its_arguments() -> None:
    mean = torch.zeros(2)
    layer = cnn.Normalise(mean, [1.0, 1.0])
    mean.add_(1)
    assert torch.equal(layer.mean, torch.zeros(2))


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ([0.0], [0.0]),
        ([0.0], [-1.0]),
        ([0.0], [math.nan]),
        ([math.nan], [1.0]),
        ([0.0], [math.inf]),
        ([0.0], [1.0, 2.0]),
    ],
)
def test_normalise_refuses(mean: list[float], std: list[float]) -> None:
    with pytest.raises(InvalidInput, match="Normalise needs"):
        cnn.Normalise(mean, std)


def test_normalise_on_the_wrong_number_of_channels() -> None:
    with pytest.raises(InvalidInput, match="0: Normalise expects 3 channels"):
        curvcert.trace(nn.Sequential(cnn.Normalise([0.0] * 3, [1.0] * 3)).eval(), torch.zeros(1, 2))


def test_lipschitz_constant_of_a_normalisation() -> None:
    net = curvcert.trace(cnn.Normalise([0.5, 0.1], [0.25, 2.0]).eval(), torch.zeros(1, 2, 3, 3))
    assert 4.0 <= float(curvcert.lipschitz(net)) <= 4.0 * (1 + 1e-9)
