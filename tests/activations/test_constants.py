"""Every constant of the table, computed again by mpmath; and the error of each formula, measured."""

import itertools
import math

import mpmath
import pytest
import torch

from curvcert.activations import ACTIVATIONS, GELU, GELU_TANH, MISH, SILU, SIN, TANH, torch_softplus
from curvcert.activations.base import Profile
from tests.activations.cases import DIGITS, EXACT, ROWS, exact_derivative

TURNS = [
    (name, order, index)
    for name in EXACT
    for order in range(3)
    for index, turn in enumerate(ROWS[name].profiles[order].turns)
    if not turn.jump and not (turn.point == 0.0 and "elu(" in name) and name != "softsign"
]


@pytest.mark.parametrize(("name", "order", "index"), TURNS)
def test_turn_is_a_root_of_the_next_derivative_and_its_value_is_outward(name: str, order: int, index: int):
    turn = ROWS[name].profiles[order].turns[index]
    with mpmath.workdps(DIGITS):
        start = (mpmath.mpf(turn.point) - mpmath.mpf("1e-6"), mpmath.mpf(turn.point) + mpmath.mpf("1.1e-6"))
        root = mpmath.findroot(
            lambda x: exact_derivative(name, order + 1, x), start, solver="anderson", tol=1e-40, verify=False
        )
        value = exact_derivative(name, order, root)
        # A root at 0 is found to the working precision only, and the value there is quadratically close.
        tiny = mpmath.mpf(10) ** -30
        assert abs(root - mpmath.mpf(turn.point)) <= math.ulp(turn.point) + tiny
        assert mpmath.mpf(turn.lower) <= value + tiny
        assert value - tiny <= mpmath.mpf(turn.upper)
    assert turn.upper - turn.lower <= 1.01 * math.ulp(max(abs(turn.lower), abs(turn.upper)))


def _declared_global_ranges():
    """DESIGN section 4 as MATH.md corrects it: name, phi', phi''."""
    yield "tanh", (0, 1), (-0.7698003590, 0.7698003590)
    yield "sigmoid", (0, 0.25), (-0.0962250449, 0.0962250449)
    yield "softplus(30)", (0, 1), (0, 7.5)
    yield "centred_softplus(3)", (0, 1), (0, 0.75)
    yield "elu(1)", (0, 1), (0, 1)
    yield "celu(0.3)", (0, 1), (0, 3.3333333334)
    yield "gelu", (-0.1289041452, 1.1289041452), (-0.1079819331, 0.7978845609)
    yield "gelu_tanh", (-0.1289930687, 1.1289930687), (-0.1079135159, 0.7978845609)
    yield "silu", (-0.0998393202, 1.0998393202), (-0.0369143732, 0.5)
    yield "mish", (-0.1125261224, 1.0884981613), (-0.0590333570, 0.6442046373)
    yield "sin", (-1, 1), (-1, 1)
    yield "arctan", (0, 1), (-0.6495190529, 0.6495190529)
    yield "erf", (0, 1.1283791671), (-0.9678828981, 0.9678828981)
    yield "softsign", (0, 1), (-2, 2)
    yield "isru", (0, 1), (-0.8586501034, 0.8586501034)
    yield "gaussian", (-0.8577638850, 0.8577638850), (-2, 0.8925206406)
    yield "tanhshrink", (0, 1), (-0.7698003590, 0.7698003590)


@pytest.mark.parametrize(("name", "slope", "curvature"), list(_declared_global_ranges()))
def test_global_ranges_are_those_of_the_design(name: str, slope, curvature):
    act = ROWS[name]
    for ours, stated in ((act.slope, slope), (act.curvature, curvature)):
        assert stated[0] <= ours[0] + 1e-15 and ours[1] <= stated[1] + 1e-15
        assert ours == pytest.approx(stated, abs=1.01e-10)


