"""What is traced is what runs: modules that differ from what one run of them shows."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvcert
from curvcert.errors import CurvcertError
from tests.network.cases import Function

_CALLS = {"count": 0}


def _by_autocast(m: Function, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tanh(m.a(x))


def _by_a_counter_outside(m: Function, x: Tensor) -> Tensor:
    _CALLS["count"] += 1
    return torch.tanh(x) if _CALLS["count"] < 1000 else 3 * torch.tanh(x)


def _by_a_counter_in_a_list(m: Function, x: Tensor) -> Tensor:
    m.seen.append(1)
    return torch.tanh(x) if len(m.seen) < 1000 else 3 * torch.tanh(x)


def _by_a_counter_of_its_own(m: Function, x: Tensor) -> Tensor:
    _by_a_counter_of_its_own.calls = getattr(_by_a_counter_of_its_own, "calls", 0) + 1  # type: ignore[attr-defined]
    return torch.tanh(x)


def _by_the_weights_dtype(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(m.a(x)) if m.a.weight.device.type == "cpu" and x.dtype != torch.float64 else 9 * torch.tanh(x)


def _draws_in_python(m: Function, x: Tensor) -> Tensor:
    random.random()
    return torch.tanh(x)


def _draws_in_numpy(m: Function, x: Tensor) -> Tensor:
    np.random.rand()
    return torch.tanh(x)


def _sets_the_default_dtype(m: Function, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.tanh(x)


DIFFERENT: dict[str, Callable[[Function, Tensor], object]] = {
    "autocast": _by_autocast,
    "a counter outside": _by_a_counter_outside,
    "a counter in a list": _by_a_counter_in_a_list,
    "a counter of its own": _by_a_counter_of_its_own,
    "the dtype": _by_the_weights_dtype,
    "the default dtype": lambda m, x: torch.tanh(x) * (2 if m.a.weight.element_size() == 4 else 3),
    "gradients": lambda m, x: torch.tanh(x) * (5 if torch.is_grad_enabled() else 1),
    "inference mode": lambda m, x: torch.tanh(x) * (5 if torch.is_inference_mode_enabled() else 1),
    "a factor by gradients": lambda m, x: torch.tanh(x) if torch.is_grad_enabled() else 2 * torch.tanh(x),
    "a cast of the weights": lambda m, x: torch.tanh(x) * m.a.weight[0].half().float(),
    "python's random state": _draws_in_python,
    "numpy's random state": _draws_in_numpy,
    "torch's default dtype": _sets_the_default_dtype,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_module_that_differs_from_what_one_run_shows_is_refused(name: str) -> None:
    model = Function(DIFFERENT[name], a=nn.Linear(4, 4), seen=[]).eval()
    before = torch.get_default_dtype(), random.getstate(), np.random.get_state()[2]
    with pytest.raises(CurvcertError):
        curvcert.trace(model, torch.zeros(1, 4))
    assert before == (torch.get_default_dtype(), random.getstate(), np.random.get_state()[2])
