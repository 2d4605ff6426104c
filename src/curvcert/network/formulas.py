r"""Formulas of one value, written out over several operations, as the activations that they are: for both front ends.

A formula such as :math:`\tfrac12 x (1 + erf(x/\sqrt2))` is spread over nodes in an order that differs from author to
author.  It is brought into a normal form, a polynomial in x and in functions of such polynomials, and compared with the
normal forms of what is known.  Constants are the formula's own; nothing is sampled.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch

from curvcert import activations
from curvcert.activations import Activation
from curvcert.errors import InvalidInput
from curvcert.network.builder import Value
from curvcert.network.elementwise import scaled
from curvcert.network.lowering import LARGEST_DEVIATION

TOLERANCE = 2.0**-21
"""How far a constant inside a formula may be from its meaning, relatively: a few roundings in float32.

A formula with such a constant is another function than the table's, and becomes the row with that constant;
coefficients that float32 holds (1/2, 1) must be exact."""

MOST_NODES = 24
"""How many operations a formula may take; none of those that are known takes as many."""

_MOST_TERMS = 16

Monomial = tuple[Any, ...]
Polynomial = frozenset[tuple[Monomial, float]]
"""Monomials with their coefficients; a factor is "x" or (function, Polynomial)."""

Lowering = Callable[[Value, str], Value]


def recognised(formula: Polynomial | None) -> Lowering | None:
    """Return what lowers a formula of x, with the formula's own constants, or None if it is not known.

    >>> x_squared = frozenset({(("x", "x"), -0.5)})
    >>> recognised(operation("Exp", [x_squared])) is None, recognised(x_squared) is None
    (False, True)
    """
    if formula is None:
        return None
    found = (rule(formula) for rule in (_bell, _gate, _kink, _softplus_with_a_threshold, _table))
    return next((lowering for lowering in found if lowering is not None), None)


def _bell(formula: Polynomial) -> Lowering | None:
    """Recognise k e^(-c x^2), k sigmoid(b x + a) and k softplus(b x + a)."""
    (((monomial, k), *rest)) = formula or [((), 0.0)]
    if rest or len(monomial) != 1 or isinstance(monomial[0], str):
        return None
    name, argument = monomial[0]
    inner = dict(argument)
    if name == "Exp" and inner.keys() == {("x", "x")} and inner["x", "x"] < 0:
        return lambda value, path: scaled(value, math.sqrt(-inner["x", "x"]), activations.GAUSSIAN, k, path)
    row = {"Sigmoid": activations.SIGMOID, "Softplus": activations.softplus()}.get(name)
    if row is not None and ("x",) in inner and inner.keys() <= {("x",), ()}:
        return lambda value, path: scaled(value, inner["x",], row, k, path, inner.get((), 0.0))
    return None


def _kink(formula: Polynomial) -> Lowering | None:
    """Recognise what is linear between kinks: a x + b + sum_k s_k (x - c_k) step(x - c_k), each part 0 at its kink."""
    parts: dict[Any, list[float]] = {}
    for monomial, coefficient in formula:
        steps = [factor for factor in monomial if factor != "x"]
        power = len(monomial) - len(steps)
        found = _joined_step(steps)
        if found is None or power > 1:
            return None
        parts.setdefault(found, [0.0, 0.0])[power] += coefficient
    offset, below = parts.pop(-math.inf, [0.0, 0.0])
    kinks = {c: s for c, (t, s) in parts.items() if s or t}
    if not kinks or any(t + s * c != 0.0 for c, (t, s) in parts.items()):
        return None
    ((c, s), *more) = kinks.items()
    if more or c or offset:
        return lambda value, path: _bent(value, below, offset, kinks, path)
    if below == 0.0:
        return lambda value, path: scaled(value, 1.0, activations.RELU, s, path)
    above = below + s
    if not above:
        return None
    return lambda value, path: scaled(value, 1.0, activations.leaky_relu(below / above), above, path)


def _joined_step(steps: Sequence[Any]) -> float | None:
    """Return the c of a product of steps of x - c, which is the step at the largest; -inf for none."""
    largest = -math.inf
    for factor in steps:
        inner = dict(factor[1]) if factor[0] == "Step" else {}
        if inner.pop(("x",), 0.0) != 1.0 or inner.keys() - {()}:
            return None
        largest = max(largest, -inner.get((), 0.0))
    return largest


def _bent(value: Value, slope: float, offset: float, kinks: Mapping[float, float], path: str) -> Value:
    """Return slope x + offset + sum_k s_k relu(x - c_k)."""
    terms = [value.times(torch.tensor(slope, dtype=torch.float64), path)] if slope else []
    for c, s in kinks.items():
        moved = value.shift(torch.full(value.shape, -c, dtype=torch.float64), name=path)
        terms.append(scaled(moved, 1.0, activations.RELU, s, path))
    total = reduce(lambda left, right: left.plus(right, path), terms)
    return total.shift(torch.full(value.shape, offset, dtype=torch.float64), name=path) if offset else total


def _softplus_with_a_threshold(formula: Polynomial) -> Lowering | None:
    """Recognise x where b x > t, and softplus(b x) / b elsewhere: torch's, written out."""
    parts = dict(formula)
    stepped = next((m[1] for m in parts if len(m) == 2 and m[0] == "x" and m[1][0] == "Step"), None)
    if stepped is None or parts.pop(("x", stepped)) != 1.0 or len(parts) != 2:
        return None
    inner = dict(stepped[1])
    beta, limit = inner.pop(("x",), 0.0), -inner.pop((), 0.0)
    whole = ("Softplus", _form((beta, ("x",))))
    gain = parts.pop((whole,), 0.0)
    ((monomial, other),) = parts.items() if len(parts) == 1 else (((), 0.0),)
    # Another gain than 1/b would change the slope beyond what a deviation in value tells.
    if inner or beta <= 0 or abs(gain * beta - 1.0) > 2.0**-50 or other != -gain or set(monomial) != {whole, stepped}:
        return None
    act = activations.torch_softplus(beta, limit)

    def lowering(value: Value, path: str) -> Value:
        if act.deviation > LARGEST_DEVIATION:
            raise InvalidInput(
                f"{path}: softplus with a threshold of {limit:.3g} jumps there by {act.deviation:.3g}. Keep PyTorch's "
                "default threshold of 20."
            )
        return value.activate(act, path)

    return lowering


