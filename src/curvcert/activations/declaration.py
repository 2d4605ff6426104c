"""A user's own activation: declared constants, contradicted by samples or else recorded as assumptions."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvcert.activations.base import Activation, Elementwise, Range, RangeFunction
from curvcert.errors import InvalidInput, SoundnessError

ROUNDING = 2.0**-43
"""Relative error that we grant a user's formulas, in float64."""

STEP = 1e-5
"""The step of the finite differences that check the derivative."""


def declare_activation(
    name: str,
    value: Elementwise,
    derivative: Elementwise,
    slope: Range,
    curvature: Range | None = None,
    second_derivative: Elementwise | None = None,
    derivative_range: RangeFunction | None = None,
    second_derivative_range: RangeFunction | None = None,
    deviation: float = 0.0,
) -> Activation:
    """Return an activation with declared ranges, after sampling has failed to contradict them.

    `slope` must enclose every phi'(z), `curvature` every slope of phi' (None: only Lipschitz bounds). The
    range functions map float64 tensors (lower, upper) to an enclosure of phi' and phi'' over [lower, upper];
    without them the global ranges serve. Nothing is proven: the result says so in `assumes`.

    >>> act = declare_activation("cosine", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0), (-1.0, 1.0))
    >>> act.assumes
    ("activation 'cosine': slope in [-1, 1], curvature in [-1, 1] as declared, sampled only",)

    Raises:
        SoundnessError: if a sample contradicts what was declared.
        InvalidInput: if a range is not finite and ordered.
    """
    if second_derivative_range is not None and curvature is None:
        raise InvalidInput("second_derivative_range needs curvature=(lower, upper), its global range.")
    act = Activation(
        name=name,
        value=value,
        derivative=derivative,
        second_derivative=second_derivative,
        slope=_as_floats(slope),
        curvature=None if curvature is None else _as_floats(curvature),
        derivative_enclosure=derivative_range,
        second_derivative_enclosure=second_derivative_range,
        deviation=deviation,
        assumes=(_assumption(name, slope, curvature),),
    )
    with torch.no_grad():
        _check_samples(act)
    return act


def _assumption(name: str, slope: Range, curvature: Range | None) -> str:
    bend = "no curvature" if curvature is None else f"curvature in {_show(curvature)}"
    return f"activation {name!r}: slope in {_show(slope)}, {bend} as declared, sampled only"


def _show(pair: Range) -> str:
    return f"[{pair[0]:.10g}, {pair[1]:.10g}]"


def _as_floats(pair: Range) -> Range:
    lower, upper = pair
    return float(lower), float(upper)


def _check_samples(act: Activation) -> None:
    z = _sample_points()
    phi, dphi = _sampled(act, "value", act.value, z), _sampled(act, "derivative", act.derivative, z)
    _demand(act, "derivative", z, dphi, act.slope, ROUNDING * (1 + dphi.abs()))
    _check_quotients(act, "slope of value", z, phi, act.slope)
    _check_derivative(act, z)
    if act.curvature is not None:
        _check_quotients(act, "slope of derivative", z, dphi, act.curvature)
    if act.curvature is not None and act.second_derivative is not None:
        second = _sampled(act, "second_derivative", act.second_derivative, z)
        _demand(act, "second_derivative", z, second, act.curvature, ROUNDING * (1 + second.abs()))
    if act.derivative_enclosure is not None:
        _check_enclosure(act, "derivative_range", act.derivative_enclosure, act.derivative)
    if act.second_derivative_enclosure is not None:
        _check_second_enclosure(act, act.second_derivative_enclosure)


