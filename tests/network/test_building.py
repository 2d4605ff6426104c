"""What both front ends make of a graph: the same nodes, and the same refusal of what is no chain."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import curvcert
from curvcert.errors import UnsupportedModule
from curvcert.network import LiveNetwork, Network
from curvcert.network.builder import concat, start
from curvcert.network.building import built, require_chain
from curvcert.network.nodes import AffineNode
from curvcert.operators import Identity
from tests.graph_families import F64, GRAPHS, Draw
from tests.network.cases import Function
from tests.network.onnx_models import built as model_of
from tests.network.onnx_models import loaded, node

# name -> forward pass, the same in ONNX, what the refusal says
GRAPHS_OF_BOTH: dict[str, tuple[Callable[[Tensor], Tensor], list[object], str]] = {
    "skip": (
        lambda x: x + x.tanh().sin(),
        [node("Tanh", "x", to="a"), node("Sin", "a", to="b"), node("Add", "x", "b")],
        "a skip around more than one activation",
    ),
    "sum": (
        lambda x: x.tanh() + x.sin(),
        [node("Tanh", "x", to="a"), node("Sin", "x", to="b"), node("Add", "a", "b")],
        "a sum or concatenation of two branches",
    ),
    "concatenation": (
        lambda x: torch.cat([x.tanh(), x.sin()], 1),
        [node("Tanh", "x", to="a"), node("Sin", "x", to="b"), node("Concat", "a", "b", axis=1)],
        "a sum or concatenation of two branches",
    ),
}


@pytest.mark.parametrize("name", GRAPHS_OF_BOTH)
def test_both_front_ends_refuse_what_is_no_chain_alike(name: str, tmp_path: Path) -> None:
    forward, nodes, says = GRAPHS_OF_BOTH[name]
    model = nn.Sequential(nn.Identity(), nn.Sequential(Function(lambda m, x: forward(x))))
    with pytest.raises(UnsupportedModule, match=rf"^1\.0\.\w+: {says}") as traced:
        curvcert.trace(model.eval(), torch.zeros(1, 4))
    with pytest.raises(UnsupportedModule, match=rf"^'\w+_y' \(\w+\): {says}") as read:
        loaded(model_of(nodes, ["b", 4]), tmp_path)
    with pytest.raises(UnsupportedModule, match=rf"^1\.0\.\w+: {says}"):
        LiveNetwork(model, torch.zeros(1, 4))
    assert str(traced.value).partition(": ")[2] == str(read.value).partition(": ")[2]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_what_is_no_chain_is_refused_in_one_place(graph: object) -> None:
    value = graph.make(Draw(0), start((4,), torch.device("cpu")))
    network = graph.network()
    if network.is_chain:
        assert len(built(value, F64).nodes) == len(network.nodes)
        require_chain(network)
        return
    with pytest.raises(UnsupportedModule, match="is not supported"):
        built(value, F64)
    with pytest.raises(UnsupportedModule, match="is not supported"):
        require_chain(network)


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
