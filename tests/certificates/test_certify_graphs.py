"""Certificates of graphs, to the end: every method, radii that no search refutes, witnesses, files and reports."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from curvcert import curvature, lipschitz, trace
from curvcert.activations import torch_softplus
from curvcert.bounds.lipschitz.problem import all_pairs
from curvcert.certificates import Certificate, certify, load_certificate
from curvcert.certificates.constants import pair_deviations
from curvcert.falsifier import falsify, largest_hessian_lower_bound, largest_slope_lower_bound
from curvcert.network import Network
from curvcert.network.builder import start
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.norms import vector_norm
from curvcert.reporting import report
from tests.graph_families import GRAPHS, SMOOTH, Draw, Graph, finished
from tests.module_families import MODULES, ModuleGraph, trained
from tests.sampling import crossed

F64 = torch.float64
NORMS = [1.0, 2.0, math.inf]
WAYS = {"lipschitz", "curvature", "combined", "anchored", "shell"}

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=[graph.name for graph in GRAPHS])
every_smooth = pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])


def points(network: Network, batch: int = 3) -> Tensor:
    return torch.randn(batch, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(1))


@cache
def certified(graph: Graph, p: float) -> tuple[Network, Tensor, Certificate]:
    network = graph.network(7)
    x = points(network)
    return network, x, certify(network, x, p=p)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(GRAPHS, NORMS, every=3))
def test_no_search_refutes_a_radius(graph: Graph, p: float) -> None:
    network, x, cert = certified(graph, p)
    # What raises no radius is not listed, or not tried; the next test, and their own, ask for each alone.
    raising = {"line", "anchored-lipschitz", "linear", "quadratic", "norms"}
    assert set(cert.radii) - raising == (WAYS if graph in SMOOTH else {"lipschitz"})
    assert bool((cert.radius > 0).all())
    assert bool((cert.radius <= cert.attack_radius).all())
    found = falsify(network, x, cert.label, cert, restarts=1, steps=8)
    assert not found.counterexamples, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "method"),
    crossed(SMOOTH, ["unrolled", "compositional", "anchored", "anchored-lipschitz", "shell", "line"], every=4),
)
def test_every_method_alone_is_no_better_than_all(graph: Graph, method: str) -> None:
    network, x, cert = certified(graph, 2.0)
    alone = certify(network, x, method=method)
    assert bool((alone.radius <= cert.radius * (1 + 1e-9)).all())
    assert bool((alone.radius > 0).all())


def near_a_boundary(network: Network) -> Tensor:
    """Return points next to others of another class: by bisection between two inputs."""
    x = 4 * points(network, 200)
    label = network(x).argmax(dim=1)
    i, j = (label[:, None] < label).nonzero().unbind(dim=1)
    inside, outside = x[i[:20]], x[j[:20]]
    for _ in range(24):
        middle = (inside + outside) / 2
        same = (network(middle).argmax(dim=1) == label[i[:20]])[:, None]
        inside, outside = torch.where(same, middle, inside), torch.where(same, outside, middle)
    return inside


@every_smooth
@pytest.mark.parametrize("p", NORMS)
def test_witnesses_are_misclassified_at_their_distance(graph: Graph, p: float) -> None:
    network = graph.network(7)
    x = near_a_boundary(network)
    cert = certify(network, x, p=p, method="unrolled")
    index = cert.witness_index
    assert len(index) > len(x) / 2
    assert not bool((network(cert.witness_points).argmax(dim=1) == cert.label[index]).any())
    distance = vector_norm((cert.witness_points - x[index]).flatten(1), p, dim=1)
    torch.testing.assert_close(distance, cert.attack_radius[index], rtol=1e-9, atol=0)
    assert bool((cert.radius <= cert.attack_radius).all())


@pytest.mark.slow
def test_files_and_reports_of_graphs(tmp_path: Path) -> None:
    network, x, cert = certified(SMOOTH[0], 2.0)
    cert.save(tmp_path / "certificate.safetensors")
    again = load_certificate(tmp_path / "certificate.safetensors")
    torch.testing.assert_close(again.radius, cert.radius, rtol=1e-9, atol=0)
    assert report(cert, tmp_path / "report.html", network=network, x=x).exists()


def test_what_a_module_departs_from_its_network_is_within_the_deviation() -> None:
    """Beyond its threshold torch's Softplus is x: in two branches of a sum, one of them two layers deep."""
    act, draw = torch_softplus(1.0, 3.0), Draw(3)
    x = start((4,), torch.device("cpu"))
    inner = x.plus(draw.dense(draw.layer(draw.layer(x, 5, act, 3.0), 5, act, 3.0), 4), "skip")
    network = finished(draw.dense(inner.plus(draw.dense(draw.layer(x, 6, act, 3.0), 4), "sum"), 3))
    pairs = all_pairs(network, 2.0)
    at = points(network, 300)
    module: list[Tensor] = []
    for node in pairs.network.nodes:
        match node:
            case ElementwiseNode():
                module.append(softplus(module[node.source], 1.0, 3.0))
            case AffineNode():
                module.append(sum(term.map.apply(module[term.source]) for term in node.terms) + node.offset)
            case _:
                module.append(at)
    off, allowed = (module[-1] - pairs.network(at)).abs().amax(dim=0), pair_deviations(pairs)
    assert bool((off > 0.01 * allowed).all())
    assert bool((off <= allowed).all())


@cache
def traced_after_training(graph: ModuleGraph) -> Network:
    return trace(trained(graph), graph.inputs(1))


@pytest.mark.parametrize("graph", MODULES, ids=lambda graph: graph.name)
def test_no_search_exceeds_the_constants_of_a_trained_graph(graph: ModuleGraph) -> None:
    network, starts = traced_after_training(graph), graph.inputs(10).double()
    pair = network.difference(0, 1)
    assert largest_slope_lower_bound(pair, starts, steps=5) <= float(lipschitz(network, pair=(0, 1)))
    if graph.smooth:
        assert largest_hessian_lower_bound(pair, starts, steps=5) <= float(curvature(network, pair=(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(MODULES, NORMS, every=3))
def test_no_search_refutes_a_radius_of_a_trained_graph(graph: ModuleGraph, p: float) -> None:
    network, x = traced_after_training(graph), graph.inputs(2)
    cert = certify(network, x, p=p)
    assert bool((cert.radius > 0).all())
    assert not falsify(network, x, cert.label, cert, restarts=1, steps=8).counterexamples
