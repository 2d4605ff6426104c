"""Live networks: over a module's own parameters, for estimates, and refused by whatever certifies."""

import pytest
import torch
from torch import nn

import curvcert
from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.network import LiveNetwork, trace
from curvcert.nn import SLLDense

X = torch.zeros(1, 4)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sll() -> nn.Sequential:
    return nn.Sequential(SLLDense(4), nn.Linear(4, 3))


def test_it_holds_the_parameters_themselves() -> None:
    model = dense()
    live = LiveNetwork(model, X)
    network = live()
    assert live.fixed
    assert network.live
    assert network.blocks[0].W.weight is model[0].weight
    assert live() is network


def test_weights_that_a_layer_computes_are_computed_anew() -> None:
    model = sll()
    live = LiveNetwork(model, X)
    before = live().blocks[0].G.as_matrix()
    assert not live.fixed
    assert before.requires_grad
    with torch.no_grad():
        model[0].log_scale.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    after = live().blocks[0].G.as_matrix()
    assert not torch.allclose(before, after)
    after.sum().backward()
    assert model[0].log_scale.grad is not None


@pytest.mark.parametrize("make", [dense, sll])
def test_its_maps_are_those_of_the_traced_network(make) -> None:
    model = make()
    live, traced = LiveNetwork(model, X)(), trace(model.eval(), X)
    assert len(live.blocks) == len(traced.blocks)
    for one, other in zip(live.blocks, traced.blocks, strict=True):
        assert type(one) is type(other)
        for name in ("H", "G", "W"):
            if hasattr(one, name):
                matrices = [getattr(block, name).as_matrix().double() for block in (one, other)]
                torch.testing.assert_close(*matrices, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [dense, sll])
@pytest.mark.parametrize(
    "ask",
    [
        curvcert.lipschitz,
        curvcert.curvature,
        lambda network: curvcert.lipschitz(network, pair="all"),
        lambda network: curvcert.curvature(network, pair=(0, 1)),
        lambda network: curvcert.curvature(network.all_differences()),
        lambda network: curvcert.certify(network, torch.zeros(2, 4)),
    ],
    ids=["lipschitz", "curvature", "all pairs", "a pair", "differences", "certify"],
)
def test_nothing_that_certifies_accepts_it(make, ask) -> None:
    with pytest.raises(InvalidInput, match="over parameters in training"):
        ask(LiveNetwork(make(), X)())


@pytest.mark.parametrize("make", [dense, sll])
def test_it_cannot_be_evaluated(make) -> None:
    """Its offsets have no values: a number computed with them would be wrong."""
    network = LiveNetwork(make(), X)()
    with pytest.raises((CurvcertError, RuntimeError, NotImplementedError)):
        float(network(torch.zeros(1, 4)).sum())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Dropout(0.1), "1: Dropout is random in training"),
        (nn.BatchNorm1d(5), "1: BatchNorm"),
        (nn.LayerNorm(5), "1: a product of values"),
    ],
)
def test_what_has_no_constants_in_training_is_refused_by_name(module: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), module, nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedModule, match=message):
        LiveNetwork(model, X)


def test_dropout_that_drops_nothing_is_accepted() -> None:
    assert LiveNetwork(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Tanh()), X)().live


def test_an_example_without_a_batch_is_refused() -> None:
    with pytest.raises(InvalidInput):
        LiveNetwork(dense(), torch.zeros(()))
