"""Two independent computations side by side on a GPU: the constants of a network, and its forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIDE: dict[torch.device, torch.cuda.Stream] = {}
"""One side stream a device, made when it is first needed."""


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run what is inside on a stream of its own, on CUDA; `rejoin` before its results are used outside.

    Its backward pass runs on that stream too.  Elsewhere this changes nothing.
    """
    if device.type != "cuda":
        yield
        return
    side = _SIDE.setdefault(device, torch.cuda.Stream(device))
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def rejoin(device: torch.device) -> None:
    """Let the current stream wait for what was run aside."""
    if device.type == "cuda" and device in _SIDE:
        torch.cuda.current_stream(device).wait_stream(_SIDE[device])
