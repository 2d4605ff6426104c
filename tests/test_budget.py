"""Budgets: a fixed plan that is cut short, by a clock that the tests turn."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.budget import Budget, OutOfTime, budget_of, checkpoint
from curvcert.certificates import Certificate, certify, load_certificate
from curvcert.checker import check_certificate
from curvcert.errors import InvalidInput
from curvcert.network import Network, trace
from curvcert.network.network_file import save_network


@dataclass
class Ticking:
    """A clock that goes on by one each time it is read."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def dense(p: float = 2) -> tuple[Network, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 9), nn.Softplus(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    return trace(nn.Sequential(*layers).eval(), torch.zeros(1, 6)), torch.randn(3, 6, dtype=torch.float64)


def image() -> tuple[Network, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 3))
    return trace(nn.Sequential(*layers).eval(), torch.zeros(1, 1, 6, 6)), torch.randn(2, 1, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, True, "3"])
@pytest.mark.parametrize(
    "ask", [lipschitz, curvature, lambda net, budget: certify(net, torch.zeros(1, 6), budget=budget)]
)
def test_what_is_no_time_is_refused(ask: Callable[..., object], budget: object) -> None:
    with pytest.raises(InvalidInput, match="positive number of seconds"):
        ask(dense()[0], budget=budget)


def test_limits_end_what_runs_inside_and_nothing_else() -> None:
    clock = Ticking()
    outer = Budget(5.0, clock)
    checkpoint()
    with pytest.raises(OutOfTime), outer.limits():
        while True:
            checkpoint()
    checkpoint()
    # A budget inside another one ends no later.
    clock.now = 0.0
    with pytest.raises(OutOfTime), Budget(5.0, clock).limits(), Budget(math.inf, clock).limits():
        while True:
            checkpoint()
    assert clock.now < 20
    assert budget_of(None) is None and budget_of(outer) is outer


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("make", [dense, image])
@pytest.mark.parametrize("ask", [lipschitz, curvature])
def test_more_steps_never_give_more_and_the_last_is_the_whole(
    ask: Callable[..., object], make: Callable[[], tuple[Network, torch.Tensor]], p: float
) -> None:
    network = make()[0]
    whole = ask(network, p, pair="all")
    assert not any("budget" in reason for reason in whole.skipped)
    values = []
    for ticks in (0.5, 16, 128, 1024, 10**9):
        bound = ask(network, p, pair="all", budget=Budget(ticks, Ticking()))
        values.append(bound.value)
        assert any("budget" in reason for reason in bound.skipped) or bool((bound.value <= whole.value).all())
    assert any("budget" in reason for reason in ask(network, p, pair="all", budget=Budget(0.5, Ticking())).skipped)
    for earlier, later in pairwise(values):
        assert bool((later <= earlier).all())
    assert bool((values[0] > values[-1]).any())
    assert torch.equal(values[-1], torch.minimum(values[-1], whole.value))


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, image])
def test_certificates_say_how_many_steps_were_done(
    make: Callable[[], tuple[Network, torch.Tensor]], tmp_path: Path
) -> None:
    network, x = make()
    whole = certify(network, x)
    assert whole.steps is None
    found = list[Certificate]()
    for ticks in (0.5, 200, 2000, 10**9):
        found.append(certify(network, x, budget=Budget(ticks, Ticking())))
    for earlier, later in pairwise(found):
        assert earlier.steps is not None and later.steps is not None
        assert bool((later.steps >= earlier.steps).all())
        assert bool((later.radius >= earlier.radius * (1 - 1e-9)).all())
    first, last = found[0], found[-1]
    assert first.steps is not None and first.steps.tolist() == [1] * len(x)
    assert "the budget of 0.5 s was spent" in " ".join(first.notes)
    assert any("cut short by the budget" in note for one in found for note in one.notes)
    assert bool((first.radius[first.correct] > 0).all()) and bool((first.radius < last.radius).any())
    assert bool((last.radius >= whole.radius * (1 - 1e-9)).all())
    assert not any("budget" in note for note in last.notes)
    saved = first.save(tmp_path / "certificate.safetensors")
    loaded = load_certificate(tmp_path / "certificate.safetensors")
    assert loaded.steps is not None and saved.steps is not None and torch.equal(loaded.steps, saved.steps)
    save_network(network, tmp_path / "network.safetensors")
    verdict = check_certificate(tmp_path / "certificate.safetensors", tmp_path / "network.safetensors", x.numpy())
    assert verdict.holds


@pytest.mark.slow
def test_each_batch_has_its_share_of_the_time() -> None:
    network, x = dense()
    clock = Ticking()
    found = certify(network, x.repeat(2, 1), batch_size=5, budget=Budget(3000, clock))
    assert found.steps is not None and int(found.steps.amin()) > 1
    assert clock.now < 3000 * 1.2


def test_one_method_that_is_not_done_proves_nothing() -> None:
    network, x = dense()
    found = certify(network, x, method="shell", budget=Budget(0.5, Ticking()))
    assert found.radius.tolist() == [0.0] * len(x)
    assert "nothing was proven within the budget of 0.5 s" in " ".join(found.notes)
