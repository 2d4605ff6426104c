r"""GELU and SELU with constants of their own: as files write them out, rounded to float32, say.

With :math:`s = c\sqrt2` the function :math:`\tfrac x2 (1 + erf(cx))` is :math:`gelu(sx) / s`: its derivatives of order
k are :math:`s^{k-1}` times those of GELU at sx, so that every turn moves by 1/s and every value by a known factor.

:math:`\tfrac x2 (1 + \tanh(ax + bx^3))` has two constants, which no change of scale takes to those of the table at
once.  Its turns are found anew, with fifty decimal digits, as those of the table were; that close to the table's
constants (`NEAR`) it turns as often, in the same order and near the same points.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import lru_cache, partial

import torch
from torch import Tensor

from curvcert.activations import formulas
from curvcert.activations.base import Activation, Elementwise, Profile, Turn, from_profiles
from curvcert.activations.table import CANCELLING, GELU, GELU_TANH, SELU, kinked_elu, show
from curvcert.errors import InvalidInput

NEAR = 2.0**-20
"""How far, relatively, a constant may be from that of the table."""

_GELU, _CUBIC = math.sqrt(0.5), formulas.SQRT_2_OVER_PI * formulas.GELU_CUBIC
_EXACT = 2.0**-51
"""Constants this near, relatively, are those of the table, rounded: within the slack of its values."""

_DIGITS = 50
_BRACKET = Decimal("1e-4")

Turning = Callable[[Decimal], Decimal]


def gelu(coefficient: float = _GELU) -> Activation:
    r"""Return :math:`\tfrac x2 (1 + erf(cx))` for c near :math:`\sqrt{1/2}`; GELU itself for that.

    >>> gelu(), gelu(0.7071067690849304).name
    (Activation(gelu, slope [-0.1289, 1.129], curvature [-0.108, 0.7979]), 'gelu(0.7071067690849304)')
    """
    c = near(coefficient, _GELU, "gelu")
    return GELU if _is(c, _GELU) else _gelu(c)


def gelu_tanh(linear: float = formulas.SQRT_2_OVER_PI, cubic: float = _CUBIC) -> Activation:
    r"""Return :math:`\tfrac x2 (1 + \tanh(ax + bx^3))` for a and b near those of GELU's approximation, or that itself.

    >>> gelu_tanh().name, round(gelu_tanh(0.7978845834732056, 0.03567740786820501).slope[1], 7)
    ('gelu_tanh', 1.1289931)
    """
    a, b = near(linear, formulas.SQRT_2_OVER_PI, "gelu_tanh"), near(cubic, _CUBIC, "gelu_tanh")
    return GELU_TANH if _is(a, formulas.SQRT_2_OVER_PI) and _is(b, _CUBIC) else _gelu_tanh(a, b)


def selu(alpha: float = formulas.SELU_ALPHA, scale: float = formulas.SELU_SCALE) -> Activation:
    """Return scale x for x > 0 and scale alpha (e^x - 1) otherwise, alpha and scale positive; SELU for its own.

    >>> selu(1.0, 2.0)
    Activation(selu(1,2), slope [0, 2], curvature none)
    """
    if (alpha, scale) == (formulas.SELU_ALPHA, formulas.SELU_SCALE):
        return SELU
    for name, value in (("alpha", alpha), ("scale", scale)):
        if not 1e-100 <= value <= 1e100:
            raise InvalidInput(f"selu needs a positive {name} between 1e-100 and 1e100, got {value!r}.")
    return _selu(float(alpha), float(scale))


def near(value: float, known: float, name: str) -> float:
    """Return a constant that is near the known one, or raise."""
    if not abs(value - known) <= NEAR * known:
        raise InvalidInput(f"{name} needs a constant within 1e-6 of {known:.9g}, relatively, got {value!r}.")
    return float(value)


def _is(value: float, known: float) -> bool:
    return abs(value - known) <= _EXACT * known


@lru_cache(maxsize=64)
def _gelu(c: float) -> Activation:
    # Rounded, as the turns are: by less than the two roundoffs of a stored point, and than CANCELLING in values.
    s = c / _GELU
    assert GELU.profiles is not None
    value, first, second = GELU.profiles
    assert second is not None
    return from_profiles(
        f"gelu({show(c)})",
        _scaled(value, lambda z: formulas.gelu_value(s * z) / s, s, 1 / s),
        _scaled(first, lambda z: formulas.gelu_derivative(s * z), s, 1.0),
        _scaled(second, lambda z: s * formulas.gelu_second(s * z), s, s),
    )


def _scaled(profile: Profile, function: Elementwise, s: float, factor: float) -> Profile:
    """Return the profile of factor g(sz); eight roundoffs outward cover those of the factor and of the product."""
    turns = tuple(
        Turn(
            turn.point / s,
            factor * turn.lower - 2.0**-50 * abs(turn.lower),
            factor * turn.upper + 2.0**-50 * abs(turn.upper),
        )
        for turn in profile.turns
    )
    return replace(profile, function=function, turns=turns, absolute=2 * CANCELLING, scale=1 / s)


@lru_cache(maxsize=64)
def _gelu_tanh(a: float, b: float) -> Activation:
    profiles = GELU_TANH.profiles
    assert profiles is not None and profiles[2] is not None

    def inner(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = z.clamp(-30, 30)
        return x, a * x + b * x**3, a + 3 * b * x * x, 6 * b * x

    def value(z: Tensor) -> Tensor:
        return z * torch.sigmoid(2 * inner(z)[1])

    def first(z: Tensor) -> Tensor:
        x, u, du, _ = inner(z)
        return torch.sigmoid(2 * u) + 0.5 * x * formulas.tanh_derivative(u) * du

    def second(z: Tensor) -> Tensor:
        x, u, du, ddu = inner(z)
        return formulas.tanh_derivative(u) * (du + 0.5 * x * ddu - x * torch.tanh(u) * du * du)

    def made(known: Profile, function: Elementwise, order: int) -> Profile:
        turns = tuple(
            _turn(turn, partial(_derivative, a, b, order), partial(_derivative, a, b, order + 1))
            for turn in known.turns
        )
        return replace(known, function=function, turns=turns, absolute=2 * CANCELLING)

    parts = made(profiles[0], value, 0), made(profiles[1], first, 1), made(profiles[2], second, 2)
    return from_profiles(f"gelu_tanh({show(a)},{show(b)})", *parts)


def _derivative(a: float, b: float, order: int, x: Decimal) -> Decimal:
    """Return x/2 (1 + tanh u), u = ax + bx^3, or one of its first three derivatives."""
    A, B = Decimal(a), Decimal(b)
    u, du, ddu, dddu = A * x + B * x**3, A + 3 * B * x * x, 6 * B * x, 6 * B
    e = (-2 * u).exp()
    t = (1 - e) / (1 + e)
    w = 1 - t * t
    if order == 0:
        return x * (1 + t) / 2
    if order == 1:
        return (1 + t) / 2 + x * w * du / 2
    bend = du + x * ddu / 2 - x * t * du * du
    if order == 2:
        return w * bend
    return w * (3 * ddu / 2 + x * dddu / 2 - t * du * du - x * w * du**3 - 2 * x * t * du * ddu - 2 * t * du * bend)


def _turn(known: Turn, function: Turning, derivative: Turning) -> Turn:
    """Return the turn near a known one: a root of the derivative by bisection, and the value there, rounded outward."""
    with localcontext() as context:
        context.prec = _DIGITS
        low, high = Decimal(known.point) - _BRACKET, Decimal(known.point) + _BRACKET
        rises = derivative(high) > 0
        if (derivative(low) > 0) == rises:
            raise InvalidInput(f"These constants have no turn near {known.point}. Keep to those of the table.")
        for _ in range(4 * _DIGITS):
            middle = (low + high) / 2
            if (derivative(middle) > 0) == rises:
                high = middle
            else:
                low = middle
        point = 0.0 if known.point == 0.0 else float(low)
        value = float(function(Decimal(point) if point == 0.0 else low))
    return Turn(point, math.nextafter(value, -math.inf), math.nextafter(value, math.inf))


@lru_cache(maxsize=64)
def _selu(alpha: float, scale: float) -> Activation:
    return kinked_elu(f"selu({show(alpha)},{show(scale)})", alpha, scale)
