"""A Network from an ONNX file computes what onnxruntime computes, up to rounding in the file's own type."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvcert.errors import InvalidInput, SoundnessError
from curvcert.network.network import Network
from curvcert.network.onnx_file import Graph, imported

_SCALES = (0.0, 1e-2, 1.0, 1.0, 1.0, 1.0, 10.0, 100.0, 1000.0)
_SLACK = 64.0
"""How many times the rounding that one evaluation in low precision shows another may have: another order of sums."""

_AT_ONCE = 2**24
"""Numbers in all values of the samples that are evaluated together."""


def require_equal_to_onnxruntime(network: Network, graph: Graph) -> None:
    """Raise unless the network and onnxruntime agree on random inputs, small and large.

    The file's arithmetic rounds, in float32 say.  How much that can matter is measured: the network itself, evaluated
    in float32, differs from its float64 values by that rounding and nothing else.

    Raises:
        InvalidInput: onnxruntime cannot run the file.
        SoundnessError: the outputs differ by more than rounding explains.
    """
    at_once = max(1, _AT_ONCE // sum(math.prod(node.shape) for node in network.nodes))
    outputs = _runtime(graph)
    compared = [_compared(network, graph, x, outputs(x), at_once) for x in _random_inputs(graph, at_once)]
    gap, noise, peak, size = (torch.cat(found) for found in zip(*compared, strict=True))
    eps = torch.finfo(graph.dtype).eps
    noise *= eps / torch.finfo(torch.float32).eps
    # Beyond the range of the file's type nothing can be compared; most inputs are within it.
    within = (peak < torch.finfo(graph.dtype).max / 2**6) & torch.isfinite(noise)
    overflown = within & ~torch.isfinite(gap)
    if 2 * int(overflown.sum()) < int(within.sum()):
        within &= ~overflown
    excess = gap - _SLACK * (noise + eps * peak)
    if not bool(within.any()) or not bool((excess[within] <= 0).all()):
        largest = float(gap[within].max()) if bool(within.any()) else float("inf")
        raise SoundnessError(
            f"onnxruntime and the network read from the file differ by {largest:.3g} on random inputs (outputs up to "
            f"{float(size.max()):.3g}), more than rounding explains. Please report this file."
        )


def _compared(
    network: Network, graph: Graph, x: Tensor, expected: Tensor, at_once: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each sample: the difference, that of float32, the largest magnitude on the way and of the output."""
    shape = (len(x), *network.out_shape)
    if expected.shape != shape:
        raise SoundnessError(
            f"onnxruntime returns {tuple(expected.shape)}, the network {shape}. Please report this file."
        )
    found = []
    for part, other in zip(x.split(at_once), expected.split(at_once), strict=True):
        values = network.values(part.to(torch.float64))
        got, peak = values[-1], torch.stack([_peak(value) for value in values]).amax(0)
        del values
        low = network.in_dtype(part, torch.float32).to(torch.float64)
        found.append((_peak(other.to(torch.float64) - got), _peak(low - got), peak, _peak(got)))
    gap, noise, peak, size = (torch.cat(values) for values in zip(*found, strict=True))
    return gap, noise, peak, size


def _random_inputs(graph: Graph, at_once: int) -> Iterator[Tensor]:
    """Yield inputs in the file's type, in whole batches of the fixed size where there is one, else as many as fit."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = graph.batch or at_once
    count = -(-len(_SCALES) // size) * size if graph.batch else len(_SCALES)
    for start in range(0, count, size):
        batch = range(start, min(start + size, count))
        yield torch.stack(
            [
                torch.randn(graph.input_shape, generator=generator, dtype=torch.float64, device="cpu")
                .mul_(_SCALES[k % len(_SCALES)])
                .to(graph.dtype)
                for k in batch
            ]
        )


def _runtime(graph: Graph) -> Callable[[Tensor], Tensor]:
    """Return what onnxruntime makes of a batch."""
    runtime = imported("onnxruntime")
    version = runtime.__version__
    with _told(version):
        session = _session(runtime, graph.serialised)

    def outputs(x: Tensor) -> Tensor:
        with _told(version):
            return torch.from_numpy(session.run([graph.output_name], {graph.input_name: x.numpy()})[0])

    return outputs


@contextmanager
def _told(version: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InvalidInput(
            f"onnxruntime {version} cannot run this file, so it cannot be checked: {reason} "
            "Export it in float32 with opset_version=20, or update onnxruntime."
        ) from error


def _session(runtime: Any, serialised: bytes) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(serialised, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def _peak(x: Tensor) -> Tensor:
    """Return the largest magnitude in each sample."""
    return x.abs().flatten(1).amax(dim=1)
