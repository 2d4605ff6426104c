"""Anchored ranges: never beaten by any y, and reached by one."""

import time

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvcert.activations import TANH, anchored_curvature_range, anchored_slope_range
from curvcert.errors import InvalidInput, UnsupportedActivation
from tests.activations.cases import EXACT, KINKED, ROWS, SMOOTH, as_tensor, exact_derivative

ANCHORED = {"slope": anchored_slope_range, "curvature": anchored_curvature_range}
CASES = [(name, "slope") for name in ROWS] + [(name, "curvature") for name in SMOOTH]
ANCHORS = torch.cat(
    (
        torch.linspace(-6.0, 6.0, 31, dtype=torch.float64),
        as_tensor(-200.0, -30.0, -12.0, 12.0, 30.0, 200.0, 1e-3, -1e-3, 1e-5, -1e-5, 1e-8, -1e-8),
        as_tensor(0.6584789485, 1.4142135623, -1.4142135624, 2.0, -2.0, 0.7570, -0.7570, 0.0281),
    )
)


def _quotients(name: str, kind: str, z: torch.Tensor, y: torch.Tensor):
    """Return the difference quotients of phi or phi' and a bound on their error, z x y."""
    act = ROWS[name]
    f = act.value if kind == "slope" else act.derivative
    d = y - z[:, None]
    f_y, f_z = f(y), f(z)[:, None]
    scale = act.profiles[0].scale
    error = 1e-15 * (f_y.abs() + f_z.abs() + max(1.0, scale)) / d.abs()
    return ((f_y - f_z) / d).nan_to_num(0.0), error.nan_to_num(torch.inf)


def _others(z: torch.Tensor, scale: float) -> torch.Tensor:
    """Return for each z many y: a grid about 0 and about z, and every magnitude from both."""
    near = torch.linspace(-30.0, 30.0, 12001, dtype=torch.float64) * scale
    far = 10.0 ** torch.linspace(-7, 12, 3801, dtype=torch.float64) * scale
    offsets = torch.cat((near, far, -far, as_tensor(1e30, -1e30)))
    return torch.cat((offsets.expand(len(z), -1), z[:, None] + offsets), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_sampled_quotient_leaves_the_range_and_one_comes_close(name: str, kind: str):
    act = ROWS[name]
    profile = act.profiles[1 if kind == "slope" else 2]
    z = ANCHORS * profile.scale
    lo, hi = ANCHORED[kind](act, z)
    q, error = _quotients(name, kind, z, _others(z, profile.scale))
    assert bool((q - error <= hi[:, None]).all()) and bool((q + error >= lo[:, None]).all())
    # Tightness: the supremum is reached by a sample, by the slope at z, or by a limit.
    clean = error < 1e-7 * max(map(abs, profile.range))
    slope_at_z = profile.function(z)
    most = torch.where(clean, q, -torch.inf).amax(1).maximum(slope_at_z).clamp(min=max(profile.limits))
    least = torch.where(clean, q, torch.inf).amin(1).minimum(slope_at_z).clamp(max=min(profile.limits))
    slack = 2e-5 * max(map(abs, profile.range))
    at_jump = torch.stack([(z - turn.point).abs() < 1e-3 for turn in profile.turns if turn.jump] or [z == torch.inf])
    smooth = ~at_jump.any(0)
    assert float((hi - most)[smooth].max()) <= slack
    assert float((least - lo)[smooth].max()) <= slack


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_range_holds_the_derivative_and_lies_in_the_global_one(name: str, kind: str):
    act = ROWS[name]
    z = torch.cat((ANCHORS, as_tensor(1e16, -1e16, 1e100, -1e100, 1e300, -1e300, 1.7e308, -1.7e308)))
    lo, hi = ANCHORED[kind](act, z)
    least, most = act.slope if kind == "slope" else act.curvature
    profile = act.profiles[1 if kind == "slope" else 2]
    at_z, error = profile.function(z), profile.slack(profile.function(z))
    assert bool(lo.isfinite().all()) and bool(hi.isfinite().all())
    assert bool((least <= lo).all()) and bool((hi <= most).all())
    assert bool((lo <= at_z + error).all()) and bool((at_z - error <= hi).all())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
@settings(max_examples=4)
@given(z=st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=30), seed=st.integers(0, 2**31))
def test_adversarial_ascent_does_not_leave_the_range(name: str, kind: str, z: list[float], seed: int):
    """Random search, then a local refinement about the best y, for a quotient outside.

    Many anchors at once: those drawn, and others near 0, where the quotients bend most.
    """
    profile = ROWS[name].profiles[1 if kind == "slope" else 2]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.cat((as_tensor(*z), 4 * torch.randn(30, generator=generator, dtype=torch.float64)))
    anchors = drawn * profile.scale
    lo, hi = ANCHORED[kind](ROWS[name], anchors)
    step = 5.0 * profile.scale
    y = step * torch.randn(len(anchors), 400, generator=generator, dtype=torch.float64)
    for _ in range(12):
        q, error = _quotients(name, kind, anchors, y)
        assert bool((q - error <= hi[:, None]).all()) and bool((q + error >= lo[:, None]).all())
        best = torch.stack(
            (
                torch.where(error < 1e-6, q, -torch.inf).argmax(dim=1),
                torch.where(error < 1e-6, q, torch.inf).argmin(dim=1),
            ),
            dim=1,
        )
        step *= 0.4
        noise = torch.randn(len(anchors), 400, generator=generator, dtype=torch.float64)
        y = y.gather(1, best.repeat(1, 200)) + step * noise


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "arctan", "erf", "isru", "gelu", "silu", "mish"])
@pytest.mark.parametrize("kind", ANCHORED)
def test_against_mpmath_with_fifty_digits(name: str, kind: str):
    """From each anchor, the quotient at the touching point that mpmath finds is below, within 1e-9."""
    order = 0 if kind == "slope" else 1
    act = ROWS[name]
    z = as_tensor(-2.7, -0.9, 0.31, 1.8, 5.3)
    hi = ANCHORED[kind](act, z)[1]
    q, _ = _quotients(name, kind, z, torch.linspace(-20.0, 20.0, 200003, dtype=torch.float64))
    for index, anchor in enumerate(z.tolist()):
        start = float(torch.linspace(-20.0, 20.0, 200003, dtype=torch.float64)[q[index].argmax()])
        if abs(start) > 19.9 or abs(start - anchor) < 1e-2:
            continue
        with mpmath.workdps(40):
            at = mpmath.mpf(anchor)
            f_z = exact_derivative(name, order, at)

            def condition(y, at=at, f_z=f_z):
                return exact_derivative(name, order + 1, y) * (y - at) - (exact_derivative(name, order, y) - f_z)

            y = mpmath.findroot(condition, (start - 1e-3, start + 1e-3), solver="anderson", tol=1e-30, verify=False)
            truth = (exact_derivative(name, order, y) - f_z) / (y - at)
            assert truth <= mpmath.mpf(hi[index].item()) <= truth * (1 + mpmath.mpf("1e-11")) + mpmath.mpf("1e-12")