def _sample_points() -> Tensor:
    """Return, sorted, a dense grid on [-50, 50], random points near 0, and large magnitudes."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(-50.0, 50.0, 50_001, dtype=torch.float64)
    near = torch.randn(20_000, dtype=torch.float64, generator=generator) * 3
    large = 10.0 ** torch.linspace(1.7, 6.0, 200, dtype=torch.float64)
    points = torch.cat((grid, near, large, -large)).sort().values
    return points[torch.cat((torch.ones(1, dtype=torch.bool), points.diff() > 0))]


def _sampled(act: Activation, what: str, function: Elementwise, z: Tensor) -> Tensor:
    result: Tensor = function(z)
    if result.shape != z.shape or result.dtype != torch.float64:
        raise InvalidInput(
            f"{what} of activation {act.name!r} must be elementwise and keep float64, got shape "
            f"{tuple(result.shape)} and {result.dtype}. Build it from elementwise torch functions."
        )
    finite = result.isfinite()
    if not bool(finite.all()):
        point = float(z[(~finite).nonzero()[0, 0]])
        raise SoundnessError(f"{what} of activation {act.name!r} is not finite at z = {point:.9g}.")
    return result


def _demand(act: Activation, what: str, z: Tensor, sample: Tensor, known: Range, slack: Tensor) -> None:
    """Raise with the worst point if a sample leaves the declared range by more than its slack."""
    excess = torch.maximum(sample - known[1], known[0] - sample) - slack
    worst = int(excess.argmax())
    if not float(excess[worst]) <= 0:
        raise SoundnessError(
            f"The declaration of activation {act.name!r} is contradicted: {what} is "
            f"{float(sample[worst]):.12g} at z = {float(z[worst]):.12g}, outside "
            f"[{known[0]:.12g}, {known[1]:.12g}]. Correct the declared range."
        )


def _check_quotients(act: Activation, what: str, z: Tensor, f: Tensor, known: Range) -> None:
    """Check the difference quotients of neighbours, and of random pairs."""
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(len(z), generator=generator)
    for order in (torch.arange(len(z)), shuffled):
        dz = z[order[1:]] - z[order[:-1]]
        quotient = (f[order[1:]] - f[order[:-1]]) / dz
        error = ROUNDING * (1 + f[order[1:]].abs() + f[order[:-1]].abs()) / dz.abs()
        _demand(act, what, z[order[1:]], quotient, known, error + ROUNDING * (1 + quotient.abs()))


def _check_derivative(act: Activation, z: Tensor) -> None:
    """Check that a central difference of the value lies in the hull of the derivative nearby."""
    h = STEP * z.abs().clamp(min=1.0)
    quotient = (act.value(z + h) - act.value(z - h)) / ((z + h) - (z - h))
    nearby = torch.stack([act.derivative(z + t * h) for t in (-1.0, -0.5, 0.0, 0.5, 1.0)])
    bend = 0.0 if act.curvature is None else act.curvature_c
    slack = ROUNDING * (1 + act.value(z).abs()) / h + bend * h / 2 + 1e-7 * (1 + nearby.abs().amax(0))
    excess = torch.maximum(quotient - nearby.amax(0), nearby.amin(0) - quotient) - slack
    worst = int(excess.argmax())
    if not float(excess[worst]) <= 0:
        raise SoundnessError(
            f"derivative of activation {act.name!r} is not that of value: at z = {float(z[worst]):.9g} the "
            f"finite difference is {float(quotient[worst]):.9g}, the derivative "
            f"{float(nearby[2, worst]):.9g}. Correct one of the two."
        )


def _check_enclosure(act: Activation, what: str, enclosure: RangeFunction, function: Elementwise) -> None:
    """Check a range function on random intervals against samples inside them."""
    for lower, upper in _random_intervals():
        lo, hi = enclosure(lower, upper)
        for t in torch.linspace(0.0, 1.0, 33, dtype=torch.float64):
            z = torch.minimum(lower + t * (upper - lower), upper)
            sample = function(z)
            _demand_inside(act, what, z, sample, (lo, hi), ROUNDING * (1 + sample.abs()))


def _check_second_enclosure(act: Activation, enclosure: RangeFunction) -> None:
    """Check an enclosure of phi'' against phi'' where it is given, and against slopes of phi' in any case."""
    if act.second_derivative is not None:
        _check_enclosure(act, "second_derivative_range", enclosure, act.second_derivative)
    for lower, upper in _random_intervals():
        lo, hi = enclosure(lower, upper)
        fall, width = act.derivative(upper) - act.derivative(lower), upper - lower
        wide = width > 0
        slack = ROUNDING * (1 + act.derivative(lower).abs()) / width
        slope, ends = fall[wide] / width[wide], (lo[wide], hi[wide])
        if slope.numel():
            _demand_inside(act, "second_derivative_range", lower[wide], slope, ends, slack[wide])


def _demand_inside(
    act: Activation, what: str, z: Tensor, sample: Tensor, ends: tuple[Tensor, Tensor], slack: Tensor
) -> None:
    lo, hi = ends
    excess = torch.maximum(sample - hi, lo - sample) - slack
    worst = int(excess.nan_to_num(math.inf).argmax())
    if not float(excess[worst]) <= 0:
        raise SoundnessError(
            f"{what} of activation {act.name!r} is contradicted: for an interval that holds "
            f"{float(z[worst]):.9g} it gives [{float(lo[worst]):.9g}, {float(hi[worst]):.9g}], but a sample "
            f"is {float(sample[worst]):.9g}. Widen the range."
        )


def _random_intervals() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield intervals of every size about random centres, degenerate ones among them."""
    generator = torch.Generator().manual_seed(2)
    for scale in (0.0, 1e-6, 1e-2, 0.3, 1.0, 5.0, 50.0):
        centre = torch.randn(500, dtype=torch.float64, generator=generator) * 4
        radius = torch.rand(500, dtype=torch.float64, generator=generator) * scale
        yield centre - radius, centre + radius
