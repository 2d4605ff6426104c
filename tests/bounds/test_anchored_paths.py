"""Anchored LipLT: its sum written out densely, what a search finds, and what it may not exceed."""

import math

import pytest
import torch
from torch import Tensor

from curvcert import lipschitz
from curvcert.activations import TANH, anchored_slope_range
from curvcert.bounds.lipschitz.problem import Pair
from curvcert.bounds.types import Anchor
from curvcert.falsifier.bound_search import BoundSearch, Target
from curvcert.network import Network
from tests.bounds.cases import feed_forward
from tests.graph_families import GRAPHS, Graph

F64 = torch.float64
INF = math.inf


def points(network: Network, count: int) -> Tensor:
    return 2 * torch.randn(count, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(3))


def written_out(network: Network, x: Tensor, p: float) -> float:
    """Return the sum over paths for one point of a chain of tanh layers, by its definition."""
    W = [block.W.as_matrix() for block in network.blocks]
    W = [W[0], *(W[k] @ network.blocks[k - 1].G.as_matrix() for k in range(1, len(W)))]
    W.append(network.blocks[-1].G.as_matrix())
    values = network.values(x[None])
    z = [values[unit.z][0] for unit in network.activated]
    intervals = [anchored_slope_range(TANH, one) for one in z]
    mu = [(low + high) / 2 for low, high in intervals]
    rho = [(high - low) / 2 for low, high in intervals]
    Z: list[Tensor] = []
    for k in range(len(W)):
        total, back = torch.zeros((), dtype=F64), W[k]
        for i in range(k - 1, -1, -1):
            total = total + torch.linalg.matrix_norm(back * rho[i], _order(p)) * Z[i]
            back = back * mu[i] @ W[i]
        Z.append(total + torch.linalg.matrix_norm(back, _order(p)))
    return float(Z[-1])


def _order(p: float) -> float:
    return {1.0: 1, 2.0: 2, INF: INF}[p]


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_the_sum_is_the_one_that_is_written_out(p: float) -> None:
    network = feed_forward((6, 8, 8, 8, 5), TANH, seed=2)
    x = points(network, 3)
    bound = lipschitz(network, p, method="anchored", at=x).value
    for one, value in zip(x, bound, strict=True):
        dense = written_out(network, one, p)
        assert float(value) <= dense * (1 + 1e-9)  # the least of it and of others
    deep = min(float(value) / written_out(network, one, p) for one, value in zip(x, bound, strict=True))
    assert deep > 1 - 1e-9, "here nothing else is less"


@pytest.mark.parametrize("graph", GRAPHS, ids=[graph.name for graph in GRAPHS])
@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("pair", [None, "all"])
def test_nothing_that_a_search_finds_is_above_it(graph: Graph, p: float, pair: Pair) -> None:
    network = graph.network(11)
    x = points(network, 3)
    bound = lipschitz(network, p, method="anchored", at=x, pair=pair).value
    search = BoundSearch(network, "lipschitz", p, p, Target.of(network, pair), Anchor(x), 12, 10)
    found = search.compare(bound, search.run(), "anchored")
    assert found.checks["lipschitz"] > 0
    assert not found.counterexamples
    assert bool((bound <= lipschitz(network, p, method="liplt", pair=pair).value * (1 + 1e-12)).all())


@pytest.mark.parametrize("graph", GRAPHS[:3], ids=[graph.name for graph in GRAPHS[:3]])
def test_a_point_far_out_sees_flat_neurons(graph: Graph) -> None:
    network = graph.network(1)
    near, far = (lipschitz(network, method="anchored", at=scale * points(network, 4)).value for scale in (0.01, 30.0))
    assert bool((far.mean() < near.mean()).all())


def test_a_batch_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network = GRAPHS[0].network(2)
    x = points(network, 5)
    whole = lipschitz(network, method="anchored", at=x, pair="all").value
    monkeypatch.setattr("curvcert.bounds.lipschitz.anchored_paths._BATCH_ELEMENTS", 1)
    torch.testing.assert_close(lipschitz(network, method="anchored", at=x, pair="all").value, whole, rtol=1e-12, atol=0)
