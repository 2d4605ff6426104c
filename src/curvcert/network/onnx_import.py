"""From an ONNX file to a `Network`, exactly, or a refusal that names the node."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.network.builder import Value, start
from curvcert.network.building import built
from curvcert.network.faithful import surroundings_kept
from curvcert.network.network import Network
from curvcert.network.onnx_activations import ELEMENTWISE, activation_of, recognised
from curvcert.network.onnx_arguments import Context, value_of
from curvcert.network.onnx_constants import fold
from curvcert.network.onnx_file import Array, Graph, Node, read_graph, shown
from curvcert.network.onnx_nodes import RULES, shape_of
from curvcert.network.onnx_runtime import require_equal_to_onnxruntime

_LONGEST_FORMULA = 12
_SOFTMAX = "Certify the logits: export the model without its last softmax."


@dataclass(frozen=True, eq=False)
class _Refused:
    """A value that has no expression by itself, but may be part of an activation's formula."""

    error: CurvcertError
    passed_on: int = 0


_Operand = Value | Array | _Refused
_Result = _Operand | tuple[Value, ...]


def load_onnx(path: str | Path, input_shape: Sequence[int] | None = None) -> Network:
    r"""Turn an ONNX file into a `Network`, exactly, or say which node is in the way.

    Covers opset 9 and later, and what both of PyTorch's exporters write: Gemm, MatMul, Conv and ConvTranspose (one- and
    two-dimensional, any padding), BatchNormalization, poolings, Resize, Pad, what moves, picks or joins the entries of
    a sample (the batch stays first), arithmetic with constants, shapes computed on the way, sums and differences of any
    values, the activations of the table, as operators or written out, and MaxPool for Lipschitz bounds; the page on
    ONNX in the documentation has the list. Needs `curvcert[onnx]`.

    The first dimension of the input is the batch, fixed or open.  `input_shape`, the shape of one input without the
    batch, is needed where the file leaves another size open.  Weights in files beside the model are read from the
    model's own folder only.

    Weights are taken as the exact values that they hold.  Rounded to float64 once are the coefficients of a batch
    normalisation, 1/d in a division by d, 1/k in a mean of k, and arithmetic between constants.  A formula written
    out, such as :math:`\tfrac12 x(1 + erf(x/\sqrt2))`, stands for the activation that it is, with the constants that
    the file has.  The result is compared with onnxruntime on random inputs.

    >>> import tempfile, onnx
    >>> from onnx import helper as h
    >>> image = h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 1, 2, 2])
    >>> mean = h.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 1, 1, 1])
    >>> nodes = [h.make_node("Tanh", ["x"], ["z"]), h.make_node("GlobalAveragePool", ["z"], ["y"])]
    >>> graph = h.make_graph(nodes, "mean of tanh", [image], [mean])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), f"{folder}/net.onnx")
    ...     load_onnx(f"{folder}/net.onnx")
    Network((1, 2, 2) -> (1, 1, 1), 1 blocks
      z: Block (1, 2, 2) -> (1, 1, 1))

    Raises:
        UnsupportedModule: a node that curvcert does not cover, by name and operator, with the remedy.
        InvalidInput: no such file, a damaged one, NaN weights, sizes that do not fit.
        SoundnessError: the network and onnxruntime disagree.
    """
    graph = read_graph(path, input_shape)
    with torch.inference_mode(False), torch.no_grad(), surroundings_kept():
        network = built(_lowered(graph), source_dtype=graph.dtype)
        require_equal_to_onnxruntime(network, graph)
    return network


def _lowered(graph: Graph) -> Value:
    """Return the output of the graph."""
    context = Context(graph)
    operands: dict[str, Any] = dict(graph.constants)
    operands[graph.input_name] = start(graph.input_shape, torch.device("cpu"))
    producers: dict[str, Node] = {}
    room = graph.room
    for node in graph.nodes:
        if any(name in operands or name in producers for name in node.outputs if name):
            raise InvalidInput(f"{node.label}: its output has a name that is taken. The file is damaged.")
        producers |= {name: node for name in node.outputs if name}
        args = [_argument(node, name, operands) for name in node.inputs]
        result = _result(node, args, operands, producers, context)
        found = result if isinstance(result, tuple) else (result,)
        weights = [arg for arg in args if isinstance(arg, np.ndarray)] if isinstance(found[0], Value) else []
        room -= sum(map(_numbers, (*found, *weights)))
        if room < 0:
            raise InvalidInput(
                f"{node.label}: up to here values and constants are over the {graph.room} numbers that load_onnx "
                "covers for a file of this size."
            )
        operands.update(zip(node.outputs, found, strict=False))
        for name in filter(None, node.outputs[len(found) :]):
            operands[name] = _Refused(node.unsupported(f"a use of its further output {shown(name)}"))
    output = operands.get(graph.output_name)
    if isinstance(output, _Refused):
        raise output.error
    if not isinstance(output, Value):
        raise UnsupportedModule(f"The output {shown(graph.output_name)} does not depend on the input.")
    return output


def _numbers(found: _Operand | None) -> int:
    if isinstance(found, Value):
        return math.prod(found.shape)
    return found.size if isinstance(found, np.ndarray) else 0


def _argument(node: Node, name: str, operands: dict[str, Any]) -> _Operand | None:
    if not name:
        return None
    if name not in operands:
        raise InvalidInput(
            f"{node.label}: it reads {shown(name)}, which nothing before it gives: an initialiser is missing, or the "
            "nodes are out of order or form a cycle. Export the model again."
        )
    found: _Operand = operands[name]
    return found


def _result(
    node: Node, args: list[Any], operands: dict[str, Any], producers: dict[str, Node], context: Context
) -> _Result:
    if not any(isinstance(arg, Value | _Refused) for arg in args):
        return fold(node, args)
    found = recognised(node, operands, producers) if _may_be_a_formula(node, args) else None
    if found is not None:
        return found
    refused = next((arg for arg in args if isinstance(arg, _Refused)), None)
    # A later node may complete the formula that this one is part of.
    if refused is not None:
        if node.op not in ELEMENTWISE or refused.passed_on == _LONGEST_FORMULA:
            raise refused.error
        return replace(refused, passed_on=refused.passed_on + 1)
    try:
        return _applied(node, args, context)
    except UnsupportedModule as error:
        if node.op not in ELEMENTWISE:
            raise
        return _Refused(error)


def _may_be_a_formula(node: Node, args: list[Any]) -> bool:
    """Whether a node ends what no rule covers: a product of values, or arithmetic with what has no expression."""
    moving = sum(isinstance(arg, Value) for arg in args)
    return any(isinstance(arg, _Refused) for arg in args) or (moving > 1 and node.op not in ("Add", "Sub"))


def _applied(node: Node, args: list[Any], context: Context) -> _Result:
    try:
        if node.op == "Shape":
            return shape_of(node, value_of(node, args))
        if node.op in RULES:
            return RULES[node.op](node, args, context)
        activation = activation_of(node, args)
        if activation is not None:
            return value_of(node, args).activate(activation, node.name or node.outputs[0])
    except UnsupportedModule:
        raise
    except InvalidInput as error:
        if str(error).startswith(node.label):
            raise
        raise InvalidInput(f"{node.label}: {error}") from error
    except (ValueError, TypeError, IndexError, RuntimeError, OverflowError, AttributeError) as error:
        raise InvalidInput(f"{node.label}: its arguments do not fit ({error}). Export the model again.") from error
    if node.op in ("Softmax", "LogSoftmax"):
        raise node.unsupported("this operator", _SOFTMAX)
    raise node.unsupported("this operator")
