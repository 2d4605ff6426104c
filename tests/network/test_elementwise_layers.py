"""Activations as modules, functions and formulas: each is taken, as the row of the table that it is."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvcert
from curvcert.errors import UnsupportedActivation
from curvcert.network import LiveNetwork
from curvcert.network.network_file import network_digest, save_network
from curvcert.network.network_reading import load_network
from curvcert.network.nodes import ElementwiseNode
from tests.network.cases import Function

Row = tuple[str, str, Callable[[], nn.Module]]


def of(function: Callable[[Function, Tensor], object], **parts: object) -> Callable[[], nn.Module]:
    return lambda: Function(function, **parts)


def _tanh_gelu(m: Function, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


ROOT = math.sqrt(2.0)

ROWS: list[Row] = [
    ("Tanhshrink", "tanhshrink", nn.Tanhshrink),
    ("Hardswish", "hardswish", nn.Hardswish),
    ("Softshrink", "softshrink(0.3)", lambda: nn.Softshrink(0.3)),
    ("RReLU", "leaky_relu(0.25)", lambda: nn.RReLU(0.125, 0.375)),
    ("LogSigmoid", "softplus(1)", nn.LogSigmoid),
    ("Hardsigmoid", "hardtanh(-3,3)", nn.Hardsigmoid),
    ("PReLU", "leaky_relu(0.25)", nn.PReLU),
    ("PReLU of channels", "relu", lambda: nn.PReLU(4, 0.3)),
    ("prelu", "leaky_relu(0.25)", of(lambda m, x: F.prelu(x, m.w), w=torch.tensor([0.25]))),
    ("cos", "sin", of(lambda m, x: torch.cos(x))),
    ("abs", "leaky_relu(-1)", of(lambda m, x: x.abs())),
    ("built-in abs", "leaky_relu(-1)", of(lambda m, x: abs(x))),
    ("clamp", "hardtanh(-1,0.5)", of(lambda m, x: x.clamp(-1, 0.5))),
    ("clamp from below", "relu", of(lambda m, x: torch.clamp(x, min=0.3))),
    ("clamp from above", "relu", of(lambda m, x: x.clamp_max(0.3))),
    ("hardswish", "hardswish", of(lambda m, x: F.hardswish(x))),
    ("logsigmoid", "softplus(1)", of(lambda m, x: F.logsigmoid(x))),
    ("silu", "silu", of(lambda m, x: x * torch.sigmoid(x))),
    ("silu by exp", "silu", of(lambda m, x: x / (1 + torch.exp(-x)))),
    ("silu of a module", "silu", of(lambda m, x: m.s(x) * x, s=nn.Sigmoid())),
    ("swish", "silu", of(lambda m, x: x * torch.sigmoid(m.beta * x), beta=torch.tensor(0.7))),
    ("quick gelu", "silu", of(lambda m, x: x * torch.sigmoid(1.702 * x))),
    ("sigmoid by exp", "sigmoid", of(lambda m, x: 1 / (1 + (-2 * x).exp()))),
    ("gelu", "gelu", of(lambda m, x: x * 0.5 * (1.0 + torch.erf(x / ROOT)))),
    ("gelu twice", "gelu", of(lambda m, x: x * (1.0 + torch.erf(x * 0.5**0.5)))),
    ("gelu by tanh", "gelu_tanh", of(_tanh_gelu)),
    ("mish", "mish", of(lambda m, x: x * torch.tanh(F.softplus(x)))),
    ("softsign", "softsign", of(lambda m, x: x / (1 + x.abs()))),
    ("isru", "isru", of(lambda m, x: x * torch.rsqrt(1 + x**2))),
    ("bell", "gaussian", of(lambda m, x: torch.exp(-(x**2)))),
    ("radial", "gaussian", of(lambda m, x: 1 - 2 * torch.exp(-0.5 * torch.square(x)))),
    ("hardswish by relu6", "hardswish", of(lambda m, x: x * F.relu6(x + 3) / 6)),
    ("hardswish in place", "hardswish", of(lambda m, x: x * m.r(x + 3.0) / 6.0, r=nn.ReLU6(inplace=True))),
    ("hardswish by hardsigmoid", "hardswish", of(lambda m, x: x * F.hardsigmoid(x))),
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_it_is_a_row_of_the_table_with_sound_constants(row: Row, tmp_path) -> None:
    _, name, make = row
    model = make().eval()
    net = curvcert.trace(model, torch.zeros(1, 4))
    assert [node.activation.name for node in net.nodes if isinstance(node, ElementwiseNode)] == [name]
    twin = model.double()
    z = torch.cat([torch.linspace(-9, 9, 4001, dtype=torch.float64), torch.randn(999, dtype=torch.float64)])
    x = z[:, None].expand(-1, 4).contiguous()
    torch.testing.assert_close(net(x), twin(x.clone()).detach(), rtol=1e-13, atol=1e-13)
    # The constants against difference quotients of the module itself, up to its rounding.
    h = 2.0**-13
    with torch.no_grad():
        below, here, above = (twin((z[:, None] + t).expand(-1, 4).contiguous())[:, 0] for t in (-h, 0.0, h))
    steepest = float(((above - here) / h).abs().max())
    assert steepest <= float(curvcert.lipschitz(net, math.inf)) * (1 + 1e-9) <= 1.01 * max(steepest, 1.0) + 0.02
    again = load_network(save_network(net, tmp_path / "net"))
    assert network_digest(again) == network_digest(net)
    try:
        bend = float(curvcert.curvature(net, math.inf))
    except UnsupportedActivation:
        return
    most = float(((above - 2 * here + below) / h**2).abs().max())
    assert most <= bend * (1 + 1e-6) + 1e-6
    assert bend <= 1.02 * most or name in ("softsign", "isru")


def test_slopes_of_channels_keep_their_gradients_in_training() -> None:
    for slopes in (1, 4):
        model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(slopes))
        network = LiveNetwork(model, torch.zeros(1, 4))()
        total = sum(
            term.map.as_matrix().square().sum() for node in network.nodes[1:] for term in getattr(node, "terms", ())
        )
        total.backward()
        assert bool(model[1].weight.grad.any())


def test_an_overwritten_part_of_a_formula() -> None:
    """As a formula this is hardswish(x) + x + 3, but the last term is overwritten by the ReLU6."""

    def forward(m: Function, x: Tensor) -> Tensor:
        moved = x + 3.0
        return x * m.r(moved) / 6.0 + moved

    net = curvcert.trace(Function(forward, r=nn.ReLU6(inplace=True)).eval(), torch.zeros(1, 4))
    x = 9 * torch.randn(99, 4, dtype=torch.float64)
    torch.testing.assert_close(net(x), F.hardswish(x) + F.relu6(x + 3))
