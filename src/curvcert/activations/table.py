r"""The activations, one row each.

Every constant was computed by mpmath with 60 digits and rounded outward to float64 (`lower` down, `upper`
up; points to nearest); `tests/activations/test_constants.py` computes them again.  A row gives
the profile of phi, phi' and phi''.  The turns of each are the zeros of the next derivative; the global ranges
of DESIGN section 4 are the hulls of turns and limits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType

import torch

from curvcert.activations import formulas
from curvcert.activations.base import EVALUATION_SLACK, Activation, Profile, Turn, from_profiles
from curvcert.errors import InvalidInput

# Sums that cancel and exponentials of rounded arguments err by ulps of their largest term, not of the value.
CANCELLING = 4 * EVALUATION_SLACK


def _odd_pair(point: float, inner: float, outer: float) -> tuple[Turn, Turn]:
    """Return the turns of an odd phi'' with its maximum, in [inner, outer], at -point."""
    return Turn(-point, inner, outer), Turn(point, -outer, -inner)


# phi'' = -2 tanh tanh' is extreme where tanh^2 = 1/3: 4/(3 sqrt 3) = 0.76980...
TANH = from_profiles(
    "tanh",
    Profile(torch.tanh, "+", limits=(-1.0, 1.0)),
    Profile(formulas.tanh_derivative, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 1.0, 1.0),)),
    Profile(
        formulas.tanh_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(0.6584789484624084, 0.7698003589195009, 0.769800358919501),
    ),
)

# sigmoid(z) = (1 + tanh(z/2)) / 2, so that phi'' peaks at 1/(6 sqrt 3) = 0.09622...
SIGMOID = from_profiles(
    "sigmoid",
    Profile(torch.sigmoid, "+", limits=(0.0, 1.0)),
    Profile(formulas.sigmoid_derivative, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 0.25, 0.25),)),
    Profile(
        formulas.sigmoid_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(1.3169578969248168, 0.09622504486493762, 0.09622504486493763),
    ),
)

# phi'' = (2 - z^2) N(z) with the normal density N: zero at +-sqrt 2, extreme at 0 and +-2.
GELU = from_profiles(
    "gelu",
    Profile(
        formulas.gelu_value,
        "-+",
        limits=(0.0, math.inf),
        turns=(Turn(-0.7517915246935645, -0.16997120747990369, -0.16997120747990366),),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.gelu_derivative,
        "-+-",
        limits=(0.0, 1.0),
        turns=(
            Turn(-1.4142135623730951, -0.1289041451851548, -0.12890414518515478),
            Turn(1.4142135623730951, 1.1289041451851547, 1.128904145185155),
        ),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.gelu_second,
        "-+-+",
        limits=(0.0, 0.0),
        turns=(
            Turn(-2.0, -0.10798193302637611, -0.1079819330263761),
            Turn(0.0, 0.7978845608028653, 0.7978845608028654),
            Turn(2.0, -0.10798193302637611, -0.1079819330263761),
        ),
        absolute=CANCELLING,
    ),
)

# z (1 + tanh u) / 2 with u = sqrt(2/pi) (z + 0.044715 z^3); roots by mpmath.
GELU_TANH = from_profiles(
    "gelu_tanh",
    Profile(
        formulas.gelu_tanh_value,
        "-+",
        limits=(0.0, math.inf),
        turns=(Turn(-0.7524614220710163, -0.17004075057125406, -0.17004075057125403),),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.gelu_tanh_derivative,
        "-+-",
        limits=(0.0, 1.0),
        turns=(
            Turn(-1.4185040087908283, -0.12899306865877178, -0.12899306865877175),
            Turn(1.4185040087908283, 1.1289930686587717, 1.128993068658772),
        ),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.gelu_tanh_second,
        "-+-+",
        limits=(0.0, 0.0),
        turns=(
            Turn(-2.013480724624258, -0.10791351589036792, -0.1079135158903679),
            Turn(0.0, 0.7978845608028653, 0.7978845608028654),
            Turn(2.013480724624258, -0.10791351589036792, -0.1079135158903679),
        ),
        absolute=CANCELLING,
    ),
)

# z sigmoid(z); roots by mpmath.
SILU = from_profiles(
    "silu",
    Profile(
        formulas.silu_value,
        "-+",
        limits=(0.0, math.inf),
        turns=(Turn(-1.2784645427610737, -0.2784645427610738, -0.27846454276107374),),
    ),
    Profile(
        formulas.silu_derivative,
        "-+-",
        limits=(0.0, 1.0),
        turns=(
            Turn(-2.3993572805154675, -0.09983932012886693, -0.09983932012886691),
            Turn(2.3993572805154675, 1.0998393201288668, 1.099839320128867),
        ),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.silu_second,
        "-+-+",
        limits=(0.0, 0.0),
        turns=(
            Turn(-3.435840993535111, -0.036914373199893186, -0.03691437319989318),
            Turn(0.0, 0.5, 0.5),
            Turn(3.435840993535111, -0.036914373199893186, -0.03691437319989318),
        ),
        absolute=CANCELLING,
    ),
)

# z tanh(softplus(z)); roots by mpmath.
MISH = from_profiles(
    "mish",
    Profile(
        formulas.mish_value,
        "-+",
        limits=(0.0, math.inf),
        turns=(Turn(-1.1924312145154952, -0.30884341301725043, -0.3088434130172504),),
    ),
    Profile(
        formulas.mish_derivative,
        "-+-",
        limits=(0.0, 1.0),
        turns=(
            Turn(-2.256376396360793, -0.11252612238946257, -0.11252612238946255),
            Turn(1.4905711794854284, 1.0884981612517277, 1.088498161251728),
        ),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.mish_second,
        "-+-+",
        limits=(0.0, 0.0),
        turns=(
            Turn(-3.2673378465204044, -0.04173207070661103, -0.04173207070661102),
            Turn(-0.08793443131491421, 0.6442046372369724, 0.6442046372369725),
            Turn(2.114842563020877, -0.05903335695393629, -0.059033356953936286),
        ),
        absolute=CANCELLING,
    ),
)

HALF_PI = 1.5707963267948966
TWO_PI = 6.283185307179586

SIN = from_profiles(
    "sin",
    Profile(
        torch.sin,
        "-+-",
        limits=(0.0, 0.0),
        turns=(Turn(-HALF_PI, -1.0, -1.0), Turn(HALF_PI, 1.0, 1.0)),
        absolute=CANCELLING,
        period=TWO_PI,
    ),
    Profile(
        torch.cos,
        "+-+",
        limits=(0.0, 0.0),
        turns=(Turn(0.0, 1.0, 1.0), Turn(2 * HALF_PI, -1.0, -1.0)),
        absolute=CANCELLING,
        period=TWO_PI,
    ),
    Profile(
        formulas.sin_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=(Turn(-HALF_PI, 1.0, 1.0), Turn(HALF_PI, -1.0, -1.0)),
        absolute=CANCELLING,
        period=TWO_PI,
    ),
)

# phi'' = -2z / (1 + z^2)^2 is extreme at 1/sqrt 3: 3 sqrt 3 / 8 = 0.64951...; limits pi/2, rounded up.
ARCTAN = from_profiles(
    "arctan",
    Profile(torch.arctan, "+", limits=(-1.5707963267948968, 1.5707963267948968)),
    Profile(formulas.arctan_derivative, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 1.0, 1.0),)),
    Profile(
        formulas.arctan_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(0.5773502691896257, 0.6495190528383289, 0.649519052838329),
    ),
)

# phi' = 2/sqrt(pi) e^(-z^2), phi'' = -2z phi' is extreme at 1/sqrt 2: 2 sqrt(2/(pi e)) = 0.96788...
ERF = from_profiles(
    "erf",
    Profile(torch.erf, "+", limits=(-1.0, 1.0)),
    Profile(
        formulas.erf_derivative,
        "+-",
        limits=(0.0, 0.0),
        turns=(Turn(0.0, 1.1283791670955126, 1.1283791670955128),),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.erf_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(0.7071067811865476, 0.9678828980765734, 0.9678828980765735),
        absolute=CANCELLING,
    ),
)

# e^(-z^2): phi' = -2z phi is extreme at 1/sqrt 2: sqrt(2/e); phi'' = (4z^2 - 2) phi at 0 and at sqrt(3/2): 4 e^(-3/2).
GAUSSIAN = from_profiles(
    "gaussian",
    Profile(formulas.gaussian_value, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 1.0, 1.0),), absolute=CANCELLING),
    Profile(
        formulas.gaussian_derivative,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(0.7071067811865476, 0.8577638849607068, 0.8577638849607069),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.gaussian_second,
        "+-+-",
        limits=(0.0, 0.0),
        turns=(
            Turn(-1.224744871391589, 0.8925206405937193, 0.8925206405937194),
            Turn(0.0, -2.0, -2.0),
            Turn(1.224744871391589, 0.8925206405937193, 0.8925206405937194),
        ),
        absolute=CANCELLING,
    ),
)

# z - tanh(z): phi' = tanh^2, and phi'' = -tanh''.
TANHSHRINK = from_profiles(
    "tanhshrink",
    Profile(formulas.tanhshrink_value, "+", limits=(-math.inf, math.inf), absolute=CANCELLING),
    Profile(formulas.tanhshrink_derivative, "-+", limits=(1.0, 1.0), turns=(Turn(0.0, 0.0, 0.0),)),
    Profile(
        formulas.tanhshrink_second,
        "-+-",
        limits=(0.0, 0.0),
        turns=(
            Turn(-0.6584789484624084, -0.769800358919501, -0.7698003589195009),
            Turn(0.6584789484624084, 0.7698003589195009, 0.769800358919501),
        ),
    ),
)

# z relu6(z + 3) / 6: phi' = z/3 + 1/2 on (-3, 3), so that it jumps from 0 to -1/2 and from 3/2 to 1.
HARDSWISH = from_profiles(
    "hardswish",
    Profile(
        formulas.hardswish_value,
        "0-+",
        limits=(0.0, math.inf),
        turns=(Turn(-3.0, 0.0, 0.0), Turn(-1.5, -0.375, -0.375)),
        absolute=CANCELLING,
    ),
    Profile(
        formulas.hardswish_derivative,
        "0+0",
        limits=(0.0, 1.0),
        turns=(Turn(-3.0, -0.5, 0.0, jump=True), Turn(3.0, 1.0, 1.5, jump=True)),
        absolute=CANCELLING,
    ),
    None,
)

# phi' = 1 / (1 + |z|)^2, and phi'' = -2 sign(z) / (1 + |z|)^3 jumps from 2 to -2 at 0.
SOFTSIGN = from_profiles(
    "softsign",
    Profile(formulas.softsign_value, "+", limits=(-1.0, 1.0)),
    Profile(formulas.softsign_derivative, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 1.0, 1.0),)),
    Profile(formulas.softsign_second, "++", limits=(0.0, 0.0), turns=(Turn(0.0, -2.0, 2.0, jump=True),)),
)

# z / sqrt(1 + z^2): phi'' = -3z (1 + z^2)^(-5/2) is extreme at 1/2: 48/(25 sqrt 5) = 0.85865...
ISRU = from_profiles(
    "isru",
    Profile(formulas.isru_value, "+", limits=(-1.0, 1.0)),
    Profile(formulas.isru_derivative, "+-", limits=(0.0, 0.0), turns=(Turn(0.0, 1.0, 1.0),)),
    Profile(
        formulas.isru_second,
        "+-+",
        limits=(0.0, 0.0),
        turns=_odd_pair(0.5, 0.8586501033599192, 0.8586501033599193),
    ),
)


def softplus(beta: float = 1.0, centred: bool = False) -> Activation:
    r"""Return :math:`\log(1 + e^{\beta z}) / \beta`, less :math:`\log(2) / \beta` if centred.

    phi' = sigmoid(beta z) lies in (0, 1), phi'' in (0, beta/4], with its maximum at 0.

    >>> softplus(2.0)
    Activation(softplus(2), slope [0, 1], curvature [0, 0.5])
    >>> float(softplus(2.0, centred=True).value(torch.zeros(())))
    0.0
    """
    return _softplus(_positive(beta, "beta"), bool(centred))


def torch_softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    r"""Return softplus with the deviation of torch's module, which returns z where beta z > threshold.

    There softplus is larger by :math:`\log(1 + e^{-\beta z}) / \beta`, at most its value at the threshold.

    >>> act = torch_softplus(2.0)
    >>> act.name, f"{act.deviation:.3g}"
    ('softplus(2)', '1.03e-09')
    """
    act = softplus(beta)
    limit = float(threshold)
    if not abs(limit) <= 88:
        raise InvalidInput(
            f"Below a threshold of {threshold!r} torch's softplus computes e^z, which overflows in float32 beyond 88. "
            "Use torch's threshold of 20, or curvcert.nn.CentredSoftplus, which has none."
        )
    # Thirty-two roundoffs cover exp, log1p and the quotient, and beta z rounded across the threshold.
    jump = math.log1p(math.exp(-limit)) / float(beta)
    return replace(act, deviation=jump * (1 + EVALUATION_SLACK * (1 + abs(limit))))


def celu(alpha: float = 1.0) -> Activation:
    r"""Return z for z > 0 and :math:`\alpha (e^{z/\alpha} - 1)` otherwise; C1 for every alpha > 0.

    phi' lies in (0, 1]; phi'' in [0, 1/alpha] and jumps from 1/alpha to 0 at 0.

    >>> celu(2.0)
    Activation(celu(2), slope [0, 1], curvature [0, 0.5])
    """
    alpha = _positive(alpha, "alpha")
    return _celu(alpha, f"celu({show(alpha)})")


def elu(alpha: float = 1.0) -> Activation:
    """Return z for z > 0 and alpha (e^z - 1) otherwise: C1 for alpha = 1 alone, a kink at 0 otherwise.

    >>> elu()
    Activation(elu(1), slope [0, 1], curvature [0, 1])
    >>> elu(2.0)
    Activation(elu(2), slope [0, 2], curvature none)
    """
    alpha = _finite(alpha, "alpha")
    if alpha == 1.0:
        return _celu(1.0, "elu(1)")
    return kinked_elu(f"elu({show(alpha)})", alpha, 1.0)


def leaky_relu(slope: float = 0.01) -> Activation:
    """Return z for z > 0 and slope z otherwise (any finite slope).

    >>> leaky_relu(0.1)
    Activation(leaky_relu(0.1), slope [0.1, 1], curvature none)
    """
    slope = _finite(slope, "slope")
    return _leaky_relu(slope, f"leaky_relu({show(slope)})")


def hardtanh(lower: float = -1.0, upper: float = 1.0) -> Activation:
    """Return z cut to [lower, upper].

    >>> hardtanh(-2.0, 2.0)
    Activation(hardtanh(-2,2), slope [0, 1], curvature none)
    """
    lower, upper = _finite(lower, "lower"), _finite(upper, "upper")
    if not lower < upper:
        raise InvalidInput(f"hardtanh needs lower < upper, got {lower} and {upper}. Swap them.")
    return _hardtanh(lower, upper, f"hardtanh({show(lower)},{show(upper)})")


def softshrink(width: float = 0.5) -> Activation:
    """Return z less its part in [-width, width].

    >>> softshrink(2.0)
    Activation(softshrink(2), slope [0, 1], curvature none)
    """
    width = _positive(width, "lambd")
    return from_profiles(
        f"softshrink({show(width)})",
        Profile(
            partial(formulas.softshrink_value, width=width),
            "+",
            limits=(-math.inf, math.inf),
            absolute=CANCELLING * width,
        ),
        Profile(
            partial(formulas.softshrink_derivative, width=width),
            "000",
            limits=(1.0, 1.0),
            turns=(Turn(-width, 0.0, 1.0, jump=True), Turn(width, 0.0, 1.0, jump=True)),
        ),
        None,
    )


@lru_cache(maxsize=64)
def _softplus(beta: float, centred: bool) -> Activation:
    shift = math.log(2) / beta if centred else 0.0
    slack = CANCELLING / beta
    return from_profiles(
        f"centred_softplus({show(beta)})" if centred else f"softplus({show(beta)})",
        Profile(
            lambda z: formulas.softplus_value(z, beta) - shift,
            "+",
            limits=(-shift * (1 + EVALUATION_SLACK), math.inf),
            absolute=slack,
            scale=1 / beta,
        ),
        Profile(lambda z: torch.sigmoid(beta * z), "+", limits=(0.0, 1.0), absolute=CANCELLING, scale=1 / beta),
        Profile(
            lambda z: beta * formulas.sigmoid_derivative(beta * z),
            "+-",
            limits=(0.0, 0.0),
            turns=(Turn(0.0, beta / 4, beta / 4),),
            absolute=CANCELLING * beta,
            scale=1 / beta,
        ),
    )


@lru_cache(maxsize=64)
def _celu(alpha: float, name: str) -> Activation:
    # Exact for a power of two; otherwise the quotient is rounded to nearest, and the next float is above it.
    inverse = 1 / alpha if math.frexp(alpha)[0] == 0.5 else math.nextafter(1 / alpha, math.inf)
    return from_profiles(
        name,
        Profile(
            partial(formulas.elu_value, alpha=alpha, length=alpha),
            "+",
            limits=(-alpha, math.inf),
            absolute=CANCELLING * alpha,
            scale=alpha,
        ),
        Profile(
            partial(formulas.elu_derivative, alpha=alpha, length=alpha),
            "+0",
            limits=(0.0, 1.0),
            turns=(Turn(0.0, 1.0, 1.0),),
            absolute=CANCELLING,
            scale=alpha,
        ),
        Profile(
            partial(formulas.celu_second, alpha=alpha),
            "+0",
            limits=(0.0, 0.0),
            turns=(Turn(0.0, 0.0, inverse, jump=True),),
            absolute=CANCELLING * inverse,
            scale=alpha,
        ),
    )


def kinked_elu(name: str, alpha: float, scale: float) -> Activation:
    """Return scale z for z > 0 and scale alpha (e^z - 1) otherwise."""
    steep = scale * alpha
    # The product is exact for scale = 1 and rounded for SELU.
    outer = steep if scale == 1.0 else math.nextafter(steep, math.inf)
    rising = "+" if alpha > 0 else "-" if alpha < 0 else "0"
    return from_profiles(
        name,
        Profile(
            lambda z: scale * formulas.elu_value(z, alpha),
            rising + "+",
            limits=(-outer, math.inf),
            turns=(Turn(0.0, 0.0, 0.0),),
            absolute=CANCELLING * abs(steep),
        ),
        Profile(
            lambda z: scale * formulas.elu_derivative(z, alpha),
            rising + "0",
            limits=(0.0, scale),
            turns=(Turn(0.0, min(outer, scale), max(outer, scale), jump=True),),
            absolute=CANCELLING * abs(steep),
        ),
        None,
    )


def _leaky_relu(slope: float, name: str) -> Activation:
    falling = "-" if slope < 0 else "0" if slope == 0 else "+"
    start = math.copysign(math.inf, -slope) if slope else 0.0
    return from_profiles(
        name,
        Profile(
            partial(formulas.leaky_relu_value, slope=slope),
            falling + "+",
            limits=(start, math.inf),
            turns=(Turn(0.0, 0.0, 0.0),),
        ),
        Profile(
            partial(formulas.step, at=0.0, left=slope, right=1.0),
            "00",
            limits=(slope, 1.0),
            turns=(Turn(0.0, min(slope, 1.0), max(slope, 1.0), jump=True),),
        ),
        None,
    )


def _hardtanh(lower: float, upper: float, name: str) -> Activation:
    return from_profiles(
        name,
        Profile(partial(torch.clamp, min=lower, max=upper), "+", limits=(lower, upper)),
        Profile(
            partial(formulas.hardtanh_derivative, lower=lower, upper=upper),
            "000",
            limits=(0.0, 0.0),
            turns=(Turn(lower, 0.0, 1.0, jump=True), Turn(upper, 0.0, 1.0, jump=True)),
        ),
        None,
    )


def show(number: float) -> str:
    """Return a parameter as names of rows have it."""
    return repr(number).removesuffix(".0")


def _finite(value: float, name: str) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e100:
        raise InvalidInput(f"{name} must be a finite number of magnitude at most 1e100, got {value!r}.")
    return number


def _positive(value: float, name: str) -> float:
    number = _finite(value, name)
    if not number >= 1e-100:
        raise InvalidInput(f"{name} must be positive (at least 1e-100), got {value!r}. Use {name}=1.")
    return number


ELU = elu()
RELU = _leaky_relu(0.0, "relu")
RELU6 = _hardtanh(0.0, 6.0, "relu6")
# Klambauer et al. (2017): the two constants as torch rounds them to float64.
SELU = kinked_elu("selu", formulas.SELU_ALPHA, formulas.SELU_SCALE)

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        act.name: act
        for act in (
            TANH,
            SIGMOID,
            softplus(),
            softplus(centred=True),
            ELU,
            celu(),
            GELU,
            GELU_TANH,
            SILU,
            MISH,
            SIN,
            ARCTAN,
            ERF,
            SOFTSIGN,
            ISRU,
            GAUSSIAN,
            TANHSHRINK,
            HARDSWISH,
            RELU,
            leaky_relu(),
            RELU6,
            hardtanh(),
            softshrink(),
            SELU,
        )
    }
)
"""Every row without parameters, and the others at their default parameters, by name."""
