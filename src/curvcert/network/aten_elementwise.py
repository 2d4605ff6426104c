"""Operations of ATen on every entry: `ELEMENTWISE` has a rule for each, `SYMBOLS` what it is inside a formula.

A rule is given the path for messages, then what the call is given, with `Batched` for the tensors that depend on the
input; the result lies in memory like them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvcert import activations
from curvcert.activations import Activation
from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network import composed, elementwise
from curvcert.network.batched import Batched, aligned, constant_of_a_sample
from curvcert.network.builder import Value
from curvcert.network.lowering import lower_exactly

Rule = Callable[..., Batched]


def _each(x: Batched, lower: Callable[[Value], Value]) -> Batched:
    return Batched(lower(x.value), x.layout)


def _row(activation: Activation) -> Rule:
    return lambda path, x: _each(x, lambda value: value.activate(activation, path))


def _layer(kind: Callable[..., nn.Module]) -> Rule:
    """Return the rule for a function that is a module of torch with the same arguments."""
    return lambda path, x, *args, **options: _each(x, lambda value: lower_exactly(kind(*args, **options), value, path))


def _elu(path: str, x: Batched, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Batched:
    if input_scale != 1:
        raise UnsupportedModule(f"{path}: elu with another factor of its input is not supported. Scale before it.")
    if scale == 1:
        return _layer(nn.ELU)(path, x, alpha)
    if (alpha, scale) == (1.6732632423543772, 1.0507009873554805):
        return _layer(nn.SELU)(path, x)
    return _product_by(path, _layer(nn.ELU)(path, x, alpha), scale)


def _rrelu(
    path: str, x: Batched, noise: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Batched:
    if training:
        raise UnsupportedModule(f"{path}: RReLU with training=True is random. Pass training=self.training.")
    return _layer(nn.LeakyReLU)(path, x, (lower + upper) / 2)


def _prelu(path: str, x: Batched, weight: Any) -> Batched:
    if not isinstance(weight, Tensor):
        raise UnsupportedModule(f"{path}: expected constant slopes.")
    if weight.numel() == 1:
        return _each(x, lambda value: elementwise.parametric_relu(value, weight.reshape(-1), path))
    full = constant_of_a_sample(weight, x.shape, x.layout, path)
    return _each(x, lambda value: elementwise.parametric_relu(value, full, path))


def _clamp(path: str, x: Batched, min: Any = None, max: Any = None) -> Batched:
    low, high = (None if limit is None else _one_number(limit, path) for limit in (min, max))
    return _each(x, lambda value: elementwise.clamped(value, low, high, path))


def _one_number(limit: Any, path: str) -> float:
    if isinstance(limit, Tensor) and limit.numel() == 1:
        limit = limit.item()
    if type(limit) not in (int, float):
        raise UnsupportedModule(f"{path}: expected a limit that is one constant number, got {type(limit).__name__}.")
    return float(limit)


def _threshold(path: str, x: Batched, threshold: float, value: float) -> Batched:
    if threshold != value:
        raise UnsupportedModule(f"{path}: jumps at {threshold}, so that it has no Lipschitz constant. Use ReLU.")
    return _clamp(path, x, threshold)


# Arithmetic.


def _sum(path: str, left: Any, right: Any, alpha: float = 1, sign: float = 1.0) -> Batched:
    """Return left + sign alpha right, where one of the two may be a constant."""
    right = _scaled(path, right, sign * alpha)
    for x, other in ((left, right), (right, left)):
        # In training, offsets have no numbers.
        if isinstance(x, Batched) and x.value.live and isinstance(other, Tensor) and other.dim() < len(x.shape):
            return Batched(
                x.value.expanded(x.layout.sample((*x.shape[:1], *torch.broadcast_shapes(x.shape[1:], other.shape)))),
                x.layout,
            )
    layout, (a, b) = aligned([_tensor(left, right), _tensor(right, left)], path)
    if isinstance(a, Value) and isinstance(b, Value):
        return Batched(a.plus(b, path), layout)
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    return Batched(value.shift(constant, name=path), layout)  # type: ignore[union-attr, arg-type]


def _scaled(path: str, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    return _product_by(path, x, factor) if isinstance(x, Batched) else factor * _exact(x)


def _product_by(path: str, x: Batched, factor: float) -> Batched:
    return _each(x, lambda value: value.times(torch.tensor(factor, dtype=torch.float64), path))


def _exact(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) else x


def _tensor(x: Any, like: Any) -> Batched | Tensor:
    """Return a number as a tensor."""
    if isinstance(x, Batched):
        return x
    if isinstance(x, Tensor) and x.is_complex():
        raise UnsupportedModule(f"Expected a constant real number or tensor, got {x.dtype}.")
    return torch.as_tensor(_exact(x), dtype=torch.float64).to(like.value.device if isinstance(like, Batched) else "cpu")


def _difference(path: str, left: Any, right: Any, alpha: float = 1) -> Batched:
    return _sum(path, left, right, alpha, -1.0)


def _reversed_difference(path: str, left: Any, right: Any, alpha: float = 1) -> Batched:
    return _sum(path, right, left, alpha, -1.0)


def _product(path: str, left: Any, right: Any) -> Batched:
    layout, (a, b) = aligned([_tensor(left, right), _tensor(right, left)], path)
    if isinstance(a, Value) and isinstance(b, Value):
        return Batched(a.multiplied(b, path), layout)
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    return Batched(value.times(constant, path), layout)  # type: ignore[union-attr, arg-type]


def _quotient(path: str, left: Any, right: Any, rounding_mode: str | None = None) -> Batched:
    if rounding_mode is not None:
        raise UnsupportedModule(f"{path}: a rounded quotient jumps, so that it has no Lipschitz constant.")
    if isinstance(right, Batched):
        return _product(path, left, _each(right, lambda value: composed.reciprocal(value, path)))
    inverse = 1.0 / torch.as_tensor(_exact(right), dtype=torch.float64)
    if not bool(torch.isfinite(inverse).all()):
        raise InvalidInput(f"{path}: a division by zero, or by a number too small for float64.")
    return _product(path, left, inverse)


def _power(path: str, base: Any, exponent: Any) -> Batched:
    if isinstance(exponent, Tensor) and exponent.numel() == 1:
        exponent = exponent.item()
    if not isinstance(base, Batched) or type(exponent) not in (int, float):
        raise UnsupportedModule(f"{path}: a power is supported with one constant exponent. Write e^(b log a) with exp.")
    return _each(base, lambda value: elementwise.power(value, path, float(exponent)))


def _lerp(path: str, start: Any, end: Any, weight: Any) -> Batched:
    return _sum(path, start, _product(path, _difference(path, end, start), weight))


def _plus_product(path: str, x: Any, left: Any, right: Any, value: float = 1) -> Batched:
    if not isinstance(left, Batched) and not isinstance(right, Batched):
        return _sum(path, x, _exact(left) * _exact(right), value)
    return _sum(path, x, _product(path, left, right), value)


def _larger(path: str, left: Any, right: Any) -> Batched:
    """Return the larger one, b + relu(a - b)."""
    above = _layer(nn.ReLU)(path, _difference(path, left, right))
    return _sum(path, above, right)


def _smaller(path: str, left: Any, right: Any) -> Batched:
    """Return the smaller one, b - relu(b - a)."""
    return _difference(path, right, _layer(nn.ReLU)(path, _difference(path, right, left)))


def _log_add_exp(path: str, left: Any, right: Any) -> Batched:
    """Return log(e^a + e^b) = b + softplus(a - b)."""
    return _sum(path, _row(activations.softplus())(path, _difference(path, left, right)), right)


def _tanh_backward(path: str, g: Any, y: Batched) -> Batched:
    """Return g (1 - y^2): what a module that differentiates a tanh reads."""
    return _product(path, g, _reversed_difference(path, _power(path, y, 2), 1.0))


def _sigmoid_backward(path: str, g: Any, y: Batched) -> Batched:
    """Return g (y - y^2)."""
    return _product(path, g, _difference(path, y, _power(path, y, 2)))


def _by_value(function: Callable[..., Value]) -> Rule:
    return lambda path, x: _each(x, lambda value: function(value, path))


_OF_ONE: dict[str, Callable[..., Value]] = {
    "exp": elementwise.exponential,
    "expm1": elementwise.exponential_less_one,
    "log": elementwise.logarithm,
    "log1p": elementwise.logarithm_of_one_more,
    "sqrt": partial(elementwise.power, exponent=0.5),
    "rsqrt": partial(elementwise.power, exponent=-0.5),
    "square": partial(elementwise.power, exponent=2.0),
    "reciprocal": composed.reciprocal,
    "sinh": partial(elementwise.hyperbolic, odd=True),
    "cosh": partial(elementwise.hyperbolic, odd=False),
    "hardsigmoid": elementwise.hard_sigmoid,
    "log_sigmoid_forward": elementwise.log_sigmoid,
    "abs": elementwise.absolute,
    "cos": elementwise.cosine,
}
"""Functions of one argument that are made of rows and affine maps."""

ELEMENTWISE: dict[str, Rule] = {
    "tanh_backward": _tanh_backward,
    "sigmoid_backward": _sigmoid_backward,
    "add": _sum,
    "sub": _difference,
    "rsub": _reversed_difference,
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "neg": lambda path, x: _product_by(path, x, -1.0),
    "lerp": _lerp,
    "addcmul": _plus_product,
    "maximum": _larger,
    "minimum": _smaller,
    "logaddexp": _log_add_exp,
    "tanh": _layer(nn.Tanh),
    "sigmoid": _layer(nn.Sigmoid),
    "softplus": _layer(nn.Softplus),
    "elu": _elu,
    "celu": _layer(nn.CELU),
    "gelu": _layer(nn.GELU),
    "silu": _layer(nn.SiLU),
    "mish": _layer(nn.Mish),
    "relu": _layer(nn.ReLU),
    "relu6": _layer(nn.ReLU6),
    "leaky_relu": _layer(nn.LeakyReLU),
    "hardtanh": _layer(nn.Hardtanh),
    "hardswish": _layer(nn.Hardswish),
    "softshrink": _layer(nn.Softshrink),
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_functional": _rrelu,
    "_prelu_kernel": _prelu,
    "threshold": _threshold,
    "clamp": _clamp,
    "clamp_min": lambda path, x, min: _clamp(path, x, min),
    "clamp_max": lambda path, x, max: _clamp(path, x, None, max),
    **{name: _by_value(function) for name, function in _OF_ONE.items()},
    "sin": _row(activations.SIN),
    "atan": _row(activations.ARCTAN),
    "erf": _row(activations.ERF),
}
"""Every operation, with its rule."""


def _plain(op: str) -> Callable[..., Any]:
    def symbol(*args: Any, **options: Any) -> Any:
        return None if options else (op, list(args))

    return symbol


def _with_factor(op: str, swap: bool = False) -> Callable[..., Any]:
    def symbol(left: Any, right: Any, alpha: float = 1) -> Any:
        return None if alpha != 1 else (op, [right, left] if swap else [left, right])

    return symbol


def _softplus_symbol(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    return ("Softplus", [x]) if (beta, threshold) == (1, 20) else None


def _hardtanh_symbol(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    return ("Relu6", [x]) if (min_val, max_val) == (0, 6) else None


def _step(sign: float) -> Callable[..., Any]:
    """Return the symbol of x > y: the step of x - y."""
    return lambda left, right: ("Step" if sign > 0 else "StepBelow", [left, right])


SYMBOLS: dict[str, Callable[..., Any]] = {
    **{
        name: _plain(name.capitalize())
        for name in ("mul", "pow", "neg", "abs", "exp", "erf", "tanh", "sigmoid", "sqrt")
    },
    **{name: _plain(name.capitalize()) for name in ("rsqrt", "reciprocal", "log", "log1p", "expm1", "relu")},
    "square": _plain("Square"),
    "hardsigmoid": _plain("HardSigmoid"),
    "add": _with_factor("Add"),
    "sub": _with_factor("Sub"),
    "rsub": _with_factor("Sub", swap=True),
    "div": _plain("Div"),
    "softplus": _softplus_symbol,
    "hardtanh": _hardtanh_symbol,
    "where": _plain("Where"),
    "gt": _step(1.0),
    "ge": _step(1.0),
    "lt": _step(-1.0),
    "le": _step(-1.0),
}
"""What a call is inside a formula: the name that `formulas.operation` has for it, and its operands."""

ENDS = {"mul", "div", "reciprocal", "exp", "log", "log1p", "sub", "rsub", "add", "where"}
"""Operations with a meaning of their own, and another one at the end of a formula."""
