r"""Activations in an ONNX graph: operators of their own, and the formulas that exporters write out for others.

A formula such as :math:`\tfrac12 x (1 + erf(x/\sqrt2))` is spread over several nodes, in an order that differs from
exporter to exporter.  It is brought into a normal form, a polynomial in x and in functions of such polynomials, and
compared with the normal forms of the table's rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from curvcert import activations
from curvcert.activations import Activation
from curvcert.activations.formulas import SELU_ALPHA, SELU_SCALE
from curvcert.errors import InvalidInput
from curvcert.network.builder import Value
from curvcert.network.lowering import LARGEST_DEVIATION
from curvcert.network.onnx_file import Array, Node

TOLERANCE = 2.0**-21
"""How far a constant inside a formula may be from its meaning, relatively: a few roundings in float32.

A formula with such a constant is another function than the table's, and becomes the row with that constant;
coefficients that float32 holds (1/2, 1) must be exact."""

_MOST_NODES = 24
_MOST_TERMS = 16

Monomial = tuple[Any, ...]
Polynomial = frozenset[tuple[Monomial, float]]
"""Monomials with their coefficients; a factor is "x" or (function, Polynomial)."""


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


def _clip(node: Node, args: list[Any]) -> Activation:
    lower, upper = (_limit(node, args, k, name) for k, name in ((1, "min"), (2, "max")))
    if lower == 0.0 and upper is None:
        return activations.RELU
    if lower is None or upper is None:
        raise node.unsupported("a clip on one side, other than max(x, 0),", "Give both limits.")
    return activations.RELU6 if (lower, upper) == (0.0, 6.0) else activations.hardtanh(lower, upper)


def _limit(node: Node, args: list[Any], position: int, name: str) -> float | None:
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
    "Clip": _clip,
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
        found = formula.softplus(node) if node.op == "Where" else _row(formula.of_node(node))
        if found is not None:
            return value.activate(found, node.name or node.outputs[0])
    return None


def _ancestors(node: Node, producers: Mapping[str, Node]) -> Iterator[str]:
    """Yield the values that a node is computed from by elementwise operations, the nearest first."""
    queue, seen = list(node.inputs), set(node.inputs)
    for name in queue:
        yield name
        producer = producers.get(name)
        if producer is not None and producer.op in ELEMENTWISE and len(queue) < _MOST_NODES:
            fresh = [source for source in producer.inputs if source not in seen]
            queue.extend(fresh)
            seen.update(fresh)


def _row(formula: Polynomial | None) -> Activation | None:
    """Return the activation that a formula is, with the formula's own constants."""
    if formula is None:
        return None
    row = next((row for row, form in _FORMULAS if _same(formula, form)), None)
    return row if row is None or isinstance(row, Activation) else row(formula)


def _inner(formula: Polynomial, function: str) -> dict[Monomial, float]:
    """Return the coefficients of a function's argument."""
    factors = (factor for monomial, _ in formula for factor in monomial)
    return next({m: c for m, c in factor[1]} for factor in factors if factor[0] == function)


def _gelu_with(formula: Polynomial) -> Activation:
    return activations.gelu(_inner(formula, "Erf")[("x",)])


def _gelu_tanh_with(formula: Polynomial) -> Activation:
    inner = _inner(formula, "Tanh")
    return activations.gelu_tanh(inner[("x",)], inner[("x", "x", "x")])


def _near(a: float, b: float) -> bool:
    return a == b if b in (0.5, 1.0) else abs(a - b) <= TOLERANCE * abs(b)


def _same(left: Polynomial, right: Polynomial) -> bool:
    """Tell whether two polynomials have the same monomials with nearly the same coefficients, all the way down."""
    return _paired(list(left), list(right), lambda a, b: _near(a[1], b[1]) and _paired(list(a[0]), list(b[0]), _factor))


def _factor(left: Any, right: Any) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return bool(left == right)
    return left[0] == right[0] and _same(left[1], right[1])


