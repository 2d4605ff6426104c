r"""What an activation is: phi, phi', phi'', their global ranges, and where they turn.

A range over an interval is exact once one knows between which points a function is monotone.  A
`Profile` states that for one function (phi, phi' or phi''); an `Activation` holds three of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedActivation
from curvcert.rounding import TINY

Elementwise = Callable[[Tensor], Tensor]
Range = tuple[float, float]
RangeFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

EVERYWHERE: tuple[Range, ...] = ((-float("inf"), float("inf")),)

EVALUATION_SLACK = 2.0**-48
"""Thirty-two unit roundoffs: torch's float64 functions err by one or two ulps each (SLEEF u10 and u15,
glibc, CUDA), and our formulas chain fewer than eight of them.  `tests/activations` measures it."""


@dataclass(frozen=True)
class Turn:
    """A point at which a function may change direction, with an enclosure of its value there.

    `point` is within one ulp of the true point.  At a jump the enclosure holds both one-sided values.

    >>> Turn(0.0, 1.0, 1.0).upper
    1.0
    """

    point: float
    lower: float
    upper: float
    jump: bool = False

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise InvalidInput(f"A Turn needs lower <= upper, got [{self.lower}, {self.upper}].")


@dataclass(frozen=True, eq=False)
class Profile:
    """A function with its turns, and the direction ('+', '-' or '0') between them.

    `limits` are the limits at -inf and +inf; one that is irrational is an extreme of the function and is
    rounded outward.  A computed value v is within `relative` |v| + `absolute` of the true one.  A periodic
    function lists the turns of one period, and 0 for its limits (the limits of its mean).  `scale` is the
    length on which it varies.

    >>> import torch
    >>> Profile(torch.tanh, "+", limits=(-1.0, 1.0)).range
    (-1.0, 1.0)
    """

    function: Elementwise
    trend: str
    limits: Range
    turns: tuple[Turn, ...] = ()
    relative: float = EVALUATION_SLACK
    absolute: float = TINY
    scale: float = 1.0
    period: float | None = None

    def __post_init__(self) -> None:
        points = [turn.point for turn in self.turns]
        if points != sorted(points):
            raise InvalidInput(f"A Profile needs its turns in increasing order, got {points}.")
        if len(self.trend) != len(points) + 1 or not set(self.trend) <= set("+-0"):
            raise InvalidInput(
                f"A Profile with {len(points)} turns needs {len(points) + 1} of '+-0', got {self.trend!r}."
            )

    @property
    def range(self) -> Range:
        """The hull of limits and turns: the global range, rounded outward."""
        lowers = [turn.lower for turn in self.turns]
        uppers = [turn.upper for turn in self.turns]
        return min((*self.limits, *lowers)), max((*self.limits, *uppers))

    def slack(self, value: Tensor) -> Tensor:
        """Return a bound on the error of a computed value; an infinite one is a limit, and exact."""
        return torch.where(value.isinf(), 0.0, value.abs() * self.relative + self.absolute)


@dataclass(frozen=True, eq=False, repr=False)
class Activation:
    r"""An elementwise function with proven constants.

    `slope` encloses every :math:`\phi'(z)`, and `curvature` every slope of :math:`\phi'`; it is None where
    :math:`\phi'` is not Lipschitz.  `deviation` bounds how far torch's module is from :math:`\phi` beyond
    rounding.  `profiles` (phi, phi', phi'') are those of a row of the table; a declared activation has none,
    and perhaps `derivative_enclosure` and `second_derivative_enclosure` instead.  `assumes` tells what
    was declared by a user and only sampled.  `domain` are the open intervals that phi is defined on.

    >>> from curvcert.activations import TANH
    >>> TANH
    Activation(tanh, slope [0, 1], curvature [-0.7698, 0.7698])
    """

    name: str
    value: Elementwise
    derivative: Elementwise
    second_derivative: Elementwise | None
    slope: Range
    curvature: Range | None
    profiles: tuple[Profile, Profile, Profile | None] | None = None
    derivative_enclosure: RangeFunction | None = None
    second_derivative_enclosure: RangeFunction | None = None
    deviation: float = 0.0
    assumes: tuple[str, ...] = ()
    domain: tuple[Range, ...] = EVERYWHERE

    def __post_init__(self) -> None:
        if self.profiles is None:
            _validate_range(self.slope, f"slope of activation {self.name!r}")
        if self.profiles is None and self.curvature is not None:
            _validate_range(self.curvature, f"curvature of activation {self.name!r}")
        if not 0.0 <= self.deviation < float("inf"):
            raise InvalidInput(f"deviation must be finite and nonnegative, got {self.deviation}.")
        if self.profiles is None and not self.assumes:
            raise InvalidInput(
                f"Activation {self.name!r} has neither profiles nor assumptions. Use declare_activation."
            )

    @property
    def is_tame(self) -> bool:
        """Whether phi has a largest slope on the real numbers, wherever it is evaluated.

        >>> from curvcert.activations import EXP, TANH
        >>> EXP.is_tame, TANH.is_tame
        (False, True)
        """
        return self.profiles is None or all(abs(end) < float("inf") for end in self.profiles[1].range)

    @property
    def is_bounded(self) -> bool:
        """Whether its slope, and that of phi' where there is one, have bounds: if not, it has no global constants.

        A function that is not tame is bounded once its slopes are those over the interval that it is evaluated on.

        >>> from curvcert.activations import EXP, RELU
        >>> EXP.is_bounded, RELU.is_bounded
        (False, True)
        """
        return all(abs(end) < float("inf") for end in (*self.slope, *(self.curvature or ())))

    @property
    def curvature_c(self) -> float:
        r"""The Lipschitz constant :math:`c = \max(|\alpha'|, |\beta'|)` of phi'.

        >>> from curvcert.activations import TANH
        >>> TANH.curvature_c
        0.769800358919501

        Raises:
            UnsupportedActivation: if phi' is not Lipschitz.
        """
        if self.curvature is None or not self.is_bounded:
            raise no_curvature(self)
        return max(abs(self.curvature[0]), abs(self.curvature[1]))

    def __repr__(self) -> str:
        curvature = "none" if self.curvature is None else "[{:.4g}, {:.4g}]".format(*self.curvature)
        slope = "[{:.4g}, {:.4g}]".format(*self.slope)
        assumes = f", assumes {'; '.join(self.assumes)}" if self.assumes else ""
        return f"Activation({self.name}, slope {slope}, curvature {curvature}{assumes})"


def from_profiles(
    name: str,
    value: Profile,
    derivative: Profile,
    second_derivative: Profile | None,
    deviation: float = 0.0,
    domain: tuple[Range, ...] = EVERYWHERE,
) -> Activation:
    """Build a row of the table; slope and curvature are read off the profiles, never declared.

    >>> from curvcert.activations import TANH
    >>> from_profiles("again", *TANH.profiles).slope
    (0.0, 1.0)
    """
    return Activation(
        name=name,
        value=value.function,
        derivative=derivative.function,
        second_derivative=None if second_derivative is None else second_derivative.function,
        slope=derivative.range,
        curvature=None if second_derivative is None else second_derivative.range,
        profiles=(value, derivative, second_derivative),
        deviation=deviation,
        domain=domain,
    )


def no_curvature(act: Activation) -> UnsupportedActivation:
    """Return the error for a curvature constant that does not exist or was not declared."""
    if act.profiles is None:
        return UnsupportedActivation(
            f"Activation {act.name!r} was declared without a curvature range. "
            "Pass curvature=(lower, upper) to declare_activation, or ask for a Lipschitz bound."
        )
    if act.curvature is not None:
        return UnsupportedActivation(
            f"Activation {act.name!r} has no largest slope or curvature on the real numbers. Ask for what holds in a "
            "ball: at=x, radius=r."
        )
    return UnsupportedActivation(
        f"Activation {act.name!r} has a kink: its derivative jumps, so that it has no curvature constant. "
        "Ask for a Lipschitz bound, or use a smooth activation (softplus for ReLU, tanh for Hardtanh)."
    )


def _validate_range(pair: Range, what: str) -> None:
    lower, upper = pair
    if not float("-inf") < lower <= upper < float("inf"):
        raise InvalidInput(f"The {what} must be finite with lower <= upper, got {pair}.")
