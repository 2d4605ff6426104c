"""Radii carried over from other norms: the shares of balls, never refuted, and what they are worth."""

import math

import pytest
import torch

from curvcert.certificates import certify
from curvcert.certificates.methods import linear, quadratic
from curvcert.certificates.methods.norms import CARRIED, carried_share
from curvcert.data import load_demo_network
from curvcert.falsifier import falsify
from curvcert.network import trace
from curvcert.norms import vector_norm
from tests.certificates.cases import blobs, digits, digits_network, planar


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("q", CARRIED)
def test_a_ball_of_the_share_lies_in_the_ball_and_touches_it(p: float, q: float) -> None:
    n = 7
    share = carried_share(p, q, n)
    corner, side = torch.ones(1, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[:1]
    extremes = torch.cat([corner, side, torch.randn(500, n, dtype=torch.float64)])
    on_the_sphere = share * extremes / vector_norm(extremes, p, dim=1)[:, None]
    longest = float(vector_norm(on_the_sphere, q, dim=1).max())
    assert 1 - 1e-12 < longest <= 1 + 4e-16


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_no_radius_is_refuted(p: float) -> None:
    net, (x, y) = planar(), blobs(12, seed=1)
    cert = certify(net, x, y, p, "norms", progress=False)
    assert set(cert.radii) == {"norms"} and bool((cert.radius[cert.correct] > 0).all())
    found = falsify(net, x, y, cert, restarts=3, steps=12)
    assert not found and found.unconfirmed == 0


@pytest.mark.slow
def test_they_are_the_best_of_the_other_norms() -> None:
    net, _ = digits_network()
    x, y = digits(8)
    here = certify(net, x, y, math.inf, "norms", progress=False)
    best = torch.stack(
        [carried_share(math.inf, q, 64) * certify(net, x, y, q, progress=False).radius for q in (1.0, 2.0)]
    ).amax(dim=0)
    torch.testing.assert_close(here.radius, best, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_beside_everything_else_constants_and_shells_in_l2_are_taken_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers are too wide for lines and parabolas, that is much."""
    for module in (linear, quadratic):
        monkeypatch.setattr(module, "AUTO_NUMBERS", 0)
    net = trace(load_demo_network(), torch.zeros(1, 1, 8, 8))
    x, y = digits(6)
    cert = certify(net, x, y, math.inf, progress=False)
    shell = certify(net, x, y, 2, "shell", progress=False).radius / 8
    assert bool((cert.radius >= shell * (1 - 1e-9)).all()) and "norms" in cert.method
    assert {note.split()[0] for note in cert.notes} >= {"linear", "quadratic"}


@pytest.mark.slow
def test_radii_are_decided_with_those_of_the_other_norm() -> None:
    net, (x, y) = planar(), blobs(20, seed=3)
    whole = certify(net, x, y, math.inf, "norms", progress=False)
    eps = float(whole.radius.quantile(0.5)) * 0.98
    asked = certify(net, x, y, math.inf, "norms", epsilons=[eps], progress=False)
    clear = (whole.radius - eps).abs() > 0.01 * eps
    assert bool(((asked.radius >= eps) == (whole.radius >= eps))[clear].all())
