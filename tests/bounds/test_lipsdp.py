"""LipSDP with free multipliers: any of them give a bound, the best are found, and rounding is paid for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from curvcert import lipschitz
from curvcert.activations import TANH, leaky_relu
from curvcert.bounds.curvature.portfolio import curvature, curvature_of
from curvcert.bounds.lipschitz import LipSDP
from curvcert.bounds.lipschitz.lipsdp import _Scaled, _scaled, proven_constant, weighted_reaches
from curvcert.bounds.lipschitz.multipliers import best_multipliers, first_multipliers, value_estimate
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.errors import InvalidInput
from curvcert.network import Block, Network
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.network.rewriting.levels import levels_of
from curvcert.operators import Dense, Identity, NormBounds
from curvcert.operators.verified import inverse_form_upper_bound
from curvcert.propagation.neuron_maps import neuron_maps
from tests.bounds.cases import ROWS, convolutional, feed_forward, linear, one_dimensional, randn
from tests.bounds.search import ROUNDING, Search
from tests.graph_families import GRAPHS, IDS, Graph

F64 = torch.float64

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)


def scaled(network: Network) -> _Scaled:
    return _scaled(make_problem(network, 2, None, None, None, None, None))


def by_definition(network: Network, T: Tensor) -> float:
    """The constant that multipliers give, neuron by neuron in the nodes' order: the slow and obvious meaning."""
    nodes, values = network.nodes, dict[int, Tensor]()
    sizes = [math.prod(node.shape) for node in nodes]
    neurons = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode)]
    starts = {k: sizes[0] + sum(sizes[j] for j in neurons[:place]) for place, k in enumerate(neurons)}
    columns = sizes[0] + sum(sizes[k] for k in neurons)
    M = torch.zeros(columns, columns, dtype=F64)
    M[: sizes[0], : sizes[0]] = torch.eye(sizes[0], dtype=F64)
    for k, node in enumerate(nodes):
        values[k] = torch.zeros(sizes[k], columns, dtype=F64)
        if k == 0:
            values[k][:, : sizes[0]] = torch.eye(sizes[0], dtype=F64)
        elif isinstance(node, AffineNode):
            values[k] = sum(
                (term.map.as_matrix() @ values[term.source] for term in node.terms), torch.zeros(sizes[k], columns)
            )
        elif isinstance(node, ElementwiseNode):
            values[k][:, starts[k] : starts[k] + sizes[k]] = torch.eye(sizes[k], dtype=F64)
            alpha, beta = node.activation.slope
            u, v = values[k] - alpha * values[node.source], beta * values[node.source] - values[k]
            weighed = u.mT @ torch.diag(T[starts[k] - sizes[0] :][: sizes[k]]) @ v
            M -= weighed + weighed.mT
    assert float(torch.linalg.eigvalsh(M)[0]) > 0
    C = values[len(nodes) - 1]
    return float(torch.linalg.eigvalsh(C @ torch.linalg.solve(M, C.mT))[-1]) ** 0.5


@every_graph
def test_the_form_is_its_definition(graph: Graph) -> None:
    network = graph.network(1)
    maps, found = neuron_maps(network.nodes), scaled(network)
    T = first_multipliers(found.form)
    assert T is not None
    T = T * torch.linspace(0.7, 1.0, len(T), dtype=F64)
    # The definition has the neurons in the nodes' order, in their own units.
    order = [k for level in maps.levels for k in level]
    parts = dict(zip(order, (T / found.behind**2).split(list(maps.sizes)), strict=True))
    expected = by_definition(network, torch.cat([parts[k] for k in sorted(parts)]))
    bound = float(proven_constant(found.form, T) * found.outputs)
    assert expected * (1 - 1e-12) <= bound <= expected * (1 + 1e-9)


@every_graph
@pytest.mark.parametrize("seed", range(2))
def test_any_multipliers_give_a_bound_or_none(graph: Graph, seed: int) -> None:
    network, generator = graph.network(seed), torch.Generator().manual_seed(seed)
    found, slope = scaled(network), float(Search(network, 2.0, 2.0, steps=10).everywhere())
    start = first_multipliers(found.form)
    assert start is not None
    best = best_multipliers(found.form, start)
    for T in (start, best):
        for forged in (
            T,
            T * 2.0 ** torch.randn(len(T), dtype=F64, generator=generator),
            T.to(torch.float32).to(F64),
            -T,
            torch.zeros_like(T),
            1e-9 * T,
            1e9 * T,
        ):
            assert slope <= float(proven_constant(found.form, forged) * found.outputs) * (1 + ROUNDING)
    assert float(proven_constant(found.form, best)) <= float(proven_constant(found.form, start))


