"""ONNX models made by hand, and what onnxruntime says of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from curvcert.network import Network
from curvcert.network.onnx_import import load_onnx

FLOATS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE, np.float16: TensorProto.FLOAT16}


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node(op: str, *inputs: str, to: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node named after its operator and its output."""
    return helper.make_node(op, list(inputs), [to], name=f"{op}_{to}", **attributes)


def several(op: str, outputs: list[str], *inputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node with several outputs."""
    return helper.make_node(op, list(inputs), outputs, name=f"{op}_{outputs[0]}", **attributes)


def built(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str | None],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
    dtype: Any = np.float32,
    output: str = "y",
) -> onnx.ModelProto:
    """A model from "x", of a shape with its batch, to "y"; the shape of "y" is left open."""
    source = helper.make_tensor_value_info("x", FLOATS[dtype], shape)
    target = helper.make_tensor_value_info(output, FLOATS[dtype], None)
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "net", [source], [target], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 22 else 10)


def loaded(model: onnx.ModelProto, folder: Path, **options: Any) -> Network:
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return load_onnx(path, **options)


def run(model: onnx.ModelProto, x: Tensor) -> Tensor:
    """Return onnxruntime's outputs."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0]).double()


def agree(network: Network, model: onnx.ModelProto, batch: int = 3, dtype: torch.dtype = torch.float32) -> None:
    """Assert that a network has onnxruntime's values, and the dtype of the file."""
    x = torch.randn(batch, *network.in_shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = run(model, x)
    slack = 1e-2 if dtype == torch.float16 else 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(network(x.double()), expected, rtol=slack, atol=slack)
    assert network.source_dtype == dtype
