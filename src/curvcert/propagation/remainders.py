r"""What a parabola leaves out of an activation, and how much of it a sum over neurons can hold at once.

With a slope s and a bend q, at a pre-activation that is at z + b + e, :math:`|b| \le \beta` and e in [el, eh]:

.. math:: \psi(b, e) = \phi(z + b + e) - \phi(z) - s(b + e) - q b^2/2, \qquad
          G^{\pm}(y) = \sup_{b, e} (\pm \psi - y b^2/2).

G is convex and does not rise in y, so its values at a few knots and the chords between bound it.  A value is found on
a grid in b and at both ends in e: where a function's second derivative is at least -m, it exceeds its chords over cells
of width h by at most :math:`m h^2/8`.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.activations import Activation, derivative_range, second_derivative_range, value_range
from curvcert.activations.base import EVERYWHERE
from curvcert.network.evaluation import Computed
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, next_down, next_up

KNOTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
"""Where G is known, in units of a neuron's own: :math:`2 \\max |\\psi| / \\beta^2`."""

_CELLS = 32
"""Cells of the grid in b."""

_NARROW = 1e-4
"""Secants over less than this are tangents."""

_INSIDE = 0.9
"""How far towards the end of a domain a secant goes."""


@dataclass(frozen=True, eq=False)
class Bend:
    """The parabola of every neuron: its slope and its bend, (batch, neurons); and the unit of its knots."""

    slope: Tensor
    bend: Tensor
    unit: Tensor


@dataclass(frozen=True, eq=False)
class Spread:
    """Where a pre-activation is, beside its centre: b up to `linear` in size, and e between `low` and `high`.

    Their sum is between -`fall` and `rise`.
    """

    linear: Tensor
    low: Tensor
    high: Tensor
    fall: Tensor
    rise: Tensor