def test_closed_forms():
    assert TANH.curvature_c == pytest.approx(4 / (3 * math.sqrt(3)), rel=1e-15)
    assert ACTIVATIONS["arctan"].curvature_c == pytest.approx(3 * math.sqrt(3) / 8, rel=1e-15)
    assert ACTIVATIONS["erf"].curvature_c == pytest.approx(2 * math.sqrt(2 / (math.pi * math.e)), rel=1e-15)
    assert ACTIVATIONS["isru"].curvature_c == pytest.approx(48 / (25 * math.sqrt(5)), rel=1e-15)
    with mpmath.workdps(DIGITS):
        assert mpmath.mpf(ACTIVATIONS["arctan"].profiles[0].limits[1]) > mpmath.pi / 2
        assert mpmath.mpf(ACTIVATIONS["centred_softplus(1)"].profiles[0].limits[0]) < -mpmath.log(2)
        alpha, scale = mpmath.mpf("1.6732632423543772"), mpmath.mpf("1.0507009873554805")
        assert alpha * scale * (1 - mpmath.mpf("1e-15")) < mpmath.mpf(ACTIVATIONS["selu"].slope[1])
        assert mpmath.mpf(ROWS["celu(0.3)"].curvature[1]) >= 1 / mpmath.mpf(0.3)


@pytest.mark.parametrize("threshold", [5.0, 20.0, 80.0])
@pytest.mark.parametrize("beta", [0.5, 1.0, 7.0])
def test_softplus_deviation_is_outward_and_tight(beta: float, threshold: float):
    act = torch_softplus(beta, threshold)
    with mpmath.workdps(DIGITS):
        truth = mpmath.log1p(mpmath.exp(-mpmath.mpf(threshold))) / mpmath.mpf(beta)
        assert truth <= mpmath.mpf(act.deviation) <= truth * (1 + mpmath.mpf("1e-11"))
    z = torch.linspace(-2, 2 * threshold / beta, 20001, dtype=torch.float64)
    gap = (torch.nn.Softplus(beta, threshold)(z) - act.value(z)).abs().max()
    assert float(gap) <= act.deviation + 1e-15 * threshold / beta


def test_torch_threshold_jump_is_the_one_of_math_md():
    assert torch_softplus(1.0).deviation == pytest.approx(2.06e-9, rel=1e-3)


ERROR_POINTS = sorted(
    {0.0, 1e-300, -1e-300, 1e-9, -1e-9}
    | {
        s * x
        for s in (1, -1)
        for x in (0.01, 0.3, 0.5, 0.66, 0.9, 1.3, 1.42, 2.01, 2.4, 3.3, 5, 8, 14, 25, 37, 60, 700)
    }
    | {math.sin(k) * 1.37**k for k in range(20)}
)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_evaluation_error_is_far_within_the_slack(name: str, order: int):
    profile: Profile = ROWS[name].profiles[order]
    points = [x for x in ERROR_POINTS if x != 0.0 or order == 0]
    z = torch.tensor(points, dtype=torch.float64)
    computed = profile.function(z)
    slack = profile.slack(computed)
    # Twice: a vectorised and a scalar code path of torch may differ.
    alone = torch.stack([profile.function(x.reshape(1))[0] for x in z])
    for index, x in enumerate(points):
        jump = abs(x) < 1e-8 and ("elu(" in name or name == "softsign")
        if order > 0 and (abs(x) > 60 or jump):
            continue  # mpmath differentiates numerically: not across a jump, and slowly far out
        # Enough digits that nothing is lost in a tail, or next to 0.
        with mpmath.workdps(700 if abs(x) > 60 or abs(x) < 1e-100 else 120):
            truth = exact_derivative(name, order, mpmath.mpf(x))
            for value in (computed[index], alone[index]):
                error = abs(mpmath.mpf(float(value)) - truth)
                assert error <= mpmath.mpf(float(slack[index])) / 3, (x, float(error), float(slack[index]))


@pytest.mark.parametrize("name", ROWS)
def test_trend_between_the_turns(name: str):
    for profile in ROWS[name].profiles:
        if profile is None:
            continue
        points = [turn.point for turn in profile.turns]
        reach = 8 * profile.scale if profile.period is None else 1.0
        ends = [(points or [0.0])[0] - reach, *points, (points or [0.0])[-1] + reach]
        for (left, right), trend in zip(itertools.pairwise(ends), profile.trend, strict=True):
            t = torch.linspace(0.0005, 0.9995, 2000, dtype=torch.float64)
            steps = profile.function(left + t * (right - left)).diff()
            noise = 4 * float(profile.slack(profile.function(t)).max())
            signed = {"+": steps, "-": -steps, "0": -steps.abs()}[trend]
            assert float(signed.min()) >= -noise


@pytest.mark.parametrize("act", [GELU, GELU_TANH, SILU, MISH, SIN], ids=lambda act: act.name)
def test_non_monotone_rows_have_a_negative_slope(act):
    assert act.slope[0] < 0
