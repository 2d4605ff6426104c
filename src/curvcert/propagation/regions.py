r"""Where inputs may lie: a ball about a point, or its cut with a box; and how far a linear function can rise there.

Everything is about the displacement d from the centre, which lies in the region.  For any covector u, with
:math:`a = |u|`, :math:`c_i` the room to the side of the box that the sign of :math:`u_i` points to, and *any* v with
:math:`0 \le v \le a`,

.. math:: \max u \cdot d \le r \|v\|_{p^*} + \sum_i c_i (a_i - v_i),

with equality for the best v: the ball pays for v and the box for the rest.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.norms import conjugate
from curvcert.rounding import gamma, inflate, next_up, norm_upper_bound_of_vectors

_ROUNDS = 6
"""Steps towards the best v in l2; each gives a bound."""


class AbstractRegion(ABC):
    """A set of displacements of a batch, each with its own size."""

    p: float

    @property
    @abstractmethod
    def sides(self) -> tuple[Tensor, Tensor]:
        """How far each coordinate can fall and rise, (batch, inputs) each, at least 0."""

    @property
    @abstractmethod
    def length(self) -> Tensor:
        """A bound on the p-norm of the displacements, (batch,)."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether the region is its own mirror image in the centre."""

    @abstractmethod
    def largest(self, u: Tensor) -> Tensor:
        """Bound u.d for covectors u of shape (batch, rows, inputs), or (1, rows, inputs): (batch, rows)."""

    @abstractmethod
    def part(self, index: Tensor) -> "AbstractRegion":
        """Return the region of some of the samples."""


@final
@dataclass(frozen=True, eq=False)
class NormBall(AbstractRegion):
    """The closed ball of radius r >= 0 in the p-norm, in so many inputs."""

    p: float
    radius: Tensor
    inputs: int

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """No coordinate moves further than the whole."""
        side = self.radius[:, None].expand(-1, self.inputs)
        return side, side

    @property
    def length(self) -> Tensor:
        """The radius."""
        return self.radius

    @property
    def symmetric(self) -> bool:
        """A ball is."""
        return True

    def largest(self, u: Tensor) -> Tensor:
        """Return r times the dual norm."""
        return inflate(self.radius[:, None] * norm_upper_bound_of_vectors(u, conjugate(self.p), 2), 0.0)

    def part(self, index: Tensor) -> "NormBall":
        """Return the balls of some of the samples."""
        return NormBall(self.p, self.radius[index], self.inputs)


@final
@dataclass(frozen=True, eq=False)
class BoxedBall(AbstractRegion):
    """The same, cut with a box that holds the centre; the radius may be infinite, for the box alone.

    `below` and `above` bound the room between the centre and the sides of the box, (batch, inputs).
    """

    p: float
    radius: Tensor
    below: Tensor
    above: Tensor

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The nearer of the ball's side and the box's."""
        r = self.radius[:, None]
        return torch.minimum(self.below, r), torch.minimum(self.above, r)

    @property
    def length(self) -> Tensor:
        """The radius, or the length of the box's longer half-diagonal."""
        longest = torch.maximum(*self.sides)
        return torch.minimum(self.radius, norm_upper_bound_of_vectors(longest, self.p, 1))

    @property
    def symmetric(self) -> bool:
        """Boxes are not in general."""
        return False

    def largest(self, u: Tensor) -> Tensor:
        """Return the least bound over the v that are tried; see the module's docstring."""
        below, above = self.sides
        a, c = u.abs(), torch.where(u > 0, above[:, None], below[:, None])
        best = self._bound(torch.zeros_like(a), a, c)
        bounded = self.radius.isfinite()
        if bool(bounded.any()):
            for v in self._splits(a, c):
                best = torch.where(bounded[:, None], torch.minimum(best, self._bound(v, a, c)), best)
        return best

    def part(self, index: Tensor) -> "BoxedBall":
        """Return the regions of some of the samples."""
        return BoxedBall(self.p, self.radius[index], self.below[index], self.above[index])

    def _bound(self, v: Tensor, a: Tensor, c: Tensor) -> Tensor:
        radius = torch.where(self.radius.isfinite(), self.radius, 0.0)[:, None]
        ball = radius * norm_upper_bound_of_vectors(v, conjugate(self.p), 2)
        return inflate(ball + (c * (a - v)).sum(dim=2), gamma(a.shape[2] + 16))

    def _splits(self, a: Tensor, c: Tensor) -> list[Tensor]:
        """Return candidates for v, the best one last where it is known; for linf the sides have it already."""
        if math.isinf(self.p):
            return []
        a = a.expand_as(c)
        if self.p == 1:
            return [a, torch.minimum(a, self._price(a, c))]
        return [a, *self._shares(a, c)] if self.p == 2 else [a]

    def _price(self, a: Tensor, c: Tensor) -> Tensor:
        """Return the gain per length at which the ball's radius is used up, the largest gains first."""
        gains, order = a.sort(dim=2, descending=True)
        spent = c.gather(2, order).cumsum(dim=2)
        last = (spent < self.radius[:, None, None]).sum(dim=2, keepdim=True).clamp(max=a.shape[2] - 1)
        return gains.gather(2, last)

    def _shares(self, a: Tensor, c: Tensor) -> list[Tensor]:
        """Return v = min(a, lambda c): from the ball alone down to where the cut ball's radius is used up."""
        squared = torch.where(self.radius.isfinite(), self.radius, 1.0).square()[:, None]
        share = (a.square().sum(dim=2) / squared.clamp(min=1e-300)).sqrt()
        found = []
        for _ in range(_ROUNDS):
            at_side = a >= share[:, :, None] * c
            found.append(torch.minimum(a, share[:, :, None] * c))
            room = squared - torch.where(at_side, c, 0.0).square().sum(dim=2)
            rest = torch.where(at_side, 0.0, a).square().sum(dim=2)
            share = torch.where(room > 0, (rest / room.clamp(min=1e-300)).sqrt(), share)
        return found


def region_of(x: Tensor, p: float, radius: Tensor | None, box: tuple[Tensor, Tensor] | None) -> AbstractRegion:
    """Return the region of a batch x within a radius, within a box that holds x, or within both.

    >>> x, side = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), 0.8, dtype=torch.float64)
    >>> ball = region_of(x, 2, torch.ones(1, dtype=torch.float64), None)
    >>> boxed = region_of(x, 2, torch.ones(1, dtype=torch.float64), (-side, side))
    >>> u = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    >>> [f"{float(each.largest(u)):.4f}" for each in (ball, boxed)]  # the box cuts the point (0.6, 0.8) off, barely
    ['5.0000', '5.0000']
    """
    inputs = x[0].numel()
    if box is None:
        if radius is None:
            raise InvalidInput("A region needs a radius, a box, or both.")
        return NormBall(p, radius, inputs)
    lower, upper = (side.expand_as(x).flatten(1) for side in box)
    centre = x.flatten(1)
    if bool(((centre < lower) | (centre > upper)).any()):
        raise InvalidInput("The box does not contain x. Widen it, or clip the inputs to it.")
    # Differences of floats, rounded up; one of 0 is exact.
    below, above = (torch.where(side > 0, next_up(side), side) for side in (centre - lower, upper - centre))
    unlimited = torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device)
    return BoxedBall(p, unlimited if radius is None else radius, below, above)
