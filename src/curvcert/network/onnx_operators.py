"""What the operators of ONNX compute, said in torch: `OPERATORS`.

A file is read by running it on tensors without numbers, as a module is: what torch makes of these calls goes by the
same rules as a module's own.  So an operator here is what its definition says, in few words.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.onnx_arguments import Given
from curvcert.network.onnx_movement import (
    concat,
    cut,
    depth_to_space,
    expand,
    flatten,
    gather,
    gather_elements,
    gather_nd,
    reshape,
    space_to_depth,
    split,
    squeeze,
    tile,
    transpose,
    triangle,
    unsqueeze,
)
from curvcert.network.onnx_recurrent import gru, lstm, rnn
from curvcert.network.onnx_windows import average_pool, conv, conv_transpose, max_pool, pad, resize, upsample
from curvcert.network.recording import Recorded

Operator = Callable[[Given], Tensor | Sequence[Tensor]]

_FLOAT32 = {0.01: 0.009999999776482582, 0.2: 0.20000000298023224, 1e-5: 9.999999747378752e-06}
"""Defaults of attributes, as the float32 that the standard says they are."""


_FARTHEST = 3.4e38


def _of_one(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda given: function(given.tensor())


def _of_many(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def operator(given: Given) -> Tensor:
        if not given.args:
            raise InvalidInput(f"{given.node.label}: expected an input, got none.")
        return reduce(function, (_broadcast(given, k) for k in range(len(given.args))))

    return operator


def _mean(given: Given) -> Tensor:
    return torch.div(_of_many(torch.add)(given), float(len(given.args)))  # type: ignore[arg-type]


def _of_two(function: Callable[[Any, Any], Tensor]) -> Operator:
    def operator(given: Given) -> Tensor:
        if len(given.args) != 2:
            raise InvalidInput(f"{given.node.label}: expected two inputs, got {len(given.args)}.")
        return function(_broadcast(given, 0), _broadcast(given, 1))

    return operator


def _broadcast(given: Given, position: int) -> Tensor:
    """Return an argument of arithmetic; a constant may not differ from sample to sample."""
    found, others = given.tensor(position), [arg for arg in given.args if isinstance(arg, Recorded)]
    if isinstance(found, Recorded) or not others:
        return found
    try:
        torch.broadcast_shapes(found.shape, *(other.shape for other in others))
    except RuntimeError:
        raise given.node.unsupported(
            f"a constant of shape {tuple(found.shape)} with a value of shape {tuple(others[0].shape[1:])} per sample",
            "It must fit, and not differ from sample to sample.",
        ) from None
    return found


def _divided(left: Tensor, right: Tensor) -> Tensor:
    return torch.div(left, right)


def _power(given: Given) -> Tensor:
    if given.moves(1):
        if given.moves(0):
            raise given.node.unsupported("a power whose exponent depends on the input", "Write e^(b log a).")
        return torch.exp(given.tensor(1) * torch.log(given.constant(0, "a base")))
    exponents = given.array(1, "an exponent")
    if exponents.size > 1 and bool((exponents == exponents.reshape(-1)[0]).all()):
        return torch.pow(given.tensor(), float(exponents.reshape(-1)[0]))
    return torch.pow(given.tensor(), given.number(1, "an exponent"))


def _clip(given: Given) -> Tensor:
    found, limits = given.tensor(), {}
    for k, name in ((1, "min"), (2, "max")):
        limit = given.node.attributes.get(name)
        limit = given.number(k, f"a {name}") if limit is None and given.has(k) else limit
        # What is the end of the file's own type cuts nothing.
        if limit is not None and abs(limit) < _FARTHEST:
            limits[name] = float(limit)
    return torch.clamp(found, limits.get("min"), limits.get("max")) if limits else found


def _cast(given: Given) -> Tensor:
    x, to = given.tensor(), given.node.attribute("to", 0)
    kind = {1: torch.float32, 10: torch.float16, 11: torch.float64}.get(to)
    if kind is not None and (not x.is_floating_point() or kind == given.graph.dtype):
        return x.to(torch.float64)
    raise given.node.unsupported(f"a cast of values to element type {to}", "Use one floating-point type throughout.")


def _dropout(given: Given) -> Tensor:
    if given.has(2) and (given.moves(2) or bool(given.array(2, "a mode").any())):
        raise given.node.unsupported("dropout in training mode", "Export the model in eval mode: model.eval().")
    return given.tensor()


# Sums and products.


def _gemm(given: Given) -> Tensor:
    node, left, right = given.node, given.tensor(0), given.tensor(1)
    if left.dim() != 2 or right.dim() != 2:
        raise InvalidInput(f"{node.label}: Gemm needs 2 dimensions, got {left.dim()} and {right.dim()}.")
    left, right = left.t() if node.flag("transA") else left, right.t() if node.flag("transB") else right
    product = _scaled(_matmul(given, left, right), node.attribute("alpha", 1.0))
    if not given.has(2):
        return product
    return product + _scaled(given.tensor(2), node.attribute("beta", 1.0))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else factor * x


def _matmul(given: Given, left: Tensor, right: Tensor) -> Tensor:
    if isinstance(left, Recorded) and isinstance(right, Recorded):
        given.require_room(math.prod(left.shape) * right.shape[-1])
    inner = left.shape[-1], right.shape[-2 if right.dim() > 1 else 0]
    if inner[0] != inner[1]:
        raise InvalidInput(f"{given.node.label}: {inner[0]} features meet weights for {inner[1]} features.")
    return torch.matmul(left, right)


def _einsum(given: Given) -> Tensor:
    tensors = [given.tensor(k) for k in range(len(given.args))]
    if sum(isinstance(x, Recorded) for x in tensors) > 1:
        given.require_room(math.prod(math.prod(x.shape) for x in tensors))
    found: Tensor = torch.einsum(given.node.attribute("equation", "").replace(" ", ""), *tensors)
    return found


def _reduced(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def operator(given: Given) -> Tensor:
        x, node = given.tensor(), given.node
        axes = sorted(given.axes(x.dim()) or ())
        if not axes and node.flag("noop_with_empty_axes"):
            return x
        return function(x, axes or list(range(x.dim())), node.flag("keepdims", True))

    return operator


def _norm_of(order: float) -> Operator:
    return _reduced(lambda x, dims, keep: torch.linalg.vector_norm(x, order, dims, keep))


def _cumulative_sum(given: Given) -> Tensor:
    x, node = given.tensor(), given.node
    axis = int(given.number(1, "a dimension"))
    if not -x.dim() <= axis < x.dim():
        raise InvalidInput(f"{node.label}: there is no dimension {axis} among {x.dim()}.")
    given.require_room(x.shape[axis] ** 2)
    turned = x.flip(axis) if node.flag("reverse") else x
    sums = torch.cumsum(turned, axis)
    sums = sums - turned if node.flag("exclusive") else sums
    return sums.flip(axis) if node.flag("reverse") else sums


# Softmax and normalisations.


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def operator(given: Given) -> Tensor:
        x = given.tensor()
        axis = given.axis(-1 if given.graph.opset >= 13 else 1, x.dim())
        if given.graph.opset >= 13 or axis == x.dim() - 1:
            return function(x, axis)
        # Until opset 12 all dimensions from the axis on are one.
        return function(x.flatten(axis), axis).reshape(x.shape)

    return operator


def _layer_norm(given: Given) -> Tensor:
    x, node = given.tensor(), given.node
    shape = list(x.shape[given.axis(-1, x.dim()) :])
    scale = given.constant(1, "a scale").expand(shape)
    bias = given.constant(2, "an offset").expand(shape) if given.has(2) else None
    return F.layer_norm(x, shape, scale, bias, node.attribute("epsilon", _FLOAT32[1e-5]))


def _rms_norm(given: Given) -> Tensor:
    x, node = given.tensor(), given.node
    shape = list(x.shape[given.axis(-1, x.dim()) :])
    return F.rms_norm(x, shape, given.constant(1, "a scale").expand(shape), node.attribute("epsilon", _FLOAT32[1e-5]))


def _group_norm(given: Given) -> Tensor:
    x, node = given.tensor(), given.node
    scale, bias = given.constant(1, "a scale"), given.constant(2, "an offset")
    groups = node.attribute("num_groups", x.shape[1] if node.op == "InstanceNormalization" else 0)
    if node.op == "GroupNormalization" and given.graph.opset < 21:
        scale, bias = (part.repeat_interleave(x.shape[1] // max(groups, 1)) for part in (scale, bias))
    return F.group_norm(x, groups, scale, bias, node.attribute("epsilon", _FLOAT32[1e-5]))


def _batch_norm(given: Given) -> Tensor:
    node, x = given.node, given.tensor()
    if node.flag("training_mode") or len([name for name in node.outputs if name]) > 1:
        raise node.unsupported("batch normalisation in training mode", "Export the model in eval mode: model.eval().")
    scale, bias, mean, variance = (given.constant(k, "a statistic") for k in range(1, 5))
    if x.dim() < 2 or any(tuple(part.shape) != (x.shape[1],) for part in (scale, bias, mean, variance)):
        shape = tuple(x.shape[1:])
        raise InvalidInput(f"{node.label}: {len(scale)} channels of statistics got samples of shape {shape}.")
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.attribute("epsilon", _FLOAT32[1e-5]))


def _attention(given: Given) -> Tensor:
    node = given.node
    if (
        any(given.has(k) for k in (4, 5, 6))
        or node.attribute("softcap", 0.0)
        or node.attributes.get("qk_matmul_output_mode")
    ):
        raise node.unsupported("attention with a past or a softcap", "Export it without.")
    q, k, v = (given.tensor(position) for position in range(3))
    flat = q.dim() == 3
    if flat:
        heads = [node.attribute(name, 0) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True))
    if q.shape[1] != k.shape[1]:
        raise node.unsupported(
            "attention with groups of heads", "Export it with as many heads for keys as for queries."
        )
    given.require_room(math.prod(q.shape) * k.shape[2])
    mask, scale = given.optional(3), node.attributes.get("scale")
    found = F.scaled_dot_product_attention(q, k, v, mask, 0.0, node.flag("is_causal"), scale=scale)
    return found.transpose(1, 2).flatten(2) if flat else found


# Activations with numbers of their own.


def _where(given: Given) -> Tensor:
    mask, above, below = (given.tensor(k, finite=k != 0) for k in range(3))
    return torch.where(mask, above, below)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x): ONNX has no threshold beyond which it is x."""
    return torch.log1p(torch.exp(x))


