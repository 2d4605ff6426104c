"""Activations that a forward pass writes out over several calls: `x * torch.sigmoid(1.702 * x)`, and many more."""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from curvcert.errors import UnsupportedModule
from curvcert.network import formulas
from curvcert.network.builder import Value
from curvcert.network.formulas import Polynomial
from curvcert.network.recording import path_of


@dataclass(frozen=True, eq=False)
class Refused:
    """A value that has no expression by itself, but may be part of an activation's formula."""

    error: UnsupportedModule


_CALLS: dict[Any, str] = {
    **dict.fromkeys((operator.add, torch.add, "add"), "Add"),
    **dict.fromkeys((operator.sub, torch.sub, torch.subtract, "sub"), "Sub"),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply, "mul"), "Mul"),
    **dict.fromkeys((operator.truediv, torch.div, torch.divide, torch.true_divide, "div"), "Div"),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), "Pow"),
    **dict.fromkeys((operator.neg, torch.neg, torch.negative, "neg"), "Neg"),
    **dict.fromkeys((torch.square, "square"), "Square"),
    **dict.fromkeys((torch.sqrt, "sqrt"), "Sqrt"),
    **dict.fromkeys((torch.rsqrt, "rsqrt"), "Rsqrt"),
    **dict.fromkeys((torch.reciprocal, "reciprocal"), "Reciprocal"),
    **dict.fromkeys((torch.exp, "exp"), "Exp"),
    **dict.fromkeys((torch.erf, "erf"), "Erf"),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), "Tanh"),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), "Sigmoid"),
    **dict.fromkeys((torch.abs, operator.abs, "abs"), "Abs"),
    F.softplus: "Softplus",
    F.relu6: "Relu6",
    F.hardsigmoid: "HardSigmoid",
}
_MODULES: dict[type[nn.Module], str] = {
    nn.Identity: "Identity",
    nn.Tanh: "Tanh",
    nn.Sigmoid: "Sigmoid",
    nn.ReLU6: "Relu6",
    nn.Hardsigmoid: "HardSigmoid",
}


def operation_of(model: nn.Module, node: fx.Node) -> str | None:
    """Return the elementary operation that a node is, by the name of `formulas.operation`, or None."""
    if not node.args or node.kwargs not in ({}, {"inplace": False}):
        return None
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        usual = type(module) is nn.Softplus and (module.beta, module.threshold) == (1, 20)
        return "Softplus" if usual else _MODULES.get(type(module))
    name = _CALLS.get(node.target)
    return name if name is None or len(node.args) == (2 if name in formulas.BINARY else 1) else None


def recognised(model: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Value | None:
    """Return the node's value if it is a known formula of an earlier one."""
    for base in _ancestors(model, node):
        value = values.get(base)
        if isinstance(value, Value):
            lowering = formulas.recognised(_Formula(model, base, values).of_node(node))
            if lowering is not None:
                return lowering(value, path_of(node))
    return None


def _ancestors(model: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node is computed from by elementary operations, the nearest first."""
    queue = list(node.all_input_nodes)
    for source in queue:
        yield source
        if operation_of(model, source) is not None and len(queue) < formulas.MOST_NODES:
            queue.extend(other for other in source.all_input_nodes if other not in queue)


@dataclass(frozen=True, eq=False)
class _Formula:
    """What the nodes after `base` are as functions of it; None for what is no elementwise function of it alone."""

    model: nn.Module
    base: fx.Node
    values: Mapping[fx.Node, Any]
    known: dict[fx.Node, Polynomial | None] = field(default_factory=dict)

    def of(self, argument: Any) -> Polynomial | None:
        if argument is self.base:
            return formulas.X
        if not isinstance(argument, fx.Node):
            return self._constant(argument)
        if argument not in self.known:
            if len(self.known) >= formulas.MOST_NODES:
                return None
            self.known[argument] = None
            value = self.values.get(argument)
            computed = isinstance(value, Value | Refused)
            self.known[argument] = self.of_node(argument) if computed else self._constant(value)
        return self.known[argument]

    def of_node(self, node: fx.Node) -> Polynomial | None:
        op = operation_of(self.model, node)
        parts = [self.of(argument) for argument in node.args]
        known = [part for part in parts if part is not None]
        return None if op is None or len(known) < len(parts) else formulas.operation(op, known)

    def _constant(self, argument: Any) -> Polynomial | None:
        """Return a constant that is one number, and does not add dimensions to what it is combined with."""
        rank = 1 + len(self.values[self.base].shape)
        if isinstance(argument, Tensor) and argument.numel() == 1 and argument.dim() <= rank:
            argument = argument.item()
        if type(argument) not in (int, float) or not math.isfinite(argument):
            return None
        return formulas.number(float(argument))
