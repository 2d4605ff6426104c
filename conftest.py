"""For tests and doctests alike: shapes checked at run time, a seed each, and torch's global state left alone."""

import gc
from collections.abc import Generator, Iterator
from importlib.util import find_spec

import pytest
import torch

from tests import shape_checks

shape_checks.install()

collect_ignore = [] if find_spec("lightning") else ["src/curvcert/training/lightning.py"]
"""Doctests are not looked for where what a module extends is not installed."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without a search for garbage, and leave what is there by then out of every later search."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _global_state() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Seed each test, and fail one that changes torch's global state (which is then restored)."""
    torch.manual_seed(0)
    before = _global_state()
    yield
    after = _global_state()
    torch.set_default_dtype(before["default dtype"])  # type: ignore[arg-type]
    torch.set_grad_enabled(before["grad mode"])  # type: ignore[arg-type]
    torch.set_num_threads(before["number of threads"])  # type: ignore[arg-type]
    torch.set_float32_matmul_precision(before["float32 matmul precision"])  # type: ignore[arg-type]
    assert after == before, "the test left torch's global state changed"
