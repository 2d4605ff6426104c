"""Networks that are no chains: what they compute, with what error, their gradients, and what is refused."""

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

import curvcert
from curvcert.activations import RELU, SILU, SIN, TANH
from curvcert.errors import InvalidInput, UnsupportedBlock
from curvcert.network import MaxPool, Network
from curvcert.network.builder import start
from curvcert.network.evaluation import evaluate_with_error
from curvcert.network.nodes import AffineNode, ElementwiseNode, InputNode, MaxPoolNode, Term
from curvcert.network.rewriting.fusion import fused
from curvcert.operators import AbstractLinearMap, Dense, Identity, NormBounds
from tests.graph_families import GRAPHS, IDS, Draw, Graph, finished

F64 = torch.float64
EXACT = {
    TANH.name: mpmath.tanh,
    SIN.name: mpmath.sin,
    SILU.name: lambda x: x / (1 + mpmath.exp(-x)),
    RELU.name: lambda x: max(x, mpmath.mpf(0)),
}
every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)


def inputs(network: Network, batch: int = 3, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(batch, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(3))


def image(op: AbstractLinearMap, x: list[mpmath.mpf]) -> list[mpmath.mpf]:
    """Apply a map exactly, factor by factor."""
    for factor in reversed(op.factors) if isinstance(op, curvcert.operators.Composition) else (op,):
        x = [mpmath.fdot([mpmath.mpf(v) for v in row.tolist()], x) for row in factor.as_matrix()]
    return x


def exact_values(network: Network, x: Tensor) -> list[list[mpmath.mpf]]:
    found: list[list[mpmath.mpf]] = []
    for node in network.nodes:
        if isinstance(node, AffineNode):
            total = [mpmath.mpf(v) for v in node.offset.tolist()]
            for term in node.terms:
                total = [a + b for a, b in zip(total, image(term.map, found[term.source]), strict=True)]
            found.append(total)
        elif isinstance(node, ElementwiseNode):
            found.append([EXACT[node.activation.name](v) for v in found[node.source]])
        else:
            found.append([mpmath.mpf(v) for v in x.tolist()])
    return found


@every_graph
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_the_exact_values_are_enclosed(graph: Graph, scale: float) -> None:
    network = graph.network(1)
    x = inputs(network, 1, scale)
    with mpmath.workdps(50):
        truth = exact_values(network, x[0])
        for norms in (None, NormBounds()):
            for node, computed in zip(truth, evaluate_with_error(network, x, norms).values, strict=True):
                gaps = [abs(mpmath.mpf(v) - t) for v, t in zip(computed.value[0].tolist(), node, strict=True)]
                assert all(gap <= mpmath.mpf(e) for gap, e in zip(gaps, computed.error[0].tolist(), strict=True))
                assert mpmath.norm(gaps) <= mpmath.mpf(float(computed.error_norm[0]))
                assert float(computed.error.amax()) <= 1e-11 * (1 + scale)


def test_the_rounding_of_every_term_is_enclosed() -> None:
    """A first term that hardly rounds, and a second that does, before the sum of both rounds again."""
    x, third = start((1,), torch.device("cpu")), torch.full((1, 1), 1 / 3, dtype=F64)
    network = finished(x.activate(SIN, "sin").plus(x.linear(Dense(third)), "sum"))
    # A third of these is just above a power of two, where rounding is largest beside the number itself.
    points = 3 * 2.0**25 + torch.arange(300, dtype=F64)[:, None] / 7
    computed = evaluate_with_error(network, points).output
    with mpmath.workdps(50):
        for point, value, error in zip(points, computed.value, computed.error, strict=True):
            truth = exact_values(network, point)[-1][0]
            assert abs(mpmath.mpf(float(value)) - truth) <= mpmath.mpf(float(error))


@every_graph
def test_jacobians_are_those_of_autograd(graph: Graph) -> None:
    network = graph.network(2)
    x = inputs(network)
    expected = torch.stack([jacobian(lambda one: network(one[None])[0], point) for point in x])
    assert torch.allclose(network.jacobian(x), expected, rtol=1e-12, atol=1e-12)


@every_graph
def test_fused_nodes_compute_the_same(graph: Graph) -> None:
    value = graph.make(Draw(1), start((4,), torch.device("cpu")))
    plain, once = Network(value.builder.nodes[: value.number + 1]), Network(fused(value.builder.nodes, value.number))
    x = inputs(plain)
    assert torch.allclose(plain(x), once(x), rtol=1e-12, atol=1e-12)
    assert len(once.nodes) <= len(plain.nodes)
    assert len(fused(once.nodes, len(once.nodes) - 1)) == len(once.nodes)


@every_graph
def test_a_graph_says_where_it_is_no_chain(graph: Graph) -> None:
    network = graph.network()
    if graph.name in ("dense net", "sines"):  # what was read before is carried along: blocks with a skip
        assert network.is_chain
        assert torch.allclose(Network.of_blocks(network.blocks)(inputs(network)), network(inputs(network)), rtol=1e-12)
        return
    assert "nodes" in repr(network)
    with pytest.raises(UnsupportedBlock, match="no place in a chain"):
        _ = network.blocks


def test_read_outs_of_a_graph() -> None:
    network = GRAPHS[0].network()
    x, y = inputs(network), GRAPHS[0].network()(inputs(network))
    assert torch.allclose(network.logit(1)(x), y[:, 1:2], rtol=1e-12)
    assert torch.allclose(network.difference(0, 2)(x), y[:, :1] - y[:, 2:], rtol=1e-12, atol=1e-12)
    assert torch.equal(network.to("cpu")(x), network(x))


def test_what_is_no_network_is_refused() -> None:
    one, zero = Identity((2,)), torch.zeros(2, dtype=F64)
    x, sum_ = InputNode((2,)), AffineNode((Term(0, one),), zero, "sum")
    for nodes, words in (
        ((), "starts with its one input"),
        ((sum_,), "starts with its one input"),
        ((x, x), "starts with its one input"),
        ((x, AffineNode((Term(1, one),), zero, "late")), "may read those before it only"),
        ((x, ElementwiseNode(0, TANH, (3,), "wide")), r"takes a value of shape \(3,\)"),
        ((x, MaxPoolNode(0, MaxPool((1, 2, 2), (2, 2), (2, 2)), "pool")), "takes a value of shape"),
        ((x, sum_, ElementwiseNode(0, TANH, (2,), "tanh")), "nothing reads node 1"),
    ):
        with pytest.raises(InvalidInput, match=words):
            Network(nodes)
    for terms, offset in (((), zero), ((Term(0, one),), zero.float()), ((Term(0, one),), zero * torch.nan)):
        with pytest.raises(InvalidInput, match="finite float64 offset"):
            AffineNode(terms, offset, "bad")
    with pytest.raises(InvalidInput, match="in a sum of shape"):
        AffineNode((Term(0, Identity((3,))),), zero, "bad")


@every_graph
def test_a_network_behind_another_is_their_composition(graph: Graph) -> None:
    network = graph.network(1)
    front = finished(start((4,), torch.device("cpu")).shift(torch.full((4,), 0.5)).times(torch.tensor(2.0)))
    both, x = network.behind(front), inputs(network)
    assert torch.allclose(both(x), network(2 * (x + 0.5)), rtol=1e-12, atol=1e-12)
    assert both.is_chain == network.is_chain and both.in_shape == front.in_shape
    with pytest.raises(InvalidInput, match="cannot stand behind"):
        graph.network(1, inputs=6).behind(front)
