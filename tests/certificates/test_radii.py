"""The closed forms: against numerical integration, at their limits, and ordered as proved."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import curvcert
from curvcert.certificates.radii import (
    attack_radius,
    combined_radius,
    curvature_beats_lipschitz,
    curvature_radius,
    lipschitz_radius,
)
from curvcert.certificates.shell.gradient_change import GradientChange
from curvcert.certificates.shell.integral import Pairs, Spent, integrate_shell

positive = st.floats(1e-6, 1e6)
nonnegative = st.one_of(st.just(0.0), st.floats(1e-9, 1e6))


def t(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def drop_within(r: float, g: float, K: float, L: float) -> float:
    """The integral of min(g + K s, L) over [0, r], in closed form of its own."""
    if K == 0:
        return g * r
    bend = min(max((L - g) / K, 0.0), r)
    return g * bend + 0.5 * K * bend**2 + L * (r - bend)


@given(positive, nonnegative, nonnegative)
def test_the_curvature_radius_solves_its_equation(m: float, g: float, K: float) -> None:
    r = float(curvature_radius(t(m), t(g), t(K)))
    if math.isinf(r):
        assert g == 0 and K == 0
        return
    assert g * r + 0.5 * K * r * r <= m
    assert g * r + 0.5 * K * r * r >= m * (1 - 1e-12)


@given(positive, nonnegative, nonnegative, nonnegative)
def test_the_combined_radius_uses_up_the_margin_and_no_more(m: float, g: float, K: float, extra: float) -> None:
    L = g + extra
    r = float(combined_radius(t(m), t(g), t(K), t(L)))
    both = max(float(curvature_radius(t(m), t(g), t(K))), float(lipschitz_radius(t(m), t(L))))
    assert r >= both * (1 - 1e-14)
    if math.isfinite(r):
        assert drop_within(r, g, K, L) <= m * (1 + 1e-14)
        assert drop_within(r, g, K, L) >= m * (1 - 1e-9)


@given(positive, positive, nonnegative)
def test_an_attack_lies_beyond_the_certificate(m: float, g: float, K: float) -> None:
    certified, attacked = float(curvature_radius(t(m), t(g), t(K))), float(attack_radius(t(m), t(g), t(K)))
    assert certified <= attacked
    if math.isfinite(attacked):
        assert math.isclose(g * attacked - 0.5 * K * attacked**2, m, rel_tol=1e-6)


def test_the_attack_needs_a_strict_inequality() -> None:
    assert math.isinf(float(attack_radius(t(1.0), t(2.0), t(2.0))))  # 2 K m = g^2: the surrogate only touches 0
    assert math.isinf(float(attack_radius(t(1.0), t(0.0), t(0.0))))


@pytest.mark.parametrize("m", [0.0, -1.0])
def test_no_margin_no_radius(m: float) -> None:
    assert float(lipschitz_radius(t(m), t(1.0))) == 0.0
    assert float(curvature_radius(t(m), t(1.0), t(1.0))) == 0.0
    assert float(combined_radius(t(m), t(1.0), t(1.0), t(2.0))) == 0.0
    assert math.isinf(float(attack_radius(t(m), t(1.0), t(0.0))))


def test_flat_functions_are_certified_everywhere() -> None:
    assert math.isinf(float(lipschitz_radius(t(1.0), t(0.0))))
    assert math.isinf(float(curvature_radius(t(1.0), t(0.0), t(0.0))))
    assert math.isinf(float(combined_radius(t(1.0), t(0.0), t(0.0), t(0.0))))


def test_no_cancellation_at_tiny_curvature() -> None:
    assert math.isclose(float(curvature_radius(t(1.0), t(1.0), t(1e-17))), 1.0, rel_tol=1e-14)
    assert math.isclose(float(attack_radius(t(1.0), t(1.0), t(1e-17))), 1.0, rel_tol=1e-14)


def test_an_anchored_lipschitz_constant_would_overclaim() -> None:
    """f = tanh(x) - tanh(0.5) at x = -2: the true radius is 2.5."""
    m, g = math.tanh(0.5) + math.tanh(2.0), 1 - math.tanh(2.0) ** 2
    anchored_L, K = 0.5815729372, 0.769800359
    assert float(combined_radius(t(m), t(g), t(K), t(anchored_L))) > 2.5
    assert float(combined_radius(t(m), t(g), t(K), t(1.0))) <= 2.5


@given(positive, positive, positive, positive)
def test_the_comparison_predicts_the_winner(m: float, g: float, K: float, extra: float) -> None:
    shortest = float(lipschitz_radius(t(m), t(g + extra)))
    if bool(curvature_beats_lipschitz(t(m), t(g), t(K), t(shortest))):
        assert float(curvature_radius(t(m), t(g), t(K))) >= shortest * (1 - 1e-12)


def test_the_erratum_overclaims_and_the_correction_does_not() -> None:
    """f = tanh(sum x), n = 20, p = inf, x = -0.05: the true radius is 0.05."""
    m, g = math.tanh(1.0), 20 * (1 - math.tanh(1.0) ** 2)
    paper, corrected = 0.769800359 * 20, 0.769800359 * 400
    assert float(curvature_radius(t(m), t(g), t(paper))) > 0.05
    assert 0.048 < float(curvature_radius(t(m), t(g), t(corrected))) <= 0.05


sizes = st.floats(1e-300, 1e300)


@given(sizes, st.just(0.0) | sizes, st.just(0.0) | sizes, st.just(0.0) | sizes)
@example(1e-170, 1e-170, 1e-170, 1e-170)
@example(1.7e308, 1e10, 0.0, 1e10)
@example(1e-200, 0.0, 1e-200, 1e-200)
@example(1e-300, 1594900460.0, 0.0, 0.0)
def test_no_size_of_the_numbers_overclaims(m: float, g: float, K: float, extra: float) -> None:
    L = g + extra
    square, both = float(curvature_radius(t(m), t(g), t(K))), float(combined_radius(t(m), t(g), t(K), t(L)))
    M, G, C, Lip = (Fraction(v) for v in (m, g, K, L))
    # Less than the margin, so that at the boundary too the label is strictly largest.
    if square < 1e300:
        assert G * Fraction(square) + C * Fraction(square) ** 2 / 2 < M
    shortest = float(lipschitz_radius(t(m), t(L)))
    assert math.isinf(shortest) or Lip * Fraction(shortest) < M
    if both < 1e300:
        bend = min((Lip - G) / C, Fraction(both)) if C else Fraction(both)
        assert G * bend + C * bend**2 / 2 + Lip * (Fraction(both) - bend) < M
    if max(g, K) >= 1e-100 and m <= 1e100:
        assert square < math.inf


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_what_overflowed_certifies_nothing(unknown: float) -> None:
    one, lost = t(1.0), t(unknown)
    assert float(lipschitz_radius(one, lost)) == 0.0
    assert float(curvature_radius(one, lost, one)) == float(curvature_radius(one, lost, lost)) == 0.0
    assert float(combined_radius(one, lost, one, one)) == float(combined_radius(one, lost, lost, lost)) == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_the_label_is_strictly_largest_on_the_boundary(seed: int) -> None:
    """An affine network reaches its Lipschitz constant everywhere: nothing is to spare but the rounding."""
    draw = torch.Generator().manual_seed(seed)
    slope, margin = torch.rand(2, dtype=torch.float64, generator=draw).mul(10.0).exp().tolist()
    model = nn.Linear(1, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [slope]], dtype=torch.float64))
        model.bias.copy_(torch.tensor([margin, 0.0], dtype=torch.float64))
    radius = float(curvcert.certify(curvcert.trace(model.eval(), t([[0.0]])), t([[0.0]])).radius)  # type: ignore[arg-type]
    assert Fraction(slope) * Fraction(radius) < Fraction(margin)
    assert Fraction(slope) * Fraction(radius) > Fraction(margin) * (1 - Fraction(1, 2**24))


@pytest.mark.parametrize("seed", range(30))
def test_an_integral_over_shells_stays_below_the_margin(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    m, g, K, more = torch.rand(4, 1, 1, dtype=torch.float64, generator=draw).mul(8.0).exp()
    endless = GradientChange(torch.full_like(m, torch.inf), torch.full_like(m, torch.inf))
    spent, low = Spent.nothing(pairs := Pairs(m, g, K, g + more)), torch.zeros(1, dtype=torch.float64)
    for high in torch.logspace(-3, 9, 25, dtype=torch.float64).split(1):
        spent, low = integrate_shell(spent, pairs, endless, low, high), high
    M, G, C, L, r = (Fraction(float(v)) for v in (m, g, K, g + more, spent.radius))
    bend = min((L - G) / C, r)
    assert G * bend + C * bend**2 / 2 + L * (r - bend) < M
