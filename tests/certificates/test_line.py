"""The line certificate: sound, close to the truth, never below the curvature certificate, and refused where it must."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from benchmarks.shell_search import KINDS, SMOOTH
from curvcert.attacks import pgd
from curvcert.certificates import certify, line
from curvcert.errors import InvalidInput, UnsupportedActivation
from curvcert.network import Network, trace
from tests.bounds.curvature.cases import trained
from tests.certificates.cases import blobs, digits, planar
from tests.certificates.test_shell_soundness import seeded
from tests.sampling import crossed

F64 = torch.float64


def true_distances(network: Network, x: Tensor, label: Tensor, end: float = 1.0, steps: int = 800) -> Tensor:
    """Return the least distance of another class in the plane, on rays in 240 directions."""
    angle = torch.arange(240, dtype=F64) * (2 * math.pi / 240)
    rays = torch.stack([angle.cos(), angle.sin()], dim=1)
    reach = torch.linspace(0, end, steps + 1, dtype=F64)
    found = []
    for point, own in zip(x, label, strict=True):
        grid = point + reach[:, None, None] * rays
        other = (network(grid.reshape(-1, 2)).argmax(dim=1) != own).reshape(steps + 1, 240).any(dim=1)
        found.append(reach[other].amin() if bool(other.any()) else reach[-1])
    return torch.stack(found)


class TestRadii:
    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "name"), crossed(KINDS, SMOOTH, every=4))
    def test_no_margin_is_lost_within_them(self, kind: str, name: str) -> None:
        generator = seeded(7 * len(name) + len(kind))
        network = KINDS[kind](SMOOTH[name], generator)
        x = torch.randn(6, *network.in_shape, dtype=F64, generator=generator)
        cert = certify(network, x, method="line")
        assert bool((cert.radius[cert.correct] > 0).all())
        attack = pgd(network, x, cert.label, 0.999 * cert.radius, steps=15, restarts=2)
        assert not bool((attack.broken & cert.correct).any())

    def test_are_below_the_true_distance_and_close_to_it(self) -> None:
        network, (x, y) = planar(), blobs(12)
        x = x.double()
        cert = certify(network, x, y)
        truth = true_distances(network, x[cert.correct], cert.label[cert.correct])
        radius = cert.radius[cert.correct]
        assert bool((radius <= truth).all())
        by_curvature = certify(network, x, y, method="unrolled").radius[cert.correct]
        assert float((radius / truth).median()) > 0.92
        assert float((by_curvature / truth).median()) < 0.9

    @pytest.mark.slow
    def test_without_the_curvature_they_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check above has teeth: with too small a curvature across the line it finds what is false."""
        worst = line._Seen.worst
        monkeypatch.setattr(line._Seen, "worst", lambda seen, zone, K: worst(seen, zone, 0.0 * K))
        broken = 0
        for seed in range(6):
            network = KINDS["dense"](SMOOTH["tanh"], seeded(seed))
            x = torch.randn(20, *network.in_shape, dtype=F64, generator=seeded(seed + 50))
            cert = certify(network, x, method="line")
            attack = pgd(network, x, cert.label, 0.999 * cert.radius, steps=40, restarts=4)
            broken += int((attack.broken & cert.correct).sum())
        assert broken > 0

    def test_reach_the_linear_limit_where_the_gradient_outweighs_the_curvature(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[0.1, 0.0, 0.0], [-0.1, 0.0, 0.0]]))
            model[0].bias.copy_(torch.tensor([0.02, -0.02]))
        network, x = trace(model, torch.zeros(1, 3)), torch.zeros(1, 3, dtype=F64)
        # tanh(0.1 t + 0.02) = tanh(-0.1 t - 0.02) at t = -0.2, and nowhere nearer.
        assert 0.2 * (1 - 1e-3) < float(certify(network, x, method="line").radius) <= 0.2
        assert float(certify(network, x, method="unrolled").radius) < 0.2 * (1 - 2e-3)

    def test_are_those_of_a_line_for_a_linear_network(self) -> None:
        network, x = trace(nn.Linear(4, 3).eval(), torch.zeros(1, 4)), torch.randn(5, 4, dtype=F64)
        exact = certify(network, x, method="lipschitz").radius
        found = certify(network, x, method="line").radius
        assert bool((found <= exact * (1 + 1e-9)).all() and (found >= exact * (1 - 1e-6)).all())

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["mlp", "conv"])
    def test_are_never_below_those_by_curvature_and_mostly_above_all_others(self, kind: str) -> None:
        network, (x, y) = trained(kind, True), digits(30)
        found = certify(network, x, y, method="line")
        for method in ("unrolled", "lipschitz"):
            assert bool((found.radius >= certify(network, x, y, method=method).radius * (1 - 1e-9)).all())
        local = certify(network, x, y, method="local")
        assert float((found.radius > local.radius)[found.correct].double().mean()) > 0.8
        assert set(found.method) <= {"line", "misclassified"}

    @pytest.mark.slow
    def test_given_ones_are_decided_as_the_full_ones_say(self) -> None:
        network, (x, y) = trained("mlp", False), digits(40)
        full = certify(network, x, y)
        for share in (0.25, 0.5, 0.75):
            eps = float(full.radius[full.correct].quantile(share))
            decided = certify(network, x, y, epsilons=[eps])
            # Of the radius of a sample itself, deciding it may fall short: its descents take fewer steps.
            assert abs(decided.certified_accuracy(eps) - full.certified_accuracy(eps)) < 2.5 / 40

    @pytest.mark.slow
    def test_do_not_depend_on_how_the_pairs_are_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network, (x, y) = trained("mlp", False), digits(4)
        whole = certify(network, x, y, method="line").radius
        monkeypatch.setattr(line, "_size", lambda *_: 3)
        torch.testing.assert_close(certify(network, x, y, method="line").radius, whole, rtol=1e-6, atol=0)


