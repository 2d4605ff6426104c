r"""How each nonlinear node is replaced by lines: slopes of any size, and what the node may exceed them by.

Beside the value at the centre, :math:`\delta a = s\,\delta z + \rho`, and the remainder :math:`\rho` over the range of
z is what the node costs.  A covector u on the node's value becomes s o u on z, with one slope where u raises the bound
(u > 0: the line should lie above) and perhaps another where it lowers it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.activations import Activation, remainder_ends
from curvcert.network.block import MaxPool
from curvcert.network.evaluation import Computed
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, next_down, next_up

_HALF, _SEARCHES = 16, 5
"""Nodes on each side of the middle of a range, and steps, in the search for slopes."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What a unit covector on each coordinate of a node's value adds to a bound: `up` where it is 1, `down` for -1."""

    up: Tensor
    down: Tensor


class AbstractRelaxation(ABC):
    """Lines in place of a nonlinear node, and what they cost."""

    costs: Costs

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether covectors u and -u go through the same lines."""

    @abstractmethod
    def pull_back(self, u: Tensor) -> Tensor:
        """Return the covectors on z, given those on the value, (batch, rows, *shape)."""


@final
@dataclass(frozen=True, eq=False)
class Lines(AbstractRelaxation):
    """Slopes of every neuron, (batch, *shape); `below` is None where they serve both sides."""

    costs: Costs
    above: Tensor
    below: Tensor | None

    @property
    def symmetric(self) -> bool:
        """Whether there is one slope per neuron."""
        return self.below is None

    def pull_back(self, u: Tensor) -> Tensor:
        """Return s o u, with the slope that the sign of u asks for."""
        above = self.above.unsqueeze(1)
        return above * u if self.below is None else torch.where(u > 0, above, self.below.unsqueeze(1)) * u


@final
@dataclass(frozen=True, eq=False)
class Chosen(AbstractRelaxation):
    """One entry of each window in place of the largest; `index` is its place in the flat image of its channel."""

    costs: Costs
    pool: MaxPool
    index: Tensor

    @property
    def symmetric(self) -> bool:
        """The same entry serves both sides."""
        return True

    def pull_back(self, u: Tensor) -> Tensor:
        """Return the covectors at the chosen entries; windows that overlap add up."""
        channels, height, width = self.pool.image_shape
        u = u.expand(len(self.index), *u.shape[1:])
        flat = u.new_zeros(*u.shape[:2], channels, height * width)
        place = self.index.flatten(2).unsqueeze(1).expand(-1, u.shape[1], -1, -1)
        return flat.scatter_add(3, place, u.flatten(3)).reshape(*u.shape[:2], *self.pool.image_shape)


@dataclass(frozen=True, eq=False)
class Reach:
    """Where a pre-activation lies: the computed one at the centre, its error, and how far it falls and rises."""

    centre: Computed
    fall: Tensor
    rise: Tensor

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The interval that it lies in, rounded outward."""
        value, error = self.centre.value, self.centre.error
        return next_down(next_down(value - error) - self.fall), next_up(next_up(value + error) + self.rise)

    @property
    def farthest(self) -> Tensor:
        """How far it moves in either direction."""
        return torch.maximum(self.fall, self.rise)


def relaxed_activation(activation: Activation, z: Reach, a: Computed, roundings: int) -> Lines:
    """Return the lines of an activation over a range; `a` is its computed value at the centre.

    `roundings` counts those of the sum that s o u enters: gamma of it bounds what the sum is off by.
    """
    below, above = resting_slopes(activation, *z.ends)
    down, up = _remainders(activation, below, above, z, a)
    costs = (_known(cost + _extra(activation, s, z, roundings)) for cost, s in ((up, above), (down, below)))
    return Lines(Costs(*costs), above, None if torch.equal(above, below) else below)


