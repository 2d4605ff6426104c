"""The quadratic certificate where layers are wide: never refuted, near the linear limit, further along gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvcert.attacks import pgd
from curvcert.certificates import certifier, certify
from curvcert.certificates.methods import forms
from curvcert.certificates.methods.balls import Centres
from curvcert.certificates.methods.linear import shared_facts
from curvcert.certificates.methods.method import Samples
from curvcert.certificates.pointwise import evaluate_points
from curvcert.falsifier import falsify
from curvcert.network import Network, trace
from curvcert.norms import vector_norm
from tests.propagation.test_expansion import convolutional

F64 = torch.float64
RADII = (0.02, 0.1, 0.2, 0.3)


def image_network(scale: float = 4.0) -> tuple[Network, Tensor]:
    """Return a network of images with more inputs than Taylor models take, and a few images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(576, 12),
        nn.Tanh(),
        nn.Linear(12, 4),
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return trace(model, torch.zeros(1, 1, 24, 24)), torch.rand(3, 1, 24, 24, dtype=F64)


def limits(network: Network, x: Tensor) -> Tensor:
    """Return margin over gradient norm of every sample, for the nearest rival."""
    J, values = network.jacobian(x).flatten(2), network(x)
    label = values.argmax(dim=1)
    found = []
    for k, own in enumerate(label.tolist()):
        others = [i for i in range(values.shape[1]) if i != own]
        gaps = values[k, own] - values[k, others]
        found.append((gaps / vector_norm(J[k, others] - J[k, own], 2, dim=1)).amin())
    return torch.stack(found)


@pytest.mark.full
def test_no_radius_is_refuted_and_small_ones_reach_the_linear_limit() -> None:
    network, x = image_network(2.0)
    certificate = certify(network, x, None, 2, "quadratic", epsilons=RADII, progress=False)
    limit = limits(network, x)
    assert bool(((certificate.radius >= RADII[0]) == (limit > RADII[0] * 1.02)).all())
    assert not falsify(network, x, None, certificate, restarts=2, steps=20)
    attack = pgd(network, x, certificate.label, 1.5, 2, restarts=1)
    nearest = vector_norm((attack.points - x).flatten(1), 2, dim=1)
    assert bool((certificate.radius <= nearest)[attack.broken].all())


def rivals(network: Network, x: Tensor) -> forms.Rivals:
    """Return the rivals of one image, whatever the size of the network."""
    question = certifier(network, 2, "quadratic", epsilons=RADII, progress=False).question
    points = evaluate_points(question.outputs, x, None, question.deviations)
    facts, samples = shared_facts(question), Samples(question, x, points)
    centre = Centres.about(facts, samples, torch.zeros(1, dtype=torch.int64))
    return forms.Rivals(facts, centre, question.deviations[points.label[0]])


@pytest.mark.slow
def test_expansions_along_the_gradient_are_not_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        network = convolutional(3.0, seed)
        x = torch.randn(1, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
        found = rivals(network, x)
        radii = [share * float(found.limits.min()) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)]
        further = found.decided(radii)[found.others].amin()
        monkeypatch.setattr(forms, "_STAGES", 0)
        once = found.decided(radii)[found.others].amin()
        monkeypatch.undo()
        assert further >= once
        label = network(x).argmax(dim=1)
        attack = pgd(network, x, label, 1.2 * float(found.limits.min()), 2, restarts=4)
        nearest = vector_norm((attack.points - x).flatten(1), 2, dim=1)
        assert not bool(attack.broken) or bool(further <= nearest)


@pytest.mark.slow
def test_an_expansion_along_the_gradient_proves_what_one_at_the_sample_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = convolutional(1.5, 1)
    x = torch.randn(1, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = rivals(network, x)
    radius = 0.98 * float(found.limits.min())
    assert bool((found.decided([radius])[found.others] == radius).all())
    monkeypatch.setattr(forms, "_STAGES", 0)
    assert not bool((found.decided([radius])[found.others] == radius).all())


@pytest.mark.slow
def test_points_along_the_gradient_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from 0 a point may be off by more than any share of a small radius: the balls about it hold that as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    x, far = torch.tensor([[0.5, -0.25]], dtype=F64), 2.0**24
    with torch.no_grad():
        model[0].bias.sub_(far * model[0].weight.sum(dim=1))
    found = rivals(trace(model, x), x + far)
    reached, reaches, steps, ball_of = list[float](), list[float](), forms._proven_up_to, forms.Ball

    def noted(*given: Any) -> float:
        reached.append(steps(*given))
        return reached[-1]

    def made(expansion: Any, t: float, **others: Any) -> Any:
        reaches.append(t)
        return ball_of(expansion, t, **others)

    monkeypatch.setattr(forms, "_proven_up_to", noted)
    monkeypatch.setattr(forms, "Ball", made)
    radius = 0.995 * float(found.limits.min())
    found.decided([radius])
    begun, *later = reaches
    assert begun == radius and later
    for at, reach in zip(reached, later, strict=False):
        assert reach - math.sqrt(radius**2 - at**2) > far * 2.0**-53


@pytest.mark.slow
def test_a_search_ends_between_what_is_proven_and_the_limit() -> None:
    network, x = image_network(1.0)
    x = x[:1]
    found = certify(network, x, None, 2, "quadratic", progress=False)
    assert 0.5 * float(limits(network, x)) < float(found.radius) < float(limits(network, x))
    assert not falsify(network, x, None, found, restarts=2, steps=20)


def test_on_a_processor_auto_leaves_forms_out() -> None:
    network, x = image_network()
    certificate = certify(network, x[:1], None, 2, "auto", epsilons=(0.01,), progress=False)
    assert any("forms of each sample" in note for note in certificate.notes)


@pytest.mark.full
def test_products_of_values_are_not_refuted() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other, self.outer = nn.Linear(600, 520), nn.Linear(600, 520), nn.Linear(520, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(self.other(x)))
            return found

    torch.manual_seed(0)
    network, x = trace(Gated().eval(), torch.zeros(1, 600)), torch.randn(1, 600, dtype=F64)
    certificate = certify(network, x, None, 2, "quadratic", epsilons=(0.01, 0.1, 0.3), progress=False)
    assert float(certificate.radius) > 0
    assert not falsify(network, x, None, certificate, restarts=2, steps=20)
