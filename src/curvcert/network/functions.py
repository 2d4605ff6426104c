"""How a function or a method in a forward pass becomes part of a block."""

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from curvcert import activations
from curvcert.activations import Activation
from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.network import composed, elementwise, movement
from curvcert.network.builder import Value
from curvcert.network.linear_calls import LINEAR
from curvcert.network.lowering import lower_exactly
from curvcert.network.movement_calls import MOVES, Batch
from curvcert.network.recording import is_in_place_call, is_in_place_module, path_of, require_own_memory
from curvcert.network.remedies import remedy

# A functional layer is the module of the same arguments.
_FUNCTIONAL: dict[Any, Callable[..., nn.Module]] = {
    torch.tanh: nn.Tanh,
    F.tanh: nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    F.sigmoid: nn.Sigmoid,
    F.softplus: nn.Softplus,
    F.elu: nn.ELU,
    F.celu: nn.CELU,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.mish: nn.Mish,
    F.softsign: nn.Softsign,
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    F.leaky_relu: nn.LeakyReLU,
    F.relu6: nn.ReLU6,
    F.hardtanh: nn.Hardtanh,
    F.hardswish: nn.Hardswish,
    F.hardsigmoid: nn.Hardsigmoid,
    F.tanhshrink: nn.Tanhshrink,
    F.softshrink: nn.Softshrink,
    F.selu: nn.SELU,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.channel_shuffle: nn.ChannelShuffle,
    F.max_pool1d: nn.MaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
}
_COMPOSED: dict[Any, Callable[[Value, str], Value]] = {
    **dict.fromkeys((torch.cos, "cos"), elementwise.cosine),
    **dict.fromkeys((torch.abs, operator.abs, "abs"), elementwise.absolute),
    F.logsigmoid: elementwise.log_sigmoid,
}
"""Functions of one argument that are made of rows and affine maps."""

_ROWS: dict[str, Callable[[Value, str], Value]] = {
    "exp": elementwise.exponential,
    "expm1": elementwise.exponential_less_one,
    "log": elementwise.logarithm,
    "log1p": elementwise.logarithm_of_one_more,
    "sqrt": partial(elementwise.power, exponent=0.5),
    "rsqrt": partial(elementwise.power, exponent=-0.5),
    "square": partial(elementwise.power, exponent=2.0),
    "reciprocal": partial(elementwise.power, exponent=-1.0),
    "sinh": partial(elementwise.hyperbolic, odd=True),
    "cosh": partial(elementwise.hyperbolic, odd=False),
}
_COMPOSED |= {function: rule for name, rule in _ROWS.items() for function in (name, getattr(torch, name))}

