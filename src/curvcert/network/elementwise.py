"""Functions of every entry that are made of rows of the table and affine maps, for both front ends."""

import math

import torch
from torch import Tensor

from curvcert import activations
from curvcert.activations import Activation
from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.builder import Value
from curvcert.operators import Diagonal

_HALF_PI, _HALF_PI_ERROR = math.pi / 2, 6.2e-17
"""The float64 number next to pi/2, and how far from it it is: 6.1232...e-17."""

UNBOUNDED = {
    "exp2": "exp(log(2) x)",
    "log2": "log(x) / log(2)",
    "log10": "log(x) / log(10)",
    "tan": "tanh",
    "xlogy": "softplus",
}
"""Functions without a largest slope that have no row either, and what computes something like them with one."""


def scaled(value: Value, inner: float, activation: Activation, outer: float, path: str, offset: float = 0.0) -> Value:
    """Return outer phi(inner x + offset)."""
    return _times(_shifted(_times(value, inner), offset).activate(activation, path), outer)


def _times(value: Value, factor: float) -> Value:
    return value if factor == 1.0 else value.times(torch.tensor(factor, dtype=torch.float64))


def _shifted(value: Value, offset: float, error: float = 0.0) -> Value:
    full = torch.full(value.shape, offset, dtype=torch.float64, device=value.device)
    return value.shift(full, torch.full_like(full, error) if error else None)


def cosine(value: Value, path: str) -> Value:
    """Return sin(x + pi/2), where pi/2 is known to within its rounding."""
    return _shifted(value, _HALF_PI, _HALF_PI_ERROR).activate(activations.SIN, path)


def log_sigmoid(value: Value, path: str) -> Value:
    """Return -softplus(-x)."""
    return value.negative().activate(activations.softplus(), path).negative()


def hard_sigmoid(value: Value, path: str) -> Value:
    """Return (3 + x cut to [-3, 3]) / 6."""
    return _times(_shifted(value.activate(activations.hardtanh(-3.0, 3.0), path), 3.0), 1 / 6)


def absolute(value: Value, path: str) -> Value:
    """Return |x|, a leaky ReLU of slope -1."""
    return value.activate(activations.leaky_relu(-1.0), path)


def power(value: Value, path: str, exponent: float) -> Value:
    """Return every entry to a constant power."""
    if exponent == 0.0:
        return value.times(torch.zeros(())).shift(torch.ones(value.shape, dtype=torch.float64))
    return value if exponent == 1.0 else value.activate(activations.power(exponent), path)


def exponential(value: Value, path: str) -> Value:
    """Return e^x."""
    return value.activate(activations.EXP, path)


def logarithm(value: Value, path: str) -> Value:
    """Return log(x)."""
    return value.activate(activations.LOG, path)


def exponential_less_one(value: Value, path: str) -> Value:
    """Return e^x - 1."""
    return _shifted(exponential(value, path), -1.0)


def logarithm_of_one_more(value: Value, path: str) -> Value:
    """Return log(1 + x)."""
    return logarithm(_shifted(value, 1.0), path)


def hyperbolic(value: Value, path: str, odd: bool) -> Value:
    """Return cosh(x), or with `odd` sinh(x)."""
    rising, falling = (_times(exponential(each, path), 0.5) for each in (value, value.negative()))
    return rising.plus(falling.negative() if odd else falling, path)


def clamped(value: Value, lower: float | None, upper: float | None, path: str) -> Value:
    """Return the value cut to [lower, upper], either of which may be left out.

    >>> from curvcert.network.builder import start
    >>> x = start((1,), torch.device("cpu"))
    >>> [type(node).__name__ for node in clamped(x, 1.0, None, "clamp").builder.nodes[1:]]
    ['AffineNode', 'ElementwiseNode', 'AffineNode']
    """
    if upper is None and lower is not None:
        return _shifted(_shifted(value, -lower).activate(activations.RELU, path), lower)
    if lower is None and upper is not None:
        return clamped(value.negative(), -upper, None, path).negative()
    if lower is None or upper is None:
        raise InvalidInput(f"{path}: expected a lower or an upper limit.")
    row = activations.RELU6 if (lower, upper) == (0.0, 6.0) else activations.hardtanh(lower, upper)
    return value.activate(row, path)


def parametric_relu(value: Value, slopes: Tensor, path: str) -> Value:
    """Return x for x > 0 and w x otherwise, with one w, one for each channel or for each entry: w x + (1 - w) relu(x).

    The factor 1 - w is rounded once.
    """
    if len(slopes) == 1 and not value.live:
        return value.activate(activations.leaky_relu(float(slopes)), path)
    w = value.weight(slopes)
    if tuple(slopes.shape) != value.shape:
        if len(slopes) not in (1, value.shape[0]):
            raise InvalidInput(f"{path}: {len(slopes)} slopes do not fit a value of shape {value.shape}.")
        w = w.reshape(-1, *(1 for _ in value.shape[1:]))
    kept = value.linear(Diagonal(w, value.shape), name=path)
    return kept.plus(value.activate(activations.RELU, path).linear(Diagonal(1 - w, value.shape)), path)


def without_a_constant(name: str, path: str) -> UnsupportedModule:
    """Return the error for a function whose slope has no bound."""
    return UnsupportedModule(
        f"{path}: {name} has no largest slope on the real numbers, so that a network with it has no global constant. "
        f"Use {UNBOUNDED[name]}, or write {name} inside a formula that has one (see 'Formulas' in the documentation "
        "of networks)."
    )
