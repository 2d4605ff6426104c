"""Remainders beside a line: never outside, as tight as dense samples show, and true in exact arithmetic."""

import mpmath
import pytest
import torch

from curvcert.activations import declare_activation, remainder_ends, remainder_range
from tests.activations.cases import DIGITS, EXACT, ROWS, as_tensor

F64 = torch.float64


def _draw(seed: int, count: int, act) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw slopes and intervals of every size: chords, tangents, slopes at and beyond the steepest, flat ones."""
    g = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(count, dtype=F64, generator=g) * 6 - 4)
    centre = torch.randn(count, dtype=F64, generator=g) * 3 * 10.0 ** (torch.rand(count, dtype=F64, generator=g) - 0.5)
    lower, upper = centre - scale * torch.rand(count, dtype=F64, generator=g), centre + scale
    chord = (act.value(upper) - act.value(lower)) / (upper - lower)
    tangent = act.derivative(lower + (upper - lower) * torch.rand(count, dtype=F64, generator=g))
    any_ = torch.randn(count, dtype=F64, generator=g)
    tiny = 10.0 ** (-14 * torch.rand(count, dtype=F64, generator=g))
    kind = torch.randint(6, (count,), generator=g)
    ends = torch.tensor([*act.slope, 0.0, 1.0, -act.slope[1], act.slope[0]], dtype=F64)
    edge = ends[torch.randint(6, (count,), generator=g)]
    s = torch.stack([chord, tangent, any_, tiny, edge, tangent * (1 + tiny)]).gather(0, kind[None])[0]
    return s, lower, upper


@pytest.mark.parametrize("name", ROWS)
def test_encloses_samples_and_is_tight(name: str):
    act = ROWS[name]
    s, lower, upper = _draw(0, 1500, act)
    least, greatest = remainder_range(act, s, lower, upper)
    t = torch.linspace(0, 1, 801, dtype=F64)[:, None]
    z = torch.minimum(lower + t * (upper - lower), upper)
    z = torch.cat(
        [z, *(torch.full_like(lower, turn.point)[None].clamp(lower, upper) for turn in act.profiles[1].turns)]
    )
    value = act.value(z) - s * z
    error = act.profiles[0].slack(act.value(z)) + 2**-51 * (act.value(z).abs() + (s * z).abs())
    assert bool(((value + error).amin(0) >= least).all()) and bool(((value - error).amax(0) <= greatest).all())
    width = (upper - lower) / 800
    bend = 1.0 if act.curvature is None else act.curvature_c
    # Between two samples lies no more than the bend allows; then a root missed by 2**-40, and rounding.
    slack = bend * width.square() + 2.0**-38 * max(map(abs, act.slope)) * (upper - lower) + 64 * error.amax(0)
    assert bool((greatest <= value.amax(0) + slack).all()) and bool((least >= value.amin(0) - slack).all())


@pytest.mark.parametrize("name", EXACT)
def test_encloses_values_of_exact_arithmetic(name: str):
    act = ROWS[name]
    s, lower, upper = _draw(1, 24, act)
    least, greatest = remainder_range(act, s, lower, upper)
    with mpmath.workdps(DIGITS):
        for slope, a, b, lo, hi in zip(*(v.tolist() for v in (s, lower, upper, least, greatest)), strict=True):
            points = [mpmath.mpf(a) + (mpmath.mpf(b) - mpmath.mpf(a)) * k / 32 for k in range(33)]
            values = [EXACT[name](z) - mpmath.mpf(slope) * z for z in points]
            assert lo <= min(values) and max(values) <= hi


@pytest.mark.parametrize("name", ["tanh", "gelu", "sin", "relu", "selu", "softplus(1)"])
def test_ends_by_two_slopes_are_those_of_their_ranges(name: str):
    act = ROWS[name]
    below, lower, upper = _draw(3, 300, act)
    above = below.flip(0)
    least, greatest = remainder_ends(act, below, above, lower, upper)
    assert torch.equal(least, remainder_range(act, below, lower, upper)[0])
    assert torch.equal(greatest, remainder_range(act, above, lower, upper)[1])


def test_sign_of_the_curvature_is_not_read_from_computed_values():
    # Beyond about 19 the computed second derivative of tanh is 0, which looked like a linear piece.
    u = -2.6375
    least, _ = remainder_range(ROWS["tanh"], as_tensor(0.02646 / u), as_tensor(-41.24), as_tensor(34.34))
    assert float(u * least) >= 2.4276


@pytest.mark.parametrize("name", ["tanh", "gelu", "sin", "softplus(1)", "relu", "selu"])
def test_extreme_arguments_stay_enclosed(name: str):
    act = ROWS[name]
    ends = [-1e308, -1e12, -745.0, -40.0, -1e-300, 0.0, 5e-324, 1.0, 40.0, 745.0, 1e12, 1e308]
    pairs = [(a, b) for a in ends for b in ends if a <= b]
    lower, upper = (as_tensor(*side) for side in zip(*pairs, strict=True))
    for slope in (0.0, 5e-324, 1e-300, 0.5, 1.0, -1.0, 1e300):
        least, greatest = remainder_range(act, torch.full_like(lower, slope), lower, upper)
        for z in (lower, upper):
            value = act.value(z) - slope * z
            fine = value.isfinite()
            error = (act.profiles[0].slack(act.value(z)) + 2**-50 * (act.value(z).abs() + (slope * z).abs()))[fine]
            assert bool((least[fine] <= value[fine] + error).all())
            assert bool((greatest[fine] >= value[fine] - error).all())


def test_unbounded_intervals_say_nothing():
    least, greatest = remainder_range(ROWS["tanh"], as_tensor(0.5), as_tensor(-torch.inf), as_tensor(0.0))
    assert (least.item(), greatest.item()) == (-torch.inf, torch.inf)


@pytest.mark.parametrize("given", [None, (-1.0, 1.0)])
def test_declared_activations_are_enclosed_by_their_slopes(given):
    act = declare_activation("cosine", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0), given)
    s, lower, upper = _draw(2, 500, ROWS["sin"])
    least, greatest = remainder_range(act, s, lower, upper)
    z = lower + torch.linspace(0, 1, 401, dtype=F64)[:, None] * (upper - lower)
    value = torch.cos(z) - s * z
    assert bool((value >= least).all()) and bool((value <= greatest).all())
    assert bool((greatest - least <= value.amax(0) - value.amin(0) + 3 * (1 + s.abs()) * (upper - lower)).all())
