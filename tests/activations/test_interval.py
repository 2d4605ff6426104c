"""Ranges over intervals: never outside, and as tight as dense samples show."""

import mpmath
import pytest
import torch
from hypothesis import given, settings

from curvcert.activations import (
    derivative_range,
    second_derivative_range,
    value_range,
)
from curvcert.errors import InvalidInput, UnsupportedActivation
from tests.activations.cases import KINKED, ROWS, SMOOTH, as_tensor, exact_derivative, intervals, samples

RANGES = {"value": value_range, "derivative": derivative_range, "second_derivative": second_derivative_range}
CASES = [(name, kind) for name in ROWS for kind in RANGES if kind != "second_derivative" or name in SMOOTH]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
@settings(max_examples=20)
@given(interval=intervals())
def test_range_encloses_samples_and_is_tight(name: str, kind: str, interval: tuple[float, float]):
    act = ROWS[name]
    lo, hi = (end.item() for end in RANGES[kind](act, as_tensor(interval[0]), as_tensor(interval[1])))
    if name == "sin" and max(map(abs, interval)) > 2**22:
        assert (lo, hi) == (-1.0, 1.0)
        return
    observed = getattr(act, kind)(samples(*interval))
    # A computed value can be an ulp beyond the true maximum, which the range does not exceed.
    error = act.profiles[list(RANGES).index(kind)].slack(observed)
    assert lo <= float((observed + error).min()) and float((observed - error).max()) <= hi
    _assert_tight(name, kind, interval, (lo, hi), (float(observed.min()), float(observed.max())))


def _assert_tight(name, kind, interval, ours, observed):
    """Compare with the samples, and at infinite ends with the limits, which samples only approach."""
    profile = ROWS[name].profiles[list(RANGES).index(kind)]
    limits = [profile.limits[i] for i in (0, 1) if interval[i] in (-torch.inf, torch.inf)]
    jumps = [v for t in profile.turns if t.jump and interval[0] <= t.point <= interval[1] for v in (t.lower, t.upper)]
    least, most = min([observed[0], *limits, *jumps]), max([observed[1], *limits, *jumps])
    size = max([1.0, *(abs(x) for x in (least, most) if abs(x) != torch.inf), *map(abs, ROWS[name].curvature or ())])
    # Samples may miss a turn by their spacing: 2e-3 near 0, and the bend there is at most 4 in these rows.
    slack = 2e-5 * size * max(1.0, 1 / profile.scale) ** 2 / 1.0
    assert ours[0] == least or ours[0] >= least - slack
    assert ours[1] == most or ours[1] <= most + slack


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_range_over_everything_is_the_global_range(name: str, kind: str):
    act = ROWS[name]
    lo, hi = RANGES[kind](act, as_tensor(-torch.inf), as_tensor(torch.inf))
    stated = {"derivative": act.slope, "second_derivative": act.curvature}.get(kind, act.profiles[0].range)
    assert (lo.item(), hi.item()) == stated


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_point_intervals_are_within_a_few_ulps(name: str, kind: str):
    act = ROWS[name]
    z = torch.linspace(-9.13, 9.27, 5003, dtype=torch.float64)
    lo, hi = RANGES[kind](act, z, z)
    value = getattr(act, kind)(z)
    scale = max(1.0, *map(abs, act.curvature or ()), 1 / act.profiles[0].scale, act.profiles[0].scale)
    error = act.profiles[list(RANGES).index(kind)].slack(value)
    assert bool((lo <= value + error).all()) and bool((value - error <= hi).all())
    assert float((hi - lo).max()) <= 2e-13 * scale


@pytest.mark.parametrize("name", SMOOTH)
def test_turns_count_as_inside_within_ulps(name: str):
    for kind, profile in zip(RANGES, ROWS[name].profiles, strict=True):
        for turn in profile.turns:
            point = as_tensor(turn.point)
            lo, hi = RANGES[kind](ROWS[name], point, point)
            assert lo.item() <= turn.lower and turn.upper <= hi.item()


def test_sin_counts_periods():
    lower = as_tensor(0.0, 1.6, 100.0, -1000.0, 1e5)
    upper = as_tensor(1.0, 4.6, 107.0, -999.9, 1e5 + 4.0)
    lo, hi = value_range(ROWS["sin"], lower, upper)
    for i in range(len(lower)):
        z = torch.linspace(float(lower[i]), float(upper[i]), 200001, dtype=torch.float64)
        assert lo[i].item() == pytest.approx(float(z.sin().min()), abs=1e-9)
        assert hi[i].item() == pytest.approx(float(z.sin().max()), abs=1e-9)


@pytest.mark.parametrize("kind", RANGES)
def test_bad_intervals_are_refused(kind: str):
    act, one = ROWS["tanh"], as_tensor(1.0)
    with pytest.raises(InvalidInput, match="lower <= upper"):
        RANGES[kind](act, one, -one)
    with pytest.raises(InvalidInput, match="NaN"):
        RANGES[kind](act, one * torch.nan, one)
    with pytest.raises(InvalidInput, match="float64"):
        RANGES[kind](act, one.float(), one)
    with pytest.raises(InvalidInput, match="same shape"):
        RANGES[kind](act, one, as_tensor(2.0, 3.0))


@pytest.mark.parametrize("name", KINKED)
def test_kinks_have_no_curvature(name: str):
    one = as_tensor(1.0)
    with pytest.raises(UnsupportedActivation, match="kink"):
        second_derivative_range(ROWS[name], one, one)
    with pytest.raises(UnsupportedActivation, match="Lipschitz"):
        _ = ROWS[name].curvature_c


def test_shapes_are_kept_and_empty_is_fine():
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        z = torch.zeros(shape, dtype=torch.float64)
        assert all(end.shape == shape for end in derivative_range(ROWS["gelu"], z, z))


@pytest.mark.parametrize("name", ["tanh", "gelu", "softplus(1)", "sin"])
def test_point_intervals_hold_the_exact_value(name: str):
    """Computed values lie on either side of the exact ones, so that no end may do without its error."""
    z = torch.linspace(-3.1, 2.9, 60, dtype=torch.float64)
    for order, kind in enumerate(("value", "derivative")):
        lo, hi = (end.tolist() for end in RANGES[kind](ROWS[name], z, z))
        with mpmath.workdps(40):
            exact = [exact_derivative(name, order, mpmath.mpf(v)) for v in z.tolist()]
            assert all(low <= value <= high for low, value, high in zip(lo, exact, hi, strict=True))