def test_tanh_against_the_published_digits():
    assert anchored_slope_range(TANH, as_tensor(2.0))[1].item() == pytest.approx(0.5815729372, abs=6e-11)
    assert anchored_slope_range(TANH, as_tensor(-2.0))[1].item() == pytest.approx(0.5815729372, abs=6e-11)
    assert anchored_curvature_range(TANH, as_tensor(0.0))[1].item() == pytest.approx(0.5825829084, abs=6e-11)


def _bisected_tanh_slope(z: torch.Tensor) -> torch.Tensor:
    """Bisect for the touching point y < 0 of tanh from z > 0, and return the upper end, nearer to 0."""
    low, high = -z - 1, torch.zeros_like(z)
    for _ in range(200):
        y = (low + high) / 2
        below = TANH.derivative(y) * (z - y) < torch.tanh(z) - torch.tanh(y)
        low, high = torch.where(below, y, low), torch.where(below, high, y)
    return TANH.derivative(high)


def test_tanh_is_as_tight_as_bisection():
    z = torch.linspace(0.003, 12.0, 4001, dtype=torch.float64)
    ratio = anchored_slope_range(TANH, z)[1] / _bisected_tanh_slope(z)
    assert float((ratio - 1).abs().max()) <= 1e-9


@pytest.mark.parametrize("z", [1e3, 1e8, 1e15, 1e100])
def test_tanh_tail(z: float):
    """Far out the slope is close to 2/z, and never below (tanh(z) - tanh(y)) / (z - y)."""
    hi = anchored_slope_range(TANH, as_tensor(z))[1].item()
    assert 2 / (z + 400) * 0.99 <= hi <= 2 / z * 1.000001


@pytest.mark.parametrize("name", ["softplus(1)", "elu(1)", "celu(7)", "relu", "elu(0.5)"])
def test_convex_rows_have_the_global_slope_range(name: str):
    lo, hi = anchored_slope_range(ROWS[name], ANCHORS)
    assert set(lo.tolist()) == {0.0} and set(hi.tolist()) == {1.0}


def test_hardtanh_anchored_beyond_its_corner():
    lo, hi = anchored_slope_range(ROWS["hardtanh(-1,1)"], as_tensor(3.0, -5.0))
    assert lo.tolist() == [0.0, 0.0]
    assert hi.tolist() == pytest.approx([0.5, 2 / 6], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANCHORED)
def test_a_million_points(kind: str):
    """Loose: tanh takes about a second on two free cores, the slowest other row about two."""
    z = torch.randn(10**6, dtype=torch.float64) * 3
    for name in ("tanh", "mish"):
        start = time.perf_counter()
        ANCHORED[kind](ROWS[name], z)
        assert time.perf_counter() - start < 10.0


def test_bad_anchors_are_refused():
    for bad, words in (
        (as_tensor(torch.nan), "NaN"),
        (as_tensor(torch.inf), "finite"),
        (torch.zeros(1), "float64"),
    ):
        with pytest.raises(InvalidInput, match=words):
            anchored_slope_range(TANH, bad)


@pytest.mark.parametrize("name", KINKED)
def test_kinks_have_no_anchored_curvature(name: str):
    with pytest.raises(UnsupportedActivation, match="kink"):
        anchored_curvature_range(ROWS[name], as_tensor(0.0))


def test_shape_is_kept_and_empty_is_fine():
    for shape in ((), (0,), (2, 3)):
        assert anchored_slope_range(TANH, torch.zeros(shape, dtype=torch.float64))[1].shape == shape


def test_every_smooth_row_has_an_exact_counterpart():
    assert set(SMOOTH) == set(EXACT)