def _gelu(given: Given) -> Tensor:
    kind = given.node.attribute("approximate", "none")
    if kind not in ("none", "tanh"):
        raise given.node.unsupported(f"the approximation {kind!r}", "ONNX knows 'none' and 'tanh'.")
    return F.gelu(given.tensor(), approximate=kind)


def _selu(given: Given) -> Tensor:
    alpha, gamma = given.node.attribute("alpha", 1.6732631921768188), given.node.attribute("gamma", 1.0507010221481323)
    if not alpha > 0 or not gamma > 0:
        raise InvalidInput(f"{given.node.label}: Selu needs a positive alpha and gamma, got {alpha} and {gamma}.")
    found: Tensor = torch.ops.aten.elu(given.tensor(), alpha, gamma)
    return found


def _with_alpha(function: Callable[[Tensor, float], Tensor], default: float) -> Operator:
    return lambda given: function(given.tensor(), given.node.attribute("alpha", default))


def _prelu(given: Given) -> Tensor:
    x, slopes = given.tensor(), given.constant(1, "slopes")
    found: Tensor = torch.ops.aten._prelu_kernel(x, slopes.expand(torch.broadcast_shapes(slopes.shape, (1,) * x.dim())))
    return found


def _hard_sigmoid(given: Given) -> Tensor:
    alpha, beta = given.node.attribute("alpha", _FLOAT32[0.2]), given.node.attribute("beta", 0.5)
    return torch.clamp(alpha * given.tensor() + beta, 0.0, 1.0)


