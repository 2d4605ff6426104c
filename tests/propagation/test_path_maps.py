"""Path maps against their definition: dense matrices, expanded over all paths."""

import pytest
import torch

from curvcert.network import Network
from curvcert.network.builder import start
from curvcert.operators.circuit import Circuit
from curvcert.propagation import path_maps
from curvcert.propagation.path_maps import PathMaps
from tests.graph_families import GRAPHS, IDS, Draw, Graph, dense_path_maps, finished

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)


def assert_maps_agree(network: Network) -> list[Circuit]:
    """Compare all maps with dense ones, and return the circuits among them."""
    paths, circuits = PathMaps(network.nodes), []
    for target in range(len(network.nodes)):
        found, expected = paths.to(target), dense_path_maps(network, target)
        for value in range(target + 1):
            op = found.get(value)
            matrix = torch.zeros_like(expected[value]) if op is None else op.as_matrix()
            assert torch.allclose(matrix, expected[value], rtol=1e-12, atol=1e-12), (target, value)
            circuits += [op] if isinstance(op, Circuit) else []
    return circuits


@every_graph
def test_maps_are_the_sums_over_all_paths(graph: Graph) -> None:
    for seed in range(3):
        assert_maps_agree(graph.network(seed))


@every_graph
def test_ways_that_would_explode_become_circuits(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_maps, "_MOST_MAPS", 1)
    circuits = assert_maps_agree(graph.network(1))
    assert circuits or graph.name == "sines"


def test_a_long_tangle_stays_small() -> None:
    """Each value reads the two before it: written out, the paths would be Fibonacci's."""
    draw, values = Draw(0), [start((2,), torch.device("cpu"))]
    values.append(draw.layer(values[0], 2))
    for k in range(60):
        total = draw.dense(values[-1], 2, 0.5).plus(draw.dense(values[-2], 2, 0.5), f"sum{k}")
        values.append(total.activate(values[1].node.activation, f"a{k}"))
    network = finished(values[-1])
    paths = PathMaps(network.nodes)
    assert max(path_maps._count(op) for op in paths.to(len(network.nodes) - 1).values()) < 200
    expected = dense_path_maps(network, len(network.nodes) - 1)[0]
    assert torch.allclose(paths.to(len(network.nodes) - 1)[0].as_matrix(), expected, rtol=1e-10, atol=1e-14)