def resting_slopes(activation: Activation, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the slopes of the lines that rest on phi from below and from above, nearest in the middle: (2, ...).

    That leaves the least area between them.  It is CROWN's choice for ReLU and for tanh but where that is worse, and
    there is one for every activation.  Searched for on a grid, as slopes need no proof: the farthest node beyond the
    edge of the hull over the middle becomes its end, until the hull is found, or touches phi in the middle.
    """
    grid = torch.linspace(0, 1, 2 * _HALF + 1).to(lower)
    z = lower + grid.reshape(-1, 1, *(1,) * lower.dim()) * (upper - lower)
    phi = activation.value(z)
    phi, z = torch.cat([-phi, phi], dim=1), z.expand(-1, 2, *lower.shape)
    left = torch.zeros_like(phi[:1], dtype=torch.int64)
    right, touches = torch.full_like(left, 2 * _HALF), torch.zeros_like(left, dtype=torch.bool)
    slope = _edge(z, phi, left, right)
    for _ in range(_SEARCHES):
        far = (phi - slope * z).argmax(dim=0, keepdim=True)
        touches |= far == _HALF
        left, right = torch.where(far < _HALF, far, left), torch.where(far > _HALF, far, right)
        slope = _edge(z, phi, left, right)
    slope = torch.cat([-slope[:, :1], slope[:, 1:]], dim=1)
    slope = torch.where(touches, activation.derivative(z[_HALF][:1]), slope)[0]
    ordinary = (upper - lower > 1e-7 * (1 + lower.abs() + upper.abs())) & slope.isfinite()
    middle = torch.where((lower + upper).isfinite(), (lower + upper) / 2, 0.0)
    return torch.where(ordinary, slope, activation.derivative(middle)).clamp(*activation.slope)


def _edge(z: Tensor, phi: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (phi.gather(0, right) - phi.gather(0, left)) / (z.gather(0, right) - z.gather(0, left))


def _remainders(activation: Activation, below: Tensor, above: Tensor, z: Reach, a: Computed) -> tuple[Tensor, Tensor]:
    """Bound how far phi(z') - s z' falls below its value at the centre, and rises above it, each with its own s."""
    least, greatest = remainder_ends(activation, below, above, *z.ends)
    found = []
    for s, sign, end in ((below, -1.0, least), (above, 1.0, greatest)):
        line = s * z.centre.value
        at = a.value - line
        error = a.error + s.abs() * z.centre.error + 4 * UNIT_ROUNDOFF * (a.value.abs() + line.abs())
        far = sign * (end - at) + error
        found.append(far + 4 * UNIT_ROUNDOFF * (at.abs() + error + far.abs()))
    return found[0], found[1]


def _extra(activation: Activation, s: Tensor, z: Reach, roundings: int) -> Tensor:
    """Bound what rounding s o u, and adding it up, costs; with a module's own deviation from its activation."""
    return (Upper(s.abs()) * z.farthest * gamma(roundings + 2) + activation.deviation).bound


def _known(cost: Tensor) -> Tensor:
    """Return costs, which are never negative; what is not a number says nothing."""
    return torch.where(cost.isnan(), torch.inf, cost.clamp(min=0.0)) + TINY


def relaxed_pool(pool: MaxPool, z: Reach, roundings: int) -> Chosen:
    r"""Return the entry that is largest in the middle of the ranges, of each window.

    The largest entry exceeds the chosen one, which is in it, by between 0 and :math:`\max_i u_i - l` with l the chosen
    one's lower end and u_i the others' upper ends; at the centre by a number that is known within rounding.
    """
    lower, upper = z.ends
    _, index = F.max_pool2d(lower + upper, pool.kernel_size, pool.stride, pool.padding, return_indices=True)
    chosen = index.flatten(2)
    low, error = (side.flatten(2).gather(2, chosen).reshape(index.shape) for side in (lower, z.centre.error))
    own = z.centre.value.flatten(2).gather(2, chosen).reshape(index.shape)
    moved = z.farthest.flatten(2).gather(2, chosen).reshape(index.shape)
    windows, numbers = _windows(pool, upper), _windows(pool, _places(pool, upper))
    others = torch.where(numbers == index.unsqueeze(2), -torch.inf, windows).amax(dim=2)
    spread = next_up((others - low).clamp(min=0.0))
    worst = _windows(pool, z.centre.error).clamp(min=0.0).amax(dim=2)
    lead = pool.evaluate(z.centre.value) - own
    doubt = inflate(worst + error, 4 * UNIT_ROUNDOFF) + 2 * UNIT_ROUNDOFF * lead
    extra = (Upper(moved) * gamma(roundings + 2) + TINY).bound
    up = next_up(spread - (lead - doubt).clamp(min=0.0)).clamp(min=0.0)
    return Chosen(Costs(_known(up + extra), _known(lead + doubt + extra)), pool, index)


def _places(pool: MaxPool, like: Tensor) -> Tensor:
    """Return the number of each pixel in its channel."""
    _, height, width = pool.image_shape
    return (
        torch.arange(height * width, dtype=like.dtype, device=like.device).reshape(1, 1, height, width).expand_as(like)
    )


def _windows(pool: MaxPool, image: Tensor) -> Tensor:
    """Return the entries of every window, (batch, channels, entries, *out); -inf beyond the image."""
    ph, pw = pool.padding
    padded = F.pad(image, (pw, pw, ph, ph), value=-torch.inf)
    (kh, kw), (sh, sw) = pool.kernel_size, pool.stride
    _, height, width = pool.out_shape
    parts = [
        padded[:, :, i : i + sh * (height - 1) + 1 : sh, j : j + sw * (width - 1) + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return torch.stack(parts, dim=2)
