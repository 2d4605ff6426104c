r"""The checker's own activations: phi, phi' and phi'' in numpy, and the points where the derivatives turn.

Between two neighbouring turns a function is monotone, so that its range over an interval is found at the ends and
at the turns inside.  Turns are zeros of the next derivative, found here by bisection of that derivative's formula or
known in closed form; at such a point an error of the point moves the value in second order only.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from curvcert.checker.outward import Array

ERROR = 2.0**-47
"""Bound on the error of a computed phi, phi' or phi'', relative and (in the function's own unit) absolute.

Each formula chains fewer than a dozen operations and elementary functions, and each of those errs by one or two
units in the last place, 2**-52: taken as given of numpy and the C library."""

Elementwise = Callable[[Array], Array]


@dataclass(frozen=True)
class Turn:
    """A point where a function turns or jumps, and an enclosure of its values there."""

    point: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Graph:
    """An elementwise function: its turns, its limits at both ends and the unit of its absolute error.

    Beyond `known` in absolute value the whole range is used: the turns of a periodic function are listed for three
    periods more, since a piece further away than one period is beaten by a nearer one.
    """

    function: Elementwise
    turns: tuple[Turn, ...]
    limits: tuple[float, float]
    unit: float = 1.0
    known: float = math.inf
    precision: float = ERROR

    @property
    def range(self) -> tuple[float, float]:
        """The range over all reals, rounded outward; without the infinite limits of a value."""
        low = min([*self.limits, *(turn.low for turn in self.turns)])
        high = max([*self.limits, *(turn.high for turn in self.turns)])
        return low, high

    def error(self, value: Array) -> Array:
        """Bound the error of computed values."""
        return self.precision * (np.abs(value) + self.unit)

    def over(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Enclose the values over intervals."""
        ends = self.function(low), self.function(high)
        least = np.minimum(ends[0] - self.error(ends[0]), ends[1] - self.error(ends[1]))
        most = np.maximum(ends[0] + self.error(ends[0]), ends[1] + self.error(ends[1]))
        nearness = 1e-12 * (1 + np.maximum(np.abs(low), np.abs(high)))
        for turn in self.turns:
            inside = (low <= turn.point + nearness) & (high >= turn.point - nearness)
            least = np.where(inside, np.minimum(least, turn.low), least)
            most = np.where(inside, np.maximum(most, turn.high), most)
        bottom, top = self.range
        far = (np.abs(low) > self.known) | (np.abs(high) > self.known)
        return np.where(far, bottom, np.maximum(least, bottom)), np.where(far, top, np.minimum(most, top))


@dataclass(frozen=True, eq=False)
class Activation:
    """phi with its first two derivatives; `third` bounds |phi'''| between jumps, `jumps` are those of phi''.

    `bends` are where a phi of linear and quadratic pieces bends; None for any other.  `vertex` tells of a slope s where
    phi - s z turns between them, if it has such a piece.
    """

    name: str
    value: Graph
    first: Graph
    second: Graph
    third: float
    jumps: tuple[float, ...] = ()
    bends: tuple[float, ...] | None = None
    vertex: Elementwise | None = None

    @property
    def slope(self) -> tuple[float, float]:
        """The range of phi'."""
        return self.first.range

    @property
    def smooth(self) -> bool:
        """Whether phi' is Lipschitz."""
        return math.isfinite(self.c)

    @property
    def steepest(self) -> float:
        """The largest |phi'|."""
        return max(map(abs, self.slope))

    @property
    def c(self) -> float:
        """The largest |phi''|."""
        return max(map(abs, self.second.range))


def _turn(function: Elementwise, point: float, unit: float) -> Turn:
    value = float(function(np.array([point]))[0])
    slack = 4 * ERROR * (abs(value) + unit)
    return Turn(point, value - slack, value + slack)


