"""Objectives: what they compute, gradients against differences, and no NaN where networks are degenerate."""

from itertools import product

import pytest
import torch
from torch import nn

from curvcert.bounds.curvature import curvature
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.losses import (
    CertifiedMargin,
    CertifiedRadiusMaximisation,
    Constants,
    CurvatureRegularised,
    CurvatureRegulariser,
    LipschitzMargin,
    RadiusReward,
    Standard,
    certified_margin_loss,
    curvature_radii,
    hinge,
    logits_and_pair_norms,
    logits_and_runner_up_norm,
    margin_cross_entropy,
    reward,
    soft_lipschitz_radii,
)
from curvcert.network import trace
from tests.losses.cases import F64, MODELS, OBJECTIVES, dense
from tests.module_families import SMOOTH_MODULES, ModuleGraph
from tests.sampling import crossed

Y = torch.tensor([0, 1, 2, 0, 1, 2])


def batch(shape: tuple[int, ...], dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.rand(6, *shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


def settled(model: nn.Module, x: torch.Tensor) -> Constants:
    """Return constants whose norms have converged, so that one more step does not move them."""
    constants = Constants(model, x[:1], steps=400)
    now = constants()
    _ = now.lipschitz, now.curvature, now.pair_lipschitz, now.pair_curvature
    return constants


class TestAgainstTheirFormulas:
    """Each objective is its formula at the model's own logits, gradients and constants."""

    def setup_method(self) -> None:
        self.model = dense()
        self.x = batch((4,))
        self.constants = settled(self.model, self.x)
        self.now, self.logits = self.constants(), self.model(self.x)
        self.norms = logits_and_pair_norms(self.model, self.x, Y)[1]
        self.K = self.now.pair_curvature

    def check(self, objective, expected: torch.Tensor, **arguments) -> None:
        found = objective(self.model, self.x, Y, **arguments)
        torch.testing.assert_close(found.loss, expected, rtol=1e-7, atol=0)
        torch.testing.assert_close(found.logits, self.logits)

    def test_standard(self) -> None:
        self.check(Standard(0.5), margin_cross_entropy(self.logits, Y, 0.5))

    def test_curvature(self) -> None:
        margin = 2**0.5 * self.now.lipschitz
        expected = margin_cross_entropy(self.logits, Y, 0.25, margin) + 0.3 * self.now.curvature
        self.check(CurvatureRegularised(self.constants, nu=1.0), expected, weight=0.3)
        plain = margin_cross_entropy(self.logits, Y, 0.25) + 0.3 * self.now.curvature
        self.check(CurvatureRegularised(self.constants), plain, weight=torch.tensor(0.3))

    def test_lipschitz_margin(self) -> None:
        expected = margin_cross_entropy(self.logits, Y, 0.25, 0.5 * 2**0.5 * self.now.lipschitz)
        self.check(LipschitzMargin(self.constants, nu=0.5), expected)

    def test_radius_reward(self) -> None:
        runner_up = logits_and_runner_up_norm(self.model, self.x, Y)[1]
        for gradients, norms in (("all", self.norms), ("runner-up", runner_up)):
            radii = curvature_radii(self.logits, Y, norms, self.K)
            expected = margin_cross_entropy(self.logits, Y) + 2.0 * reward(self.logits, Y, radii)
            self.check(RadiusReward(self.constants, gradients=gradients), expected, weight=2.0)

    def test_crm(self) -> None:
        radii = soft_lipschitz_radii(self.logits, Y, self.now.pair_lipschitz, 5.0)
        expected = margin_cross_entropy(self.logits, Y) + 2.0 * reward(self.logits, Y, radii, hinge(0.8))
        self.check(CertifiedRadiusMaximisation(self.constants, target=0.8), expected, weight=2.0)

    def test_certified_margin(self) -> None:
        for progress, epsilon in ((0.1, 0.075), (1.0, 0.3)):
            expected = certified_margin_loss(self.logits, Y, self.norms, self.K, epsilon, 0.5)
            self.check(CertifiedMargin(self.constants, 0.3, tau=0.5), expected, progress=progress)
        expected = certified_margin_loss(self.logits, Y, self.norms, self.K, 0.3, 0.5, "line")
        self.check(CertifiedMargin(self.constants, 0.3, tau=0.5, certificate="line"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective_name"),
    [*product(("dense", "conv"), OBJECTIVES), ("SLL", "curvature"), ("SLL", "certified-margin, runner-up")],
)
def test_gradients_are_finite_differences(name: str, objective_name: str) -> None:
    """Along one random direction in the weights, in float64, where norms have converged."""
    (create, shape), make = MODELS[name], OBJECTIVES[objective_name]
    model, x = create(), batch(shape)
    objective = make(Constants(model, x[:1], steps=60))
    for _ in range(2 if name == "SLL" else 8):  # until the norms have converged
        model.zero_grad()
        objective(model, x, Y, weight=0.7).loss.backward()
    generator = torch.Generator().manual_seed(7)
    direction = [torch.randn(p.shape, dtype=F64, generator=generator) for p in model.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True))

    def moved(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=step)
        value = float(objective(model, x, Y, weight=0.7).loss.detach())
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=-step)
        return value

    h = 1e-5
    # Off a chain, the last block's form starts its iteration afresh at every step, and ends it early.
    rounding = 1e-2 if name == "SLL" else 1e-4
    assert slope == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=rounding, abs=1e-7)


