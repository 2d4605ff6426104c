"""What parabolas leave out of activations: tables against dense grids."""

import pytest
import torch
from torch import Tensor

from curvcert.activations import ACTIVATIONS, Activation
from curvcert.network.evaluation import Computed
from curvcert.propagation.remainders import KNOTS, Bend, Spread, Tables, sampled, secant

F64 = torch.float64
SMOOTH = [act for act in ACTIVATIONS.values() if act.curvature is not None]
NEURONS = 40


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def case(activation: Activation, seed: int) -> tuple[Computed, Bend, Spread, Tables]:
    """Return random neurons: centres, ranges from narrow to wide, and the tables of their secants."""
    value = 2 * randn(seed, 1, NEURONS)
    z = Computed(value, torch.zeros_like(value), torch.zeros(1, dtype=F64))
    linear, low, high = (10 ** (0.7 * randn(seed + k, 1, NEURONS) - k / 2) for k in (1, 2, 3))
    spread = Spread(linear, -low, high, linear + low, linear + high)
    slope, bend = secant(activation, value, linear)
    found = sampled(activation, z, slope, bend, spread)
    bends = Bend(slope, bend, found.unit)
    return z, bends, spread, Tables.of(found, bends, linear)


def dense_remainders(activation: Activation, z: Computed, bend: Bend, spread: Spread) -> tuple[Tensor, Tensor]:
    """Return b and psi on a grid of 401 by 21 points."""
    b = torch.linspace(-1, 1, 401, dtype=F64)[:, None, None, None] * spread.linear
    share = torch.linspace(0, 1, 21, dtype=F64)[None, :, None, None]
    e = spread.low + share * (spread.high - spread.low)
    line = bend.slope * (b + e) + bend.bend * b.square() / 2
    return b, activation.value(z.value + b + e) - activation.value(z.value) - line


@pytest.mark.parametrize("activation", SMOOTH, ids=lambda act: act.name)
def test_tables_hold_on_a_dense_grid_and_are_nearly_attained(activation: Activation) -> None:
    for seed in range(3):
        z, bend, spread, tables = case(activation, 10 * seed)
        b, psi = dense_remainders(activation, z, bend, spread)
        for sign, values in zip((1.0, -1.0), tables.values, strict=True):
            for k, knot in enumerate(KNOTS):
                found = (sign * psi - knot * bend.unit * b.square() / 2).amax(dim=(0, 1))
                assert bool((values[..., k] >= found).all())
            size = psi.abs().amax(dim=(0, 1))
            # The chords' slack is second order in the range of e; where that is narrow nearly nothing is lost.
            narrow = spread.high - spread.low < 0.1 * spread.linear
            gap = values[..., 0] - (sign * psi).amax(dim=(0, 1))
            assert bool((gap[narrow] <= 0.15 * size[narrow] + 1e-9).all())


def test_between_knots_chords_bound_what_the_knots_do() -> None:
    activation = ACTIVATIONS["tanh"]
    z, bend, spread, tables = case(activation, 5)
    b, psi = dense_remainders(activation, z, bend, spread)
    u, y = randn(1, 1, 30, NEURONS), 5 * randn(2, 1, 30, NEURONS).abs()
    for sign, bound in zip((1.0, -1.0), tables.between(u, y), strict=True):
        signed = sign * torch.sign(u)
        best = torch.full_like(u, -torch.inf)
        for at, left in zip(b.flatten(0, 1), psi.amax(dim=1), strict=True):
            best = torch.maximum(best, torch.where(signed > 0, left, -torch.inf) - y * bend.unit * at.square() / 2)
        for at, left in zip(b.flatten(0, 1), (-psi).amax(dim=1), strict=True):
            best = torch.maximum(best, torch.where(signed < 0, left, -torch.inf) - y * bend.unit * at.square() / 2)
        assert bool((bound >= (u.abs() * best).sum(dim=2)).all())
    for k in range(len(KNOTS)):
        at_knot, chords = tables.at_knot(u, k), tables.between(u, torch.full_like(u, KNOTS[k] * (1 + 1e-12)))
        torch.testing.assert_close(at_knot, chords, rtol=1e-9, atol=0)


def test_a_dead_neuron_and_an_unknown_centre() -> None:
    activation, zero = ACTIVATIONS["sigmoid"], torch.zeros(1, 1, dtype=F64)
    z = Computed(zero + 0.3, zero + 1e-3, zero[0])
    slope, bend = secant(activation, z.value, zero)
    found = sampled(activation, z, slope, bend, Spread(zero, zero, zero, zero, zero))
    tables = Tables.of(found, Bend(slope, bend, found.unit), zero)
    assert float(found.unit) == 0.0
    # Where the centre is known to 1e-3 alone, so is phi there.
    assert 0 < float(tables.values.amax()) < 1e-2
