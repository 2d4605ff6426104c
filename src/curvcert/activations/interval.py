r"""Ranges of phi, phi' and phi'' over intervals [l, u]: exact, rounded outward, vectorised.

A function that is monotone between its turns has as its range over [l, u] the hull of its values at l, at u
and at the turns inside.  The values at l and u are widened by the error of their evaluation, those at the
turns are enclosures already, and a turn within four ulps of the interval counts as inside, because the
stored point is itself rounded.  At last the hull is cut to the global range.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from curvcert.activations.base import EVERYWHERE, Activation, Profile, Range, RangeFunction, Turn, no_curvature
from curvcert.errors import InvalidInput
from curvcert.rounding import next_down, next_up

Intervals = tuple[Float64[Tensor, "*shape"], Float64[Tensor, "*shape"]]

NEARNESS = 2.0**-50
"""Four ulps of 1: a turn at this relative distance outside an interval counts as inside it."""

LARGEST = torch.finfo(torch.float64).max

PERIODIC_LIMIT = 2.0**22
"""Beyond this magnitude a periodic function is enclosed by its global range."""


@torch.no_grad()
def value_range(act: Activation, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose :math:`\{\phi(z) : l \le z \le u\}`, elementwise; infinite ends are allowed.

    >>> from curvcert.activations import TANH
    >>> ends = torch.tensor([-1.0, torch.inf], dtype=torch.float64)
    >>> lo, hi = value_range(TANH, ends[:1], ends[1:])
    >>> lo.item() <= -0.7615941559557649, hi.item()
    (True, 1.0)

    Raises:
        InvalidInput: if l > u somewhere, at NaN, or if the dtype is not float64.
    """
    _check_interval(lower, upper)
    if act.profiles is None:
        return _mean_value_range(act, lower, upper)
    return _where_defined(act, lower, upper, profile_range(act.profiles[0], lower, upper))


