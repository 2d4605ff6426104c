"""What "auto" runs: whatever may be the least."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curvcert import curvature, trace
from curvcert.activations import TANH
from curvcert.bounds.curvature import CURVATURE_METHODS, portfolio
from curvcert.bounds.curvature.compositional import compositional_bound, glimpsed_recursion
from curvcert.bounds.curvature.unrolled import unrolled_bound
from curvcert.bounds.lipschitz.problem import Problem, make_problem
from curvcert.bounds.types import SIDES, Side
from curvcert.network import Block, Network
from curvcert.operators import Dense
from tests.bounds.cases import feed_forward, randn, residual
from tests.bounds.curvature.cases import SMOOTH

RIVALS = ("compositional", "crc")


def pairs(network: Network, p: float = 2, side: Side = "both") -> Problem:
    return make_problem(network, p, None, None, None, "all", None, side)


def convolutional() -> Network:
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2), nn.SiLU()]
    torch.manual_seed(3)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    return trace(model, torch.zeros(1, 1, 7, 7, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(SMOOTH))
@pytest.mark.parametrize("widths", [(3, 4, 4, 2), (5, 2, 6, 3, 3), (2, 8, 3, 8, 4)], ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_what_it_leaves_out_is_never_below_what_it_runs(name, widths, side) -> None:
    problem = pairs(feed_forward(widths, SMOOTH[name], seed=len(name)), side=side)
    found = unrolled_bound(problem).value
    for rival in map(CURVATURE_METHODS.__getitem__, RIVALS):
        assert rival.reason_to_skip(problem) is None and not rival.can_win(problem)
        assert bool((found <= rival.bound(problem).value * (1 + 1e-9)).all())


@pytest.mark.parametrize("name", sorted(SMOOTH))
def test_what_is_seen_from_a_point_is_never_above_the_larger_of_both_sides(name) -> None:
    """The sums over layers of either side may both be below that of the larger of both, layer by layer."""
    network, x = feed_forward((6, 8, 8, 4), SMOOTH[name], seed=1), 3 * randn(4, 6, seed=2)
    everywhere = curvature(network, method="unrolled", pair="all").value
    sides = [curvature(network, method="unrolled", pair="all", side=side).value for side in SIDES[1:]]
    assert bool((everywhere <= torch.maximum(*sides) * (1 + 1e-12)).all())
    anchored = curvature(network, method="anchored", at=x, pair="all").value
    assert bool((anchored <= everywhere * (1 + 1e-12)).all())


@pytest.mark.parametrize("p", [1, 1.5, 3, float("inf")])
@pytest.mark.parametrize("name", ["sin", "gelu", "softplus(5)"])
def test_the_recursion_is_never_below_in_other_norms(name, p) -> None:
    problem = pairs(feed_forward((5, 4, 6, 3), SMOOTH[name], seed=7), p)
    found, rival = unrolled_bound(problem).value, compositional_bound(problem, problem.norms).value
    assert bool((found <= rival * (1 + 1e-9)).all())


def test_nor_behind_convolutions() -> None:
    problem = pairs(convolutional())
    assert not any(CURVATURE_METHODS[name].can_win(problem) for name in RIVALS)
    for name in RIVALS:
        assert bool((unrolled_bound(problem).value <= CURVATURE_METHODS[name].bound(problem).value * (1 + 1e-9)).all())


def test_what_may_win_is_run() -> None:
    deep = feed_forward((3, 4, 4, 2), TANH)
    first, second = deep.blocks[0], deep.blocks[1]
    assert isinstance(first, Block)
    behind = Network.of_blocks((replace(first, G=Dense(randn(4, 4, seed=5))), second))
    assert CURVATURE_METHODS["crc"].can_win(pairs(behind))
    assert CURVATURE_METHODS["crc"].can_win(pairs(feed_forward((3, 4, 2), TANH)))


@pytest.mark.parametrize("seed", range(6))
def test_the_recursion_is_left_out_only_where_it_is_above(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = feed_forward((3, 5, 5, 2), TANH, seed=seed)
    first, second = inner.blocks[0], inner.blocks[1]
    assert isinstance(first, Block)
    behind = Network.of_blocks((replace(first, G=Dense(randn(5, 5, seed=seed))), second))
    method = CURVATURE_METHODS["compositional"]
    questions = (pairs(behind), pairs(residual(3, 4, TANH)), make_problem(behind, 2, None, None, None, None, None))
    for problem in questions:
        rival, glimpsed = method.bound(problem).value, glimpsed_recursion(problem)
        assert glimpsed is not None and bool((glimpsed <= rival * (1 + 1e-9)).all())
        assert method.can_win(problem) or bool((unrolled_bound(problem).value <= rival).all())
        monkeypatch.setattr(portfolio, "glimpsed_recursion", lambda _: torch.zeros((), dtype=torch.float64))
        assert method.can_win(problem)
        monkeypatch.undo()