@pytest.mark.slow
@every_graph
def test_no_slope_exceeds_the_bounds_of_graphs(graph: Graph) -> None:
    network, method = graph.network(3), LipSDP()
    x, r = randn(3, 4, seed=5), torch.tensor([0.0, 0.3, 1.0], dtype=F64)
    search = Search(network, 2.0, 2.0, steps=10)
    assert float(search.everywhere()) <= float(lipschitz(network, method=method)) * (1 + ROUNDING)
    assert bool((search.from_anchors(x) <= lipschitz(network, method=method, at=x).value * (1 + ROUNDING)).all())
    local = lipschitz(network, method=method, at=x, radius=r)
    assert bool((search.in_balls(x, r) <= local.value * (1 + ROUNDING)).all())
    pairs = Search(network.all_differences(), 2.0, 2.0, scalars=True, steps=10).everywhere()
    assert bool((pairs <= lipschitz(network, method=method, pair="all").value * (1 + ROUNDING)).all())


@pytest.mark.parametrize("name", ROWS)
def test_it_is_never_looser_than_the_recursion(name: str) -> None:
    network = feed_forward((4, 7, 6, 3), ROWS[name], seed=4)
    for pair in (None, "all"):
        best, recursion = (lipschitz(network, method=m, pair=pair).value for m in ("lipsdp", "lipsdp-recursion"))
        assert bool((best <= recursion * (1 + 1e-9)).all())


@pytest.mark.parametrize("w", [-2.5, 0.3, 1e-6, 1e6])
def test_one_neuron_is_exact(w: float) -> None:
    bound = float(lipschitz(one_dimensional(w, TANH), method="lipsdp"))
    assert abs(w) * (1 - 1e-15) <= bound <= abs(w) * (1 + 2e-3)


def test_a_single_slope_leaves_the_product_of_the_maps() -> None:
    network = feed_forward((4, 3, 5, 2), leaky_relu(1.0), seed=3)
    maps = [block.W.as_matrix() for block in network.blocks] + [network.blocks[-1].G.as_matrix()]
    exact = float(torch.linalg.matrix_norm(torch.linalg.multi_dot(maps[::-1]), 2))
    assert exact <= float(lipschitz(network, method="lipsdp")) <= exact * (1 + 5e-3)


def test_a_block_that_does_not_expand_is_found_out() -> None:
    # x - W' phi(Wx) with |W|^2 = 2 and slopes from 0 to 1 is 1-Lipschitz; a sum of norms gives 2 or 3.
    W = torch.diag(torch.tensor([2.0**0.5, 1.0], dtype=F64))
    zero = torch.zeros(2, dtype=F64)
    block = Block(Identity((2,)), Dense(-W.mT.contiguous()), Dense(W), zero, zero, TANH, "contracting")
    behind = Network.of_blocks((block, *feed_forward((2, 3, 2), TANH).blocks))
    alone = Network.of_blocks((block,))
    assert 1.0 <= float(lipschitz(alone, method="lipsdp")) <= 1.0 + 2e-3
    assert float(lipschitz(behind, method="lipsdp")) < float(lipschitz(behind, method="liplt"))


def test_the_optimum_is_that_of_a_solver() -> None:
    cvxpy = pytest.importorskip("cvxpy")
    network = feed_forward((5, 8, 8, 3), TANH, seed=2)
    W1, W2 = (block.W.as_matrix().numpy() for block in network.blocks)
    found = lipschitz(network, method="lipsdp", pair="all").value.tolist()
    for row, ours in zip(network.all_differences().blocks[-1].G.as_matrix().numpy(), found, strict=True):
        T1, T2, rho = cvxpy.Variable(8, nonneg=True), cvxpy.Variable(8, nonneg=True), cvxpy.Variable()
        first, second, none = cvxpy.diag(T1) @ W1, cvxpy.diag(T2) @ W2, torch.zeros(8, 5).numpy()
        last = 2 * cvxpy.diag(T2) - row[:, None] @ row[None, :]
        M = [[rho * torch.eye(5).numpy(), -first.T, none.T], [-first, 2 * cvxpy.diag(T1), -second.T]]
        M.append([none, -second, last])
        cvxpy.Problem(cvxpy.Minimize(rho), [cvxpy.bmat(M) >> 0]).solve(solver="CLARABEL")
        assert ours == pytest.approx(float(rho.value) ** 0.5, rel=2e-3)


@pytest.mark.parametrize("width", [2, 9])
def test_inputs_of_any_number(width: int) -> None:
    """More rows than inputs, and fewer: then a factor of the rows' Gram matrix stands for the input."""
    network = feed_forward((width, 5, 4, 2), TANH, seed=width)
    found = scaled(network)
    assert found.form.inputs == min(width, 5)
    slope = float(Search(network, 2.0, 2.0).everywhere())
    assert slope <= float(lipschitz(network, method="lipsdp")) * (1 + ROUNDING)


def test_convolutions_and_averages() -> None:
    network = convolutional("average")
    bound = float(lipschitz(network, method="lipsdp"))
    assert float(Search(network, 2.0, 2.0).everywhere()) <= bound <= float(lipschitz(network, method="liplt"))


