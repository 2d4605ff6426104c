"""Attacks of other packages: what they propose is evaluated anew, and what is missing is named."""

import math
import sys
from types import ModuleType

import pytest
import torch

from curvcert.attacks import autoattack, foolbox
from curvcert.certificates import certify, with_search
from curvcert.cli.searching import ATTACKS, nearest_found, require_attack
from curvcert.data import load_demo_network, load_digits
from curvcert.errors import InvalidInput
from curvcert.network import Network, trace

DIGITS = load_digits("test")
X, Y = DIGITS.as_float64()[:4], DIGITS.labels[:4]


@pytest.fixture(scope="module")
def network() -> Network:
    return trace(load_demo_network(), torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("attack", "p"), [("foolbox-ddn", 2.0), ("foolbox-deepfool", math.inf), ("foolbox-deepfool", 2.0)]
)
def test_foolbox_finds_points_outside_of_every_certified_ball(network: Network, attack: str, p: float) -> None:
    pytest.importorskip("foolbox", reason="foolbox is not installed (extra 'attack')")
    certificate = certify(network, X, Y, p, method="lipschitz", box=(0, 1))
    found = nearest_found(certificate, network, X, box=(0.0, 1.0), attack=attack)
    assert bool(found.broken.all())
    points = found.points[found.broken]
    assert bool(((points >= 0) & (points <= 1)).all())
    merged = with_search(certificate, network, X, found)
    assert bool((merged.search_radius > merged.radius).all() and merged.search_radius.isfinite().all())


def test_an_attack_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'autoattack'"):
        require_attack("autoatack", None)
    with pytest.raises(InvalidInput, match="--eps"):
        require_attack("autoattack", None)
    for attack in ATTACKS:
        require_attack(attack, (0.1,))
    pytest.importorskip("foolbox", reason="foolbox is not installed (extra 'attack')")
    with pytest.raises(InvalidInput, match="ddn covers p = 2, got 1"):
        foolbox(lambda x: x, X, Y, "ddn", p=1)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", None)
    monkeypatch.setitem(sys.modules, "autoattack", None)
    with pytest.raises(InvalidInput, match="pip install foolbox"):
        foolbox(lambda x: x, X, Y, "ddn")
    with pytest.raises(InvalidInput, match="auto-attack"):
        autoattack(lambda x: x, X, Y, 0.1, box=(0.0, 1.0))


def test_autoattack_is_asked_in_its_own_terms(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Part:
        n_target_classes = 9

    class Standing:
        """A stand-in that proposes x itself for all samples but the first."""

        def __init__(self, model, norm, eps, seed, verbose, device, version, attacks_to_run=None) -> None:
            self.model, self.fab, self.apgd_targeted = model, Part(), Part()
            asked.append((norm, eps, seed, version, device))

        def run_standard_evaluation(self, x, y, bs):
            assert x.dtype == self.model(x).dtype == torch.float32
            assert self.fab.n_target_classes == 9
            torch.manual_seed(7)
            return torch.cat([1 - x[:1], x[1:]])

    package = ModuleType("autoattack")
    package.AutoAttack = Standing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoattack", package)
    state = torch.random.get_rng_state()
    found = autoattack(network, X, Y, 0.25, p=math.inf, box=(0.0, 1.0), seed=3)
    assert asked == [("Linf", 0.25, 3, "standard", "cpu")]
    assert found.broken.tolist() == [True, False, False, False]
    assert found.points.dtype == X.dtype and bool(found.points[1:].isnan().all())
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(InvalidInput, match=r"box \(0, 1\)"):
        autoattack(network, X, Y, 0.25)