def _gate(formula: Polynomial) -> Lowering | None:
    """Recognise k x sigmoid(b x), and k x relu6(x + 3)."""
    (((monomial, k), *rest)) = formula or [((), 0.0)]
    if rest or len(monomial) != 2 or monomial[0] != "x" or isinstance(monomial[1], str):
        return None
    name, argument = monomial[1]
    inner = dict(argument)
    if name == "Sigmoid" and inner.keys() == {("x",)}:
        b = inner["x",]
        return lambda value, path: scaled(value, b, activations.SILU, k / b, path)
    if name == "Relu6" and inner == {("x",): 1.0, (): 3.0}:
        outer = 1.0 if abs(6 * k - 1) <= 2.0**-50 else 6 * k
        return lambda value, path: scaled(value, 1.0, activations.HARDSWISH, outer, path)
    return None


def _table(formula: Polynomial) -> Lowering | None:
    """Recognise the formulas of the table, and GELUs with another factor in front than 1/2."""
    half = dict(formula).get(("x",), 0.5)
    for factor in dict.fromkeys((0.5, half)):
        plain = frozenset((m, 0.5 * (c / factor)) for m, c in formula)
        row = next((row for row, form in _FORMULAS if _same(plain, form)), None)
        if row is not None:
            act, outer = row if isinstance(row, Activation) else row(plain), 2 * factor
            return lambda value, path: scaled(value, 1.0, act, outer, path)
    return None


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
    """Whether two polynomials have the same monomials with nearly the same coefficients, all the way down."""
    return _paired(list(left), list(right), lambda a, b: _near(a[1], b[1]) and _paired(list(a[0]), list(b[0]), _factor))


def _factor(left: Any, right: Any) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return bool(left == right)
    return left[0] == right[0] and _same(left[1], right[1])


