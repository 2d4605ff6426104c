"""The linear certificate: never refuted, beside CROWN written out, at home with kinks and on any graph."""

import math

import pytest
import torch
from torch import Tensor, nn

from curvcert.attacks import pgd
from curvcert.certificates import certify
from curvcert.certificates.methods.balls import PRECISION
from curvcert.falsifier import falsify
from curvcert.network import Network
from curvcert.norms import conjugate, vector_norm
from tests.certificates.cases import blobs, digits, digits_network, planar
from tests.graph_families import GRAPHS, IDS

F64 = torch.float64
NORMS = [1.0, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.SiLU, nn.Hardtanh, nn.SELU, nn.GELU])
def test_no_radius_is_refuted(activation: type[nn.Module], p: float) -> None:
    net, (x, y) = planar(activation), blobs(12, seed=1)
    cert = certify(net, x, y, p, "linear", progress=False)
    assert set(cert.radii) == {"linear"} and bool((cert.radius[cert.correct] > 0).all())
    found = falsify(net, x, y, cert, restarts=3, steps=12)
    assert not found and found.unconfirmed == 0


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS, ids=IDS)
def test_no_radius_is_refuted_on_graphs(graph) -> None:
    net = graph.network(1)
    x = torch.randn(6, *net.in_shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    cert = certify(net, x, None, 2, "linear", progress=False)
    assert bool((cert.radius[cert.correct] > 0).all())
    assert not falsify(net, x, None, cert, restarts=2, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_reaches_crown_written_out(activation: type[nn.Module], p: float) -> None:
    net, (x, y) = planar(activation), blobs(7, seed=2)
    cert = certify(net, x, y, p, "linear", progress=False)
    ours, crown = cert.radius[cert.correct], crown_radii(net, x.double(), y, p)[cert.correct]
    assert float((ours / crown).median()) >= 1 - 2 * PRECISION
    assert bool((ours >= 0.97 * crown).all())


def test_lies_between_a_lipschitz_radius_and_an_attack() -> None:
    net, _ = digits_network()
    x, y = digits(12)
    for p, most in ((2.0, 3.0), (math.inf, 0.5)):
        linear = certify(net, x, y, p, "linear", progress=False)
        plain = certify(net, x, y, p, "product", progress=False)
        assert bool((linear.radius >= plain.radius).all())
        attack = pgd(net, x, y, most, p, restarts=1)
        nearest = vector_norm((attack.points - x).flatten(1), p, dim=1)
        reached = attack.broken & linear.correct
        assert bool((linear.radius <= nearest)[reached].all())


def test_decides_the_radii_that_are_asked_for() -> None:
    net, (x, y) = planar(nn.ReLU), blobs(30, seed=3)
    whole = certify(net, x, y, 2, "linear", progress=False)
    eps = (float(whole.radius.quantile(0.3)), float(whole.radius.quantile(0.7)))
    asked = certify(net, x, y, 2, "linear", epsilons=eps, progress=False)
    for one in eps:
        clear = (whole.radius - one).abs() > 2 * PRECISION * one
        assert bool(((asked.radius >= one) == (whole.radius >= one))[clear].all())


def test_kinks_are_certified_without_curvature_and_it_says_so() -> None:
    net, (x, y) = planar(nn.ReLU), blobs(6)
    cert = certify(net, x, y, 2, progress=False)
    assert any("curvature skipped" in note and "kink" in note for note in cert.notes)


def test_pairs_that_are_proven_further_keep_it() -> None:
    net, (x, y) = planar(), blobs(12, seed=5)
    cert = certify(net, x, y, 2, "linear", progress=False)
    others = cert.pair_radius.scatter(1, cert.label[:, None], torch.inf)
    assert torch.equal(others.amin(dim=1)[cert.correct], cert.radius[cert.correct])


def crown_radii(net: Network, x: Tensor, y: Tensor, p: float) -> Tensor:
    """Return radii by CROWN as it is published (Zhang et al., 2018), in plain float64 matrices, by 16 bisections."""
    layers = [(block.W.as_matrix(), block.b) for block in net.blocks if hasattr(block, "W")]
    last = net.blocks[-1]
    final = (last.G.as_matrix() if hasattr(last, "G") else last.H.as_matrix(), last.c)
    relu = "relu" in net.blocks[0].activation.name
    low, high = torch.zeros(len(x), dtype=F64), torch.full((len(x),), 4.0, dtype=F64)
    for _ in range(16):
        middle = (low + high) / 2
        holds = torch.tensor([_holds(layers, final, relu, *one, p) for one in zip(x, y, middle, strict=True)])
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return low


def _holds(layers, final, relu: bool, x: Tensor, y: Tensor, r: Tensor, p: float) -> bool:
    lines: list = []
    for k, (W, b) in enumerate(layers):
        upper = _bound(layers[:k], lines, W, b, x, r, p)
        lower = -_bound(layers[:k], lines, -W, -b, x, r, p)
        lines.append((_relu_lines if relu else _tanh_lines)(lower, upper))
    V, c = final
    rows = V - V[y]
    return bool((_bound(layers, lines, rows, c - c[y], x, r, p)[torch.arange(len(V)) != y] < 0).all())


def _bound(layers, lines, A: Tensor, b: Tensor, x: Tensor, r: Tensor, p: float) -> Tensor:
    for (W, offset), (above, over, below, under) in zip(layers[::-1], lines[::-1], strict=True):
        b = b + A.clamp(min=0) @ over + A.clamp(max=0) @ under
        A = A.clamp(min=0) * above + A.clamp(max=0) * below
        A, b = A @ W, b + A @ offset
    return A @ x + b + r * vector_norm(A, conjugate(p), dim=1)


def _relu_lines(lo: Tensor, hi: Tensor):
    chord = torch.where(lo >= 0, 1.0, torch.where(hi <= 0, 0.0, hi / (hi - lo).clamp(min=1e-30)))
    below = torch.where((lo < 0) & (hi > 0), (hi > -lo).double(), chord)
    return chord, torch.where((lo < 0) & (hi > 0), -chord * lo, 0.0), below, torch.zeros_like(lo)


def _tanh_lines(lo: Tensor, hi: Tensor):
    above, over = _tanh_above(lo, hi)
    below, under = _tanh_above(-hi, -lo)
    return above, over, below, -under


def _tanh_above(lo: Tensor, hi: Tensor):
    """Return lines above tanh: the chord left of 0, a tangent in the middle right of it, or one through (lo, phi)."""
    chord = (hi.tanh() - lo.tanh()) / (hi - lo).clamp(min=1e-12)
    a, b = torch.zeros_like(hi), hi.clamp(min=0)
    for _ in range(60):
        d = (a + b) / 2
        left = (1 - d.tanh() ** 2) * (d - lo) > d.tanh() - lo.tanh()
        a, b = torch.where(left, d, a), torch.where(left, b, d)
    at = torch.where(lo >= 0, (lo + hi) / 2, torch.maximum(b, torch.zeros_like(b)))
    slope = 1 - at.tanh() ** 2
    straight = (hi <= 0) | ((lo < 0) & ((1 - hi.tanh() ** 2) * (hi - lo) >= hi.tanh() - lo.tanh()))
    slope = torch.where(straight, chord, slope)
    return slope, torch.where(straight, lo.tanh() - slope * lo, at.tanh() - slope * at)
