"""A training step as one CUDA graph: launched once, without the host in between."""

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

WARM_UP = 3
"""Steps before a capture, on a stream of their own: libraries choose their algorithms and make their buffers."""


def captured(*steps: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays one step, or one of each of several that share nothing, side by side.

    A step reads no value on the host and keeps its tensors in place.  Takes `WARM_UP` real steps, and captures one
    without taking it.

    Raises:
        RuntimeError: a step cannot be captured; torch says why.
    """
    # Each on a stream of its own: steps that share one share the libraries' work space, and may not run side by side.
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(WARM_UP):
        _side_by_side(steps, streams)
    graph, whole = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    whole.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=whole):
        _side_by_side(steps, streams)
    return graph.replay


def captured_or_reason(*steps: Callable[[], None]) -> tuple[Callable[[], None] | None, str | None]:
    """Capture training steps; return what replays them, or why they cannot be captured."""
    try:
        with training_arithmetic(), warnings.catch_warnings():
            # A weight's gradient comes from two streams, the model's and its constants': torch waits for both.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            return captured(*steps), None
    except RuntimeError as error:
        return None, str(error).splitlines()[0]


def _side_by_side(steps: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream]) -> None:
    for step, stream in zip(steps, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def missing_compiler() -> str | None:
    """Return what torch.compile needs for CUDA and does not find here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "there is no C compiler, which triton needs"
    return None


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
