"""The quadratic certificate: never refuted, beyond the linear one where a network bends, and refused at kinks."""

import math

import pytest
import torch
from torch import nn

from curvcert.attacks import pgd
from curvcert.certificates import certify
from curvcert.certificates.methods.balls import PRECISION
from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.falsifier import falsify
from curvcert.network import trace
from curvcert.norms import vector_norm
from tests.certificates.cases import blobs, digits, digits_network, planar
from tests.graph_families import SMOOTH, Graph

F64 = torch.float64
NORMS = [1.0, 2.0, 3.0, math.inf]


@pytest.mark.slow
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.SiLU, nn.GELU])
def test_no_radius_is_refuted(activation: type[nn.Module], p: float) -> None:
    net, (x, y) = planar(activation), blobs(12, seed=1)
    cert = certify(net, x, y, p, "quadratic", progress=False)
    assert set(cert.radii) == {"quadratic"} and bool((cert.radius[cert.correct] > 0).all())
    found = falsify(net, x, y, cert, restarts=3, steps=12)
    assert not found and found.unconfirmed == 0


@pytest.mark.slow
@pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])
def test_no_radius_is_refuted_on_graphs(graph: Graph) -> None:
    net = graph.network(1)
    x = torch.randn(4, *net.in_shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    cert = certify(net, x, None, 2, "quadratic", progress=False)
    assert bool((cert.radius[cert.correct] > 0).all())
    assert not falsify(net, x, None, cert, restarts=2, steps=10)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_it_reaches_further_than_lines_and_less_far_than_an_attack(p: float) -> None:
    net, _ = digits_network()
    x, y = digits(12)
    linear, quadratic = (certify(net, x, y, p, method, progress=False) for method in ("linear", "quadratic"))
    good = linear.correct
    assert float((quadratic.radius / linear.radius)[good].median()) > {1.0: 1.05, 2.0: 1.2, math.inf: 1.1}[p]
    assert bool((quadratic.radius >= linear.radius * (1 - 2 * PRECISION))[good].all())
    attack = pgd(net, x, y, {1.0: 8.0, 2.0: 3.0, math.inf: 0.5}[p], p, restarts=1)
    nearest = vector_norm((attack.points - x).flatten(1), p, dim=1)
    assert bool((quadratic.radius <= nearest)[attack.broken & good].all())


def test_a_parabola_of_one_neuron_is_exact() -> None:
    """f = 2 tanh(x) beside 0.5: the boundary is at atanh(1/4), and so is the end of the ball."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)).double().eval()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ([[1.0]], [0.0], [[2.0], [0.0]], [0.0, 0.5]), strict=True):
            parameter.copy_(torch.tensor(value))
    x = torch.tensor([[0.75]], dtype=F64)
    cert = certify(trace(model, x), x, torch.tensor([0]), math.inf, "quadratic", progress=False)
    truth = 0.75 - math.atanh(0.25)
    assert 0.995 * truth < float(cert.radius) <= truth


def test_decides_the_radii_that_are_asked_for() -> None:
    net, (x, y) = planar(), blobs(20, seed=3)
    whole = certify(net, x, y, 2, "quadratic", progress=False)
    eps = (float(whole.radius.quantile(0.3)), float(whole.radius.quantile(0.7)))
    asked = certify(net, x, y, 2, "quadratic", epsilons=eps, progress=False)
    for one in eps:
        clear = (whole.radius - one).abs() > 0.01 * one
        assert bool(((asked.radius >= one) == (whole.radius >= one))[clear].all())


def test_kinks_are_refused_by_name() -> None:
    x, y = blobs(4)
    with pytest.raises(UnsupportedActivation, match="'relu' has a kink"):
        certify(planar(nn.ReLU), x, y, 2, "quadratic", progress=False)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)).eval()
    net, image = trace(model, torch.zeros(1, 1, 8, 8)), torch.rand(2, 1, 8, 8)
    with pytest.raises(UnsupportedModule, match="max-pooling has kinks"):
        certify(net, image, None, 2, "quadratic", progress=False)


@pytest.mark.parametrize("p", [1.0, math.inf])
def test_more_inputs_than_eigenvalues_are_worth_are_refused_outside_of_l2(p: float) -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 2)).eval()
    with pytest.raises(UnsupportedModule, match="needs at most 512 inputs"):
        certify(trace(model, torch.zeros(1, 600)), torch.zeros(1, 600), None, p, "quadratic", progress=False)
