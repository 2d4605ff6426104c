"""The rows under test, and what mpmath knows about them."""

from collections.abc import Callable, Mapping

import mpmath
import torch
from hypothesis import strategies as st

from curvcert.activations import ACTIVATIONS, Activation, celu, elu, hardtanh, leaky_relu, softplus, softshrink

DIGITS = 50

ROWS: dict[str, Activation] = dict(ACTIVATIONS) | {
    act.name: act
    for act in (
        softplus(0.01),
        softplus(30.0),
        softplus(3.0, centred=True),
        celu(0.3),
        celu(7.0),
        elu(2.0),
        elu(0.5),
        elu(-1.5),
        leaky_relu(-0.5),
        leaky_relu(3.0),
        hardtanh(-0.3, 2.0),
        softshrink(2.0),
    )
}
SMOOTH = [name for name, act in ROWS.items() if act.curvature is not None]
KINKED = [name for name, act in ROWS.items() if act.curvature is None]


def _softplus(beta: float, shift: bool) -> Callable:
    beta = mpmath.mpf(beta)
    return lambda x: mpmath.log1p(mpmath.exp(beta * x)) / beta - (mpmath.log(2) / beta if shift else 0)


def _celu(alpha: float) -> Callable:
    alpha = mpmath.mpf(alpha)
    return lambda x: x if x > 0 else alpha * mpmath.expm1(x / alpha)


def _gelu_tanh(x):
    u = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / 2 * (1 + mpmath.tanh(u))


EXACT: Mapping[str, Callable] = {
    "tanh": mpmath.tanh,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "softplus(1)": _softplus(1.0, False),
    "softplus(30)": _softplus(30.0, False),
    "softplus(0.01)": _softplus(0.01, False),
    "centred_softplus(1)": _softplus(1.0, True),
    "centred_softplus(3)": _softplus(3.0, True),
    "elu(1)": _celu(1.0),
    "celu(1)": _celu(1.0),
    "celu(0.3)": _celu(0.3),
    "celu(7)": _celu(7.0),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "mish": lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
    "sin": mpmath.sin,
    "arctan": mpmath.atan,
    "erf": mpmath.erf,
    "softsign": lambda x: x / (1 + abs(x)),
    "isru": lambda x: x / mpmath.sqrt(1 + x * x),
    "gaussian": lambda x: mpmath.exp(-x * x),
    "tanhshrink": lambda x: x - mpmath.tanh(x),
}


def exact_derivative(name: str, order: int, x):
    """Return phi, phi', phi'' or phi''' at x by the Taylor coefficients of mpmath."""
    phi = EXACT[name]
    return phi(x) if order == 0 else mpmath.taylor(phi, x, order)[order] * mpmath.factorial(order)


def as_tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def samples(lower: float, upper: float, count: int = 4001) -> torch.Tensor:
    """Return points of [lower, upper], an infinite end cut, dense at its ends and about 0."""
    low, high = max(lower, -1e300), min(upper, 1e300)
    t = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    uniform = low * (1 - t) + high * t
    nearby = torch.linspace(-12.0, 12.0, count, dtype=torch.float64)
    ends = torch.cat((low + 10.0 ** (-12 * t), high - 10.0 ** (-12 * t)))
    return torch.cat((uniform, nearby, ends, as_tensor(low, high))).clamp(low, high)


_MODEST = st.floats(-15.0, 15.0)
_ANY = st.one_of(_MODEST, st.floats(-1e300, 1e300), st.sampled_from([0.0, 1.0, -2.0, 2.0, -0.5]))


@st.composite
def intervals(draw: st.DrawFn) -> tuple[float, float]:
    """Draw intervals of every kind: usual, tiny, degenerate, huge, half-infinite."""
    kind = draw(st.sampled_from(["usual", "tiny", "point", "huge", "left", "right"]))
    if kind == "usual":
        first, second = draw(_MODEST), draw(_MODEST)
        return min(first, second), max(first, second)
    centre = draw(_ANY if kind in ("point", "huge") else _MODEST)
    if kind == "tiny":
        return centre, centre + draw(st.floats(0.0, 1e-6))
    if kind == "point":
        return centre, centre
    if kind == "huge":
        other = draw(_ANY)
        return min(centre, other), max(centre, other)
    return (-torch.inf, centre) if kind == "left" else (centre, torch.inf)
