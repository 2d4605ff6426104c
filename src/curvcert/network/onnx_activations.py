r"""Activations in an ONNX graph: operators of their own, and the formulas that exporters write out for others.

What is spread over several nodes is brought into the normal form of `formulas.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from curvcert import activations
from curvcert.activations import Activation
from curvcert.activations.formulas import SELU_ALPHA, SELU_SCALE
from curvcert.errors import InvalidInput
from curvcert.network import formulas
from curvcert.network.builder import Value
from curvcert.network.lowering import LARGEST_DEVIATION
from curvcert.network.onnx_file import Array, Node


def activation_of(node: Node, args: list[Any]) -> Activation | None:
    """Return the activation that a node computes by itself, or None if its operator is none.

    >>> activation_of(Node("Elu", "elu", ("x",), ("y",), {"alpha": 2.0}), [])
    Activation(elu(2), slope [0, 2], curvature none)
    """
    return None if node.op not in _OPERATORS else _OPERATORS[node.op](node, args)


def _gelu(node: Node, args: list[Any]) -> Activation:
    match node.attribute("approximate", "none"):
        case "none":
            return activations.GELU
        case "tanh":
            return activations.GELU_TANH
        case other:
            raise node.unsupported(f"the approximation {other!r}", "ONNX knows 'none' and 'tanh'.")


def _selu(node: Node, args: list[Any]) -> Activation:
    alpha, gamma = (
        node.attribute(name, float(np.float32(value))) for name, value in (("alpha", SELU_ALPHA), ("gamma", SELU_SCALE))
    )
    return activations.selu(alpha, gamma)


def _swish(node: Node, args: list[Any]) -> Activation:
    if node.attribute("alpha", 1.0) != 1.0:
        raise node.unsupported(f"alpha = {node.attributes['alpha']}", "Scale the input and the output instead.")
    return activations.SILU


def limit_of(node: Node, args: Sequence[Any], position: int, name: str) -> float | None:
    """Return a limit of a Clip, as an attribute or an input; None if it has none."""
    found = node.attributes.get(name)
    if found is None and len(args) > position:
        found = args[position]
    if found is None:
        return None
    if isinstance(found, Value) or np.size(found) != 1:
        raise node.unsupported(f"a {name} that is not one constant")
    return float(np.reshape(found, ()))


def _alpha(row: Callable[[float], Activation], default: float) -> Callable[[Node, list[Any]], Activation]:
    return lambda node, args: row(node.attribute("alpha", default))


def _plain(row: Activation) -> Callable[[Node, list[Any]], Activation]:
    return lambda node, args: row


_OPERATORS: dict[str, Callable[[Node, list[Any]], Activation]] = {
    "Tanh": _plain(activations.TANH),
    "Sigmoid": _plain(activations.SIGMOID),
    "Softplus": _plain(activations.softplus()),
    "Softsign": _plain(activations.SOFTSIGN),
    "Erf": _plain(activations.ERF),
    "Sin": _plain(activations.SIN),
    "Atan": _plain(activations.ARCTAN),
    "Mish": _plain(activations.MISH),
    "Relu": _plain(activations.RELU),
    "Elu": _alpha(activations.elu, 1.0),
    "Celu": _alpha(activations.celu, 1.0),
    "LeakyRelu": _alpha(activations.leaky_relu, float(np.float32(0.01))),
    "Gelu": _gelu,
    "Selu": _selu,
    "Swish": _swish,
    "HardSwish": _plain(activations.HARDSWISH),
}


def recognised(node: Node, operands: Mapping[str, Any], producers: Mapping[str, Node]) -> Value | None:
    """Return phi(value) if the node's output is a known formula phi of an earlier value."""
    if node.op not in ELEMENTWISE:
        return None
    for base in _ancestors(node, producers):
        value = operands.get(base)
        if not isinstance(value, Value):
            continue
        formula = _Formula(base, 1 + len(value.shape), operands, producers)
        name = node.name or node.outputs[0]
        if node.op == "Where":
            row = formula.softplus(node)
            if row is not None:
                return value.activate(row, name)
        else:
            lowering = formulas.recognised(formula.of_node(node))
            if lowering is not None:
                return lowering(value, name)
    return None