_UNBOUNDED = {
    function: name
    for name in elementwise.UNBOUNDED
    for function in (name, getattr(torch, name, name), getattr(operator, name, name))
}
_PLAIN: dict[Any, Activation] = {
    torch.sin: activations.SIN,
    torch.atan: activations.ARCTAN,
    torch.arctan: activations.ARCTAN,
    torch.erf: activations.ERF,
    "sin": activations.SIN,
    "atan": activations.ARCTAN,
    "arctan": activations.ARCTAN,
    "erf": activations.ERF,
}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SUBTRACT = {operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"}
_DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_"}
_NEGATE = {operator.neg, torch.neg, torch.negative, "neg"}
_OF_SHAPES = {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv}
_NAMES = """abs cat diag exp flatten matmul mean mm mul neg permute pow reciprocal relu reshape rsqrt sigmoid
sqrt square squeeze stack sum t tanh transpose tril triu unsqueeze"""
_PURE = {
    *(getattr(torch, name) for name in _NAMES.split()),
    *(name for name in (*_NAMES.split(), "contiguous", "clone", "detach", "view") if hasattr(Tensor, name)),
    *(operator.matmul, operator.neg, operator.pow, operator.truediv, torch.add, torch.sub, torch.div),
    *(F.softplus, F.normalize, torch.linalg.vector_norm, torch.linalg.matrix_norm),
}
"""What weights may be computed with in a forward pass: functions and methods without state, memory or chance."""

_PARTS_OF_CONSTANTS = {"T", "mT", "data"}

_GENERAL_REMEDY = (
    "Use what the page 'Networks' of the documentation lists, or put it into a module of your own with a rule "
    "(curvcert.network.lower.register)."
)


def lower_call(model: nn.Module, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a function or method gives: an expression, or the shape of one."""
    target, path = node.target, path_of(node)
    if not _holds_value((args, kwargs)):
        return _of_constants(node, args, kwargs)
    if is_in_place_call(node):
        require_own_memory(model, node)
    if target in _ADD | _SUBTRACT | _MULTIPLY | _DIVIDE and not kwargs and len(args) == 2:
        return _arithmetic(path, target, args[0], args[1])
    if target in (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm") and not kwargs and _count(args) == 2:
        return composed.matrix_product(args[0], args[1], path)
    if target in MOVES and args and _holds_value(args[0]) and not _holds_value((args[1:], kwargs)):
        return _by_rule(MOVES[target], node, args, kwargs)
    if target in LINEAR and _count((*args, *kwargs.values())) == 1:
        return _by_rule(LINEAR[target], node, args, kwargs)
    if not args or not isinstance(args[0], Value) or _holds_value((args[1:], kwargs)):
        raise _unsupported(node)
    value, rest = args[0], args[1:]
    if target in _FUNCTIONAL:
        module = _module(node, rest, kwargs)
        if is_in_place_module(module):
            require_own_memory(model, node)
        return lower_exactly(module, value, path)
    if target in _PLAIN and not rest and not kwargs:
        return value.activate(_PLAIN[target], path)
    if target in _COMPOSED and not rest and not kwargs:
        return _COMPOSED[target](value, path)
    if target in _POWERS and len(rest) == 1 and not kwargs and type(rest[0]) in (int, float):
        return elementwise.power(value, path=path, exponent=float(rest[0]))
    if target in _SOFTMAXES:
        return _by_rule(_SOFTMAXES[target], node, args, kwargs)
    if target in _CLAMPS:
        return _by_rule(_CLAMPS[target], node, args, kwargs)
    if target in _UNBOUNDED:
        raise elementwise.without_a_constant(_UNBOUNDED[target], path)
    if target in _NEGATE and not rest and not kwargs:
        return value.negative()
    if target in (F.dropout, F.dropout2d):
        return _dropout(path, value, *rest, **kwargs)
    if target == "size" or (target is getattr and rest == ["shape"]):
        return _size(node, value, rest, kwargs)
    raise _unsupported(node)


def _clamp(path: str, value: Value, min: Any = None, max: Any = None) -> Value:
    lower, upper = (None if limit is None else _one_number(limit, path) for limit in (min, max))
    return elementwise.clamped(value, lower, upper, path)


def _clamp_min(path: str, value: Value, min: Any) -> Value:
    return _clamp(path, value, min)


def _clamp_max(path: str, value: Value, max: Any) -> Value:
    return _clamp(path, value, None, max)


def _one_number(limit: Any, path: str) -> float:
    if isinstance(limit, Tensor) and limit.numel() == 1:
        limit = limit.item()
    if type(limit) not in (int, float):
        raise UnsupportedModule(f"{path}: expected a limit that is one constant number, got {type(limit).__name__}.")
    return float(limit)


def _prelu(path: str, value: Value, weight: Any) -> Value:
    if not isinstance(weight, Tensor):
        raise UnsupportedModule(f"{path}: expected constant slopes.")
    return elementwise.parametric_relu(value, weight.reshape(-1), path)


_CLAMPS: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys((torch.clamp, torch.clip, "clamp", "clip"), _clamp),
    **dict.fromkeys((torch.clamp_min, "clamp_min"), _clamp_min),
    **dict.fromkeys((torch.clamp_max, "clamp_max"), _clamp_max),
    **dict.fromkeys((F.prelu, torch.prelu, "prelu"), _prelu),
}


def _softmax(path: str, value: Value, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Value:
    return composed.softmax(value, movement.axis_of(value, dim, path), path)


def _log_softmax(path: str, value: Value, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Value:
    return composed.log_softmax(value, movement.axis_of(value, dim, path), path)


_SOFTMAXES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys((F.softmax, torch.softmax, "softmax"), _softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, "log_softmax"), _log_softmax),
}
_POWERS = (operator.pow, torch.pow, "pow")


def _by_rule(rule: Callable[..., Any], node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Lower a call that has a rule with torch's own parameters."""
    try:
        inspect.signature(rule).bind(path_of(node), *args, **kwargs)
    except TypeError:
        raise _unsupported(node) from None
    try:
        return rule(path_of(node), *args, **kwargs)
    except InvalidInput as error:
        if str(error).startswith(path_of(node)):
            raise
        raise InvalidInput(f"{path_of(node)}: {error}") from error


def _size(node: fx.Node, value: Value, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the shape of a value, or one size of it; that of the batch is a symbol."""
    shape = (Batch.SIZE, *value.shape)
    dim = None if node.target is getattr else (*rest, *kwargs.values(), None)[0]
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise _unsupported(node)
    return shape if dim is None else shape[dim]


def _unsupported(node: fx.Node) -> UnsupportedModule:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    what = "with these arguments is not supported" if node.target in _KNOWN else "is unknown to curvcert"
    return UnsupportedModule(f"{path_of(node)}{_owner(node)}: {name} {what}. {remedy(name) or _GENERAL_REMEDY}")


def _owner(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return f" (in a {stack[-1][1].__name__})" if stack else ""


_KNOWN = {
    *MOVES,
    *LINEAR,
    *_FUNCTIONAL,
    *_COMPOSED,
    *_PLAIN,
    *_UNBOUNDED,
    *_CLAMPS,
    *_SOFTMAXES,
    *_POWERS,
    *_NEGATE,
    *_OF_SHAPES,
    *_PURE,
}
_KNOWN |= {*_ADD, *_SUBTRACT, *_MULTIPLY, *_DIVIDE, F.dropout, F.dropout2d, "size", getattr}


def _holds_value(argument: Any) -> bool:
    return _holds(Value, argument)


def _count(arguments: Any) -> int:
    """Return how many values the arguments hold, in lists too."""
    return sum(_count(part) if isinstance(part, tuple | list) else isinstance(part, Value) for part in arguments)


def _holds(kind: type, argument: Any) -> bool:
    if isinstance(argument, dict):
        return _holds(kind, tuple(argument.values()))
    return isinstance(argument, kind) or (
        isinstance(argument, tuple | list) and any(_holds(kind, part) for part in argument)
    )


def _of_constants(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Evaluate a node that depends on weights, or on the shape of the input, alone."""
    known = node.target in _OF_SHAPES or (node.target in _PURE and _holds(Tensor, args))
    of_constant = node.target is getattr and isinstance(args[0], Tensor) and args[1] in _PARTS_OF_CONSTANTS
    if not (known or of_constant):
        raise _unsupported(node)
    try:
        if isinstance(node.target, str):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)
    except (TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise UnsupportedModule(
            f"{path_of(node)}: {error}. A forward pass may use x.shape, but not compute with the size of the batch."
        ) from error


def _module(node: fx.Node, rest: list[Any], kwargs: dict[str, Any]) -> nn.Module:
    try:
        return _FUNCTIONAL[node.target](*rest, **kwargs)
    except CurvcertError:
        raise
    except Exception as error:
        raise UnsupportedModule(f"{path_of(node)}: unexpected arguments ({error}).") from error


def _dropout(path: str, value: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    if training and p != 0.0:
        raise UnsupportedModule(
            f"{path}: dropout with training=True is random in eval mode too. Pass training=self.training."
        )
    return value


def _arithmetic(path: str, target: Any, left: Any, right: Any) -> Value:
    if isinstance(left, Value) and isinstance(right, Value):
        if target in _ADD:
            return left.plus(right, path)
        if target in _SUBTRACT:
            return left.plus(right.negative(), path)
        if target in _MULTIPLY:
            return _product(path, left, right)
        return _product(path, left, elementwise.power(right, path=path, exponent=-1.0))
    value, constant = (left, right) if isinstance(left, Value) else (right, left)
    number = _as_constant(constant, value, path)
    if target in _ADD:
        return value.shift(number)
    if target in _SUBTRACT:
        return value.shift(-number) if value is left else value.negative().shift(number)
    if target in _MULTIPLY:
        return value.times(number)
    if value is right:
        return elementwise.power(value, path=path, exponent=-1.0).times(number)
    if not bool(torch.isfinite(1.0 / number).all()):
        raise InvalidInput(f"{path}: a division by zero, or by a number too small for float64.")
    return value.times(1.0 / number)


def _product(path: str, left: Value, right: Value) -> Value:
    """Return the product of two values, each repeated along axes of size 1 as torch does."""
    try:
        shape = torch.broadcast_shapes((1, *left.shape), (1, *right.shape))[1:]
    except RuntimeError as error:
        raise UnsupportedModule(f"{path}: {error}.") from None
    return left.expanded(tuple(shape), path).multiplied(right.expanded(tuple(shape), path), path)


def _as_constant(constant: Any, value: Value, path: str) -> Tensor:
    if not isinstance(constant, int | float | Tensor) or (isinstance(constant, Tensor) and constant.is_complex()):
        kind = constant.dtype if isinstance(constant, Tensor) else type(constant).__name__
        raise UnsupportedModule(f"{path}: expected a constant real number or tensor, got {kind}.")
    number = torch.as_tensor(constant, dtype=torch.float64).detach().to(value.device)
    if not bool(torch.isfinite(number).all()):
        raise InvalidInput(f"{path}: a constant is NaN or infinite.")
    # A leading dimension of 1 stands for the batch.
    if number.dim() == len(value.shape) + 1 and number.shape[0] == 1:
        number = number[0]
    try:
        return number.expand(value.shape)
    except RuntimeError:
        raise UnsupportedModule(
            f"{path}: a constant of shape {tuple(number.shape)} does not fit a value of shape {value.shape}. "
            "Expand the value's shape with a layer, or shrink the constant."
        ) from None
