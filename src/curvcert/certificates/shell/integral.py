r"""From bounds on the gradient's change in each shell to a radius: the exact integral of their minimum.

For :math:`\tau` in the shell :math:`(t_{j-1}, t_j]` the gradient's norm is at most :math:`\min(a_j, g + \kappa_j \tau)`
with :math:`\kappa_j = \min(D_{lin}(t_j) / t_j, K)` and :math:`a_j = \min(g + D_{sat}(t_j), g + \kappa_j t_j, L)`.
The margin lasts up to the r at which the integral of that reaches it.  :math:`D_{lin}(t) / t` does not decrease in t,
so that :math:`\kappa_j` serves the whole shell; the saturated bound divided by t may, so it is used as a constant only.
L is global; K may be anchored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.certificates.shell.gradient_change import GradientChange
from curvcert.rounding import TINY, gamma, inflate

_DOWN = 1 - gamma(64)
_STEP = gamma(64)
"""Relative slack of one shell's integral: fewer than 64 operations on numbers >= 0."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Margins (rounded down), gradient norms and global constants (rounded up) of the pairs: (batch, pairs) each."""

    m: Tensor
    g: Tensor
    K: Tensor
    L: Tensor

    def of_samples(self, index: Tensor) -> "Pairs":
        """Return those of some of the samples."""
        return Pairs(self.m[index], self.g[index], self.K[index], self.L[index])

    def chosen(self, index: Tensor) -> "Pairs":
        """Return some of the pairs, (batch, fewer) by their places."""
        return Pairs(*(value.gather(1, index) for value in (self.m, self.g, self.K, self.L)))


@dataclass(frozen=True, eq=False)
class Spent:
    """How far the integral has come: what it has taken of the margins, the radii so far, and who is still open."""

    total: Tensor
    radius: Tensor
    open_: Tensor

    @staticmethod
    def nothing(pairs: Pairs) -> "Spent":
        """Start at the centre."""
        zero = torch.zeros_like(pairs.m)
        return Spent(zero, zero, torch.ones_like(zero, dtype=torch.bool))


def integrate_shell(spent: Spent, pairs: Pairs, change: GradientChange, low: Tensor, high: Tensor) -> Spent:
    r"""Go on through the shell from `low` to `high`, (batch,) each; a pair stops where its margin is used up.

    With q the place where :math:`g + \kappa q = a`, cut to the shell, the integral up to r is
    :math:`g (q - t_{j-1}) + \kappa (q^2 - t_{j-1}^2) / 2 + a (r - q)`; with any other q it is larger, so that the
    rounding of q does not matter.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> pairs, flat = Pairs(one, one, 0 * one, 9 * one), GradientChange(9 * one, 9 * one)
    >>> spent = integrate_shell(Spent.nothing(pairs), pairs, flat, 0 * one[0], 2 * one[0])
    >>> round(float(spent.radius), 9)
    1.0
    """
    lo, hi = low[:, None], high[:, None]
    slope = torch.minimum(inflate(change.linear / hi, 0.0), pairs.K)
    top = torch.minimum(torch.minimum(pairs.g + change.saturated, pairs.g + slope * hi), pairs.L)
    top = torch.maximum(inflate(top, 0.0), pairs.g)
    bend = torch.where(slope > 0, (top - pairs.g) / torch.where(slope > 0, slope, 1.0), hi)
    bend = torch.minimum(torch.maximum(bend, lo), hi)
    start = pairs.g + slope * lo
    rising = inflate((start + slope * (bend - lo) / 2) * (bend - lo), _STEP) + TINY
    full = inflate(spent.total + rising + top * (hi - bend), _STEP) + TINY
    fits = full <= pairs.m
    left = ((pairs.m - spent.total) * _DOWN).clamp(min=0.0)
    # Written with roots, so that no product leaves the range of floats.
    root = torch.hypot(start, (2 * slope).sqrt() * left.sqrt())
    on_rise = 2 * (left / (start + root).clamp(min=TINY))
    on_top = (bend - lo) + (left - rising).clamp(min=0.0) / top.clamp(min=TINY)
    step = torch.where(left < rising, torch.minimum(on_rise, bend - lo), on_top) * _DOWN
    reached = torch.where(fits, hi, torch.minimum(lo + step, hi) * _DOWN)
    radius = torch.where(spent.open_, reached, spent.radius)
    return Spent(torch.where(spent.open_, full, spent.total), radius, spent.open_ & fits)
