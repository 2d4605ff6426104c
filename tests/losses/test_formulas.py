"""The losses as formulas on tensors: against cases computed by hand, and their gradients against differences."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from curvcert.errors import InvalidInput
from curvcert.losses import (
    accuracy,
    certified_margin_logits,
    certified_margin_loss,
    curvature_radii,
    exponential,
    hinge,
    lipschitz_margin,
    lost_within,
    margin_cross_entropy,
    ramp,
    reward,
    soft_lipschitz_radii,
    straight_line_radii,
)
from tests.losses.cases import F64

LOGITS = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]], dtype=F64)
Y = torch.tensor([0, 1])
NORMS = torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.0, 1.5]], dtype=F64)
K = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 4.0], [1.0, 4.0, 0.0]], dtype=F64)


def cross_entropy_by_hand(logits: list[float], y: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[y]


def test_margin_cross_entropy_by_hand() -> None:
    tau, margin = 0.25, 0.75
    rows = [[(2.0 - margin) / tau, 0.5 / tau, -1.0 / tau], [0.0, (1.0 - margin) / tau, 3.0 / tau]]
    expected = tau * sum(map(cross_entropy_by_hand, rows, (0, 1))) / 2
    assert math.isclose(float(margin_cross_entropy(LOGITS, Y, tau, margin)), expected, rel_tol=1e-14)


def test_without_a_margin_it_is_the_cross_entropy() -> None:
    expected = torch.nn.functional.cross_entropy(LOGITS, Y)
    torch.testing.assert_close(margin_cross_entropy(LOGITS, Y), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan])
def test_a_temperature_is_positive(tau: float) -> None:
    with pytest.raises(InvalidInput, match="tau must be positive"):
        margin_cross_entropy(LOGITS, Y, tau)


def test_the_paper_s_margin_is_nu_root_two_L() -> None:
    assert float(lipschitz_margin(0.5, torch.tensor(4.0, dtype=F64))) == 2 * math.sqrt(2)
    loss = margin_cross_entropy(LOGITS, Y, 0.25, lipschitz_margin(1.0, torch.tensor(3.0, dtype=F64)))
    by_hand = margin_cross_entropy(LOGITS - 3 * math.sqrt(2) * torch.eye(3, dtype=F64)[Y], Y, 0.25)
    torch.testing.assert_close(loss, by_hand, rtol=1e-14, atol=0)


def test_accuracy_counts_the_largest_logit() -> None:
    assert float(accuracy(LOGITS, Y)) == 0.5
    assert float(accuracy(LOGITS, torch.tensor([0, 2]))) == 1.0


def test_certified_margin_logits_by_hand() -> None:
    eps = 0.5
    expected = [
        [2.0, 0.5 + eps * 1.0 + eps**2 / 2 * 2.0, -1.0 + eps * 2.0 + eps**2 / 2 * 1.0],
        [0.0 + eps * 0.5 + eps**2 / 2 * 2.0, 1.0, 3.0 + eps * 1.5 + eps**2 / 2 * 4.0],
    ]
    torch.testing.assert_close(certified_margin_logits(LOGITS, Y, NORMS, K, eps), torch.tensor(expected, dtype=F64))
    loss = sum(map(cross_entropy_by_hand, expected, (0, 1))) / 2
    assert math.isclose(float(certified_margin_loss(LOGITS, Y, NORMS, K, eps)), loss, rel_tol=1e-14)


def test_one_column_of_norms_serves_every_class() -> None:
    column = torch.tensor([[1.0], [2.0]], dtype=F64)
    expected = certified_margin_logits(LOGITS, Y, column.expand(2, 3), K, 0.5)
    torch.testing.assert_close(certified_margin_logits(LOGITS, Y, column, K, 0.5), expected, rtol=0, atol=0)


def test_the_label_s_own_entries_do_not_count() -> None:
    wrong = NORMS + 7 * torch.eye(3, dtype=F64)[Y]
    expected = certified_margin_logits(LOGITS, Y, NORMS, K, 0.5)
    torch.testing.assert_close(certified_margin_logits(LOGITS, Y, wrong, K + 9 * torch.eye(3), 0.5), expected)


def test_the_label_leads_exactly_up_to_the_curvature_radius() -> None:
    radius = curvature_radii(LOGITS[:1], Y[:1], NORMS[:1], K)
    for factor, leads in ((1 - 1e-9, True), (1 + 1e-9, False)):
        z = certified_margin_logits(LOGITS[:1], Y[:1], NORMS[:1], K, radius * factor)
        assert (int(z.argmax()) == 0) == leads


def test_the_label_leads_exactly_up_to_the_line_s_radius() -> None:
    for scale in (0.1, 1.0, 10.0):
        radius = straight_line_radii(LOGITS[:1], Y[:1], NORMS[:1], scale * K)
        for factor, leads in ((1 - 1e-9, True), (1 + 1e-9, False)):
            z = certified_margin_logits(LOGITS[:1], Y[:1], NORMS[:1], scale * K, radius * factor, "line")
            assert (int(z.argmax()) == 0) == leads


def test_a_line_loses_what_the_worst_of_its_points_does() -> None:
    """By the definition: the largest g a + K (eps^2 - a^2) / 2 over a in [0, eps]."""
    g, K_, eps = torch.rand(50, dtype=F64), 4 * torch.rand(50, dtype=F64), 0.7
    a = torch.linspace(0, eps, 20001, dtype=F64)[:, None]
    worst = (g * a + K_ * (eps**2 - a**2) / 2).amax(dim=0)
    found = lost_within(eps, g, K_, "line")
    torch.testing.assert_close(found, worst, rtol=1e-6, atol=1e-9)
    assert bool((found <= lost_within(eps, g, K_, "curvature")).all())


def test_curvature_radii_by_hand() -> None:
    first = min(2 * 1.5 / (1 + math.sqrt(1 + 2 * 2 * 1.5)), 2 * 3 / (2 + math.sqrt(4 + 2 * 1 * 3)))
    expected = torch.tensor([first, 0.0], dtype=F64)  # the second sample is misclassified
    torch.testing.assert_close(curvature_radii(LOGITS, Y, NORMS, K), expected, rtol=1e-14, atol=0)


def test_soft_lipschitz_radii_by_hand() -> None:
    t, L = 5.0, K + torch.eye(3, dtype=F64)
    expected = [
        -math.log(math.exp(-t * 1.5 / 2) + math.exp(-t * 3.0 / 1)) / t,
        -math.log(math.exp(-t * 1.0 / 2) + math.exp(-t * -2.0 / 4)) / t,
    ]
    found = soft_lipschitz_radii(LOGITS, Y, L, t)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)
    assert float(soft_lipschitz_radii(LOGITS, Y, L, 500.0)[0]) == pytest.approx(0.75, rel=1e-6)


def test_only_correct_samples_are_rewarded() -> None:
    radius = torch.tensor([0.25, 0.5], dtype=F64)
    assert float(reward(LOGITS, Y, radius)) == pytest.approx(math.exp(-0.25) / 2, rel=1e-15)
    assert float(reward(LOGITS, Y, radius, hinge(1.0))) == 0.375
    assert exponential(radius).tolist() == pytest.approx([math.exp(-0.25), math.exp(-0.5)])


@pytest.mark.parametrize(
    ("progress", "share", "expected"),
    [(0.0, 0.4, 0.0), (0.1, 0.4, 0.25), (0.4, 0.4, 1.0), (0.9, 0.4, 1.0), (0.0, 0.0, 1.0), (0, 0.5, 0.0)],
)
def test_the_ramp(progress: float, share: float, expected: float) -> None:
    assert float(ramp(progress, share)) == pytest.approx(expected)
    assert float(ramp(torch.tensor(progress), share)) == pytest.approx(expected)


FORMULAS = {
    "margin cross-entropy": lambda f, g, k: margin_cross_entropy(f, Y, 0.5, lipschitz_margin(1.0, k.sum())),
    "certified margin": lambda f, g, k: certified_margin_loss(f, Y, g, k, 0.3, 0.7),
    "certified margin, line": lambda f, g, k: certified_margin_loss(f, Y, g, k, 0.9, 0.7, "line"),
    "curvature radii": lambda f, g, k: curvature_radii(f, torch.tensor([0, 2]), g + 0.1, k),
    "exponential reward": lambda f, g, k: reward(f, Y, curvature_radii(f, Y, g + 0.1, k)),
    "hinge reward": lambda f, g, k: reward(f, Y, soft_lipschitz_radii(f, Y, k, 2.0), hinge(3.0)),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_gradients_are_those_of_the_formula(formula) -> None:
    inputs = tuple(t.clone().requires_grad_() for t in (LOGITS, NORMS, K))
    assert gradcheck(formula, inputs)


ALIKE = {
    "identical logits": (torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(3, 3)),
    "logits far apart, constants zero": (
        torch.tensor([[9.0, 0, -9], [9, 0, -9]]),
        torch.zeros(2, 3),
        torch.zeros(3, 3),
    ),
    "large logits": (1e4 * torch.tensor([[1.0, 0, -1], [1, 0, -1]]), torch.ones(2, 3), torch.ones(3, 3)),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("inputs", ALIKE.values(), ids=ALIKE)
def test_values_and_gradients_stay_finite(formula, inputs) -> None:
    inputs = tuple(t.clone().requires_grad_() for t in inputs)
    value = formula(*inputs).sum()
    value.backward()
    assert torch.isfinite(value)
    assert all(bool(torch.isfinite(t.grad).all()) for t in inputs if t.grad is not None)
