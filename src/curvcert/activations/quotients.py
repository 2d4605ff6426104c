r"""Second-order quotients: how an activation departs from its tangent, as a multiple of the squared step.

.. math:: Q(\delta) = \frac{2}{\delta^2} \big( \phi(z + \delta) - \phi(z) - \phi'(z) \delta \big)
                    = \int_0^1 2 (1 - s)\, \phi''(z + s \delta)\, ds

is a mean of the second derivative that weighs what is near z the most.  So it is enclosed more tightly than
:math:`\phi''` is over the range: where :math:`\phi''` is linear, by a third of what that varies.
"""

import torch
from torch import Tensor

from curvcert.activations.base import Activation
from curvcert.activations.interval import Intervals, second_derivative_range
from curvcert.rounding import UNIT_ROUNDOFF, next_down, next_up

_CELLS = 16
"""Pieces of the integral; a power of two, so that their weights are exact."""


@torch.no_grad()
def second_quotient_range(act: Activation, lower: Tensor, upper: Tensor, reach: Tensor) -> Intervals:
    r"""Enclose :math:`Q(\delta)` for every z in [lower, upper] and :math:`|\delta| \le` reach, elementwise.

    On the j-th piece of the integral :math:`\phi''` is looked at no further than :math:`s_{j+1}` times the reach.

    >>> from curvcert.activations import TANH
    >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> low, high = second_quotient_range(TANH, zero, zero, one)  # 2 (1 - tanh 1) at a step of -1
    >>> bool(0.4768 < high < 0.56), bool(low == -high)
    (True, True)

    Raises:
        UnsupportedActivation: if phi' is not Lipschitz, or its curvature was not declared.
    """
    shape = (_CELLS, *(1,) * lower.dim())
    ends = (torch.arange(1, _CELLS + 1, dtype=lower.dtype, device=lower.device) / _CELLS).reshape(shape)
    weights = (2 * (1 - ends) + 1 / _CELLS) / _CELLS
    far = ends * reach
    low, high = lower.expand(_CELLS, *lower.shape), upper.expand(_CELLS, *upper.shape)
    sides = ((low, next_up(next_up(upper + far))), (next_down(next_down(lower - far)), high))
    found = [second_derivative_range(act, *side) for side in sides]
    least = torch.minimum(*((weights * side[0]).sum(dim=0) for side in found))
    greatest = torch.maximum(*((weights * side[1]).sum(dim=0) for side in found))
    # The weights add up to 1: what the sums round off is at most this much of the largest |phi''|.
    size = torch.stack([end.abs().amax(dim=0) for side in found for end in side]).amax(dim=0)
    slack = 4 * _CELLS * UNIT_ROUNDOFF * size
    return least - slack, greatest + slack
