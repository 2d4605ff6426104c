"""Taylor models with numbers of their own: rises that no search exceeds, and the parts that they are made of."""

import math

import pytest
import torch
from torch import Tensor

from curvcert.activations import ACTIVATIONS, TANH
from curvcert.activations.base import EVERYWHERE
from curvcert.network.evaluation import Computed
from curvcert.propagation.coordinates import Seen
from curvcert.propagation.optimised import Numbers, Optimised, _Neurons
from curvcert.propagation.remainders import Spread
from tests.graph_families import SMOOTH, Graph
from tests.propagation.test_taylor import F64, SAMPLES, largest_found, models
from tests.sampling import crossed

SMOOTH_ONES = [a for a in ACTIVATIONS.values() if a.curvature is not None and a.domain == EVERYWHERE]


def neurons(activation=TANH, seed: int = 0) -> tuple[_Neurons, Spread, Tensor]:  # type: ignore[no-untyped-def]
    """Return the neurons of a node at random ranges, one sample, and where they are."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(size: float) -> Tensor:
        return size * torch.rand(1, 12, dtype=F64, generator=generator)

    z = 2 * numbers(2.0) - 2
    linear, high, low = numbers(1.5), numbers(0.4), -numbers(0.2)
    spread = Spread(linear, low, high, linear - low - numbers(0.1), linear + high - numbers(0.1))
    seen = Seen(torch.ones(1, 12, 1, dtype=F64), linear, None)
    return _Neurons.of(activation, Computed(z, torch.zeros_like(z), torch.zeros(1, dtype=F64)), spread, seen), spread, z


def of_neurons(size: float, seed: int) -> tuple[Tensor, Numbers]:
    """Return random covectors of two rows, with slopes and weights."""
    generator = torch.Generator().manual_seed(seed)
    u, slope, weight = (size * torch.randn(1, 2, 12, dtype=F64, generator=generator) for _ in range(3))
    return u, Numbers(slope, weight)


class TestParts:
    @pytest.mark.parametrize("activation", SMOOTH_ONES, ids=lambda each: each.name)
    def test_peaks_are_no_less_than_on_a_dense_grid_and_hardly_more(self, activation) -> None:  # type: ignore[no-untyped-def]
        made, spread, z = neurons(activation)
        u, numbers = of_neurons(1.0, 1)
        delta = -spread.fall + torch.linspace(0, 1, 4001, dtype=F64)[:, None, None] * (spread.fall + spread.rise)
        change = (activation.value(z + delta) - activation.value(z)).unsqueeze(2)
        delta, centre = delta.unsqueeze(2), ((spread.low + spread.high) / 2).unsqueeze(1)
        bracket = u * (change - numbers.slope * delta) - numbers.weight * (delta - centre).square() / 2
        dense, bound = bracket.amax(dim=0).sum(dim=2), made.peaks(u, numbers)
        assert bool((bound >= dense).all())
        assert bool((bound <= dense + 0.02 * (u.abs() + numbers.weight.abs()).sum(dim=2)).all())

    def test_peaks_between_nodes_are_paid_for(self) -> None:
        """A parabola that stands on its head has its peak between two nodes of the grid."""
        made, spread, z = neurons()
        middle = -spread.fall + (spread.fall + spread.rise) * (10.5 / 32)
        centre = (spread.low + spread.high) / 2
        weight = torch.full((1, 1, 12), 50.0, dtype=F64)
        slope = -weight * (middle - centre).unsqueeze(1)
        bracket = -slope * middle.unsqueeze(1) - weight * (middle - centre).square().unsqueeze(1) / 2
        u = torch.ones(1, 1, 12, dtype=F64)
        change = (TANH.value(z + middle) - TANH.value(z)).unsqueeze(1)
        value = (u * change + bracket).sum(dim=2)
        nodes = (
            u * (TANH.value(z + made.delta[:, :, 0]) - TANH.value(z)).unsqueeze(2)
            - slope * made.delta
            - weight * (made.delta - centre.unsqueeze(1)).square() / 2
        )
        assert float(made.peaks(u, Numbers(slope, weight))) >= float(value) > float(nodes.amax(dim=0).sum())

    def test_what_is_split_holds_the_whole_and_touches_it(self) -> None:
        made, spread, _ = neurons()
        _, numbers = of_neurons(1.0, 2)
        weight, left = made.split(numbers.weight)
        closest = torch.inf
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            signs = torch.randint(0, 2, (2, 1, 1, 12), generator=generator).to(F64) * 2 - 1
            size = torch.ones(12, dtype=F64) if seed % 2 else torch.rand(12, dtype=F64, generator=generator)
            a, e = (
                signs[0] * spread.linear.unsqueeze(1) * size,
                signs[1] * ((spread.high - spread.low) / 2).unsqueeze(1),
            )
            whole = (numbers.weight * (a + e).square()).sum(dim=2) / 2
            bound = (weight * a.square()).sum(dim=2) / 2 + left
            assert bool((whole <= bound).all())
            closest = min(closest, float((bound - whole).amin()))
        assert closest < 0.5 * float((numbers.weight.abs() * spread.linear.square()).sum())

    def test_where_linear_parts_are_nothing_a_split_is_still_a_bound(self) -> None:
        made, spread, _ = neurons()
        dead = Spread(0 * spread.linear, spread.low, spread.high, spread.fall, spread.rise)
        z = torch.zeros_like(spread.fall)
        made = _Neurons.of(TANH, Computed(z, z, torch.zeros(1, dtype=F64)), dead, made.seen)
        weight = torch.tensor([1.0, -1.0], dtype=F64)[None, :, None].expand(1, 2, 12)
        own, left = made.split(weight)
        whole = (weight * made.half.square()).sum(dim=2).clamp(min=0) / 2
        assert bool((left >= whole).all()) and bool(own.isfinite().all())


@pytest.mark.parametrize(("graph", "p"), crossed(SMOOTH, (2.0, math.inf)))
@pytest.mark.slow
def test_no_ascent_rises_higher(graph: Graph, p: float) -> None:
    network, t = graph.network(1), torch.full((SAMPLES,), 0.4, dtype=F64)
    if not Optimised.apply_to(network, p):
        pytest.skip("an activation of it is not defined everywhere")
    made, x, rows = models(network, p, 0.4)
    enough = 0.9 * made.rise(t)
    once = Optimised(made, t, enough)
    for own in (once, Optimised(made, 1.2 * t, enough, once)):
        for each in (0.4, 0.6):
            bound = own.rise(torch.full_like(t, each))
            assert bool((bound <= made.rise(torch.full_like(t, each))).all())
            assert bool((largest_found(network, x, rows, p, each) <= bound).all())


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_they_gain_where_a_network_bends(p: float) -> None:
    network = next(g for g in SMOOTH if g.name == "dense net").network(0, 8)
    made, _, _ = models(network, p, 0.4)
    t = torch.full((SAMPLES,), 0.4, dtype=F64)
    plain = made.rise(t)
    assert float((Optimised(made, t, plain).rise(t) / plain).median()) < 0.99


def test_a_sample_does_not_depend_on_its_company() -> None:
    network = next(g for g in SMOOTH if g.name == "dense net").network(0, 8)
    made, x, rows = models(network, 2.0, 0.3)
    t = torch.full((SAMPLES,), 0.3, dtype=F64)
    together = Optimised(made, t, made.rise(t)).rise(t)
    one = type(made)(made.facts, made.evaluation.of_samples(torch.tensor([1])), rows[1:2], t[:1])
    alone = Optimised(one, t[:1], one.rise(t[:1])).rise(t[:1])
    torch.testing.assert_close(alone, together[1:2], rtol=1e-6, atol=0)
    assert len(x) == SAMPLES


def test_beyond_the_reach_of_its_models_it_says_nothing() -> None:
    made, _, _ = models(SMOOTH[0].network(0), 2.0, 0.1)
    t = torch.full((SAMPLES,), 0.1, dtype=F64)
    own = Optimised(made, t, made.rise(t))
    assert bool(own.rise(100 * t).isinf().all()) and float(own.rise(0 * t).max()) < 1e-10
