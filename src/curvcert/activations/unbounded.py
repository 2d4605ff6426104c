r"""Functions without a largest slope: powers, the exponential and the logarithm.

They have no global constants; over an interval inside their domain all that is asked of an activation is as finite, and
as exactly known, as of the others.  A power with a whole exponent is defined everywhere, or but for 0 if the exponent
is negative; with any other exponent, as the logarithm, on positive numbers.
"""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from curvcert.activations.base import EVALUATION_SLACK, EVERYWHERE, Activation, Profile, Range, Turn, from_profiles
from curvcert.activations.table import show
from curvcert.errors import InvalidInput

POSITIVE: tuple[Range, ...] = ((0.0, math.inf),)
NOT_ZERO: tuple[Range, ...] = ((-math.inf, 0.0), (0.0, math.inf))
MOST = 16
"""The largest exponent in size: beyond, values leave the floats at once."""

_EXP = Profile(torch.exp, "+", limits=(0.0, math.inf))
EXP = from_profiles("exp", _EXP, _EXP, _EXP)


def power(exponent: float) -> Activation:
    r"""Return :math:`z^p`, for any exponent but 0 and 1.

    >>> power(2.0).name, power(-0.5).slope
    ('power(2)', (-inf, 0.0))
    """
    p = float(exponent)
    if not 0 < abs(p) <= MOST or p == 1.0:
        raise InvalidInput(f"A power has an exponent of at most {MOST} in size, not 0 and not 1, got {exponent!r}.")
    return _power(p)


@lru_cache(maxsize=64)
def _power(p: float) -> Activation:
    orders = ((1.0, p), (p, p - 1), (p * (p - 1), p - 2))
    domain = POSITIVE if not p.is_integer() else EVERYWHERE if p > 0 else NOT_ZERO
    value, derivative, second = (_multiple(factor, k, domain) for factor, k in orders)
    return from_profiles(f"power({show(p)})", value, derivative, second, domain=domain)


def _multiple(factor: float, k: float, domain: tuple[Range, ...]) -> Profile:
    """Return the profile of factor z^k over a domain: below 0 and above it, it rises or falls, or is constant."""
    function = partial(_scaled_power, factor=factor, k=k)
    # Exponents that are no halves may have been rounded, which matters the more, the farther z is from 1.
    relative = EVALUATION_SLACK if (2 * k).is_integer() else 2.0**-42
    rising, falling = ("+", "-") if factor > 0 else ("-", "+")
    above = "0" if k == 0 else rising if k > 0 else falling
    at_zero, far = (factor, factor) if k == 0 else (0.0, factor * math.inf) if k > 0 else (factor * math.inf, 0.0)
    if domain == POSITIVE:
        return Profile(function, above, limits=(at_zero, far), relative=relative)
    odd = k % 2 == 1
    below = "0" if k == 0 else above if odd else {"+": "-", "-": "+"}[above]
    start = -far if odd and far else far
    ends = (min(-at_zero, at_zero), max(-at_zero, at_zero)) if odd else (at_zero, at_zero)
    return Profile(function, below + above, limits=(start, far), turns=(Turn(0.0, *ends, jump=k < 0),))


def _scaled_power(z: Tensor, factor: float, k: float) -> Tensor:
    """Return factor z^k; torch's own functions for the usual exponents are exact or rounded once."""
    if k == 0:
        return torch.full_like(z, factor)
    usual = {1.0: lambda: z, 2.0: lambda: z * z, -1.0: z.reciprocal, 0.5: z.sqrt, -0.5: z.rsqrt}
    found = usual[k]() if k in usual else z.pow(k)
    return found if factor == 1.0 else factor * found


LOG = from_profiles(
    "log",
    Profile(torch.log, "+", limits=(-math.inf, math.inf)),
    _multiple(1.0, -1.0, POSITIVE),
    _multiple(-1.0, -2.0, POSITIVE),
    domain=POSITIVE,
)
