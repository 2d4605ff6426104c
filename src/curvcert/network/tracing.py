"""From an nn.Module to a Network: `curvcert.trace(model, example_input)`.

The module's forward pass is recorded symbolically (torch.fx), so nested Sequentials, modules with a
forward of their own, functional activations and residual sums all arrive as one graph.  Every node is
either lowered by a rule or refused by name; the result is then compared with the module itself.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from curvcert import activations
from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.block import AbstractBlock, Affine, Block, add_offsets
from curvcert.network.lowering import Value, flatten, is_known, lower_exactly, scale_by, start
from curvcert.network.network import Network
from curvcert.network.verification import require_equal_forward, require_traceable
from curvcert.operators import Reshape

# A functional activation is the module of the same arguments.
_FUNCTIONAL: dict[Callable[..., Any], Callable[..., nn.Module]] = {
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
    F.selu: nn.SELU,
}
_PLAIN = {
    torch.sin: activations.SIN,
    torch.atan: activations.ARCTAN,
    torch.arctan: activations.ARCTAN,
    torch.erf: activations.ERF,
}
_METHODS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "sin": torch.sin,
    "erf": torch.erf,
}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SUBTRACT = {operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"}
_DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_"}


def trace(model: nn.Module, example_input: Tensor) -> Network:
    """Turn a module in eval mode into a `Network`, exactly, or say what is in the way.

    Covers what is built from Linear, Conv2d, Flatten, AvgPool2d, BatchNorm (eval), Dropout (eval),
    Identity, arithmetic with constants (a normalisation), every activation of the table, and residual
    sums around one activation; ReLU-like kinks and max-pooling for Lipschitz bounds.  `example_input`
    gives the input's shape, batch dimension included.  The weights are copied in float64.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    >>> trace(model, torch.zeros(1, 2))
    Network((2,) -> (1,), 1 blocks
      1: Block (2,) -> (1,))

    Raises:
        UnsupportedModule: a part that curvcert does not recognise, with its path and the remedy.
        InvalidInput: train mode, NaN weights, a wrong shape or dtype, an empty batch.
        SoundnessError: the module and the network disagree on random inputs.
    """
    require_traceable(model, example_input)
    network = Network(_closed(_lowered(model, tuple(example_input.shape[1:]), example_input.device)))
    require_equal_forward(model, network, example_input)
    return network


def _closed(value: Value) -> tuple[AbstractBlock, ...]:
    """Return the blocks; a last affine map belongs to the last block's H, G and c."""
    blocks = value.close()
    if len(blocks) > 1 and isinstance(blocks[-1], Affine) and isinstance(blocks[-2], Block):
        block, last = blocks[-2].read_out(blocks[-1].H), blocks[-1]
        c, error = add_offsets(block.c, last.c, block.c_error, last.c_error)
        return (*blocks[:-2], replace(block, c=c, c_error=error))
    return blocks


