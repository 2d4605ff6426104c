r"""Closed forms of certified and attack radii, on plain tensors.

For a class i beside the label y: m = f_y(x) - f_i(x) > 0 the margin, g the dual norm of the gradient of
f_i - f_y at x, K a curvature constant and L a Lipschitz constant of f_i - f_y.  Every form here is free of
cancellation and right at K = 0 and at g = 0, and every radius is rounded to the safe side: down for a
certificate.  The caller hands in m rounded down and g, K, L rounded up.  Each form is rounded down by more than its own
rounding, so that what it uses up is less than m: on the boundary of the closed ball too, f_y is strictly larger.
"""

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from curvcert.rounding import TINY, UNIT_ROUNDOFF

_DOWN = 1 - 16 * UNIT_ROUNDOFF

Values = Float64[Tensor, "..."]


def decided(epsilon: float) -> float:
    """Return the radius that is proven where epsilon is to be decided: a little beyond, as files round radii down.

    >>> decided(0.5) * (1 - 2.0**-30) > 0.5
    True
    """
    return epsilon * (1 + 2.0**-29)


def lipschitz_radius(m: Values, L: Values) -> Values:
    r"""Return :math:`m / L`: within it the margin stays positive; inf where L = 0, and 0 where m <= 0.

    Reference: Entesari et al. (ICML 2024), equation `eq:neuripsLipschitzCertificate`.

    >>> lipschitz_radius(torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    tensor(0.5000, dtype=torch.float64)
    """
    return _quotient(m, L)


def curvature_radius(m: Values, g: Values, K: Values) -> Values:
    r"""Return the root :math:`2m / (g + \sqrt{g^2 + 2Km})` of :math:`m = g r + K r^2 / 2`.

    Reference: Entesari et al. (ICML 2024), `prop:secondOrderCertifiedRadius`.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> curvature_radius(one, 0 * one, 2 * one)
    tensor(1.0000, dtype=torch.float64)
    >>> curvature_radius(one, one, 0 * one)
    tensor(1.0000, dtype=torch.float64)
    """
    # Written with roots, so that no product leaves the range of floats.
    return 2 * _quotient(m, g + torch.hypot(g, (2 * K).sqrt() * m.clamp(min=0.0).sqrt()))


def combined_radius(m: Values, g: Values, K: Values, L: Values) -> Values:
    r"""Return the radius by both constants: the gradient's norm grows from g with slope K, up to L at most.

    The integral of min(g + K t, L) reaches m at

    .. math:: r = \begin{cases} 2m / (g + \sqrt{g^2 + 2Km}) & (L^2 - g^2) / (2K) \ge m \\
                                 m/L + (L - g)^2 / (2KL) & \text{otherwise.} \end{cases}

    Never below either radius.  L must bound the gradient along the whole path, so it is global or over a
    ball; an anchored L is unsound here (f = tanh(x) - tanh(0.5) at x = -2: 2.904, and the truth is 2.5).
    K may be anchored.

    >>> m, g, K, L = (torch.tensor(v, dtype=torch.float64) for v in (1.0, 0.0, 10.0, 1.0))
    >>> combined_radius(m, g, K, L)
    tensor(1.0500, dtype=torch.float64)
    """
    L = torch.maximum(L, g)
    quadratic = curvature_radius(m, g, K)
    # Quotients first, so that no product leaves the range of floats.
    rise = (L - g) / (2 * K)
    bend = _rounded_down(rise * ((L - g) / L))
    linear = _quotient(m, L) + torch.where((K > 0) & (L > 0), bend, torch.zeros_like(bend)) * _DOWN
    # Past the bend the quadratic form underestimates; before it the linear one overestimates.
    bends_before = rise * (L + g) * (1 + 16 * UNIT_ROUNDOFF) < m * _DOWN
    return torch.maximum(quadratic, torch.where(bends_before, linear * _DOWN, _quotient(m, L)))


def curvature_beats_lipschitz(m: Values, g: Values, K: Values, shortest: Values) -> Bool[Tensor, "..."]:
    r"""Evaluate the condition of `prop:compare` for each class, at the Lipschitz radius `shortest`.

    :math:`K \le 2 (m - g \varepsilon_0) / \varepsilon_0^2` for every class implies that the curvature radius is not
    below the Lipschitz one.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> curvature_beats_lipschitz(one, 0.5 * one, one, one)
    tensor(True)
    """
    return K * shortest.square() <= 2 * (m - g * shortest)


def attack_radius(m: Values, g: Values, K: Values) -> Values:
    r"""Return :math:`2m / (g + \sqrt{g^2 - 2Km})`, where the surrogate of f_i - f_y along the gradient reaches 0.

    inf where :math:`2Km \ge g^2`: the surrogate stays short of 0, or only touches it.  The point there is a tie
    of the surrogate; a witness steps past it and is checked.

    Reference: Entesari et al. (ICML 2024), `prop:AttackCert`, its index set made strict.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> attack_radius(one, 2 * one, 1.5 * one), attack_radius(one, one, one)
    (tensor(0.6667, dtype=torch.float64), tensor(inf, dtype=torch.float64))
    """
    room = g.square() - 2 * K * m
    radius = 2 * m / (g + room.clamp(min=0.0).sqrt())
    return torch.where((room > 0) & (m > 0), radius, torch.full_like(radius, torch.inf))


def _quotient(m: Values, L: Values) -> Values:
    """Return m / L rounded down: inf for L = 0 < m, 0 for m <= 0 and where an overflow left nothing known of L."""
    ratio = _rounded_down(m / torch.where(L > 0, L, torch.ones_like(L)))
    ratio = torch.where(L > 0, ratio, torch.where(L == 0, torch.inf, 0.0))
    return torch.where(m > 0, ratio, torch.zeros_like(ratio))


def _rounded_down(x: Values) -> Values:
    """Return x >= 0 rounded down; 0 among the least floats, where no rounding is relative."""
    return torch.where(x > TINY, x * _DOWN, torch.zeros_like(x))
