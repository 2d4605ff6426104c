"""A Network from an ONNX file computes what onnxruntime computes, up to rounding in the file's own type."""

import math
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
    x = _random_inputs(graph)
    at_once = max(1, _AT_ONCE // sum(math.prod(node.shape) for node in network.nodes))
    expected = _outputs(graph, x, at_once)
    parts = [_evaluated(network, part) for part in x.split(at_once)]
    got, peak, low = (torch.cat(found) for found in zip(*parts, strict=True))
    if expected.shape != got.shape:
        raise SoundnessError(
            f"onnxruntime returns {tuple(expected.shape)}, the network {tuple(got.shape)}. Please report this file."
        )
    eps = torch.finfo(graph.dtype).eps
    noise = _peak(low - got) * (eps / torch.finfo(torch.float32).eps)
    # Beyond the range of the file's type nothing can be compared.
    within = (peak < torch.finfo(graph.dtype).max / 2**6) & torch.isfinite(noise)
    excess = _peak(expected - got) - _SLACK * (noise + eps * peak)
    if not bool(within.any()) or not bool((excess[within] <= 0).all()):
        gap = float(_peak(expected - got)[within].max()) if bool(within.any()) else float("inf")
        raise SoundnessError(
            f"onnxruntime and the network read from the file differ by {gap:.3g} on random inputs (outputs up to "
            f"{float(got.abs().max()):.3g}), more than rounding explains. Please report this file."
        )


def _evaluated(network: Network, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the largest magnitude on the way, and the outputs in float32."""
    values = network.values(x.to(torch.float64))
    got, peak = values[-1], torch.stack([_peak(value) for value in values]).amax(0)
    del values
    return got, peak, network.in_dtype(x, torch.float32).to(torch.float64)


def _random_inputs(graph: Graph) -> Tensor:
    """Return inputs in the file's type, as many as whole batches of the fixed size hold."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = graph.batch or 1
    count = -(-len(_SCALES) // size) * size
    noise = torch.randn(count, *graph.input_shape, generator=generator, dtype=torch.float64, device="cpu")
    scales = torch.tensor(_SCALES, dtype=torch.float64, device="cpu")[torch.arange(count) % len(_SCALES)]
    return (noise * scales.reshape(-1, *(1,) * len(graph.input_shape))).to(graph.dtype)


def _outputs(graph: Graph, x: Tensor, at_once: int) -> Tensor:
    runtime = imported("onnxruntime")
    try:
        session = _session(runtime, graph.serialised)
        batches = x.split(graph.batch or at_once)
        found = [session.run([graph.output_name], {graph.input_name: part.numpy()})[0] for part in batches]
        return torch.cat([torch.from_numpy(part).to(torch.float64) for part in found])
    except Exception as error:
        raise InvalidInput(
            f"onnxruntime {runtime.__version__} cannot run this file, so it cannot be checked: "
            f"{str(error).splitlines()[0][:300]} Export it in float32 with opset_version=20, or update onnxruntime."
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