def test_an_inverse_form_is_bounded_for_every_matrix_within_the_errors() -> None:
    A = randn(6, 6, seed=1)
    M, C = A @ A.mT + torch.eye(6, dtype=F64), randn(2, 6, seed=2)
    error, C_error = torch.tensor(1e-3, dtype=F64), torch.tensor(1e-2, dtype=F64)
    bound = float(inverse_form_upper_bound(M, C, error, C_error))
    for seed in range(40):
        shift, off = randn(6, 6, seed=10 + seed), randn(2, 6, seed=60 + seed)
        shift = shift + shift.mT
        shift, off = shift / torch.linalg.matrix_norm(shift, 2), off / torch.linalg.matrix_norm(off, 2)
        moved = C + C_error * off
        value = moved @ torch.linalg.solve(M + error * shift, moved.mT)
        assert float(torch.linalg.eigvalsh(value)[-1]) <= bound
    indefinite = M - 1.001 * torch.linalg.eigvalsh(M)[0] * torch.eye(6, dtype=F64)
    assert inverse_form_upper_bound(indefinite, C, 0 * error, 0 * error) == math.inf


def test_it_says_where_it_does_not_apply() -> None:
    for network, arguments, reason in (
        (feed_forward((3, 4, 2), TANH), {"p": 1}, "needs p = q = 2"),
        (convolutional("max"), {}, "no rule for a MaxPool"),
        (linear(2, 3), {}, "there is no activation"),
        (feed_forward((3, 4, 2), TANH), {"method": LipSDP(most_work=10)}, "takes long"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            lipschitz(network, **{"method": "lipsdp", **arguments})
    small = make_problem(feed_forward((3, 400, 2), TANH), 2, None, None, None, None, None)
    assert "memory budget" in str(LipSDP().reason_to_skip(replace(small, norms=NormBounds(memory_budget=2**20))))


def test_the_search_only_improves() -> None:
    form = scaled(feed_forward((5, 8, 8, 3), TANH, seed=2)).form
    first = first_multipliers(form)
    assert first is not None
    assert value_estimate(form, best_multipliers(form, first)) < 0.9 * value_estimate(form, first)
    poor = 1e3 * first
    assert best_multipliers(form, poor) is poor and float(proven_constant(form, poor)) == math.inf


@every_graph
@pytest.mark.parametrize("most_work", [1e7, 1e4])
def test_no_jacobian_exceeds_the_weighted_reaches(graph: Graph, most_work: float) -> None:
    """With multipliers for each row of weights, and with less work for the mean of all."""
    network = graph.network(2)
    problem = replace(make_problem(network, 2, None, None, None, "all", None), most_work=most_work)
    nodes = problem.network.nodes
    hidden = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode)]
    weights = {k: randn(3, *nodes[k].shape, seed=k).square() for k in hidden}
    found = weighted_reaches(problem, weights, {k: torch.full((3,), torch.inf, dtype=F64) for k in hidden})
    assert set(found) == {k for level in levels_of(nodes)[1:] for k in level} or most_work == 1e4
    x = (2 * randn(6, *network.in_shape, seed=7)).requires_grad_()
    values = problem.network.values(x)
    for k, reach in found.items():
        z = values[nodes[k].sources[0]].flatten(1)
        rows = [torch.autograd.grad(one.sum(), x, retain_graph=True)[0].flatten(1) for one in z.unbind(1)]
        J = torch.stack(rows, dim=1)
        for w, bound in zip(weights[k].flatten(1), reach, strict=True):
            assert float(torch.linalg.matrix_norm(w.sqrt()[:, None] * J, 2).amax()) ** 2 <= float(bound) * (
                1 + ROUNDING
            )


def test_no_multipliers_are_searched_for_where_they_cannot_give_what_is_wanted() -> None:
    network = feed_forward((5, 8, 8, 3), TANH, seed=2)
    problem = replace(make_problem(network, 2, None, None, None, "all", None), most_work=1e7)
    _, k = (number for number, node in enumerate(problem.network.nodes) if isinstance(node, ElementwiseNode))
    weights = {k: randn(3, 8, seed=4).square()}
    found = weighted_reaches(problem, weights, {k: torch.full((3,), torch.inf, dtype=F64)})[k]
    # What one network attains is within reach; just below that nothing is.
    W1, W2 = (block.W.as_matrix() for block in network.blocks)
    attained = torch.linalg.matrix_norm(weights[k].sqrt()[:, :, None] * (W2 @ W1), 2).square()
    assert bool((attained <= found * (1 + ROUNDING)).all())
    again = weighted_reaches(problem, weights, {k: torch.stack([found[0], 0.9 * attained[1], 0.9 * attained[2]])})[k]
    assert float(again[0]) == pytest.approx(float(found[0]), rel=1e-9) and bool(again[1:].isinf().all())


def test_the_search_lowers_the_curvature_of_deep_networks() -> None:
    network = feed_forward((5, 8, 8, 8, 3), TANH, seed=2)
    pair = make_problem(network, 2, None, None, None, (0, 1), None)
    plain, searched = curvature_of(pair), curvature(network, pair=(0, 1))
    assert float(searched) < 0.97 * float(plain)
    assert "gradient entries, multipliers" in {term.method for term in searched.per_layer}