def _smooth(
    name: str,
    value: Elementwise,
    first: Elementwise,
    second: Elementwise,
    turns_of_first: tuple[float, ...],
    turns_of_second: tuple[float, ...],
    limits: tuple[float, float] = (0.0, 0.0),
    third: float = 16.0,
    unit: float = 1.0,
    known: float = math.inf,
) -> Activation:
    """Build a twice differentiable activation; `limits` are those of phi', phi'' tends to 0, phi' has no unit."""
    steep = 1.0 / unit
    return Activation(
        name,
        Graph(value, (), (-math.inf, math.inf), unit),
        Graph(first, tuple(_turn(first, t, 1.0) for t in turns_of_first), limits, 1.0, known),
        Graph(second, tuple(_turn(second, t, steep) for t in turns_of_second), (0.0, 0.0), steep, known),
        third,
    )


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return a point near the one sign change of a function."""
    falls = function(low) > 0
    for _ in range(80):
        middle = 0.5 * (low + high)
        if (function(middle) > 0) == falls:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _peak(function: Elementwise, low: float, high: float) -> float:
    """Return a point near the one maximum of a function, by golden sections; at a maximum the point matters little."""
    ratio = 0.5 * (math.sqrt(5) - 1)
    for _ in range(60):
        width = ratio * (high - low)
        ends = function(np.array([high - width, low + width]))
        low, high = (low, low + width) if ends[0] > ends[1] else (high - width, high)
    return 0.5 * (low + high)


def _exp(z: Array) -> Array:
    """Return e^z for z <= 0."""
    found: Array = np.exp(np.maximum(z, -745.0))
    return found


def _bell(z: Array) -> Array:
    """Return the derivative of the logistic function, w / (1 + w)^2 with w = e^-|z|."""
    w = _exp(-np.abs(z))
    return w / ((1 + w) * (1 + w))


def _logistic(z: Array) -> Array:
    w = _exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + w), w / (1 + w))


_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _density(z: Array) -> Array:
    near = np.clip(z, -38.0, 38.0)
    return np.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)


def _tanh() -> Activation:
    peak = math.atanh(math.sqrt(1 / 3))
    return _smooth(
        "tanh",
        np.tanh,
        lambda z: 4 * _bell(2 * z),
        lambda z: -8 * np.tanh(z) * _bell(2 * z),
        (0.0,),
        (-peak, peak),
    )


def _sigmoid() -> Activation:
    peak = 2 * math.atanh(math.sqrt(1 / 3))
    return _smooth("sigmoid", _logistic, _bell, lambda z: -np.tanh(0.5 * z) * _bell(z), (0.0,), (-peak, peak))


def _softplus(name: str, beta: float, shift: float) -> Activation:
    return _smooth(
        name,
        lambda z: np.maximum(z, 0.0) + np.log1p(_exp(-beta * np.abs(z))) / beta - shift,
        lambda z: _logistic(beta * z),
        lambda z: beta * _bell(beta * z),
        (),
        (0.0,),
        limits=(0.0, 1.0),
        third=beta * beta,
        unit=1 / beta,
    )


def _gelu(name: str = "gelu", c: float = math.sqrt(0.5)) -> Activation:
    """Build z (1 + erf(cz)) / 2: with s = c sqrt(2) it is that of c = sqrt(1/2) at sz, divided by s."""
    s = c * math.sqrt(2)
    return _smooth(
        name,
        lambda z: 0.5 * z * _erfc(-c * z),
        lambda z: 0.5 * _erfc(-c * z) + np.clip(s * z, -38, 38) * _density(s * z),
        lambda z: s * (2 - np.clip(s * z, -38, 38) ** 2) * _density(s * z),
        (-1 / c, 1 / c),
        (-2.0 / s, 0.0, 2.0 / s),
        limits=(0.0, 1.0),
        unit=1 / s,
    )


def _silu() -> Activation:
    def second(z: Array) -> Array:
        return (2 - z * np.tanh(0.5 * z)) * _bell(z)

    # phi''' = bell (z (bell-like terms)): zeros where tanh(z/2) (3 - z tanh(z/2)) + z / (2 cosh^2(z/2)) = 0.
    edge = _root(lambda z: 2 - z * math.tanh(0.5 * z), 1.0, 4.0)
    peak = _root(lambda z: math.tanh(z / 2) * (3 - z * math.tanh(z / 2)) + z / 2 / math.cosh(z / 2) ** 2, 2.0, 6.0)
    return _smooth(
        "silu",
        lambda z: z * _logistic(z),
        lambda z: _logistic(z) + z * _bell(z),
        second,
        (-edge, edge),
        (-peak, 0.0, peak),
        limits=(0.0, 1.0),
    )


def _sin() -> Activation:
    halves = [k * math.pi / 2 for k in range(-40, 41)]
    return _smooth(
        "sin",
        np.sin,
        np.cos,
        lambda z: -np.sin(z),
        tuple(halves[0::2]),
        tuple(halves[1::2]),
        known=40.0,
    )


def _arctan() -> Activation:
    peak = math.sqrt(1 / 3)
    return _smooth(
        "arctan",
        np.arctan,
        lambda z: 1 / (1 + z * z),
        lambda z: -2 * (z / (1 + z * z)) / (1 + z * z),
        (0.0,),
        (-peak, peak),
    )


def _error_function() -> Activation:
    peak, top = math.sqrt(0.5), 2 / math.sqrt(math.pi)
    return _smooth(
        "erf",
        _erf,
        lambda z: top * np.exp(-np.minimum(z * z, 740.0)),
        lambda z: -2 * np.clip(z, -27, 27) * top * np.exp(-np.minimum(z * z, 740.0)),
        (0.0,),
        (-peak, peak),
    )


def _isru() -> Activation:
    def root(z: Array) -> Array:
        return 1 / np.hypot(1.0, z)

    return _smooth(
        "isru",
        lambda z: z * root(z),
        lambda z: root(z) ** 3,
        lambda z: -3 * (z * root(z)) * root(z) ** 4,
        (0.0,),
        (-0.5, 0.5),
    )


def _gaussian() -> Activation:
    # |phi'''| = |12 z - 8 z^3| e^(-z^2) is at most 5 everywhere.
    return _smooth(
        "gaussian",
        lambda z: np.exp(-np.minimum(z * z, 740.0)),
        lambda z: -2 * np.clip(z, -27, 27) * np.exp(-np.minimum(z * z, 740.0)),
        lambda z: (4 * np.clip(z, -27, 27) ** 2 - 2) * np.exp(-np.minimum(z * z, 740.0)),
        (-math.sqrt(0.5), math.sqrt(0.5)),
        (-math.sqrt(1.5), 0.0, math.sqrt(1.5)),
    )


def _tanhshrink() -> Activation:
    peak = math.atanh(math.sqrt(1 / 3))
    found = _smooth(
        "tanhshrink",
        lambda z: z - np.tanh(z),
        lambda z: np.tanh(z) ** 2,
        lambda z: 8 * np.tanh(z) * _bell(2 * z),
        (),
        (-peak, peak),
        limits=(1.0, 1.0),
    )
    # Its slope at 0 is 0 exactly, and nowhere negative.
    return replace(found, first=replace(found.first, turns=(Turn(0.0, 0.0, 0.0),)))


def _softsign() -> Activation:
    jump = Turn(0.0, -2.0, 2.0)
    return Activation(
        "softsign",
        Graph(lambda z: z / (1 + np.abs(z)), (), (-math.inf, math.inf)),
        Graph(lambda z: (1 + np.abs(z)) ** -2.0, (Turn(0.0, 1.0, 1.0),), (0.0, 0.0)),
        Graph(lambda z: np.where(z >= 0, -2.0, 2.0) * (1 + np.abs(z)) ** -3.0, (jump,), (0.0, 0.0)),
        16.0,
        (0.0,),
    )


def _celu(name: str, alpha: float) -> Activation:
    steep = 1 / alpha * (1 + 2.0**-50)
    return Activation(
        name,
        Graph(
            lambda z: np.where(z > 0, z, alpha * np.expm1(np.minimum(z, 0) / alpha)), (), (-math.inf, math.inf), alpha
        ),
        Graph(lambda z: _exp(np.minimum(z, 0) / alpha), (Turn(0.0, 1.0, 1.0),), (0.0, 1.0)),
        Graph(
            lambda z: np.where(z > 0, 0.0, _exp(np.minimum(z, 0) / alpha) / alpha),
            (Turn(0.0, 0.0, steep),),
            (0.0, 0.0),
            steep,
        ),
        2 * steep * steep,
        (0.0,),
    )


def _gelu_tanh(
    name: str = "gelu_tanh", a: float = math.sqrt(2 / math.pi), cubic: float = math.sqrt(2 / math.pi) * 0.044715
) -> Activation:
    """Build z (1 + tanh(az + cubic z^3)) / 2."""
    b = cubic / a

    def near(z: Array) -> Array:
        return np.clip(z, -30.0, 30.0)

    def first(z: Array) -> Array:
        z = near(z)
        u, du = a * (z + b * z**3), a * (1 + 3 * b * z * z)
        return _logistic(2 * u) + 2 * z * _bell(2 * u) * du

    def second(z: Array) -> Array:
        z = near(z)
        u, du, ddu = a * (z + b * z**3), a * (1 + 3 * b * z * z), 6 * a * b * z
        return 4 * _bell(2 * u) * (du + 0.5 * z * ddu - z * np.tanh(u) * du * du)

    edge, peak = _peak(first, 1.0, 2.0), _peak(lambda z: -second(z), 1.0, 3.0)
    return _smooth(
        name,
        lambda z: z * _logistic(2 * a * (near(z) + b * near(z) ** 3)),
        first,
        second,
        (-edge, edge),
        (-peak, 0.0, peak),
        limits=(0.0, 1.0),
    )


def _mish() -> Activation:
    def parts(z: Array) -> tuple[Array, Array, Array]:
        """Return t = tanh(softplus(z)) and its two derivatives, in terms of w = e^-|z|."""
        w = _exp(-np.abs(z))
        right, left = 1 + 2 * w + 2 * w * w, w * w + 2 * w + 2
        t = np.where(z >= 0, (1 + 2 * w) / right, (w * w + 2 * w) / left)
        d = np.where(z >= 0, 4 * w * w * (1 + w) / right**2, 4 * w * (1 + w) / left**2)
        above = 4 * w * w * (2 * w**3 + 2 * w * w - 3 * w - 2) / right**3
        below = 4 * w * (2 + 2 * w - 3 * w * w - 2 * w**3) / left**3
        return t, d, np.where(z >= 0, above, below)

    def first(z: Array) -> Array:
        t, d, _ = parts(z)
        return t + z * d

    def second(z: Array) -> Array:
        _, d, e = parts(z)
        return 2 * d + z * e

    slopes = _peak(lambda z: -first(z), -4.0, -1.5), _peak(first, 0.5, 3.0)
    bends = (_peak(lambda z: -second(z), -5.0, -2.5), _peak(second, -1.0, 1.0), _peak(lambda z: -second(z), 1.5, 4.0))
    return _smooth("mish", lambda z: z * parts(z)[0], first, second, slopes, bends, limits=(0.0, 1.0))


def _kinked(
    name: str,
    value: Elementwise,
    slopes: tuple[float, float],
    bends: tuple[float, ...] | None = None,
    vertex: Elementwise | None = None,
) -> Activation:
    """Build an activation with kinks: slopes in a range, no second derivative; linear or quadratic between bends."""
    low, high = min(slopes), max(slopes)
    return Activation(
        name,
        Graph(value, (), (-math.inf, math.inf)),
        Graph(lambda z: np.full_like(z, 0.5 * (low + high)), (), (low, high), high - low + 1.0),
        Graph(lambda z: np.full_like(z, np.nan), (), (-math.inf, math.inf)),
        math.inf,
        bends=bends,
        vertex=vertex,
    )


def _hardswish() -> Activation:
    """z (z + 3) / 6 between -3 and 3, where it bends: the derivative of that less s is 0 at 3 s - 3/2."""

    def value(z: Array) -> Array:
        return z * np.clip(z + 3.0, 0.0, 6.0) / 6.0

    return _kinked("hardswish", value, (-0.5, 1.5), (-3.0, 3.0), lambda s: np.clip(3.0 * s - 1.5, -3.0, 3.0))


_PLAIN: dict[str, Callable[[], Activation]] = {
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "silu": _silu,
    "sin": _sin,
    "arctan": _arctan,
    "erf": _error_function,
    "isru": _isru,
    "gaussian": _gaussian,
    "tanhshrink": _tanhshrink,
    "softsign": _softsign,
    "gelu_tanh": _gelu_tanh,
    "mish": _mish,
    "relu": lambda: _kinked("relu", lambda z: np.maximum(z, 0.0), (0.0, 1.0), (0.0,)),
    "hardswish": _hardswish,
    "relu6": lambda: _kinked("relu6", lambda z: np.clip(z, 0.0, 6.0), (0.0, 1.0), (0.0, 6.0)),
}
_PARAMETRISED = re.compile(r"(softplus|centred_softplus|elu|celu|leaky_relu|softshrink)\(([0-9.eE+-]{1,32})\)")


DECLARED_ERROR = 2.0**-43
"""What the values of a declared formula may be off by, relatively and absolutely: taken as given."""


@dataclass(frozen=True, eq=False)
class Declared:
    """A formula that a user declared, on float64 arrays, and the range of its slopes: believed, and said to be.

    >>> Declared(np.cos, (-1.0, 1.0)).activation("cosine").slope
    (-1.0, 1.0)
    """

    formula: Elementwise
    slope: tuple[float, float]

    def activation(self, name: str) -> Activation:
        """Return it as an activation without a curvature: for Lipschitz certificates alone."""
        value = Graph(self.formula, (), (-math.inf, math.inf), precision=DECLARED_ERROR)
        return replace(_kinked(name, self.formula, self.slope), value=value)


@lru_cache(maxsize=64)
def activation(name: str) -> Activation | None:
    """Return the activation of that name, or None for one that the checker does not know.

    >>> activation("tanh").slope[0], 1.0 <= activation("tanh").slope[1] < 1.000001
    (0.0, True)
    >>> activation("relu").smooth, activation("no such function") is None
    (False, True)
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    found = _PARAMETRISED.fullmatch(name)
    if found is None:
        return _of_two_numbers(name)
    try:
        number = float(found[2])
    except ValueError:
        return None
    if not (1e-3 if found[1] != "leaky_relu" else -1e3) <= number <= 1e3:
        return None
    match found[1]:
        case "softplus":
            return _softplus(name, number, 0.0)
        case "centred_softplus":
            return _softplus(name, number, math.log(2) / number)
        case "softshrink":
            return _kinked(name, lambda z: z - np.clip(z, -number, number), (0.0, 1.0), (-number, number))
        case "leaky_relu":
            return _kinked(name, lambda z: np.where(z > 0, z, number * z), (number, 1.0), (0.0,))
        case "elu" if number != 1.0:
            return None
        case _:
            return _celu(name, number)


def _of_two_numbers(name: str) -> Activation | None:
    """Return hardtanh, or a GELU whose constants a file has, rounded to float32, say; None for other functions."""
    word, _, rest = name.partition("(")
    usual = {"gelu": (math.sqrt(0.5),), "gelu_tanh": (math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715)}
    try:
        numbers = tuple(float(text) for text in rest.removesuffix(")")[:80].split(","))
    except ValueError:
        return None
    if word == "hardtanh" and len(numbers) == 2 and -1e3 <= numbers[0] < numbers[1] <= 1e3:
        return _kinked(name, lambda z: np.clip(z, *numbers), (0.0, 1.0), (numbers[0], numbers[1]))
    known = usual.get(word, ())
    if len(numbers) != len(known) or any(not abs(n / k - 1) <= 1e-6 for n, k in zip(numbers, known, strict=True)):
        return None
    return _gelu(name, *numbers) if word == "gelu" else _gelu_tanh(name, *numbers)