def zeroed(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.zero_()


def zero_weights(model: nn.Sequential) -> None:
    for layer in (model[0], model[2], model[4]):
        layer.weight.zero_()
    model[4].bias.copy_(torch.tensor([8.0, 0.0, -8.0]))


def zero_last(model: nn.Sequential) -> None:
    model[4].weight.zero_()


def alike(model: nn.Sequential) -> None:
    model[4].weight.copy_(model[4].weight[:1].expand(3, -1))
    model[4].bias.fill_(1.0)


@pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("degenerate", [zeroed, zero_weights, zero_last, alike])
def test_no_nan_in_degenerate_networks(make, degenerate) -> None:
    model, x = dense(torch.float32), batch((4,), torch.float32)
    with torch.no_grad():
        degenerate(model)
    objective = make(Constants(model, x[:1]))
    for progress in (0.0, 0.5, 1.0):
        model.zero_grad()
        found = objective(model, x, Y, progress)
        found.loss.backward()
        assert bool(torch.isfinite(found.loss))
        for name, p in model.named_parameters():
            assert p.grad is None or bool(torch.isfinite(p.grad).all()), name


@pytest.mark.parametrize("epsilon", [0.0, -0.1, float("nan")])
def test_the_certified_margin_needs_a_radius(epsilon: float) -> None:
    with pytest.raises(InvalidInput, match="positive epsilon"):
        CertifiedMargin(Constants(dense(), torch.zeros(1, 4)), epsilon)


def test_an_objective_does_not_own_the_model() -> None:
    objective = CertifiedMargin(Constants(dense(), torch.zeros(1, 4)), 0.1)
    assert list(objective.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_regulariser_is_the_curvature_in_the_model_s_dtype(dtype: torch.dtype) -> None:
    model = dense(dtype)
    regulariser = CurvatureRegulariser(model, torch.zeros(1, 4, dtype=dtype), steps=100)
    K = regulariser()
    assert K.dtype == dtype
    expected = settled(model.to(F64), torch.zeros(1, 4, dtype=F64))().curvature
    torch.testing.assert_close(K.double(), expected, rtol=1e-4, atol=0)


def test_descending_the_regulariser_lowers_the_curvature() -> None:
    model = dense(torch.float32).eval()
    regulariser = CurvatureRegulariser(model, torch.zeros(1, 4))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    before = float(curvature(trace(model, torch.zeros(1, 4))))
    for _ in range(30):
        optimiser.zero_grad()
        regulariser().backward()
        optimiser.step()
    assert float(curvature(trace(model, torch.zeros(1, 4)))) < 0.9 * before


def test_a_model_without_a_curvature_constant_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(UnsupportedActivation, match="relu"):
        CurvatureRegulariser(model, torch.zeros(1, 4))


@pytest.mark.parametrize("nu", [0.0, 1.0])
def test_backward_part_by_part_is_that_of_the_sum(nu: float) -> None:
    x, y = torch.rand(5, 4, dtype=F64), torch.tensor([0, 1, 2, 0, 1])
    found = []
    for by_parts in (True, False):
        model = dense()
        objective = CurvatureRegularised(Constants(model, x[:1], steps=50), nu=nu)(model, x, y, weight=0.3)
        objective.backward() if by_parts else objective.loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


GRAPH_OBJECTIVES = [name for name in OBJECTIVES if name != "certified-margin, quadratic"]


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "name"), crossed(SMOOTH_MODULES, GRAPH_OBJECTIVES, every=3))
def test_objectives_of_graphs_have_the_gradients_of_differences(graph: ModuleGraph, name: str) -> None:
    model, x, y = graph.model().to(F64), graph.inputs().to(F64), torch.tensor([0, 2, 1])
    objective = OBJECTIVES[name](Constants(model, x[:1], steps=60))
    for _ in range(4):
        model.zero_grad()
        found = objective(model, x, y, weight=0.7)
        found.backward()
    generator = torch.Generator().manual_seed(7)
    direction = [torch.randn(p.shape, dtype=F64, generator=generator) for p in model.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True))

    def moved(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=step)
            value = float(objective(model, x, y, weight=0.7).loss)
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=-step)
        return value

    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("graph", SMOOTH_MODULES[:1], ids=lambda graph: graph.name)
def test_the_quadratic_certificate_refuses_graphs_by_name(graph: ModuleGraph) -> None:
    model, x = graph.model(), graph.inputs()
    objective = OBJECTIVES["certified-margin, quadratic"](Constants(model, x[:1]))
    with pytest.raises(UnsupportedModule, match=f'got {graph.name}. Use certificate "line"'):
        objective(model, x, torch.tensor([0, 2, 1]))
