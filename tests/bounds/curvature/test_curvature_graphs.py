"""Curvature of graphs: no second derivative and no difference of gradients that a search finds exceeds a bound."""

import math

import pytest
import torch
from torch import Tensor

from curvcert import curvature
from curvcert.bounds.curvature.gradients import gradient_bounds
from curvcert.bounds.lipschitz.problem import Pair, all_pairs
from curvcert.network import Network
from tests.bounds.curvature.search import CurvatureSearch
from tests.bounds.curvature.test_curvature_soundness import assert_above, check_scalars, points
from tests.graph_families import SMOOTH, Graph
from tests.sampling import crossed

F64 = torch.float64
INF = math.inf
MIXED = [(1.0, INF), (2.0, 1.0), (1.5, 3.0), (INF, 2.0), (3.0, 3.0)]

every_graph = pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(SMOOTH, [1.0, 2.0, INF], every=3))
def test_nothing_exceeds_a_bound_of_the_pairs(graph: Graph, p: float) -> None:
    network = graph.network(int(p) if p < INF else 3)
    check_scalars(network, p, points(network, 2), torch.tensor([0.05, 1.0], dtype=F64), steps=5, starts=6)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(SMOOTH, [1.5, 3.0], every=6))
def test_nothing_exceeds_a_bound_between_the_usual_norms(graph: Graph, p: float) -> None:
    network = graph.network(4)
    check_scalars(network, p, points(network, 1), torch.tensor([0.3], dtype=F64), steps=4, starts=4)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "norms"), crossed(SMOOTH, [(1.0, 1.0), (2.0, 2.0), (INF, INF), *MIXED], every=5))
def test_nothing_exceeds_a_bound_of_the_vector(graph: Graph, norms: tuple[float, float]) -> None:
    network, (p, q) = graph.network(5), norms
    x = points(network, 2)
    search = CurvatureSearch(network, p, q, steps=5)
    everywhere, anchored = torch.maximum(search.everywhere(6), search.quotients(6)), search.from_anchors(x, 4)
    assert_above(curvature(network, p, q).value, everywhere, "auto")
    assert_above(curvature(network, p, q, "compositional").value, everywhere, "compositional")
    assert_above(curvature(network, p, q, "unrolled").value, everywhere, "unrolled")
    assert_above(curvature(network, p, q, "anchored", at=x).value, anchored, "anchored")
    assert_above(curvature(network, p, q, at=x, radius=0.5).value, anchored, "over a ball")


@pytest.mark.slow
@every_graph
@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("pair", [None, "all"])
def test_what_is_seen_from_a_point_is_never_above_what_holds_everywhere(graph: Graph, p: float, pair: Pair) -> None:
    network = graph.network(7)
    x = points(network, 3)
    everywhere = curvature(network, p, method="compositional", pair=pair).value
    everywhere = torch.minimum(everywhere, curvature(network, p, method="unrolled", pair=pair).value)
    assert bool((curvature(network, p, method="anchored", at=x, pair=pair).value <= everywhere * (1 + 1e-12)).all())


def gradients(network: Network, x: Tensor) -> list[Tensor]:
    """Return the gradients of every output with respect to all values, (batch, outputs, *shape), by autograd."""
    found = []
    values = network.values(x.requires_grad_())
    for output in values[-1].flatten(1).unbind(dim=1):
        found.append(torch.autograd.grad(output.sum(), values, retain_graph=True, allow_unused=True))
    return [torch.stack([one if one is not None else torch.zeros_like(v) for one in each], dim=1)
            for v, each in zip(values, zip(*found, strict=True), strict=True)]  # fmt: skip


@every_graph
@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_no_gradient_inside_exceeds_its_bound(graph: Graph, p: float) -> None:
    problem = all_pairs(graph.network(6), p)
    bounds = gradient_bounds(problem, problem.norms)
    x = torch.randn(200, *problem.network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = gradients(problem.network, x * torch.logspace(-1, 1, 200, dtype=F64)[:, None])
    dual = {1.0: INF, 2.0: 2.0, INF: 1.0}[p]
    for unit in problem.network.activated:
        u, bound = found[unit.hidden].flatten(2), bounds[unit.hidden]
        assert bool((torch.linalg.vector_norm(u, dual, dim=2) <= bound.size * (1 + 1e-12)).all())
        assert bool((u.abs() <= bound.entries.flatten(1) * (1 + 1e-12)).all())
        if bound.behind is not None:
            behind = found[unit.output].flatten(2)
            assert bool((torch.linalg.vector_norm(behind, dual, dim=2) <= bound.behind * (1 + 1e-12)).all())


def test_what_needs_a_chain_is_skipped_with_the_reason() -> None:
    bound = curvature(SMOOTH[0].network(), pair=(0, 1))
    assert "crc: needs a chain of blocks" in bound.skipped


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (INF, INF), (INF, 1.0), (2.0, INF)])
def test_the_best_is_no_worse_than_what_l2_gives(p: float, q: float) -> None:
    network = SMOOTH[0].network()
    n, m = 4, 3
    into, out = n ** max(0.0, 0.5 - 1 / p), m ** max(0.0, 1 / q - 0.5)
    for pair in (None, "all"):
        bound, euclidean = curvature(network, p, q, pair=pair), curvature(network, pair=pair).value
        assert bool((bound.value <= into**2 * (1 if pair else out) * euclidean * (1 + 1e-9)).all())
        assert p == 2 or "through l2" in bound.method
