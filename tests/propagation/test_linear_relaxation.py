"""Linear relaxation where it is exact, and where nothing but the rounding of covectors is left of a change."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from curvcert.activations import RELU
from curvcert.network import Network
from curvcert.network.builder import Value, start
from curvcert.network.evaluation import evaluate_with_error
from curvcert.operators import Dense, NormBounds
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.regions import NormBall

F64 = torch.float64


def positive(value: Value, name: str) -> Value:
    """Return a ReLU far from its kink, where it is linear."""
    return value.shift(torch.full(value.shape, 50.0, dtype=F64)).activate(RELU, name)


def test_ranges_of_a_linear_network_are_attained_and_no_narrower() -> None:
    g = torch.Generator().manual_seed(0)
    W, V = torch.randn(6, 4, dtype=F64, generator=g), torch.randn(5, 6, dtype=F64, generator=g)
    x = positive(start((4,), torch.device("cpu")).linear(Dense(W)), "a").linear(Dense(V))
    net = Network(positive(x, "b").builder.nodes)
    at, r = torch.randn(3, 4, dtype=F64, generator=g), torch.tensor([0.1, 0.5, 1.0], dtype=F64)
    norms = NormBounds()
    for p, dual in ((1.0, math.inf), (2.0, 2.0), (math.inf, 1.0)):
        facts = NetworkFacts(net, p, norms)
        relaxed = Relaxed(facts, evaluate_with_error(net, at, norms), NormBall(p, r, 4))
        moved = relaxed.moved(net.nodes[-1].sources[0])
        exact = r[:, None] * torch.linalg.vector_norm(V @ W, dual, dim=1)
        for side in (moved.fall, moved.rise):
            assert bool((side >= exact * (1 - 1e-14)).all())
            torch.testing.assert_close(side, exact, rtol=1e-11, atol=0)


def test_the_rounding_of_covectors_counts_where_nothing_else_is_left() -> None:
    # The rows 1e16, 1 and -1e16 that are carried back add up to 0 or 2 in some order, and the function rises by 1.
    for rows in permutations([1e16, 1.0, -1e16]):
        W = Dense(torch.tensor(rows, dtype=F64)[:, None])
        value = start((1,), torch.device("cpu")).activate(RELU, "a").linear(W)
        net = Network(value.linear(Dense(torch.tensor([[1.0, 1.0, 1.0]], dtype=F64))).builder.nodes)
        norms = NormBounds()
        at = evaluate_with_error(net, torch.ones(1, 1, dtype=F64), norms)
        relaxed = Relaxed(NetworkFacts(net, 2.0, norms), at, NormBall(2.0, torch.tensor([0.25], dtype=F64), 1))
        change = relaxed.change(len(net.nodes) - 1, torch.ones(1, 1, 1, dtype=F64))
        assert float(change.rise) >= 0.25 and float(change.fall) >= 0.25


@pytest.mark.parametrize("rows", [1, 3])
def test_changes_are_those_of_every_row(rows: int) -> None:
    g = torch.Generator().manual_seed(1)
    W = torch.randn(3, 4, dtype=F64, generator=g)
    net = Network(start((4,), torch.device("cpu")).linear(Dense(W)).activate(RELU, "a").builder.nodes)
    at, r = torch.randn(2, 4, dtype=F64, generator=g), torch.tensor([0.2, 2.0], dtype=F64)
    norms = NormBounds()
    relaxed = Relaxed(NetworkFacts(net, 2.0, norms), evaluate_with_error(net, at, norms), NormBall(2.0, r, 4))
    u: Tensor = torch.randn(2, rows, 3, dtype=F64, generator=g)
    change = relaxed.change(len(net.nodes) - 1, u)
    d = torch.randn(500, 2, 4, dtype=F64, generator=g)
    d = d / torch.linalg.vector_norm(d, dim=2, keepdim=True) * r[:, None]
    moved = net((at + d).reshape(-1, 4)).reshape(500, 2, 3) - net(at)
    value = torch.einsum("brk,nbk->nbr", u, moved)
    assert bool((value.amax(0) <= change.rise).all()) and bool((-value.amin(0) <= change.fall).all())