def test_without_a_gradient_there_is_no_line() -> None:
    """f_1 - f_0 = tanh(x + 1) - tanh(x - 1) - 1.6 is at its peak, and negative, at 0: no direction leads anywhere."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        model[0].bias.copy_(torch.tensor([1.0, -1.0]))
        model[2].weight.copy_(torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
        model[2].bias.copy_(torch.tensor([1.6, 0.0]))
    network, x = trace(model, torch.zeros(1, 1)), torch.zeros(1, 1, dtype=F64)
    cert = certify(network, x, method="line")
    assert bool(cert.correct)
    assert float(cert.radius) == float(torch.maximum(cert.radius, certify(network, x, method="unrolled").radius))


def test_zones_cover_the_ball_without_a_gap() -> None:
    start, end = torch.tensor([0.1, 0.3], dtype=F64), torch.tensor([1.0, 0.3], dtype=F64)
    zones = list(line._beyond(start, end))
    assert zones[0][0].equal(start) and zones[-1][1].equal(end)
    assert all(before[1].equal(after[0]) for before, after in pairwise(zones))
    assert all(bool(((low <= at) & (at <= high)).all()) for low, high, at in zones)


@pytest.mark.parametrize("seed", range(6))
def test_a_zone_is_bounded_by_the_largest_value_in_it(seed: int) -> None:
    n, generator = 200, seeded(seed)
    r, at, slope, across, K = (torch.rand(n, dtype=F64, generator=generator) for _ in range(5))
    low, high = torch.rand(2, n, dtype=F64, generator=generator).mul(2).sub(1).mul(r).sort(dim=0).values
    high = torch.where(torch.arange(n) % 3 == 0, r, high)
    at, slope, K = at * r, 2 * slope - 1, K * 10.0 ** (seed - 2)
    zone, zero = line._Zone(low, high, at, r), torch.zeros(n, dtype=F64)
    found = line._Seen(zero, (slope, slope), across, slope.abs(), zero).worst(zone, K)
    alpha = low + (high - low) * torch.linspace(0, 1, 4001, dtype=F64)[:, None]
    root = (r.square() - alpha.square()).clamp(min=0).sqrt()
    truth = slope * (alpha - at) + across * root + 0.5 * K * (r.square() + at.square() - 2 * alpha * at)
    assert bool((found >= truth.amax(dim=0)).all())
    assert bool((found <= truth.amax(dim=0) + 2e-3 * r * (1 + K)).all())
    assert float((found - truth.amax(dim=0)).median()) < 1e-6


def test_what_the_first_zones_left_is_tried_again_with_zones_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = planar(), blobs(40)
    twice = certify(network, x.double(), y, method="line").radius
    monkeypatch.setattr(line, "_AGAIN", 0)
    once = certify(network, x.double(), y, method="line").radius
    assert bool((twice >= once).all())
    assert bool((twice > once).any())


def test_a_zone_that_ends_before_its_point_is_bounded_by_the_lesser_slope() -> None:
    """From 0.2, with a slope between 1 and 3, F at 0.11 may be 0.09 less than there, or 0.27: the former counts."""
    low, high, at, r = torch.tensor([[0.1], [0.3], [0.2], [0.11]], dtype=F64)
    F, gentle, steep, zero = torch.tensor([[0.095], [1.0], [3.0], [0.0]], dtype=F64)
    seen = line._Seen(F, (gentle, steep), zero, steep, zero)
    assert 0.005 <= float(seen.worst(line._Zone.cut((low, high, at), r), zero)) < 0.0051


@pytest.mark.parametrize("eps", [1e99, 1e300, 1.7e308])
def test_no_radius_is_too_large_to_ask_for(eps: float) -> None:
    certificate = certify(planar(), blobs(3)[0].double(), epsilons=[eps])
    assert certificate.certified_accuracy(eps) == 0


def test_refusals() -> None:
    network = planar()
    with pytest.raises(InvalidInput, match="p = 2, got p = 1"):
        certify(network, torch.zeros(1, 2), p=1, method="line")
    kinked = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), torch.zeros(1, 2))
    with pytest.raises(UnsupportedActivation):
        certify(kinked, torch.zeros(1, 2), method="line")
    assert "line" not in certify(kinked, torch.randn(4, 2)).method
