"""Hypothesis profiles, a seed for each test, and a check that torch's global state is left alone."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The tests' matrices are small: one thread is faster than two, and far steadier on a busy machine.
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is no accelerator."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator"))