def _paired(left: list[Any], right: list[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether each item of one list has its own partner in the other."""
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
    result: Polynomial | None = number(1.0)
    if exponent not in (1.0, 2.0, 3.0):
        return None
    for _ in range(int(exponent)):
        result = None if result is None else _times(result, base)
    return result


def number(value: float) -> Polynomial:
    """Return a constant as a polynomial."""
    return frozenset({((), value)}) if value != 0.0 else frozenset()


def constant(polynomial: Polynomial) -> float | None:
    """Return the value of a polynomial without x."""
    if not polynomial:
        return 0.0
    ((monomial, coefficient), *rest) = polynomial
    return coefficient if not monomial and not rest else None


def _function(name: str, argument: Polynomial) -> Polynomial:
    return frozenset({(((name, argument),), 1.0)})


def _quotient(left: Polynomial, right: Polynomial) -> Polynomial | None:
    divisor = constant(right)
    if divisor is None:
        return _times(left, _reciprocal(right))
    return _times(left, number(1.0 / divisor)) if divisor else None


def _reciprocal(divisor: Polynomial) -> Polynomial:
    """Return 1 / q, which is sigmoid(-z) for q = 1 + e^z."""
    inner = _one_plus_exp(divisor)
    if inner is not None:
        return _function("Sigmoid", frozenset((m, -c) for m, c in inner))
    return _function("Reciprocal", divisor)


def _logarithm(argument: Polynomial) -> Polynomial:
    """Return log q, which is softplus(z) for q = 1 + e^z."""
    inner = _one_plus_exp(argument)
    return _function("Log", argument) if inner is None else _function("Softplus", inner)


def _one_plus_exp(q: Polynomial) -> Polynomial | None:
    """Return z where q is 1 + e^z."""
    parts = dict(q)
    if len(parts) == 2 and parts.get(()) == 1.0:
        ((monomial, coefficient),) = ((m, c) for m, c in parts.items() if m)
        if coefficient == 1.0 and len(monomial) == 1 and monomial[0][0] == "Exp":
            found: Polynomial = monomial[0][1]
            return found
    return None


def _step(left: Polynomial, right: Polynomial) -> Polynomial | None:
    """Return 1 where left > right, and 0 elsewhere."""
    difference = _plus(left, right, -1.0)
    return None if difference is None else _function("Step", difference)


def _step_below(left: Polynomial, right: Polynomial) -> Polynomial | None:
    above = _step(left, right)
    return None if above is None else _plus(number(1.0), above, -1.0)


def _where(mask: Polynomial, left: Polynomial, right: Polynomial) -> Polynomial | None:
    """Return mask left + (1 - mask) right."""
    difference = _plus(left, right, -1.0)
    chosen = None if difference is None else _times(mask, difference)
    return None if chosen is None else _plus(right, chosen)


def _raised(base: Polynomial, exponent: Polynomial) -> Polynomial | None:
    given = constant(exponent)
    return None if given is None else _power(base, given)


def operation(op: str, parts: Sequence[Polynomial]) -> Polynomial | None:
    """Return what an operation, by the name that ONNX has for it, makes of formulas; None where that leads nowhere."""
    if op == "Where":
        return _where(*parts) if len(parts) == 3 else None
    if op in _BINARY:
        return _BINARY[op](*parts) if len(parts) == 2 else None
    if len(parts) != 1:
        return None
    (argument,) = parts
    match op:
        case "Identity":
            return argument
        case "Neg":
            return _times(argument, number(-1.0))
        case "Square":
            return _times(argument, argument)
        case "Reciprocal":
            return _quotient(number(1.0), argument)
        case "Rsqrt":
            return _function("Reciprocal", _function("Sqrt", argument))
        case "HardSigmoid":
            moved = _plus(argument, number(3.0))
            return None if moved is None else _times(number(1 / 6), _function("Relu6", moved))
        case "Log":
            return _logarithm(argument)
        case "Log1p":
            moved = _plus(argument, number(1.0))
            return None if moved is None else _logarithm(moved)
        case "Expm1":
            return _plus(_function("Exp", argument), number(1.0), -1.0)
        case _:
            return _function(op, argument)


_BINARY: dict[str, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    "Add": _plus,
    "Sub": lambda left, right: _plus(left, right, -1.0),
    "Mul": _times,
    "Div": _quotient,
    "Pow": _raised,
    "Step": _step,
    "StepBelow": _step_below,
}
BINARY = frozenset(_BINARY)
"""Operations on two formulas."""

X: Polynomial = frozenset({(("x",), 1.0)})


def _form(*terms: tuple[float, tuple[Any, ...]]) -> Polynomial:
    return frozenset((monomial, coefficient) for coefficient, monomial in terms)


_INNER = math.sqrt(2 / math.pi)
_STEP, _E, _E_BELOW = ("Step", X), ("Exp", X), ("Exp", _form((-1.0, ("x",))))
_OVER = ("Reciprocal", _form((1.0, (_E,)), (1.0, (_E_BELOW,))))
_FORMULAS: tuple[tuple[Activation | Callable[[Polynomial], Activation], Polynomial], ...] = (
    (activations.MISH, _form((1.0, ("x", ("Tanh", _function("Softplus", X)))))),
    (_gelu_with, _form((0.5, ("x",)), (0.5, ("x", ("Erf", _form((math.sqrt(0.5), ("x",)))))))),
    (
        _gelu_tanh_with,
        _form(
            (0.5, ("x",)),
            (0.5, ("x", ("Tanh", _form((_INNER, ("x",)), (0.044715 * _INNER, ("x", "x", "x")))))),
        ),
    ),
    (activations.SOFTSIGN, _form((1.0, ("x", ("Reciprocal", _form((1.0, ()), (1.0, (("Abs", X),)))))))),
    (activations.TANHSHRINK, _form((1.0, ("x",)), (-1.0, (("Tanh", X),)))),
    (activations.TANH, _form((1.0, (_E, _OVER)), (-1.0, (_E_BELOW, _OVER)))),
    (activations.elu(), _form((1.0, ("x", _STEP)), (1.0, (_E,)), (-1.0, ()), (-1.0, (_E, _STEP)), (1.0, (_STEP,)))),
    (
        activations.ISRU,
        _form((1.0, ("x", ("Reciprocal", _function("Sqrt", _form((1.0, ()), (1.0, ("x", "x")))))))),
    ),
)
