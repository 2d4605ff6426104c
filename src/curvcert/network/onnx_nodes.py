"""How each linear operator of an ONNX graph becomes part of a block.

Values carry no batch dimension; ONNX counts it as dimension 0, and no rule lets samples meet.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert import activations
from curvcert.errors import InvalidInput
from curvcert.network import elementwise, movement, windows
from curvcert.network.builder import Value
from curvcert.network.movement import reshape
from curvcert.network.onnx_activations import limit_of
from curvcert.network.onnx_arguments import Batch, Context, Rule, argument, linear, require_size, value_of, weight
from curvcert.network.onnx_constants import axes_of
from curvcert.network.onnx_file import FLOATS, Array, Node
from curvcert.network.onnx_movement import (
    concat,
    depth_to_space,
    flatten,
    gather,
    reshape_node,
    slice_node,
    space_to_depth,
    split_node,
    squeeze,
    transpose,
    unsqueeze,
)
from curvcert.network.onnx_resize import resize
from curvcert.network.onnx_windows import average_pool, conv, conv_transpose, max_pool, pad
from curvcert.operators import (
    Conv2d,
    Dense,
    batch_norm_in_eval,
    scale,
)
from curvcert.rounding import TINY, UNIT_ROUNDOFF

_BATCH = "Keep the batch as the first dimension throughout."


def gemm(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower alpha A' B' + beta C with the value as A."""
    value, B = value_of(node, args), weight(node, args, 1, 2)
    if len(value.shape) != 1 or node.flag("transA"):
        raise node.unsupported(f"Gemm with transA, or on samples of shape {value.shape},", _BATCH)
    W = B if node.flag("transB") else B.T.contiguous()
    if W.shape[1] != value.shape[0]:
        raise InvalidInput(f"{node.label}: weights for {W.shape[1]} features got samples of shape {value.shape}.")
    product = linear(node, context, value, scale(node.attribute("alpha", 1.0), Dense(W)))
    if len(args) < 3 or args[2] is None:
        return product
    beta, C = node.attribute("beta", 1.0), broadcast(node, args, 2, product)
    if beta == 1.0:
        return product.shift(C)
    return product.shift(beta * C, UNIT_ROUNDOFF * (beta * C).abs() + TINY)


