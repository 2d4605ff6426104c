"""GELU and SELU with constants of their own, against mpmath and against what they are near."""

import math

import mpmath
import numpy as np
import pytest
import torch

from curvcert.activations import (
    GELU,
    GELU_TANH,
    SELU,
    Activation,
    anchored_curvature_range,
    anchored_slope_range,
    derivative_range,
    gelu,
    gelu_tanh,
    remainder_range,
    second_derivative_range,
    selu,
    value_range,
)
from curvcert.checker.activations import activation as checkers
from curvcert.errors import InvalidInput

C = math.sqrt(0.5)
A, B = math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715
NEAR = (1 - 2.0**-21, 1 / (math.sqrt(2) * float(np.float32(1 / math.sqrt(2)))), 1 + 2.0**-21)
CASES = [("gelu", (C * t,)) for t in NEAR] + [
    ("gelu_tanh", (A * s, B * t)) for s, t in ((NEAR[0], NEAR[2]), (NEAR[2], NEAR[0]), (NEAR[1], NEAR[1]))
]


def made(name: str, numbers: tuple[float, ...]) -> Activation:
    return gelu(*numbers) if name == "gelu" else gelu_tanh(*numbers)


def exact(name: str, numbers: tuple[float, ...]):
    constants = [mpmath.mpf(number) for number in numbers]
    if name == "gelu":
        return lambda x: x / 2 * (1 + mpmath.erf(constants[0] * x))
    return lambda x: x / 2 * (1 + mpmath.tanh(constants[0] * x + constants[1] * x**3))


@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_turns_are_those_of_the_function(name: str, numbers: tuple[float, ...]) -> None:
    act, f = made(name, numbers), exact(name, numbers)
    with mpmath.workdps(40):
        for order, profile in enumerate(act.profiles):
            for turn in profile.turns:
                start = (mpmath.mpf(turn.point) - mpmath.mpf("1e-6"), mpmath.mpf(turn.point) + mpmath.mpf("1.1e-6"))
                g = (lambda x, order=order: mpmath.diff(f, x, order + 1)) if turn.point else None
                root = mpmath.findroot(g, start, solver="anderson", tol=1e-30, verify=False) if g else mpmath.mpf(0)
                value = mpmath.diff(f, root, order) if order else f(root)
                assert abs(root - mpmath.mpf(turn.point)) <= 4 * math.ulp(turn.point) + mpmath.mpf("1e-18")
                assert turn.lower - 1e-15 <= value <= turn.upper + 1e-15
                assert turn.upper - turn.lower < 1e-14


@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_values_and_both_derivatives(name: str, numbers: tuple[float, ...]) -> None:
    act, f = made(name, numbers), exact(name, numbers)
    z = torch.linspace(-9, 9, 13, dtype=torch.float64)
    functions = (act.value, act.derivative, act.second_derivative)
    with mpmath.workdps(40):
        for order, (function, profile) in enumerate(zip(functions, act.profiles, strict=True)):
            got = function(z)
            for point, value, slack in zip(z.tolist(), got.tolist(), profile.slack(got).tolist(), strict=True):
                assert abs(mpmath.diff(f, mpmath.mpf(point), order) - mpmath.mpf(value)) <= slack + 1e-20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_ranges_hold_what_is_sampled(name: str, numbers: tuple[float, ...]) -> None:
    act = made(name, numbers)
    draw = torch.Generator().manual_seed(0)
    lower = 8 * torch.rand(2000, dtype=torch.float64, generator=draw) - 5
    upper = lower + 10.0 ** (-8 + 9 * torch.rand(2000, dtype=torch.float64, generator=draw))
    slope = 1.5 * torch.rand(2000, dtype=torch.float64, generator=draw) - 0.3
    for t in torch.rand(8, dtype=torch.float64, generator=draw):
        z = torch.minimum(lower + t * (upper - lower), upper)
        for ranged, function in (
            (value_range, act.value),
            (derivative_range, act.derivative),
            (second_derivative_range, act.second_derivative),
        ):
            lo, hi = ranged(act, lower, upper)
            assert bool(((lo - 1e-15 <= function(z)) & (function(z) <= hi + 1e-15)).all())
        lo, hi = remainder_range(act, slope, lower, upper)
        rest = act.value(z) - slope * z
        assert bool(((lo - 1e-14 <= rest) & (rest <= hi + 1e-14)).all())
        apart = upper - z > 1e-3
        for anchored, f in ((anchored_slope_range, act.value), (anchored_curvature_range, act.derivative)):
            lo, hi = anchored(act, z)
            quotient = ((f(upper) - f(z)) / (upper - z))[apart]
            assert bool(((lo[apart] - 1e-11 <= quotient) & (quotient <= hi[apart] + 1e-11)).all())


@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_the_checker_knows_the_same_function(name: str, numbers: tuple[float, ...]) -> None:
    ours = made(name, numbers)
    theirs = checkers(ours.name)
    z = np.linspace(-9, 9, 301)
    for mine, graph in zip(ours.profiles, (theirs.value, theirs.first, theirs.second), strict=True):
        assert np.allclose(mine.function(torch.from_numpy(z)).numpy(), graph.function(z), rtol=0, atol=1e-13)
    assert np.allclose(theirs.slope, ours.slope, atol=1e-9) and np.allclose(
        theirs.second.range, ours.curvature, atol=1e-9
    )
    assert checkers("gelu(0.8)") is checkers("gelu_tanh(0.79)") is checkers("gelu(nan)") is None


def test_constants_of_the_table_give_its_rows() -> None:
    assert gelu(1 / math.sqrt(2)) is GELU
    assert gelu_tanh(A, B) is GELU_TANH
    assert selu(1.6732632423543772, 1.0507009873554805) is SELU


def test_selu_with_constants_of_its_own() -> None:
    act = selu(0.5, 3.0)
    assert (act.name, act.slope) == ("selu(0.5,3)", (0.0, 3.0))
    assert selu(2.0, 3.0).slope == (0.0, pytest.approx(6.0))
    z = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    assert act.value(z).tolist() == pytest.approx([1.5 * math.expm1(-1.0), 6.0])


@pytest.mark.parametrize("make", [lambda: gelu(0.71), lambda: gelu(math.nan), lambda: gelu_tanh(A, 0.04)])
def test_other_constants_are_refused(make) -> None:
    with pytest.raises(InvalidInput, match="needs a constant within"):
        make()
    with pytest.raises(InvalidInput, match="positive alpha"):
        selu(0.0, 1.0)
