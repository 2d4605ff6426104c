"""LipLT in its z-form on graphs: never below what is found, never above the forms that it combines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.activations import TANH
from curvcert.bounds.curvature.gradients import gradient_sizes
from curvcert.bounds.lipschitz import growth
from curvcert.bounds.lipschitz.growth import Growth
from curvcert.bounds.lipschitz.problem import all_pairs, make_problem
from curvcert.data import load_demo_network
from curvcert.network import Network
from curvcert.network.builder import Value, start
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.levels import levels_of
from curvcert.operators import AbstractLinearMap, Dense, NormBounds
from curvcert.propagation.path_maps import PathMaps
from tests.graph_families import GRAPHS, IDS, Draw, Graph, concat, finished

F64 = torch.float64

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)


def jacobians(network: Network, seed: int = 0) -> Tensor:
    """Return Jacobians near and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, *network.in_shape, dtype=F64, generator=generator)
    return network.jacobian(x * torch.logspace(-2, 1, 400, dtype=F64)[:, None]).flatten(2)


def liplt(network: Network, p: float = 2.0) -> Tensor:
    return curvcert.lipschitz(network, p, method="liplt").value


@pytest.mark.slow
@every_graph
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_no_jacobian_exceeds_the_constants(graph: Graph, p: float) -> None:
    for seed in range(2):
        network = graph.network(seed)
        J = jacobians(network)
        row = torch.linalg.vector_norm(J[:, 0], {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[p], dim=1).amax()
        for method in ("liplt", "product"):
            vector, scalar = (float(curvcert.lipschitz(network, p, method=method, logit=i)) for i in (None, 0))
            assert float(torch.linalg.matrix_norm(J, p).amax()) <= vector * (1 + 1e-12)
            assert float(row) <= scalar * (1 + 1e-12)
        assert float(liplt(network, p)) <= vector * (1 + 1e-9)
        assert float(curvcert.lipschitz(network, p)) <= float(liplt(network, p))


@every_graph
def test_every_value_and_level_is_bounded(graph: Graph) -> None:
    network = graph.network(1)
    found = Growth(make_problem(network, 2, None, None, None, None, None), NormBounds())
    for value in range(1, len(network.nodes)):
        until = Network(fused(network.nodes, value))
        J = jacobians(until)
        assert float(torch.linalg.matrix_norm(J, 2).amax()) <= float(found.of(value)) * (1 + 1e-12)
    for level in levels_of(network.nodes):
        parts = [jacobians(Network(fused(network.nodes, network.nodes[k].sources[0]))) for k in level]
        joint = torch.linalg.matrix_norm(torch.cat(parts, dim=1), 2).amax()
        together = found._of_level.get(level)
        assert together is None or float(joint) <= float(together) * (1 + 1e-12)


@every_graph
def test_levels_never_lose(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    network = graph.network(2)
    with_levels = {p: liplt(network, p) for p in (1.0, 2.0, math.inf)}
    monkeypatch.setattr(growth, "levels_of", lambda nodes: [(k,) for level in levels_of(nodes) for k in level])
    for p, value in with_levels.items():
        assert float(value) <= float(liplt(network, p)) * (1 + 1e-9)


def split(widths: Sequence[int], parts: int, scales: Sequence[float] = (), skips: bool = False) -> Network:
    """Return a chain of tanh layers, each written as several nodes that are concatenated; the function is the same.

    With `skips` a square layer Wx is written as x + (W - I)x.
    """
    draw, x = Draw(5), start((widths[0],), torch.device("cpu"))
    for n, m in pairwise(widths[:-1]):
        W = draw.normal(m, n) / n**0.5
        if scales:
            W = W * torch.tensor(scales, dtype=F64).repeat_interleave(m // len(scales))[:, None]
        if skips and n == m:
            x = x.plus(x.linear(Dense(W - torch.eye(n, dtype=F64))), "skip").activate(TANH, "tanh")
            continue
        pieces: list[Value] = [x.linear(Dense(rows.clone())).activate(TANH, "tanh") for rows in W.chunk(parts)]
        x = concat(pieces)
    return finished(x.linear(Dense(draw.normal(widths[-1], widths[-2]) / widths[-2] ** 0.5)))


@pytest.mark.slow
@pytest.mark.parametrize("scales", [(), (1.0, 1e-3, 30.0, 1.0)], ids=["even", "badly scaled"])
@pytest.mark.parametrize(
    "widths",
    [(24, 40, 40, 40, 40, 10), pytest.param((64, *(100,) * 5, 10), marks=pytest.mark.full)],
    ids=["24-40^4-10", "64-100^5-10"],
)
def test_a_layer_written_in_another_way_loses_nothing(widths: tuple[int, ...], scales: tuple[float, ...]) -> None:
    """Node by node, 64-100^5-10 in two and four parts has 2.5 and 7.8 times the chain's constant."""
    chain = float(liplt(split(widths, 1, scales)))
    assert float(liplt(split(widths, 1, scales, skips=True))) <= chain * (1 + 1e-9)
    for parts in (2, 4):
        assert float(liplt(split(widths, parts, scales))) <= chain * (1 + 1e-6)


def gradient_size_of_first_layer(network: Network, parts: int) -> float:
    problem = all_pairs(network, 2)
    sizes = [*gradient_sizes(problem, problem.norms).items()]
    first = torch.stack([size for _, size in sorted(sizes)[:parts]])
    return float(torch.linalg.vector_norm(first, dim=0).mean())


def test_gradients_are_carried_back_by_levels() -> None:
    """Node by node the first layer's gradient was bounded by 3.7 times the chain's where layers are in four parts."""
    widths = (24, 40, 40, 40, 40, 10)
    chain = gradient_size_of_first_layer(split(widths, 1), 1)
    assert gradient_size_of_first_layer(split(widths, 4), 4) <= 1.4 * chain


def densely_connected(layers: int) -> Network:
    """Return a network each of whose layers reads all that came before, concatenated."""
    draw = Draw(1)
    found = draw.layer(start((8,), torch.device("cpu")), 6)
    for _ in range(layers - 1):
        found = concat([found, draw.layer(found, 6)])
    return finished(draw.dense(found, 4))


@dataclass
class Counted:
    """How many norms, and how many sweeps for path maps, a bound took."""

    norms: int = 0
    sweeps: int = 0


def work_of_liplt(network: Network, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted, norm, sweep = Counted(), NormBounds.norm, PathMaps._maps_to

    def counting_norm(self: NormBounds, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        counted.norms += 1
        return norm(self, op, p, q)

    def counting_sweep(self: PathMaps, target: int) -> dict[int, AbstractLinearMap]:
        counted.sweeps += 1
        return sweep(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(NormBounds, "norm", counting_norm)
        patched.setattr(PathMaps, "_maps_to", counting_sweep)
        liplt(network)
    return counted


@pytest.mark.slow
def test_a_densely_connected_network_takes_a_sweep_per_node_and_a_norm_per_two(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 24
    small, large = (densely_connected(n) for n in (layers // 2, layers))
    fewer, work = (work_of_liplt(network, monkeypatch) for network in (small, large))
    assert work.sweeps <= len(large.nodes)
    # A graph's width counts, not its paths, of which there are 2**23; nodes are its layers and what joins them.
    assert work.norms <= 2 * layers**2 <= len(large.nodes) ** 2
    assert work.norms <= 4 * fewer.norms


def test_identity_skips_change_nothing() -> None:
    """x + 0 f(x), and a sum of a value with a multiple of itself, are what they are."""
    x = start((3,), torch.device("cpu"))
    W = Dense(Draw(0).normal(3, 3))
    plain = x.linear(W).activate(TANH, "tanh")
    halves = plain.linear(Dense(0.5 * torch.eye(3, dtype=F64)))
    assert float(liplt(finished(halves.plus(halves, "sum")))) == pytest.approx(float(liplt(finished(plain))), rel=1e-9)


def test_the_z_form_is_below_the_published_recursion() -> None:
    """MATH's figure for the convolutional demo network: 111.9, where the recursion on blocks gives 140.9."""
    network = curvcert.trace(load_demo_network(), torch.zeros(1, 1, 8, 8))
    assert float(liplt(network)) == pytest.approx(111.906, rel=1e-4)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
def test_several_activations_of_one_value(p: float) -> None:
    """tanh(x) + tanh(x) has the slope 2, however the two are bounded together."""
    x = start((1,), torch.device("cpu"))
    assert float(liplt(finished(x.activate(TANH, "a").plus(x.activate(TANH, "b"), "sum")), p)) == pytest.approx(2.0)


def test_two_activations_in_a_branch_by_hand() -> None:
    """x + v tanh(w tanh(u x)) in one dimension: Z = 1 + v (w u / 4 + w u / 4 + w u / 2) / ... written out."""
    u, w, v = 2.0, 3.0, 0.5
    one = lambda value: Dense(torch.full((1, 1), value, dtype=F64))  # noqa: E731
    x = start((1,), torch.device("cpu"))
    y = x.plus(x.linear(one(u)).activate(TANH, "a").linear(one(w)).activate(TANH, "b").linear(one(v)), "skip")
    z1 = u
    z2 = w * u / 2 + w * z1 / 2
    expected = (1 + v * w * u / 4) + v * w / 2 / 2 * z1 + v / 2 * z2
    assert float(liplt(finished(y))) == pytest.approx(expected, rel=1e-9)
