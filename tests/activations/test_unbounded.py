"""Powers, exp and log: ranges over intervals in their domain hold every sample, and nothing is claimed outside."""

import math

import pytest
import torch

from curvcert.activations import (
    EXP,
    LOG,
    Activation,
    derivative_range,
    power,
    remainder_range,
    second_derivative_range,
    value_range,
)
from curvcert.errors import InvalidInput, UnsupportedActivation

F64 = torch.float64
ROWS = [EXP, LOG, *(power(p) for p in (2, 3, 4, -1, -2, -3, 0.5, -0.5, 1.5, 0.3, -1.5))]


def intervals(act: Activation, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = 10 ** (7 * torch.rand(300, generator=generator, dtype=F64) - 6)
    if act.domain == ((-math.inf, math.inf),):
        lower = 3 * torch.randn(300, generator=generator, dtype=F64)
        return lower, lower + width
    lower = 10 ** (7 * torch.rand(300, generator=generator, dtype=F64) - 6)
    upper = lower + width
    negative = seed % 2 == 1 and len(act.domain) == 2
    return (-upper, -lower) if negative else (lower, upper)


@pytest.mark.parametrize("act", ROWS, ids=lambda act: act.name)
@pytest.mark.parametrize("seed", range(4))
def test_ranges_hold_every_sample_and_are_attained(act: Activation, seed: int) -> None:
    lower, upper = intervals(act, seed)
    share = torch.linspace(0, 1, 129, dtype=F64)[:, None]
    z = (lower + share * (upper - lower)).clamp(lower, upper)
    slope = act.derivative(lower + 0.3 * (upper - lower))
    line = slope * z
    for found, sample in (
        (value_range(act, lower, upper), act.value(z)),
        (derivative_range(act, lower, upper), act.derivative(z)),
        (second_derivative_range(act, lower, upper), act.second_derivative(z)),
        (remainder_range(act, slope, lower, upper), act.value(z) - line),
    ):
        size = act.value(z).abs() + line.abs() if sample.equal(act.value(z) - line) else sample.abs()
        slack = 1e-13 * size.amax(dim=0)
        assert bool((sample >= found[0] - slack).all()) and bool((sample <= found[1] + slack).all())
        gap = torch.maximum(sample.amin(dim=0) - found[0], found[1] - sample.amax(dim=0)) - 20 * slack
        assert bool((gap <= 0.2 * (found[1] - found[0])).all())


@pytest.mark.parametrize("act", ROWS, ids=lambda act: act.name)
def test_the_derivatives_are_those_of_the_value(act: Activation) -> None:
    z = torch.linspace(0.2, 3.0, 50, dtype=F64).requires_grad_()
    (first,) = torch.autograd.grad(act.value(z).sum(), z, create_graph=True)
    torch.testing.assert_close(first, act.derivative(z))
    if act.name != "power(2)":
        (second,) = torch.autograd.grad(first.sum(), z)
        torch.testing.assert_close(second, act.second_derivative(z))


def test_nothing_is_claimed_outside_the_domain() -> None:
    lower, upper = torch.tensor([-1.0, 0.0, -2.0], dtype=F64), torch.tensor([1.0, 1.0, -1.0], dtype=F64)
    for act in (LOG, power(0.5), power(-0.5)):
        for found in (value_range(act, lower, upper), remainder_range(act, lower, lower, upper)):
            assert found[0].tolist() == [-math.inf] * 3 and found[1].tolist() == [math.inf] * 3
    low, high = derivative_range(power(-1), lower, upper)
    assert low[:2].tolist() == [-math.inf] * 2 and low[2] == pytest.approx(-1.0) and high[2] == pytest.approx(-0.25)


def test_exp_overflows_upwards() -> None:
    low, high = value_range(EXP, torch.tensor([700.0], dtype=F64), torch.tensor([800.0], dtype=F64))
    assert float(low) <= 1.1e304 and float(high) == math.inf


def test_they_have_no_global_constants() -> None:
    assert not EXP.is_bounded and not power(2).is_tame
    with pytest.raises(UnsupportedActivation, match="in a ball"):
        _ = EXP.curvature_c
    for exponent in (0, 1, 17, math.inf):
        with pytest.raises(InvalidInput, match="exponent"):
            power(exponent)