def matmul(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower x W along the last dimension, or W x for samples that are matrices."""
    if len(args) == 2 and isinstance(args[1], Value):
        W, value = weight(node, args, 0, 2), value_of(node, args, 1)
        if len(value.shape) != 2 or W.shape[1] != value.shape[0]:
            raise node.unsupported(f"a {tuple(W.shape)} matrix from the left on samples of shape {value.shape}", _BATCH)
        return _channels_mixed(node, context, value, W)
    value, W = value_of(node, args), weight(node, args, 1, 2).T.contiguous()
    if not value.shape or W.shape[1] != value.shape[-1]:
        raise InvalidInput(f"{node.label}: weights for {W.shape[1]} features got samples of shape {value.shape}.")
    if len(value.shape) == 1:
        return linear(node, context, value, Dense(W))
    *lead, features = value.shape
    rows = math.prod(lead)
    flat = reshape(value, (rows, features), node.label).permuted((1, 0))
    mixed = _channels_mixed(node, context, flat, W).permuted((1, 0))
    return reshape(mixed, (*lead, W.shape[0]), node.label)


def _channels_mixed(node: Node, context: Context, value: Value, W: Tensor) -> Value:
    """Return W X for samples X with two dimensions: a convolution by one pixel."""
    channels, width = value.shape
    if width == 1:
        mixed = linear(node, context, reshape(value, (channels,), node.label), Dense(W))
    else:
        image = reshape(value, (channels, width, 1), node.label)
        mixed = linear(node, context, image, Conv2d(W[:, :, None, None], image.shape))
    return reshape(mixed, (W.shape[0], width), node.label)


def global_average_pool(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower the mean of each channel."""
    value = value_of(node, args)
    if len(value.shape) < 2:
        raise InvalidInput(f"{node.label}: expected channels and positions, got samples of shape {value.shape}.")
    return windows.reduced(value, range(1, len(value.shape)), True, True, node.label)


def reduction(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a mean or a sum over dimensions of a sample."""
    value = value_of(node, args)
    axes = sorted(axes_of(node, args, 1 + len(value.shape)) or ())
    if not axes and node.flag("noop_with_empty_axes"):
        return value
    if not axes or axes[0] == 0:
        raise node.unsupported(f"{node.op} over the batch", "Name the dimensions of a sample.")
    mean = node.op == "ReduceMean"
    return windows.reduced(value, [axis - 1 for axis in axes], node.flag("keepdims", True), mean, node.label)


def cumulative_sum(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower the sums of all entries up to each along a dimension."""
    value, given = value_of(node, args), argument(args, 1)
    if not isinstance(given, np.ndarray) or given.size != 1 or node.flag("exclusive") or node.flag("reverse"):
        raise node.unsupported("CumSum from behind, without the entry itself, or along a computed dimension")
    axis = movement.axis_of(value, int(given.reshape(())), node.label)
    require_size(node, context, (value.shape[axis] ** 2,))
    return windows.cumulative_sum(value, axis, node.label)


def parametric_relu(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a leaky ReLU with one slope, or one for each channel."""
    value = value_of(node, args)
    slopes = broadcast(node, args, 1, value)
    of_channels = slopes.flatten(1)[:, 0] if slopes.dim() > 1 else slopes
    per_channel = of_channels.reshape(-1, *(1 for _ in value.shape[1:]))
    if not bool((slopes == per_channel).all()):
        raise node.unsupported("slopes that differ within a channel", "Give one for each channel.")
    alike = bool((of_channels == of_channels[0]).all())
    return elementwise.parametric_relu(value, of_channels[:1] if alike else of_channels, node.label)


def hard_sigmoid(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower alpha x + beta cut to [0, 1]."""
    alpha = node.attribute("alpha", float(np.float32(0.2)))
    beta = node.attribute("beta", 0.5)
    return elementwise.scaled(value_of(node, args), alpha, activations.hardtanh(0.0, 1.0), 1.0, node.label, beta)


def clip(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a cut to an interval, which may be open on one side."""
    lower, upper = (limit_of(node, args, k, name) for k, name in ((1, "min"), (2, "max")))
    value = value_of(node, args)
    return value if lower is upper is None else elementwise.clamped(value, lower, upper, node.name or node.outputs[0])


def batch_normalization(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower batch normalisation with fixed statistics."""
    value = value_of(node, args)
    if node.flag("training_mode") or len([name for name in node.outputs if name]) > 1:
        raise node.unsupported("batch normalisation in training mode", "Export the model in eval mode: model.eval().")
    factor, bias, mean, variance = (weight(node, args, k, 1) for k in range(1, 5))
    if not value.shape or any(len(part) != value.shape[0] for part in (factor, bias, mean, variance)):
        raise InvalidInput(f"{node.label}: {len(factor)} channels of statistics got samples of shape {value.shape}.")
    D, offset = batch_norm_in_eval(
        value.shape, mean, variance, node.attribute("epsilon", float(np.float32(1e-5))), factor, bias
    )
    return linear(node, context, value, D, offset)


def dropout(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower dropout in inference, which does nothing."""
    value, training = value_of(node, args), argument(args, 2)
    if training is not None and (not isinstance(training, np.ndarray) or bool(training.any())):
        raise node.unsupported("dropout in training mode", "Export the model in eval mode: model.eval().")
    return value


def cast(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a cast to the type that the value has already."""
    value, to = value_of(node, args), node.attribute("to", 0)
    if FLOATS.get(to) != context.graph.dtype:
        raise node.unsupported(f"a cast of values to element type {to}", "Use one floating-point type throughout.")
    return value


def arithmetic(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower sums of values, and arithmetic of a value with a constant."""
    if len(args) != 2:
        raise InvalidInput(f"{node.label}: expected two inputs, got {len(args)}.")
    if isinstance(args[0], Value) and isinstance(args[1], Value):
        return _of_values(node, args[0], args[1])
    right = 1 if isinstance(args[1], Value) else 0
    value = value_of(node, args, right)
    number = broadcast(node, args, 1 - right, value)
    match node.op:
        case "Add":
            return value.shift(number)
        case "Sub":
            return value.negative().shift(number) if right else value.shift(-number)
        case "Mul":
            return value.times(number)
    if right:
        raise node.unsupported("a division by a value that depends on the input")
    if not bool(torch.isfinite(1.0 / number).all()):
        raise InvalidInput(f"{node.label}: a division by zero, or by a number too small for float64.")
    return value.times(1.0 / number)


def _of_values(node: Node, left: Value, right: Value) -> Value:
    if node.op not in ("Add", "Sub"):
        raise node.unsupported(
            "a product or quotient of two values that depend on the input",
            "GELU, SiLU, Mish and softsign, written out, are recognised by their exact constants.",
        )
    return left.plus(right if node.op == "Add" else right.negative(), node.label)


def broadcast(node: Node, args: Sequence[Any], position: int, value: Value) -> Tensor:
    """Return a constant as one number for each coordinate of a value, by ONNX's rules with the batch in front."""
    number = weight(node, args, position)
    shape = tuple(number.shape)
    inner = shape[1:] if len(shape) == 1 + len(value.shape) and shape[0] == 1 else shape
    fits = len(inner) <= len(value.shape) and all(
        a in (1, b) for a, b in zip(reversed(inner), reversed(value.shape), strict=False)
    )
    if not fits:
        raise node.unsupported(
            f"a constant of shape {shape} with samples of shape {value.shape}",
            "It must not enlarge the value, nor differ from sample to sample.",
        )
    return number.reshape(inner).expand(value.shape)


RULES: dict[str, Rule] = {
    "Abs": lambda node, args, context: elementwise.absolute(value_of(node, args), node.name or node.outputs[0]),
    "Add": arithmetic,
    "AveragePool": average_pool,
    "BatchNormalization": batch_normalization,
    "Cast": cast,
    "Clip": clip,
    "Concat": concat,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Cos": lambda node, args, context: elementwise.cosine(value_of(node, args), node.name or node.outputs[0]),
    "CumSum": cumulative_sum,
    "DepthToSpace": depth_to_space,
    "Div": arithmetic,
    "Dropout": dropout,
    "Flatten": flatten,
    "Gather": gather,
    "Gemm": gemm,
    "GlobalAveragePool": global_average_pool,
    "HardSigmoid": hard_sigmoid,
    "Identity": lambda node, args, context: value_of(node, args),
    "MatMul": matmul,
    "MaxPool": max_pool,
    "Mul": arithmetic,
    "Neg": lambda node, args, context: value_of(node, args).negative(),
    "PRelu": parametric_relu,
    "Pad": pad,
    "ReduceMean": reduction,
    "ReduceSum": reduction,
    "Reshape": reshape_node,
    "Resize": resize,
    "Slice": slice_node,
    "SpaceToDepth": space_to_depth,
    "Split": split_node,
    "Squeeze": squeeze,
    "Sub": arithmetic,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
"""One rule for each operator that moves or adds numbers; activations have their own table."""


def shape_of(node: Node, value: Value) -> Array:
    """Return the shape of a value as a constant, with the batch as a symbol that nothing can be computed with."""
    shape = (Batch.SIZE, *value.shape)
    first, last = node.attribute("start", 0), node.attribute("end", len(shape))
    found = np.empty(len(shape[first:last]), dtype=object)
    found[:] = shape[first:last]
    return found