class _Tracer(fx.Tracer):
    """Records the forward pass down to the modules that have a rule."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_known(m) or super().is_leaf_module(m, module_qualified_name)


def _lowered(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Value:
    if is_known(model):
        return lower_exactly(model, start((), shape, device), type(model).__name__)
    try:
        graph = _Tracer().trace(model)
    except (TypeError, ValueError, RuntimeError, fx.proxy.TraceError) as error:
        raise UnsupportedModule(
            f"{type(model).__name__}: its forward pass cannot be recorded ({error}). "
            "Write it without branches or loops that depend on the input."
        ) from error
    values: dict[fx.Node, Any] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise UnsupportedModule(f"{type(model).__name__} takes {len(inputs)} inputs; only one is supported.")
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = start((), shape, device)
        elif node.op == "output":
            return _require_value(_resolve(node.args[0], values), "output")
        else:
            values[node] = _lower_node(model, node, values)
    raise UnsupportedModule(f"{type(model).__name__} returns nothing.")


def _lower_node(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = [_resolve(arg, values) for arg in node.args]
    kwargs = {key: _resolve(arg, values) for key, arg in node.kwargs.items()}
    if node.op == "get_attr":
        return _attribute(model, str(node.target))
    if node.op == "call_module":
        path = str(node.target)
        return lower_exactly(model.get_submodule(path), _require_value(args[0], path), path)
    if not any(isinstance(arg, Value) for arg in (*args, *kwargs.values())):
        return _constant(node, args, kwargs)
    return _lower_call(node, args, kwargs)


def _resolve(arg: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    if isinstance(arg, tuple | list):
        return tuple(_resolve(item, values) for item in arg)
    return arg


def _require_value(value: Any, name: str) -> Value:
    if isinstance(value, Value):
        return value
    raise UnsupportedModule(f"{name}: expected a tensor that depends on the input, got {type(value).__name__}.")


def _attribute(model: nn.Module, target: str) -> Tensor:
    *path, name = target.split(".")
    found = getattr(model.get_submodule(".".join(path)), name)
    if not isinstance(found, Tensor):
        raise UnsupportedModule(f"{target}: expected a parameter or buffer, got {type(found).__name__}.")
    return found.detach().to(torch.float64)


def _constant(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Evaluate a node that does not depend on the input."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _lower_call(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if target in _ADD | _SUBTRACT | _MULTIPLY | _DIVIDE and not kwargs and len(args) == 2:
        return _arithmetic(node, target, args[0], args[1])
    value = _require_value(args[0] if args else None, node.name)
    if target is operator.neg or target in (torch.neg, "neg"):
        return _scaled(value, -1.0)
    if target in (torch.flatten, "flatten", torch.reshape, "view", "reshape"):
        return _reshaped(node, value, args[1:], kwargs)
    if target == "size" or (target is getattr and args[1] == "shape"):
        shape = ("batch", *value.shape)
        return shape if target is getattr or len(args) == 1 else shape[args[1]]
    if target in (F.dropout, F.dropout2d, "contiguous", "clone"):
        return value
    plain = _METHODS.get(target, target) if isinstance(target, str) else target
    if plain in _PLAIN:
        return value.activate(_PLAIN[plain], node.name)
    if plain in _FUNCTIONAL:
        arguments = {key: arg for key, arg in kwargs.items() if key != "inplace"}
        return lower_exactly(_FUNCTIONAL[plain](*args[1:], **arguments), value, node.name)
    raise UnsupportedModule(
        f"{node.name}: {getattr(target, '__name__', target)} is not supported. Use the modules and functions that "
        "curvcert.trace lists, or register a rule for a module of your own with curvcert.network.lower.register."
    )


def _arithmetic(node: fx.Node, target: Any, left: Any, right: Any) -> Value:
    if isinstance(left, Value) and isinstance(right, Value):
        if target in _ADD:
            return left.plus(right, node.name)
        if target in _SUBTRACT:
            return left.plus(_scaled(right, -1.0), node.name)
        raise UnsupportedModule(f"{node.name}: a product of two values that depend on the input is not supported.")
    value, constant = (left, right) if isinstance(left, Value) else (right, left)
    number = _as_constant(constant, value, node.name)
    if target in _ADD:
        return value.shift(number)
    if target in _SUBTRACT:
        return value.shift(-number) if value is left else _scaled(value, -1.0).shift(number)
    if target in _MULTIPLY:
        return scale_by(value, number)
    if value is right:
        raise UnsupportedModule(f"{node.name}: a division by a value that depends on the input is not supported.")
    return scale_by(value, 1.0 / number)


def _as_constant(constant: Any, value: Value, name: str) -> Tensor:
    if not isinstance(constant, int | float | Tensor):
        raise UnsupportedModule(f"{name}: expected a constant number or tensor, got {type(constant).__name__}.")
    number = torch.as_tensor(constant, dtype=torch.float64).detach().to(value.device)
    # A leading dimension of 1 stands for the batch.
    if number.dim() == len(value.shape) + 1 and number.shape[0] == 1:
        number = number[0]
    try:
        return number.expand(value.shape)
    except RuntimeError:
        raise UnsupportedModule(
            f"{name}: a constant of shape {tuple(number.shape)} does not fit a value of shape {value.shape}."
        ) from None


def _scaled(value: Value, factor: float) -> Value:
    return scale_by(value, torch.full(value.shape, factor, dtype=torch.float64))


def _reshaped(node: fx.Node, value: Value, args: list[Any], kwargs: dict[str, Any]) -> Value:
    if node.target in (torch.flatten, "flatten"):
        limits = (*args, *kwargs.values())
        if limits not in ((1,), (1, -1)):
            raise UnsupportedModule(f"{node.name}: flatten is supported from dimension 1 on: flatten(x, 1).")
        return flatten(value)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], tuple) else tuple(args)
    rest = tuple(sizes[1:])
    total = value.H.out_size
    if sizes[:1] not in ((-1,), ("batch",)) or not all(isinstance(n, int) for n in rest) or rest.count(-1) > 1:
        raise UnsupportedModule(f"{node.name}: reshape must keep the batch dimension first: view(len(x), ...).")
    if -1 in rest:
        known = -math.prod(rest)
        rest = tuple(total // known if n == -1 else n for n in rest)
    if math.prod(rest) != total:
        raise InvalidInput(f"{node.name}: cannot reshape {value.shape} into {rest}.")
    return value.linear(Reshape(value.shape, rest))
