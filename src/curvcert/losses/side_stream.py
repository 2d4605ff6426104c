"""Two independent computations side by side on a GPU: the constants of a network, and its forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIDE: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
"""One side stream for each stream that works, made when it is first needed."""


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run what is inside on a stream of its own, on CUDA; `rejoin` before its results are used outside.

    Its backward pass runs on that stream too.  Elsewhere this changes nothing.
    """
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    if current not in _SIDE:
        _SIDE[current] = torch.cuda.Stream(device)
    _SIDE[current].wait_stream(current)
    with torch.cuda.stream(_SIDE[current]):
        yield


def rejoin(device: torch.device) -> None:
    """Let the current stream wait for what was run aside."""
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        if current in _SIDE:
            current.wait_stream(_SIDE[current])