def _shrink(given: Given) -> Tensor:
    bias, limit = given.node.attribute("bias", 0.0), given.node.attribute("lambd", 0.5)
    if bias != limit:
        raise given.node.unsupported(f"Shrink with bias {bias} and lambd {limit}", "It jumps unless they are the same.")
    return F.softshrink(given.tensor(), limit)


def _swish(given: Given) -> Tensor:
    x = given.tensor()
    return x * torch.sigmoid(_scaled(x, given.node.attribute("alpha", 1.0)))


def _scaler(given: Given) -> Tensor:
    """Return (x - offset) scale, feature by feature: scikit-learn's scalers."""
    offset, scale = (
        torch.tensor(given.node.attribute(name, ()), dtype=torch.float64, device=given.device)
        for name in ("offset", "scale")
    )
    return (given.tensor() - offset) * scale


def _local_response_norm(given: Given) -> Tensor:
    node, x = given.node, given.tensor()
    size, given_alpha = node.attribute("size", 1), node.attribute("alpha", 9.999999747378752e-05)
    before = (size - 1) // 2
    squares = F.pad((x * x).movedim(1, -1), (before, size - 1 - before))
    parts = [torch.ops.aten.slice.Tensor(squares, -1, k, k + x.shape[1]) for k in range(size)]
    sums = reduce(torch.add, parts).movedim(-1, 1)
    return x * torch.pow(node.attribute("bias", 1.0) + given_alpha / size * sums, -node.attribute("beta", 0.75))