def _ancestors(node: Node, producers: Mapping[str, Node]) -> Iterator[str]:
    """Yield the values that a node is computed from by elementwise operations, the nearest first."""
    queue, seen = list(node.inputs), set(node.inputs)
    for name in queue:
        yield name
        producer = producers.get(name)
        if producer is not None and producer.op in ELEMENTWISE and len(queue) < formulas.MOST_NODES:
            fresh = [source for source in producer.inputs if source not in seen]
            queue.extend(fresh)
            seen.update(fresh)


@dataclass(frozen=True, eq=False)
class _Formula:
    """What the values after `base` are as functions of it; None for what is no elementwise function of it alone."""

    base: str
    rank: int
    operands: Mapping[str, Any]
    producers: Mapping[str, Node]
    known: dict[str, formulas.Polynomial | None] = field(default_factory=dict)

    def of(self, name: str) -> formulas.Polynomial | None:
        if name not in self.known:
            # No formula of the table takes as many nodes; a file may hold any number.
            if len(self.known) >= formulas.MOST_NODES:
                return None
            self.known[name] = None
            self.known[name] = self._found(name)
        return self.known[name]

    def _found(self, name: str) -> formulas.Polynomial | None:
        if name == self.base:
            return formulas.X
        operand = self.operands.get(name)
        if isinstance(operand, np.ndarray):
            return _scalar(operand, self.rank)
        producer = self.producers.get(name)
        return None if producer is None else self.of_node(producer)

    def of_node(self, node: Node) -> formulas.Polynomial | None:
        if node.op not in ELEMENTWISE or node.op in ("Where", "Greater"):
            return None
        parts = [self.of(name) for name in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len(parts) != (2 if node.op in formulas.BINARY else 1):
            return None
        return formulas.operation(node.op, known)

    def softplus(self, node: Node) -> Activation | None:
        """Return softplus(beta) for x where beta x > threshold, else softplus(beta x) / beta: torch's, written out."""
        condition = self.producers.get(node.inputs[0])
        if len(node.inputs) != 3 or condition is None or condition.op != "Greater" or len(condition.inputs) != 2:
            return None
        scaled, threshold, above, below = (self.of(name) for name in (*condition.inputs, *node.inputs[1:]))
        if scaled is None or threshold is None or above != formulas.X or below is None or len(scaled) != 1:
            return None
        ((monomial, beta),) = scaled
        limit = formulas.constant(threshold)
        if monomial != ("x",) or beta <= 0 or limit is None:
            return None
        ((function, gain), *more) = below or [((), 0.0)]
        # Another gain than 1/beta would change the slope beyond what a deviation in value tells.
        if more or function != (("Softplus", scaled),) or abs(gain * beta - 1.0) > 2.0**-50:
            return None
        act = activations.torch_softplus(beta, limit)
        if act.deviation > LARGEST_DEVIATION:
            raise InvalidInput(
                f"{node.label}: softplus with a threshold of {limit:.3g} jumps there by {act.deviation:.3g}. "
                "Keep PyTorch's default threshold of 20."
            )
        return act


def _scalar(array: Array, rank: int) -> formulas.Polynomial | None:
    """Return a constant that is one number, and does not add dimensions to what it is combined with."""
    if array.size != 1 or array.ndim > rank or array.dtype.kind not in "fi":
        return None
    value = float(array.reshape(()))
    return formulas.number(value) if math.isfinite(value) else None


ELEMENTWISE = formulas.BINARY | {
    *("Identity", "Neg", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Softplus", "Abs", "Sqrt", "Exp"),
    *("Where", "Greater"),
}
"""Operators that a formula may consist of."""