def _paired(left: list[Any], right: list[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Tell whether each item of one list has its own partner in the other."""
    if len(left) != len(right):
        return False
    for item in left:
        partner = next((k for k, other in enumerate(right) if same(item, other)), None)
        if partner is None:
            return False
        right = right[:partner] + right[partner + 1 :]
    return True


def _sum(terms: Iterator[tuple[Monomial, float]]) -> Polynomial | None:
    total: dict[Monomial, float] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0.0) + coefficient
    kept = frozenset((m, c) for m, c in total.items() if c != 0.0)
    fine = len(kept) <= _MOST_TERMS and all(math.isfinite(c) and len(m) <= _MOST_TERMS for m, c in kept)
    return kept if fine else None


def _plus(left: Polynomial, right: Polynomial, sign: float = 1.0) -> Polynomial | None:
    return _sum(item for part, s in ((left, 1.0), (right, sign)) for item in ((m, s * c) for m, c in part))


def _times(left: Polynomial, right: Polynomial) -> Polynomial | None:
    return _sum(
        (tuple(sorted((*m, *n), key=lambda factor: (isinstance(factor, tuple), hash(factor)))), c * d)
        for (m, c), (n, d) in product(left, right)
    )


def _power(base: Polynomial, exponent: float) -> Polynomial | None:
    result: Polynomial | None = _number(1.0)
    if exponent not in (1.0, 2.0, 3.0):
        return None
    for _ in range(int(exponent)):
        result = None if result is None else _times(result, base)
    return result


def _number(value: float) -> Polynomial:
    return frozenset({((), value)}) if value != 0.0 else frozenset()


def _constant(polynomial: Polynomial) -> float | None:
    """Return the value of a polynomial without x."""
    if not polynomial:
        return 0.0
    ((monomial, coefficient), *rest) = polynomial
    return coefficient if not monomial and not rest else None


def _function(name: str, argument: Polynomial) -> Polynomial:
    return frozenset({(((name, argument),), 1.0)})


def _quotient(left: Polynomial, right: Polynomial) -> Polynomial | None:
    divisor = _constant(right)
    if divisor is None:
        return _times(left, _function("Reciprocal", right))
    return _times(left, _number(1.0 / divisor)) if divisor else None


@dataclass(frozen=True, eq=False)
class _Formula:
    """What the values after `base` are as functions of it; None for what is no elementwise function of it alone."""

    base: str
    rank: int
    operands: Mapping[str, Any]
    producers: Mapping[str, Node]
    known: dict[str, Polynomial | None] = field(default_factory=dict)

    def of(self, name: str) -> Polynomial | None:
        if name not in self.known:
            # No formula of the table takes as many nodes; a file may hold any number.
            if len(self.known) >= _MOST_NODES:
                return None
            self.known[name] = None
            self.known[name] = self._found(name)
        return self.known[name]

    def _found(self, name: str) -> Polynomial | None:
        if name == self.base:
            return _X
        operand = self.operands.get(name)
        if isinstance(operand, np.ndarray):
            return _scalar(operand, self.rank)
        producer = self.producers.get(name)
        return None if producer is None else self.of_node(producer)

    def of_node(self, node: Node) -> Polynomial | None:
        if node.op not in ELEMENTWISE or node.op in ("Where", "Greater"):
            return None
        parts = [self.of(name) for name in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len(parts) != (2 if node.op in _BINARY else 1):
            return None
        return _BINARY[node.op](*known) if len(known) == 2 else _unary(node.op, known[0])

    def softplus(self, node: Node) -> Activation | None:
        """Return softplus(beta) for x where beta x > threshold, else softplus(beta x) / beta: torch's, written out."""
        condition = self.producers.get(node.inputs[0])
        if len(node.inputs) != 3 or condition is None or condition.op != "Greater" or len(condition.inputs) != 2:
            return None
        scaled, threshold, above, below = (self.of(name) for name in (*condition.inputs, *node.inputs[1:]))
        if scaled is None or threshold is None or above != _X or below is None or len(scaled) != 1:
            return None
        ((monomial, beta),) = scaled
        limit = _constant(threshold)
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


def _scalar(array: Array, rank: int) -> Polynomial | None:
    """Return a constant that is one number, and does not add dimensions to what it is combined with."""
    if array.size != 1 or array.ndim > rank or array.dtype.kind not in "fi":
        return None
    value = float(array.reshape(()))
    return _number(value) if math.isfinite(value) else None


def _raised(base: Polynomial, exponent: Polynomial) -> Polynomial | None:
    number = _constant(exponent)
    return None if number is None else _power(base, number)


def _unary(op: str, argument: Polynomial) -> Polynomial | None:
    match op:
        case "Identity":
            return argument
        case "Neg":
            return _times(argument, _number(-1.0))
        case "Reciprocal":
            return _quotient(_number(1.0), argument)
        case _:
            return _function(op, argument)


_BINARY: dict[str, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    "Add": _plus,
    "Sub": lambda left, right: _plus(left, right, -1.0),
    "Mul": _times,
    "Div": _quotient,
    "Pow": _raised,
}
ELEMENTWISE = frozenset(
    {*_BINARY, "Identity", "Neg", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Softplus", "Abs", "Sqrt", "Where", "Greater"}
)
"""Operators that a formula may consist of."""

_X: Polynomial = frozenset({(("x",), 1.0)})


def _form(*terms: tuple[float, tuple[Any, ...]]) -> Polynomial:
    return frozenset((monomial, coefficient) for coefficient, monomial in terms)


_INNER = math.sqrt(2 / math.pi)
_FORMULAS: tuple[tuple[Activation | Callable[[Polynomial], Activation], Polynomial], ...] = (
    (activations.SILU, _form((1.0, ("x", ("Sigmoid", _X))))),
    (activations.MISH, _form((1.0, ("x", ("Tanh", _function("Softplus", _X)))))),
    (_gelu_with, _form((0.5, ("x",)), (0.5, ("x", ("Erf", _form((math.sqrt(0.5), ("x",)))))))),
    (
        _gelu_tanh_with,
        _form(
            (0.5, ("x",)),
            (0.5, ("x", ("Tanh", _form((_INNER, ("x",)), (0.044715 * _INNER, ("x", "x", "x")))))),
        ),
    ),
    (activations.SOFTSIGN, _form((1.0, ("x", ("Reciprocal", _form((1.0, ()), (1.0, (("Abs", _X),)))))))),
    (
        activations.ISRU,
        _form((1.0, ("x", ("Reciprocal", _function("Sqrt", _form((1.0, ()), (1.0, ("x", "x")))))))),
    ),
)
