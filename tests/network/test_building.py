"""What both front ends make of graphs: the same nodes, and whatever curvcert does with them, to the end."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.errors import UnsupportedActivation
from curvcert.network import LiveNetwork, Network
from curvcert.network.builder import concat, start
from curvcert.network.building import built
from curvcert.network.nodes import AffineNode
from curvcert.operators import Identity
from tests.graph_families import F64, GRAPHS, IDS, Draw, Graph
from tests.module_families import MODULES, NAMES, ModuleGraph
from tests.network.cases import Function
from tests.network.onnx_models import agree, loaded, node
from tests.network.onnx_models import built as model_of
from tests.network.test_onnx_exporters import exported

# name -> forward pass, the same in ONNX
GRAPHS_OF_BOTH: dict[str, tuple[Callable[[Tensor], Tensor], list[object]]] = {
    "skip": (
        lambda x: x + x.tanh().sin(),
        [node("Tanh", "x", to="a"), node("Sin", "a", to="b"), node("Add", "x", "b")],
    ),
    "sum": (
        lambda x: x.tanh() + x.sin(),
        [node("Tanh", "x", to="a"), node("Sin", "x", to="b"), node("Add", "a", "b")],
    ),
    "concatenation": (
        lambda x: torch.cat([x.tanh(), x.sin()], 1),
        [node("Tanh", "x", to="a"), node("Sin", "x", to="b"), node("Concat", "a", "b", axis=1)],
    ),
}

every_module = pytest.mark.parametrize("graph", MODULES, ids=NAMES)


def same_structure(one: Network, other: Network) -> bool:
    """Whether two networks have the same kinds of nodes, which read the same values."""
    return [(type(node), node.sources) for node in one.nodes] == [(type(node), node.sources) for node in other.nodes]


@pytest.mark.parametrize("name", GRAPHS_OF_BOTH)
def test_both_front_ends_make_the_same_graph(name: str, tmp_path: Path) -> None:
    forward, nodes = GRAPHS_OF_BOTH[name]
    module, model = Function(lambda m, x: forward(x)).eval(), model_of(nodes, ["b", 4])
    traced, read = curvcert.trace(module, torch.zeros(1, 4)), loaded(model, tmp_path)
    assert not traced.is_chain
    assert same_structure(traced, read) and same_structure(traced, LiveNetwork(module, torch.zeros(1, 4))())
    agree(read, model)
    x = torch.randn(3, 4, dtype=F64)
    torch.testing.assert_close(traced(x), forward(x), rtol=1e-14, atol=1e-14)
    assert float(curvcert.lipschitz(traced)) == pytest.approx(float(curvcert.lipschitz(read)), rel=1e-12)


@every_module
def test_a_module_and_its_export_are_one_graph(graph: ModuleGraph, tmp_path: Path) -> None:
    model, x = graph.model(), graph.inputs()
    traced = curvcert.trace(model, x)
    read = curvcert.load_onnx(exported(model, graph.shape, tmp_path, dynamo=False))
    assert not traced.is_chain and not read.is_chain
    expected = graph.model().double()(x.double()).detach()
    torch.testing.assert_close(traced(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(read(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@every_module
def test_from_the_module_to_the_report(graph: ModuleGraph, tmp_path: Path) -> None:
    model, x = graph.model(), graph.inputs()
    network = curvcert.trace(model, x)
    flat = x.flatten(1).double()
    jacobians = network.jacobian(x).flatten(2)
    assert float(curvcert.lipschitz(network)) >= float(torch.linalg.matrix_norm(jacobians, 2).max())
    if graph.smooth:
        change = torch.linalg.matrix_norm(jacobians[1:] - jacobians[:-1], 2) / (flat[1:] - flat[:-1]).norm(dim=1)
        assert float(curvcert.curvature(network)) >= float(change.max())
    else:
        with pytest.raises(UnsupportedActivation, match="kink"):
            curvcert.curvature(network)
    cert = curvcert.certify(network, x, method="checkable")
    assert bool((cert.radius > 0).all())
    assert not curvcert.falsify(network, x, cert.label, cert, restarts=1, steps=8).counterexamples
    files = tmp_path / "certificate.safetensors", tmp_path / "network.safetensors"
    cert.save(files[0])
    curvcert.save_network(network, files[1])
    torch.testing.assert_close(curvcert.load_certificate(files[0]).radius, cert.radius, rtol=1e-9, atol=0)
    verdict = curvcert.check_certificate(*files, x.double().numpy())
    # The checker has no engine for max-pooling, and says so.
    assert verdict.holds if graph.smooth else set(verdict.status) == {"cannot check"}, verdict
    page = curvcert.report(cert, tmp_path / "report.html", network=network, x=x)
    assert page.stat().st_size > 1000


@pytest.mark.parametrize("graph", GRAPHS, ids=IDS)
def test_nothing_is_lost_on_the_way(graph: Graph) -> None:
    value = graph.make(Draw(0), start((4,), torch.device("cpu")))
    network, direct = built(value, F64), graph.network()
    x = torch.randn(3, 4, dtype=F64)
    assert same_structure(network, direct)
    assert torch.equal(network(x), direct(x))


def test_a_concatenation_is_one_sum_of_embeddings() -> None:
    x = start((2, 3), torch.device("cpu"))
    joined = concat([x, x.cut(1, 1, 2).permuted((0, 1)), x.flipped((1,)), x.negative()], 1, "joined")
    network = Network(joined.builder.nodes)
    assert isinstance(network.nodes[-1], AffineNode) and len(network.nodes[-1].terms) == 4
    point = torch.randn(3, 2, 3, dtype=F64)
    expected = torch.cat([point, point[:, :, 1:], point.flip(-1), -point], 2)
    assert torch.equal(network(point), expected)
    again = concat([x], 0, "alone")
    assert again is x


def test_what_changes_nothing_makes_no_node() -> None:
    x = start((2, 1, 3), torch.device("cpu"))
    for same in (
        x.reshaped((2, 1, 3)), x.permuted((0, 1, 2)), x.flipped((1,)), x.cut(0, 0, 2), x.linear(Identity((2, 1, 3))),
        x.times(torch.tensor(1.0)), x.shift(torch.zeros(3)),
    ):  # fmt: skip
        assert same is x


def test_maps_are_made_for_the_values_dtype_and_device() -> None:
    x = start((3,), torch.device("cpu"), torch.float32, live=True)
    value = concat([x.cut(0, 1, 2), x.flipped((0,)).times(torch.tensor([1.0, 2.0, 3.0]))], 0, "joined")
    maps = [term.map for node in value.builder.nodes[1:] for term in node.terms]
    assert {op.dtype for op in maps} == {torch.float32}