@torch.no_grad()
def derivative_range(act: Activation, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose :math:`\{\phi'(z) : l \le z \le u\}`; at a kink both one-sided slopes.

    >>> from curvcert.activations import TANH
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> [round(end.item(), 9) for end in derivative_range(TANH, -one, 2 * one)]
    [0.070650825, 1.0]
    """
    _check_interval(lower, upper)
    if act.profiles is None:
        return _declared_range(act, act.derivative_enclosure, act.slope, lower, upper)
    return _where_defined(act, lower, upper, profile_range(act.profiles[1], lower, upper))


@torch.no_grad()
def second_derivative_range(act: Activation, lower: Tensor, upper: Tensor) -> Intervals:
    r"""Enclose the slopes of phi' on [l, u]: :math:`\phi''`, one-sided values at its jumps included.

    >>> from curvcert.activations import TANH
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> [round(end.item(), 9) for end in second_derivative_range(TANH, 0 * one, one)]
    [-0.769800359, 0.0]

    Raises:
        UnsupportedActivation: if phi' is not Lipschitz, or its curvature was not declared.
    """
    _check_interval(lower, upper)
    if act.curvature is None:
        raise no_curvature(act)
    if act.profiles is None or act.profiles[2] is None:
        return _declared_range(act, act.second_derivative_enclosure, act.curvature, lower, upper)
    return _where_defined(act, lower, upper, profile_range(act.profiles[2], lower, upper))


def is_defined(act: Activation, lower: Tensor, upper: Tensor) -> Tensor:
    """Whether phi is defined on all of [l, u], elementwise; an infinite end is one of the domain's.

    >>> from curvcert.activations import LOG
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> is_defined(LOG, one, 2 * one).item(), is_defined(LOG, 0 * one, one).item()
    (True, False)
    """
    inside = torch.zeros_like(lower, dtype=torch.bool)
    for left, right in act.domain:
        above = lower > left if left > -torch.inf else torch.ones_like(inside)
        inside |= above & (upper < right if right < torch.inf else torch.ones_like(inside))
    return inside


def _where_defined(act: Activation, lower: Tensor, upper: Tensor, found: Intervals) -> Intervals:
    """Return a range, or all numbers where phi is not defined on the whole interval."""
    if act.domain == EVERYWHERE:
        return found
    inside = is_defined(act, lower, upper)
    return torch.where(inside, found[0], -torch.inf), torch.where(inside, found[1], torch.inf)


def profile_range(profile: Profile, lower: Float64[Tensor, "*shape"], upper: Float64[Tensor, "*shape"]) -> Intervals:
    """Return the hull of the end values and of the turns inside, cut to the global range.

    >>> from curvcert.activations import SIGMOID
    >>> zero = torch.zeros((), dtype=torch.float64)
    >>> profile_range(SIGMOID.profiles[1], zero, zero)[1].item()
    0.25
    """
    at_lower, at_upper = _end_value(profile, lower), _end_value(profile, upper)
    lo = torch.minimum(at_lower - profile.slack(at_lower), at_upper - profile.slack(at_upper))
    hi = torch.maximum(at_lower + profile.slack(at_lower), at_upper + profile.slack(at_upper))
    for turn in profile.turns:
        inside = _contains(lower, upper, turn, profile.period)
        lo = torch.where(inside, lo.clamp(max=turn.lower), lo)
        hi = torch.where(inside, hi.clamp(min=turn.upper), hi)
    least, greatest = profile.range
    return lo.clamp(least, greatest), hi.clamp(least, greatest)


def _end_value(profile: Profile, end: Tensor) -> Tensor:
    """Evaluate the function, with its limits at infinite ends; a finite value that overflows stays finite."""
    value = profile.function(torch.where(end.isfinite(), end, torch.zeros_like(end))).clamp(-LARGEST, LARGEST)
    value = torch.where(end == -torch.inf, profile.limits[0], value)
    return torch.where(end == torch.inf, profile.limits[1], value)


def _contains(lower: Tensor, upper: Tensor, turn: Turn, period: float | None) -> Tensor:
    if period is None:
        near = NEARNESS * abs(turn.point)
        return (lower <= turn.point + near) & (upper >= turn.point - near)
    # Whole periods from the turn to each end; the margin covers the errors of this division.
    first, last = (lower - turn.point) / period, (upper - turn.point) / period
    margin = NEARNESS * (1 + first.abs() + last.abs())
    far = (lower.abs() > PERIODIC_LIMIT) | (upper.abs() > PERIODIC_LIMIT)
    return far | (torch.ceil(first - margin) <= torch.floor(last + margin))


def _mean_value_range(act: Activation, lower: Tensor, upper: Tensor) -> Intervals:
    """Enclose a declared phi by its slope: phi(l) + [alpha, beta] (z - l), and the same from u."""
    least, greatest = derivative_range(act, lower, upper)
    width = next_up(upper - lower)
    fall, rise = _product(least.clamp(max=0), width), _product(greatest.clamp(min=0), width)
    from_lower, from_upper = _declared_value(act, lower), _declared_value(act, upper)
    lo = torch.maximum(from_lower[0] + fall, from_upper[0] - rise)
    hi = torch.minimum(from_lower[1] + rise, from_upper[1] - fall)
    # inf - inf says nothing: an unbounded end.
    lo, hi = torch.where(lo.isnan(), -torch.inf, lo), torch.where(hi.isnan(), torch.inf, hi)
    return next_down(lo), next_up(hi)


def _product(slope: Tensor, width: Tensor) -> Tensor:
    """Return slope x width away from zero, with 0 x inf = 0."""
    product = torch.where(slope == 0, torch.zeros_like(slope), slope * width)
    return torch.where(product < 0, next_down(product), next_up(product))


def _declared_value(act: Activation, end: Tensor) -> Intervals:
    """Return a declared phi's value, widened; unbounded at an infinite end."""
    finite = end.isfinite()
    value = act.value(torch.where(finite, end, torch.zeros_like(end)))
    slack = value.abs() * 2.0**-44 + 2.0**-44
    infinite = torch.full_like(value, torch.inf)
    return torch.where(finite, value - slack, -infinite), torch.where(finite, value + slack, infinite)


def _declared_range(
    act: Activation, enclosure: RangeFunction | None, known: Range, lower: Tensor, upper: Tensor
) -> Intervals:
    """Return a declared enclosure cut to the global range, or that range itself."""
    least, greatest = torch.full_like(lower, known[0]), torch.full_like(lower, known[1])
    if enclosure is None:
        return least, greatest
    lo, hi = enclosure(lower, upper)
    check_tensor(lo, f"the declared range of activation {act.name!r}")
    check_tensor(hi, f"the declared range of activation {act.name!r}")
    if lo.shape != lower.shape or hi.shape != lower.shape or bool((lo > hi).any()):
        raise InvalidInput(
            f"The declared range of activation {act.name!r} must return lo <= hi of shape "
            f"{tuple(lower.shape)}, got {tuple(lo.shape)} and {tuple(hi.shape)}. Correct the callable."
        )
    return torch.maximum(lo, least), torch.minimum(hi, greatest)


def _check_interval(lower: Tensor, upper: Tensor) -> None:
    check_tensor(lower, "lower")
    check_tensor(upper, "upper")
    if lower.shape != upper.shape:
        raise InvalidInput(f"lower and upper need the same shape, got {tuple(lower.shape)} and {tuple(upper.shape)}.")
    if bool((lower > upper).any()):
        worst = (lower - upper).argmax()
        raise InvalidInput(
            f"An interval needs lower <= upper, got [{lower.flatten()[worst]}, {upper.flatten()[worst]}]. "
            "Swap the ends."
        )


def check_tensor(z: Tensor, name: str) -> None:
    """Raise unless z is a float64 tensor without NaN.

    >>> check_tensor(torch.zeros(2), "z")
    Traceback (most recent call last):
    ...
    curvcert.errors.InvalidInput: z must be a float64 tensor, got torch.float32. Convert it with .double().
    """
    if not isinstance(z, Tensor) or z.dtype != torch.float64:
        got = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise InvalidInput(f"{name} must be a float64 tensor, got {got}. Convert it with .double().")
    if bool(z.isnan().any()):
        raise InvalidInput(f"{name} contains NaN. Check the network's weights and inputs.")
