"""From an nn.Module to a Network: `curvcert.trace(model, example_input)`.

The module's forward pass is recorded symbolically (torch.fx), so nested Sequentials, modules with a
forward of their own, functional activations and residual sums all arrive as one graph.  Every node is
either lowered by a rule or refused by name; the result is then compared with the module itself.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.builder import Value, start
from curvcert.network.building import built
from curvcert.network.faithful import require_one_function, surroundings_kept
from curvcert.network.functions import lower_call
from curvcert.network.lowering import is_known, lower_exactly
from curvcert.network.network import Network, tensor_of
from curvcert.network.recording import (
    is_in_place_module,
    overwrites_its_input,
    path_of,
    record,
    require_own_memory,
    written_at,
)
from curvcert.network.verification import (
    float64_copy,
    lacks_a_batch,
    own_copy,
    require_equal_forward,
    require_traceable,
)
from curvcert.network.written_out import Refused, operation_of, recognised


def trace(model: nn.Module, example_input: Tensor | np.ndarray) -> Network:
    """Turn a module in eval mode into a `Network`, exactly, or say what is in the way.

    Covers what is built from linear layers (dense, convolutions and their adjoints, average pooling, interpolation,
    BatchNorm and Dropout in eval mode, weights in functional calls), arithmetic with constants (a normalisation), every
    activation of the table, and whatever moves, picks, repeats or joins the entries of a sample, joined by skips and
    sums in any way, layers and values used many times included; ReLU-like kinks and max-pooling for Lipschitz bounds.
    "Networks" in the documentation has the list.
    `example_input` gives the input's shape, batch dimension included; an array is taken in the dtype of the weights.

    The weights are copied in float64, as the exact values that they hold, and are never multiplied
    together.  Three coefficients are rounded to float64 once, and the Network is the one with the rounded
    value: the factor and offset of a batch normalisation, 1/d in a division by d, 1/k in a mean of k.
    What folding rounds off offsets is bounded and carried along (`Block.b_error`, `Block.c_error`).

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    >>> trace(model, torch.zeros(1, 2))
    Network((2,) -> (1,), 1 blocks
      1: Block (2,) -> (1,))

    Raises:
        UnsupportedModule: a part that curvcert does not recognise, with its path and the remedy.
        InvalidInput: train mode, NaN weights, a wrong shape or dtype, an empty batch.
        SoundnessError: the module and the network disagree on random inputs.
    """
    # Weights made in inference mode could not be differentiated through later.
    with torch.inference_mode(False), torch.no_grad(), surroundings_kept():
        example = tensor_of(example_input)
        if isinstance(model, nn.Module) and isinstance(example_input, np.ndarray):
            example = example.to(next(_weights(model), example))
        require_traceable(model, example)
        twin = float64_copy(model)
        try:
            output = lowered(twin, start(tuple(example.shape[1:]), example.device))
        except InvalidInput as error:
            if lacks_a_batch(twin, example):
                raise InvalidInput(
                    f"{error} The module itself fails on the example of shape {tuple(example.shape)}, and takes a "
                    "batch of it: is the batch dimension missing? Then pass x[None]."
                ) from error
            raise
        network = built(output, source_dtype=_dtype_of(model))
        require_one_function(own_copy(model), float64_copy(model), example)
        require_equal_forward(twin, network, example)
    return network


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the module's weights; float64 if it has none."""
    return next((weight.dtype for weight in _weights(model)), torch.float64)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    return (weight for weight in model.parameters() if weight.dtype.is_floating_point)


def lowered(model: nn.Module, x: Value, graph: fx.Graph | None = None) -> Value:
    """Return model(x), by the rules of its parts; `graph` is its forward pass, if it is known."""
    # A layer of torch's own is not recorded: what it is called says more than what it calls.
    own = type(model).__module__.startswith("torch.nn.") and not isinstance(model, nn.Sequential)
    if own or is_known(model):
        return lower_exactly(model, x, type(model).__name__)
    values: dict[fx.Node, Any] = {}
    for node in (graph or record(model)).nodes:
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "output":
            found = _resolve(node.args[0], values)
            _require_expression(found)
            return _require_value(found, f"The output of {type(model).__name__}")
        else:
            values[node] = _lower_node(model, node, values)
    raise UnsupportedModule(f"{type(model).__name__} returns nothing. Return one tensor.")


def _lower_node(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return _attribute(model, str(node.target))
    args = [_resolve(arg, values) for arg in node.args]
    kwargs = {key: _resolve(arg, values) for key, arg in node.kwargs.items()}
    whole = recognised(model, node, values) if operation_of(model, node) in _ENDS else None
    if whole is not None:
        return whole
    try:
        _require_expression((*args, *kwargs.values()))
        return _applied(model, node, args, kwargs)
    except (UnsupportedModule, InvalidInput) as error:
        placed = _placed(error, node)
        # A later node may complete the formula that this one is part of; what overwrites its input has no later.
        if isinstance(placed, InvalidInput) or operation_of(model, node) is None or _is_in_place(model, node):
            raise placed from error.__cause__
        return recognised(model, node, values) or Refused(placed)


_ENDS = ("Mul", "Div", "Reciprocal", "Exp")
"""Operations that have a meaning of their own, and another one at the end of an activation's formula."""

_Error = TypeVar("_Error", bound=UnsupportedModule | InvalidInput)


def _placed(error: _Error, node: fx.Node) -> _Error:
    """Return the error with the line of the user's code that a function or method is called in, if it is known."""
    place = written_at(node)
    if node.op == "call_module" or not place or re.search(r", line \d+\)$", str(error)):
        return error
    return type(error)(f"{error} ({place})")


def _is_in_place(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and is_in_place_module(model.get_submodule(str(node.target)))


def _require_expression(argument: Any) -> None:
    """Raise the error of a value that is only part of a formula."""
    if isinstance(argument, Refused):
        raise argument.error
    if isinstance(argument, tuple):
        for part in argument:
            _require_expression(part)


def _applied(model: nn.Module, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if node.op != "call_module":
        return lower_call(model, node, args, kwargs)
    path, inputs = path_of(node), (*args, *kwargs.values())
    module = model.get_submodule(path)
    if len(inputs) != 1:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} is called with {len(inputs)} arguments; only one tensor is supported."
        )
    value = _require_value(inputs[0], path)
    result = lower_exactly(module, value, path)
    if overwrites_its_input(module, value.shape, value.device, value.dtype):
        require_own_memory(model, node)
    return result


def _resolve(arg: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    if isinstance(arg, tuple | list):
        return tuple(_resolve(item, values) for item in arg)
    if isinstance(arg, slice):
        return slice(*(_resolve(bound, values) for bound in (arg.start, arg.stop, arg.step)))
    return arg


def _require_value(value: Any, name: str) -> Value:
    if isinstance(value, Value):
        return value
    raise UnsupportedModule(
        f"{name}: expected one tensor that depends on the input, got {type(value).__name__}. "
        "Wrap the model in a module that takes and returns one tensor."
    )


def _attribute(model: nn.Module, target: str) -> Tensor:
    *path, name = target.split(".")
    found = getattr(model.get_submodule(".".join(path)), name)
    if not isinstance(found, Tensor):
        raise UnsupportedModule(f"{target}: expected a parameter or buffer, got {type(found).__name__}.")
    return found
