"""Radii by bounds over whole balls: each radius that is tried is a proof of its own, or none.

Within the ball of radius r about x every margin :math:`f_y - f_i` falls by no more than a bound says.  A ball in which
no margin reaches 0 is certified; nothing rests on how the radii to try are chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvcert.boxes import Box
from curvcert.certificates.methods.method import WORTHWHILE, Samples
from curvcert.certificates.radii import decided
from curvcert.network.evaluation import Evaluation
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.regions import AbstractRegion, region_of
from curvcert.rounding import inflate

PRECISION = 2.0**-11
"""How near, relatively, a radius is to one that is not proven when the search ends."""

_CHECKERS_ROOM = 2.0**-24

_EVALUATIONS = 16
_FARTHEST = 8.0
"""How much further than the last radius the next one may be."""

_FIRST = 2.0**-6
"""The first radius to try where nothing is known."""

Rises = Callable[[Tensor, Tensor], Tensor]
"""Bounds how far each competitor rises above the label, (samples, classes): of the samples of these indices, over the
balls of these radii."""


@dataclass(frozen=True, eq=False)
class Centres:
    """Samples whose radii are searched for.

    `rows` are those of the differences of outputs, (batch, classes, outputs); `margin`, (batch, classes), is inf at the
    label; `known` is what is proven of each sample, and `guess` a radius beyond it.  `box` is what the balls are cut
    with, if anything, and `farthest` how far its corners are: a ball that holds all of it is proven at any radius.
    """

    facts: NetworkFacts
    evaluation: Evaluation
    x: Tensor
    rows: Tensor
    margin: Tensor
    known: Tensor
    guess: Tensor
    farthest: Tensor
    box: Box | None

    @staticmethod
    def about(facts: NetworkFacts, samples: Samples, index: Tensor) -> "Centres":
        """Return some of the samples."""
        points, network, x = samples.points, facts.network, samples.x[index]
        eye = torch.eye(network.outputs, dtype=torch.float64, device=x.device)
        rows = (eye[None] - eye[points.label[index]][:, None]).reshape(len(x), -1, *network.out_shape)
        known, limit = samples.known[index].amin(dim=1), samples.limit[index]
        start = torch.where((limit > 0) & limit.isfinite(), limit / 2, _FIRST)
        guess = torch.where(known > 0, known * (1 + WORTHWHILE), start)
        evaluation = points.at.evaluation.of_samples(index)
        box = None if samples.box is None else samples.box.part(index)
        farthest = samples.farthest[index]
        return Centres(facts, evaluation, x, rows, points.margin[index], known, guess, farthest, box)

    def part(self, index: Tensor) -> "Centres":
        """Return some of them."""
        names = ("x", "rows", "margin", "known", "guess", "farthest")
        parts = {name: getattr(self, name)[index] for name in names}
        box = None if self.box is None else self.box.part(index)
        return replace(self, evaluation=self.evaluation.of_samples(index), box=box, **parts)

    def region(self, index: Tensor, radius: Tensor) -> AbstractRegion:
        """Return the balls about some of them, cut with their boxes."""
        x = self.x[index]
        return region_of(x, self.facts.p, radius, None if self.box is None else self.box.part(index).sides(x))

    def relaxed(self, index: Tensor, radius: Tensor) -> Tensor:
        """Bound the rises by linear relaxation, with some room for a checker that draws lines of its own."""
        relaxed = Relaxed(self.facts, self.evaluation.of_samples(index), self.region(index, radius))
        return inflate(relaxed.change(len(self.facts.network.nodes) - 1, self.rows[index]).rise, _CHECKERS_ROOM)

    def used_up(self, rise: Tensor, index: Tensor) -> Tensor:
        """Return how much of each margin is used up: below 1 is a proof."""
        margin = self.margin[index]
        # Compared before it is divided, so that the quotient's rounding decides nothing.
        share = torch.where(margin.isinf(), 0.0, rise / margin.clamp(min=1e-300))
        return torch.where(margin.isinf() | (rise < margin), share.clamp(max=1 - 2.0**-53), share.clamp(min=1.0))


def parts_of(wanted: Tensor, size: int) -> Sequence[Tensor]:
    """Return the indices of the wanted samples, so many at a time."""
    index = wanted.nonzero().flatten()
    return index.split(size) if len(index) else ()


def decided_radii(centres: Centres, epsilons: tuple[float, ...], rises: Rises) -> Tensor:
    """Try the radii that are to be decided, the smallest first, while they are proven: (batch, classes)."""
    found, open_ = torch.zeros_like(centres.margin), torch.ones_like(centres.known, dtype=torch.bool)
    for eps in sorted(epsilons):
        index = (open_ & (centres.known < eps)).nonzero().flatten()
        if len(index):
            share = centres.used_up(rises(index, torch.full_like(centres.known[index], decided(eps))), index)
            found[index] = torch.where(share < 1, decided(eps), found[index])
            open_[index] = (share < 1).all(dim=1)
    return found


def largest_radii(centres: Centres, rises: Rises, precision: float = PRECISION) -> Tensor:
    """Bracket the radius at which the first margin may be used up, and close in on it: (batch, classes).

    0 where none is proven.
    """
    found = torch.zeros_like(centres.margin)
    low, high = torch.zeros_like(centres.known), torch.full_like(centres.known, torch.inf)
    low_share, high_share = torch.zeros_like(low), torch.full_like(low, torch.inf)
    radius = torch.minimum(centres.guess, centres.farthest)
    for step in range(_EVALUATIONS):
        index = ((high > low * (1 + precision)) & radius.isfinite()).nonzero().flatten()
        if len(index) == 0:
            break
        r = radius[index]
        share = centres.used_up(rises(index, r), index)
        found[index] = torch.where(share < 1, torch.maximum(found[index], r[:, None]), found[index])
        worst = share.amax(dim=1)
        good = worst < 1
        low[index], low_share[index] = torch.where(good, r, low[index]), torch.where(good, worst, low_share[index])
        high[index], high_share[index] = (
            torch.where(good, high[index], r),
            torch.where(good, high_share[index], worst),
        )
        high = torch.where(low >= centres.farthest, low, high)
        if step == 0:
            # Where not even the first radius beyond what is known is proven, there is nothing to gain.
            high = torch.where((centres.known > 0) & (high <= centres.guess), 0.0, high)
        radius = torch.minimum(_between(low, high, low_share, high_share), centres.farthest)
    return found


def _between(low: Tensor, high: Tensor, low_share: Tensor, high_share: Tensor) -> Tensor:
    """Return the next radius: where the shares, as powers of the radius, cross 1; kept off the ends of the bracket.

    Without an upper end, the line through 0 says how far it may be; without a lower one, likewise.
    """
    further = low * (1 / low_share.clamp(min=1e-300)).clamp(1.001, _FARTHEST)
    nearer = high * (1 / high_share).clamp(1 / _FARTHEST, 0.999)
    rise = (high_share / low_share).log()
    weight = ((1 / low_share).log() / rise).nan_to_num(nan=0.5).clamp(0.05, 0.95)
    inside = low * (high / low) ** weight
    return torch.where(high.isinf(), further, torch.where(low == 0, nearer, inside))
