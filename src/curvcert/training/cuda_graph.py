"""A training step as one CUDA graph: launched once, without the host in between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

WARM_UP = 3
"""Steps before a capture, on a stream of their own: libraries choose their algorithms and make their buffers."""


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays one step; the step reads no value on the host and keeps its tensors in place.

    Takes `WARM_UP` real steps, and captures one without taking it.

    Raises:
        RuntimeError: the step cannot be captured; torch says why.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # On a stream of its own, since graphs that share one share the libraries' work space, and may not run side by side.
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


@contextmanager
def training_arithmetic() -> Iterator[None]:
    """Let float32 products round their factors to TF32, and convolutions be timed, and leave the settings as found.

    For training only: nothing that certifies runs in here.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = True, True, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
