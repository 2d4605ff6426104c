"""Hypothesis profiles, and tests marked gpu skipped where there is no accelerator."""

import os

import pytest
import torch
from hypothesis import settings

# The tests' matrices are small: one thread is faster than two, and far steadier on a busy machine.
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is no accelerator."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator"))
