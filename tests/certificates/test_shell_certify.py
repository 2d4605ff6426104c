"""`certify` with the local certificate: where it runs, what it says, and that "auto" is never below the others."""

import math

import pytest
import torch
from torch import nn

from curvcert.certificates import certify
from curvcert.certificates.methods import anchored, shell
from curvcert.certificates.shell import Query, shells
from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.network import trace
from tests.bounds.curvature.cases import trained
from tests.certificates.cases import blobs, digits, digits_network, planar


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_auto_is_never_below_any_method(p: float) -> None:
    network = trained("mlp", False)
    x, y = digits(16)
    best = certify(network, x, y, p=p)
    for method in ("lipschitz", "anchored", "unrolled", "local", *(["line"] if p == 2 else [])):
        assert bool((certify(network, x, y, p=p, method=method).radius <= best.radius * (1 + 1e-9)).all())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_it_wins_over_constants_on_trained_networks(kind: str) -> None:
    network = trained(kind, False)
    x, y = digits(30)
    cert = certify(network, x, y, method="checkable")
    run = cert.local_radius.isfinite() & cert.correct
    by_constants = torch.stack([cert.radii[name] for name in ("lipschitz", "curvature", "anchored", "combined")])
    assert int((cert.local_radius > by_constants.nan_to_num(nan=0.0).amax(0))[run].sum()) >= 5
    assert bool((cert.radius[run] >= cert.local_radius[run]).all())


def test_it_is_no_less_than_its_constants_give() -> None:
    """With the same K and L the integral is never above that of min(g + K t, L)."""
    network = trained("mlp", True)
    x, y = digits(30)
    local = certify(network, x, y, method="local")
    for method in ("unrolled", "lipschitz"):
        assert bool((local.radius >= certify(network, x, y, method=method).radius * (1 - 1e-9)).all())


def test_radii_to_decide_leave_the_decided_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network = trained("mlp", False)
    x, y = digits(40)
    full = certify(network, x, y, method="local")
    asked: list[int] = []
    original = shell.shell_radii

    def counted(layers: object, query: Query) -> torch.Tensor:
        asked.append(len(query.label))
        return original(layers, query)

    monkeypatch.setattr(shell, "shell_radii", counted)
    certify(network, x, y, method="local", epsilons=[1e-6])
    assert asked == []
    eps = float(full.radius[full.correct].median())
    decided = certify(network, x, y, method="local", epsilons=[eps])
    assert len(asked) == 1
    assert 0 < asked[0] < int(full.correct.sum())
    assert decided.certified_accuracy(eps) >= full.certified_accuracy(eps) - 1 / 40
    untouched = decided.local_radius.isnan() & decided.correct
    assert bool(((decided.radius[untouched] >= eps) | (full.radius[untouched] < eps)).all())


def test_by_name_the_global_constants_decide_first_too() -> None:
    network = trained("mlp", False)
    x, y = digits(40)
    full = certify(network, x, y, method="local")
    eps = float(full.radius[full.correct].median())
    decided = certify(network, x, y, method="local", epsilons=[0.5 * eps, 0.9 * eps])
    assert bool(decided.local_radius.isnan().any())
    assert bool((decided.radius[decided.correct] > 0).all())
    for radius in (0.5 * eps, 0.9 * eps):
        assert decided.certified_accuracy(radius) >= full.certified_accuracy(radius) - 1 / 40


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_a_second_grid_is_walked_only_where_it_can_decide(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = trained(kind, False), digits(40)
    full = certify(network, x, y, method="local")
    middle = float(full.radius[full.correct].median())
    epsilons = [0.5 * middle, 0.8 * middle, middle, 1.5 * middle]
    refined: list[int] = []
    original = shells._refined

    def counted(centres: object, pairs: object, radius: torch.Tensor, *rest: object) -> torch.Tensor:
        refined.append(len(radius))
        return original(centres, pairs, radius, *rest)

    monkeypatch.setattr(shells, "_refined", counted)
    decided = certify(network, x, y, method="local", epsilons=epsilons)
    spared = sum(refined)
    monkeypatch.setattr(shells, "_short", lambda spent, *_: ~spent.open_.all(dim=1))
    thorough = certify(network, x, y, method="local", epsilons=epsilons)
    assert 0 < spared < sum(refined) - spared
    for eps in epsilons:
        assert bool(((decided.radius >= eps) == (thorough.radius >= eps)).all())
    assert bool((decided.radius <= thorough.radius).all())


@pytest.mark.slow
def test_shells_with_the_same_constants_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = trained("mlp", False), digits(20)
    middle = float(certify(network, x, y).radius.median())
    monkeypatch.setattr(anchored, "WIDTH", 1)
    original, asked = shell.shell_radii, []

    def counted(layers: object, query: Query) -> torch.Tensor:
        asked.append(len(query.label))
        return original(layers, query)

    monkeypatch.setattr(shell, "shell_radii", counted)
    certify(network, x, y, epsilons=[0.5 * middle, 3 * middle])
    assert len(asked) == 1


def test_misclassified_samples_are_not_run() -> None:
    network, _ = digits_network()
    x, y = digits(6)
    cert = certify(network, x, (y + 1) % 10, method="local")
    assert not bool(cert.correct.any())
    assert float(cert.radius.amax()) == 0.0
    assert float(cert.local_radius.amax()) == 0.0


class TestKinks:
    def test_are_skipped_with_the_reason(self) -> None:
        x, y = blobs(6)
        cert = certify(planar(nn.ReLU), x, y)
        assert bool(cert.local_radius.isnan()[cert.correct].all())
        assert any("shell skipped" in note and "kink" in note for note in cert.notes)

    def test_are_refused_by_name(self) -> None:
        x, y = blobs(6)
        with pytest.raises(UnsupportedActivation, match="kink"):
            certify(planar(nn.ReLU), x, y, method="local")
        pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)).eval()
        with pytest.raises(UnsupportedModule, match="MaxPool"):
            certify(trace(pooled, torch.zeros(1, 1, 4, 4)), torch.zeros(1, 1, 4, 4), method="local")


def test_a_constant_pair_is_never_lost() -> None:
    """Where f_y - f_i does not depend on x, no radius is too large."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    nn.init.zeros_(model[2].weight)
    model[2].bias.data = torch.tensor([1.0, 0.0])
    cert = certify(trace(model, torch.zeros(1, 2)), torch.zeros(3, 2), method="local")
    assert float(cert.radius.amin()) > 1e99


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_an_accelerator_gives_the_same_radii(kind: str) -> None:
    network = trained(kind, False)
    x, y = digits(20)
    there = certify(network, x, y, method="local", device="cuda").radius.cpu()
    torch.testing.assert_close(there, certify(network, x, y, method="local").radius, rtol=1e-6, atol=0)