OPERATORS: dict[str, Operator] = {
    # One argument.
    **{
        name: _of_one(getattr(torch, name.lower()))
        for name in ("Abs", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu")
    },
    **{
        name: _of_one(getattr(torch, name.lower()))
        for name in ("Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tanh")
    },
    "Identity": _of_one(lambda x: x),
    "HardSwish": _of_one(F.hardswish),
    "Mish": _of_one(F.mish),
    "Softplus": _of_one(_softplus),
    "Softsign": _of_one(F.softsign),
    "Celu": _with_alpha(F.celu, 1.0),
    "Elu": _with_alpha(F.elu, 1.0),
    "LeakyRelu": _with_alpha(F.leaky_relu, _FLOAT32[0.01]),
    "ThresholdedRelu": _with_alpha(lambda x, alpha: F.threshold(x, alpha, 0.0), 1.0),
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "PRelu": _prelu,
    "Selu": _selu,
    "Shrink": _shrink,
    "Swish": _swish,
    "Cast": _cast,
    "Clip": _clip,
    "Dropout": _dropout,
    # Several.
    "Add": _of_two(torch.add),
    "Sub": _of_two(torch.sub),
    "Mul": _of_two(torch.mul),
    "Div": _of_two(_divided),
    "Pow": _power,
    "Max": _of_many(torch.maximum),
    "Min": _of_many(torch.minimum),
    "Sum": _of_many(torch.add),
    "Mean": _mean,
    "Greater": _of_two(torch.gt),
    "GreaterOrEqual": _of_two(torch.ge),
    "Less": _of_two(torch.lt),
    "LessOrEqual": _of_two(torch.le),
    "Where": _where,
    "Gemm": _gemm,
    "MatMul": lambda given: _matmul(given, given.tensor(0), given.tensor(1)),
    "Einsum": _einsum,
    # Windows.
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "AveragePool": average_pool,
    "MaxPool": max_pool,
    "GlobalAveragePool": lambda given: given.tensor().mean(list(range(2, given.tensor().dim())), keepdim=True),
    "GlobalMaxPool": lambda given: given.tensor().amax(list(range(2, given.tensor().dim())), keepdim=True),
    "Pad": pad,
    "Resize": resize,
    "Upsample": upsample,
    # Along axes.
    "CumSum": _cumulative_sum,
    "ReduceL1": _norm_of(1),
    "ReduceL2": _norm_of(2),
    "ReduceLogSumExp": _reduced(torch.logsumexp),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceMin": _reduced(torch.amin),
    "ReduceSum": _reduced(torch.sum),
    "ReduceSumSquare": _reduced(lambda x, dims, keep: torch.sum(x * x, dims, keep)),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "LRN": _local_response_norm,
    "LpNormalization": lambda given: (
        given.tensor()
        / torch.linalg.vector_norm(
            given.tensor(), given.node.attribute("p", 2), [given.axis(-1, given.tensor().dim())], True
        )
    ),
    "Attention": _attention,
    "RNN": rnn,
    "GRU": gru,
    "LSTM": lstm,
    # Shapes, orders, parts.
    "Concat": concat,
    "DepthToSpace": depth_to_space,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Reshape": reshape,
    "Slice": cut,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": triangle,
    "Unsqueeze": unsqueeze,
    # scikit-learn's.
    "Scaler": _scaler,
}
"""Every operator that may depend on the input."""
