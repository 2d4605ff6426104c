"""What is traced is what runs: modules that differ from what they seem, and some that only look so."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvcert
from curvcert.errors import CurvcertError
from tests.network.cases import Function
from tests.network.impostors import HARMLESS, IMPOSTORS, UNSEEN, Forward

SAMPLE = 4
"""One of so many impostors is tried each time."""

ON_PURPOSE = {"in place on the input", "in place far from the kink", "its storage"}
"""Impostors that are read as what they do compute."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def model_of(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(4, 4), "buffer": torch.zeros(4), "seen": [], "table": torch.randn(4, 4)}
    return Function(forward, **parts).eval()


def inputs() -> Tensor:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x * torch.logspace(-2, 7, 60, dtype=torch.float64)[:, None]


def test_the_lists_are_as_long_as_they_say() -> None:
    assert len(IMPOSTORS) >= 100
    assert len(HARMLESS) >= 20


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if k % SAMPLE else ()) for k, n in enumerate(IMPOSTORS)]
)
def test_no_impostor_is_taken_for_what_it_is_not(name: str) -> None:
    model = model_of(IMPOSTORS[name])
    state = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    try:
        net = curvcert.trace(model, torch.zeros(1, 4))
    except CurvcertError:
        net = None
    assert state[:2] == (random.getstate(), np.random.get_state()[2])
    assert torch.equal(state[2], torch.get_rng_state())
    assert (net is not None) == (name in ON_PURPOSE)
    if net is not None:
        expected = model_of(IMPOSTORS[name]).double()(inputs())
        torch.testing.assert_close(net(inputs()), expected.detach(), equal_nan=True)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_suspicious_is_taken(name: str) -> None:
    net = curvcert.trace(model_of(HARMLESS[name]), torch.zeros(1, 4))
    expected = model_of(HARMLESS[name]).double()(inputs()).detach().double()
    torch.testing.assert_close(net(inputs()), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_can_see_is_named(name: str) -> None:
    """Where one of them is found after all, the list and the documentation have to change."""
    forward, _ = UNSEEN[name]
    assert curvcert.trace(model_of(forward), torch.zeros(1, 4)).out_shape == (4,)
    assert "CURVCERT_TEST_FACTOR" not in os.environ


def _counting(tries: list[int], factor: float) -> Callable[..., Tensor | None]:
    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        tries.append(1)
        return factor * output if len(tries) > 1000 else None

    return hook


def _in_place(tries: list[int], factor: float) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        tries.append(1)
        output.mul_(1.0 + (len(tries) > 1000) * factor)

    return hook


@pytest.mark.parametrize("make", [_counting, _in_place])
def test_a_hook_that_changes_its_mind_is_no_observer(make: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    model[1].register_forward_hook(make([], 2.0))
    with pytest.raises(CurvcertError, match="changes from call to call"):
        curvcert.trace(model, torch.zeros(1, 4))
