"""Weights of any size: a bound holds, or the network is refused.

Scaling the first layer by 2**-k and the inputs by 2**k changes nothing but the unit, exactly: the largest slope and
the largest second derivative of the network as it was are those of the scaled one, in its units.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from curvcert import Network, certify, curvature, lipschitz, trace
from curvcert.activations import declare_activation
from curvcert.bounds.types import Bound
from curvcert.errors import InvalidInput
from curvcert.network import Block
from tests.bounds.cases import linear

F64 = torch.float64
X, RADIUS = torch.tensor([[0.3]], dtype=F64), 0.5
LIPSCHITZ: dict[str, Callable[[Network, float], Bound]] = {
    name: lambda net, unit, name=name: lipschitz(net, method=name, pair=(1, 0))  # type: ignore[misc]
    for name in ("product", "liplt", "lipsdp-recursion", "auto")
} | {
    "anchored": lambda net, unit: lipschitz(net, at=unit * X, method="anchored", pair=(1, 0)),
    "local": lambda net, unit: lipschitz(net, at=unit * X, radius=unit * RADIUS, method="local", pair=(1, 0)),
}
CURVATURE: dict[str, Callable[[Network, float], Bound]] = {
    name: lambda net, unit, name=name: curvature(net, method=name, pair=(1, 0))  # type: ignore[misc]
    for name in ("compositional", "unrolled", "crc", "auto")
} | {
    "anchored": lambda net, unit: curvature(net, at=unit * X, method="anchored", pair=(1, 0)),
    "local": lambda net, unit: curvature(net, at=unit * X, radius=unit * RADIUS, method="local", pair=(1, 0)),
}


def net_of(activation: type[nn.Module], depth: int) -> nn.Sequential:
    torch.manual_seed(depth)
    hidden = [part for _ in range(depth - 1) for part in (nn.Linear(2, 2), activation())]
    return nn.Sequential(nn.Linear(1, 2), activation(), *hidden, nn.Linear(2, 2)).double().eval()


def scaled(model: nn.Sequential, k: int, outputs: int) -> Network:
    model = copy.deepcopy(model)
    first, last = model[0], model[-1]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    first.weight.data *= 2.0**-k
    last.weight.data *= 2.0**outputs
    return trace(model, torch.zeros(1, 1, dtype=F64))


def in_old_units(value: Tensor, k: int, outputs: int, order: int) -> float:
    found = float(value.flatten()[0]) * 2.0**-outputs
    return math.prod([found, *[2.0**k] * order])


def derivatives(model: nn.Sequential) -> tuple[Tensor, Tensor, Tensor]:
    """The places of a grid, and the slopes and second derivatives of f_1 - f_0 there."""
    t = torch.linspace(-8, 8, 3201, dtype=F64)[:, None].requires_grad_()
    f = model(t)
    (slope,) = torch.autograd.grad((f[:, 1] - f[:, 0]).sum(), t, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), t)
    return t.detach().flatten(), slope.detach().flatten(), bend.flatten()


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.Mish])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("outputs", [0, -300, 400])
def test_a_bound_on_the_smallest_weights_holds(activation: type[nn.Module], depth: int, outputs: int) -> None:
    model = net_of(activation, depth)
    places, slope, bend = derivatives(model)
    near = (places - float(X)).abs() <= RADIUS
    anchored = (slope - slope[places.sub(float(X)).abs().argmin()]).abs() / (places - float(X)).abs()
    held = refused = 0
    for k in (0, 100, 224, 270, 600):
        network = scaled(model, k, outputs)
        for methods, order, found in ((LIPSCHITZ, 1, slope.abs()), (CURVATURE, 2, bend.abs())):
            for name, bound in methods.items():
                try:
                    value = in_old_units(bound(network, 2.0**k).value, k, outputs, order)
                except InvalidInput as error:
                    assert "too small for bounds" in str(error) and k >= 60
                    refused += 1
                    continue
                least = found[near].max() if name == "local" else found.max()
                if name == "anchored":
                    # A slope from the anchor, or a change of slope, over a distance that is not tiny.
                    least = anchored[(places - float(X)).abs() > 0.1].max() if order == 2 else slope[near].abs().min()
                assert value >= float(least) * (1 - 1e-9), (name, order, k)
                held += 1
    assert held >= 12 and refused >= 12


@pytest.mark.parametrize("bound", [lipschitz, curvature])
@pytest.mark.parametrize("k", [300, 600, 900])
def test_two_maps_whose_product_rounds_to_nothing_are_no_map_that_does_nothing(
    bound: Callable[[Network], Bound], k: int
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double().eval()
    for layer in model[:2]:
        assert isinstance(layer, nn.Linear)
        layer.weight.data *= 2.0**-k
    with pytest.raises(InvalidInput, match=r"too small for (bounds|norms)"):
        bound(trace(model, torch.zeros(1, 2, dtype=F64)))


def test_an_activation_without_slope_does_nothing() -> None:
    flat = declare_activation("flat", torch.zeros_like, torch.zeros_like, slope=(0.0, 0.0), curvature=(0.0, 0.0))
    (block,) = trace(net_of(nn.Tanh, 1), torch.zeros(1, 1, dtype=F64)).blocks
    assert isinstance(block, Block)
    assert float(lipschitz(Network.of_blocks((replace(block, activation=flat),)))) < 1e-10


@pytest.mark.parametrize("method", ["auto", "lipschitz", "lipsdp-recursion", "anchored", "unrolled", "local", "line"])
def test_no_certificate_of_weights_that_underflow(method: str) -> None:
    network = scaled(net_of(nn.Tanh, 2), 300, 0)
    with pytest.raises(InvalidInput, match="Scale the weights up"):
        certify(network, 2.0**300 * X, method=method, progress=False)


def test_a_layer_that_does_nothing_is_no_small_one() -> None:
    model = net_of(nn.Tanh, 2)
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight.data.zero_()
    assert float(lipschitz(trace(model, torch.zeros(1, 1, dtype=F64)))) < 1e-10


def test_an_affine_network_is_measured_too() -> None:
    small = Network.of_blocks(tuple(block.read_out(1e-200 * block.H.T @ block.H) for block in linear(2, 2).blocks * 2))
    with pytest.raises(InvalidInput, match="too small for bounds"):
        lipschitz(small)