def secant(activation: Activation, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope and the bend of the parabola through phi at z - h, z and z + h.

    >>> from curvcert.activations import TANH
    >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> [f"{float(each):.3f}" for each in secant(TANH, zero, one)]
    ['0.762', '0.000']
    """
    if activation.domain != EVERYWHERE:
        # The ends of every domain are infinite, or 0.
        h = torch.minimum(h, _INSIDE * z.abs())
    wide = h > _NARROW * (1 + z.abs())
    step = torch.where(wide, h, 1.0)
    above, at, below = (activation.value(point) for point in (z + step, z, z - step))
    slope = torch.where(wide, (above - below) / (2 * step), activation.derivative(z))
    bend = torch.where(wide, (above - 2 * at + below) / step.square(), 0.0)
    return slope, bend


@final
@dataclass(frozen=True, eq=False)
class Sampled:
    """Both signs of psi on the grid, (2, points, batch, neurons), rounded up; and how far below chords they bend."""

    values: Tensor
    squares: Tensor
    across: Tensor
    sag: Tensor

    @property
    def unit(self) -> Tensor:
        """The unit of the knots: with it the largest remainder is forgotten at the ends of the range."""
        end = 2 * self.squares[0]
        unit = 2 * self.values.amax(dim=(0, 1)) / torch.where(end > 0, end, 1.0)
        return torch.where((end > 1e-200) & unit.isfinite(), unit, 0.0)


def sampled(activation: Activation, z: Computed, slope: Tensor, bend: Tensor, spread: Spread) -> Sampled:
    """Evaluate psi on the grid.

    Some points of the grid are beyond all that z can be.  Where phi is not defined everywhere, it is continued there
    by its tangents.
    """
    value, error = (each.flatten(1) for each in (z.value, z.error))
    grid = torch.linspace(-1.0, 1.0, _CELLS + 1, dtype=torch.float64, device=value.device)[:, None, None]
    b = grid * spread.linear
    reach = torch.maximum(-spread.low, spread.high)
    at = value_range(activation, value, value)
    limited = activation.domain != EVERYWHERE
    low = next_down(next_down(value - error) - (spread.fall if limited else spread.linear - spread.low))
    high = next_up(next_up(value + error) + (spread.rise if limited else spread.linear + spread.high))
    ends = next_down(low), next_up(high)
    sides: list[list[Tensor]] = [[], []]
    for e in (spread.low, spread.high):
        point = value + b + e
        below, above = _continued(activation, point, *ends) if limited else value_range(activation, point, point)
        line = slope * (b + e) + bend * b.square() / 2
        sides[0].append(above - at[0] - line)
        sides[1].append(at[1] - below + line)
    steepest: float | Tensor = max(map(abs, activation.slope))
    if not activation.is_tame:
        flattest, steepest = derivative_range(activation, *ends)
        steepest = torch.maximum(flattest.abs(), steepest.abs())
    # The point, the line, the differences; and z is known but for its error.
    far, bent = Upper(spread.linear) + reach, Upper(spread.linear).square() * bend.abs()
    sizes, moved = far * slope.abs() + bent + at[0].abs() + at[1].abs(), (far + value.abs()) * steepest
    rounded = (sizes + moved) * (8 * UNIT_ROUNDOFF) + Upper(2 * error) * steepest + TINY
    values = torch.stack([torch.maximum(*side) for side in sides])
    values = values + (rounded + 4 * UNIT_ROUNDOFF * values.abs()).bound
    least, greatest = second_derivative_range(activation, *ends)
    if limited:
        least, greatest = least.clamp(max=0.0), greatest.clamp(min=0.0)
    sag = torch.stack([-least, greatest])
    across = Upper(spread.high - spread.low, 1).square() * sag.clamp(min=0) / 8.0
    return Sampled(values, b.square() / 2, across.bound, sag)


def _continued(activation: Activation, z: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Enclose phi at points, and beyond [lower, upper] its tangent at the nearer end."""
    inside = z.clamp(lower, upper)
    below, above = value_range(activation, inside, inside)
    ends = [slope * (z - inside) for slope in derivative_range(activation, inside, inside)]
    slack = 4 * UNIT_ROUNDOFF * ends[0].abs().maximum(ends[1].abs())
    return below + torch.minimum(*ends) - slack, above + torch.maximum(*ends) + slack


@final
@dataclass(frozen=True, eq=False)
class Tables:
    """G at the knots for both signs, (2, batch, neurons, knots): what neurons may leave out of a sum."""

    values: Tensor

    @staticmethod
    def of(found: Sampled, bend: Bend, linear: Tensor) -> "Tables":
        """Return the tables of psi on the grid."""
        cell = (Upper(2 * linear, 8) / _CELLS).square() / 8.0
        signed = torch.stack([bend.bend, -bend.bend])
        columns = []
        for knot in KNOTS:
            # At slightly less than the knot G is no smaller.
            y = knot * bend.unit * (1 - 8 * UNIT_ROUNDOFF)
            peak = (found.values - y * found.squares * (1 - 8 * UNIT_ROUNDOFF)).amax(dim=1)
            slack = (Upper(y) + found.sag.abs() + signed.abs()) * (4 * UNIT_ROUNDOFF)
            bow = (slack + (found.sag + signed + y).clamp(min=0)) * cell
            columns.append((bow + found.across + Upper(peak.clamp(min=0.0), 4)).bound)
        # G does not rise, and is at least psi at 0.
        return Tables(torch.stack(columns, dim=3).cummin(dim=3).values)

    def at_knot(self, u: Tensor, knot: int) -> tuple[Tensor, Tensor]:
        """Bound u.psi, and -u.psi, less what the knot's y takes, for rows u, (batch, rows, neurons)."""
        above, below = self.values[..., knot].unsqueeze(3)
        plus, minus = Upper(u.clamp(min=0)), Upper((-u).clamp(min=0))
        sides = (plus @ above + minus @ below, plus @ below + minus @ above)
        return sides[0].bound.squeeze(2), sides[1].bound.squeeze(2)

    def between(self, u: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Bound both at a y of each row's and neuron's own, in units of the knots."""
        knots = torch.tensor(KNOTS, dtype=y.dtype, device=y.device)
        y = (y * (1 - 8 * UNIT_ROUNDOFF)).clamp(min=0.0, max=KNOTS[-1])
        left = sum((y >= knot).to(torch.int64) for knot in KNOTS[1:-1])
        assert isinstance(left, Tensor)
        share = (y - knots[left]) / (knots[left + 1] - knots[left])
        (batch, _, neurons), flat = u.shape, self.values.flatten()
        neuron = torch.arange(batch * neurons, device=u.device).reshape(batch, 1, neurons)
        sides = []
        for side in (u < 0, u >= 0):
            place = (side * (batch * neurons) + neuron) * len(KNOTS) + left
            value = torch.lerp(flat.take(place), flat.take(place + 1), share)
            # Shares and what they join are off by a few units, of numbers that are not negative.
            sides.append((Upper(value, 16) * u.abs()).sum(2).bound)
        return sides[0], sides[1]
