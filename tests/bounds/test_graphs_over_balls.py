"""Bounds over balls and from anchors on graphs: never below what a search finds, exact where they are known to be."""

import math

import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.bounds.lipschitz.analyses import at_points, over_balls
from curvcert.bounds.lipschitz.problem import make_problem
from tests.bounds.search import Search
from tests.graph_families import GRAPHS, IDS, Graph
from tests.sampling import crossed

F64 = torch.float64
POINTS = 3
MIXED = [(1.0, math.inf), (2.0, 1.0), (1.5, 1.5), (1.5, 3.0)]

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)


def points(graph: Graph, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(POINTS, *graph.network(seed).in_shape, dtype=F64, generator=generator)


@every_graph
def test_units_compute_what_the_nodes_do(graph: Graph) -> None:
    network, x = graph.network(0), points(graph, 0)
    values = network.values(x)
    for unit in network.units:
        read = unit.stacked([values[source] for source in unit.sources])
        torch.testing.assert_close(unit.block.evaluate(read), values[unit.output], rtol=1e-12, atol=1e-12)
    assert network.units[-1].output == len(network.nodes) - 1


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(GRAPHS, [1.0, 2.0, math.inf]))
def test_no_slope_in_a_ball_exceeds_its_bound(graph: Graph, p: float) -> None:
    for seed, r in enumerate((0.05, 1.0)):
        network, x = graph.network(seed), points(graph, seed)
        radius = torch.full((POINTS,), r, dtype=F64)
        for pair in (None, "all"):
            asked = network if pair is None else network.all_differences()
            found = Search(asked, p, p, pair is not None, steps=6).in_balls(x, radius, starts=3)
            bound = curvcert.lipschitz(network, p, at=x, radius=radius, pair=pair, method="local").value
            assert bool((found <= bound * (1 + 1e-12)).all())
            assert bool((bound <= curvcert.lipschitz(network, p, pair=pair, method="liplt").value * (1 + 1e-9)).all())


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(GRAPHS, [1.0, 2.0, math.inf]))
def test_no_quotient_from_a_point_exceeds_its_bound(graph: Graph, p: float) -> None:
    network, x = graph.network(1), points(graph, 1)
    for pair in (None, "all"):
        asked = network if pair is None else network.all_differences()
        found = Search(asked, p, p, pair is not None, steps=6).from_anchors(x)
        bound = curvcert.lipschitz(network, p, at=x, pair=pair, method="anchored").value
        assert bool((found <= bound * (1 + 1e-12)).all())
        assert bool((bound <= curvcert.lipschitz(network, p, pair=pair, method="liplt").value * (1 + 1e-9)).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "norms"), crossed(GRAPHS, [(1.0, math.inf), (2.0, 1.0), (1.5, 1.5), (1.5, 3.0)], every=2)
)
def test_no_slope_exceeds_a_bound_between_other_norms(graph: Graph, norms: tuple[float, float]) -> None:
    network, x, radius = graph.network(3), points(graph, 3), torch.full((POINTS,), 0.5, dtype=F64)
    search = Search(network, *norms, steps=6)
    everywhere = search.everywhere(6)
    for method in ("product", "liplt", "auto"):
        bound = curvcert.lipschitz(network, *norms, method=method).value
        assert bool((everywhere <= bound * (1 + 1e-12)).all())
    anchored = curvcert.lipschitz(network, *norms, at=x, method="anchored").value
    assert bool((search.from_anchors(x) <= anchored * (1 + 1e-12)).all())
    local = curvcert.lipschitz(network, *norms, at=x, radius=radius, method="local").value
    assert bool((search.in_balls(x, radius, starts=3) <= local * (1 + 1e-12)).all())


@pytest.mark.slow
@every_graph
def test_nothing_leaves_its_reach_and_no_gradient_drifts_further(graph: Graph) -> None:
    for seed, r in enumerate((0.1, 1.0)):
        network, x = graph.network(seed), points(graph, seed)
        problem = make_problem(network, 2, None, x, r, "all", None)
        balls = over_balls(problem)
        covectors = balls.gradients_of()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            d = torch.randn(x.shape, dtype=F64, generator=generator)
            d = r * d / torch.linalg.vector_norm(d, dim=1, keepdim=True)
            there = problem.network.values(x + d)
            here = problem.network.values(x)
            for z, reach in balls.reaches.items():
                moved = there[z] - here[z]
                assert bool((-reach.fall - 1e-12 <= moved).all())
                assert bool((moved <= reach.rise + 1e-12).all())
            if covectors is not None:
                J = problem.network.jacobian(x + d).flatten(2)
                drift = torch.linalg.vector_norm(J - covectors[0].value.flatten(2), dim=2)
                assert bool((drift <= covectors[0].drift * (1 + 1e-9) + 1e-13).all())


@every_graph
def test_a_ball_of_radius_0_gives_the_gradient(graph: Graph) -> None:
    network, x = graph.network(0), points(graph, 0)
    problem = make_problem(network, 2, None, x, 0.0, "all", None)
    found = at_points(problem, x).gradients
    if found is not None:
        torch.testing.assert_close(found[0].value, problem.network.jacobian(x), rtol=1e-12, atol=1e-13)
        assert float(found[0].drift.amax()) < 1e-7
        exact = torch.linalg.vector_norm(problem.network.jacobian(x).flatten(2), dim=2)
        local = curvcert.lipschitz(network, 2, at=x, radius=0.0, pair="all", method="local").value
        torch.testing.assert_close(local, exact, rtol=1e-7, atol=1e-8)
