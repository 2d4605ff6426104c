"""The shell certificate on graphs: no gradient moves further than it says, whatever reads what."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.shell_search import Bounded
from curvcert.network import Network
from tests.graph_families import SMOOTH, Graph

F64 = torch.float64
T = torch.tensor([0.02, 0.3, 1.5], dtype=F64)

every_smooth = pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])


def points(network: Network, seed: int) -> Tensor:
    return torch.randn(3, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@every_smooth
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_no_gradient_is_found_beyond_the_bound(graph: Graph, p: float) -> None:
    for seed in range(2):
        network = graph.network(seed)
        bounded = Bounded.at(network, points(network, seed), T, p)
        found = bounded.found(steps=8)
        for layers in bounded.variants():
            for change in (bounded.change(layers), bounded.change_one_by_one(layers)):
                assert bool((found <= change.saturated).all())
                assert bool((change.saturated <= change.linear * (1 + 1e-9)).all())


@every_smooth
def test_the_bound_is_near_in_small_balls(graph: Graph) -> None:
    network = graph.network(3)
    bounded = Bounded.at(network, points(network, 3), 0 * T + 1e-4)
    assert float((bounded.found(steps=20) / bounded.change().saturated).amax()) > 0.25


@every_smooth
def test_its_linear_side_grows_at_least_linearly(graph: Graph) -> None:
    network = graph.network(0)
    x, t = points(network, 0)[:1].expand(12, -1), torch.logspace(-4, 1, 12, dtype=F64)
    slope = Bounded.at(network, x, t).change().linear / t[:, None]
    assert bool((slope[1:] >= slope[:-1] * (1 - 1e-9)).all())
