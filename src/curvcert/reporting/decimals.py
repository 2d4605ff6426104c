"""Decimal numbers for a reader, rounded to the side that keeps the claim: certified down, found up."""

import math
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from statistics import median

_CONTEXT = Context(prec=800)
"""Enough digits for every finite float, written out."""


def floor_to(value: float, decimals: int) -> float:
    """Return the largest number of so many decimals that is not above the value; inf and NaN stay.

    >>> floor_to(0.69999, 2), floor_to(-0.001, 2), floor_to(math.inf, 2)
    (0.69, -0.01, inf)
    """
    return _quantised(value, decimals, ROUND_FLOOR)


def ceil_to(value: float, decimals: int) -> float:
    """Return the smallest number of so many decimals that is not below the value; inf and NaN stay.

    >>> ceil_to(0.61001, 2), ceil_to(0.5, 2)
    (0.62, 0.5)
    """
    return _quantised(value, decimals, ROUND_CEILING)


def percent_floor(count: int, total: int) -> str:
    """Return a share as a percentage of one decimal, rounded down, in whole-number arithmetic.

    >>> percent_floor(29, 100), percent_floor(2, 3), percent_floor(0, 0)
    ('29.0%', '66.6%', 'n/a')
    """
    return _percent(1000 * count // total) if total else "n/a"


def percent_ceil(count: int, total: int) -> str:
    """Return a share as a percentage of one decimal, rounded up, in whole-number arithmetic.

    >>> percent_ceil(29, 100), percent_ceil(2, 3)
    ('29.0%', '66.7%')
    """
    return _percent(-(-1000 * count // total)) if total else "n/a"


def significant_floor(value: float) -> str:
    """Return four significant digits, rounded down; with an exponent where the number is very small or large.

    >>> significant_floor(1674.87), significant_floor(0.0123456), significant_floor(3e12)
    ('1,674', '0.01234', '3.000e+12')
    """
    return _significant(value, floor_to)


def significant_ceil(value: float) -> str:
    """Return four significant digits, rounded up.

    >>> significant_ceil(1674.87), significant_ceil(136.0091), significant_ceil(math.inf)
    ('1,675', '136.1', '∞')
    """
    return _significant(value, ceil_to)


def decimals_for(values: Iterable[float]) -> int:
    """Return how many decimals show four significant digits of the median of the positive values: 2 to 12.

    >>> decimals_for([0.0632, 0.05, 0.0, math.inf]), decimals_for([])
    (5, 4)
    """
    sizes = [value for value in values if 0 < value < math.inf]
    if not sizes:
        return 4
    return min(12, max(2, 3 - math.floor(math.log10(median(sizes)))))


def nice_ceiling(value: float) -> float:
    """Return a round number that is not below the value: 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6 or 8 times a power of ten.

    >>> nice_ceiling(0.0898), nice_ceiling(1.0), nice_ceiling(0.0)
    (0.1, 1.0, 1.0)
    """
    if not 0 < value < math.inf:
        return 1.0
    exponent = math.floor(math.log10(value))
    steps = ("1", "1.2", "1.5", "2", "2.5", "3", "4", "5", "6", "8", "10", "12")
    candidates = (float(f"{step}e{exponent}") for step in steps)
    return next(candidate for candidate in candidates if candidate >= value)


def _quantised(value: float, decimals: int, rounding: str) -> float:
    if not math.isfinite(value):
        return value
    return float(Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=rounding, context=_CONTEXT)) + 0.0


def _significant(value: float, towards: Callable[[float, int], float]) -> str:
    if not math.isfinite(value):
        return "n/a" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    decimals = 3 - math.floor(math.log10(abs(value)))
    rounded = towards(value, decimals)
    if 1e-4 <= abs(value) < 1e7:
        return f"{rounded:,.{max(0, decimals)}f}"
    return f"{rounded:.3e}"


def _percent(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}%"
