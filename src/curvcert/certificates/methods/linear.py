r"""The linear certificate: linear relaxation over a ball, whose radius is searched for with all pairs at once.

Within the ball of radius r about x every margin :math:`f_y - f_i` falls by no more than linear relaxation says.  A ball
in which no margin reaches 0 is certified, and each evaluation in the search is a proof of its own; nothing rests on
how the radii to try are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import unit_facts
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.method import (
    WORTHWHILE,
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
)
from curvcert.certificates.radii import decided
from curvcert.errors import UnsupportedModule
from curvcert.memory import spare_elements
from curvcert.network.evaluation import Evaluation
from curvcert.propagation.analysis import covector_numbers
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.regions import region_of

AUTO_NUMBERS = 2**21
"""Covectors of all layers of one sample hold at most this many numbers where "auto" takes linear relaxation along."""

PRECISION = 2.0**-11
"""How near, relatively, a radius is to one that is not proven when the search ends."""

_EVALUATIONS = 16
_FARTHEST = 8.0
"""How much further than the last radius the next one may be."""

_CHUNK_ELEMENTS = 2**22


@final
@dataclass(frozen=True)
class LinearRadius(AbstractCertificateMethod):
    """Linear relaxation of all layers over the ball; kinks are welcome."""

    name: str = "linear"
    way: str = "linear"
    in_auto: bool = False

    @property
    def tables(self) -> Tables:
        """It needs no constants."""
        return Tables()

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare the norms of the layers; leave wide networks to the other methods where the best is asked for."""
        facts = unit_facts(question.outputs).maps
        numbers = covector_numbers(facts)
        if not question.alone and numbers > AUTO_NUMBERS:
            raise UnsupportedModule(
                f"its covectors are {numbers:.2g} numbers (over {AUTO_NUMBERS}); ask for it by name"
            )
        return [_ByRelaxation(facts)]


@final
@dataclass(frozen=True, eq=False)
class _ByRelaxation(AbstractStep):
    facts: NetworkFacts
    way: str = "linear"
    cost: int = 70

    def run(self, samples: Samples) -> None:
        question, known = samples.question, samples.known
        todo = samples.open_
        if not question.alone and samples.points.gradient is not None:
            todo &= samples.could_gain
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        size = max(1, spare_elements(samples.x.device, _CHUNK_ELEMENTS) // self._numbers)
        for index in todo.nonzero().flatten().split(size):
            found[index] = _Search.about(self.facts, samples, index).radii()
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("linear", found)

    @property
    def _numbers(self) -> int:
        network = self.facts.network
        return network.outputs * self.facts.numbers_behind(len(network.nodes) - 1)


@dataclass(frozen=True, eq=False)
class _Search:
    """Samples whose radii are searched for: margins (batch, classes), radii known so far, and a first guess."""

    facts: NetworkFacts
    evaluation: Evaluation
    x: Tensor
    rows: Tensor
    margin: Tensor
    known: Tensor
    guess: Tensor
    epsilons: tuple[float, ...]

    @staticmethod
    def about(facts: NetworkFacts, samples: Samples, index: Tensor) -> "_Search":
        """Return the search for the radii of some of the samples."""
        points, network, x = samples.points, facts.network, samples.x[index]
        eye = torch.eye(network.outputs, dtype=torch.float64, device=x.device)
        rows = (eye[None] - eye[points.label[index]][:, None]).reshape(len(x), -1, *network.out_shape)
        known, limit = samples.known[index].amin(dim=1), samples.limit[index]
        start = torch.where((limit > 0) & limit.isfinite(), limit / 2, _FIRST)
        guess = torch.where(known > 0, known * (1 + WORTHWHILE), start)
        evaluation = points.at.evaluation.of_samples(index)
        epsilons = samples.question.epsilons
        return _Search(facts, evaluation, x, rows, points.margin[index], known, guess, epsilons)

    def radii(self) -> Tensor:
        """Return a proven radius of every class, (batch, classes), 0 where none is proven."""
        return self._decided() if self.epsilons else self._searched()

    def _decided(self) -> Tensor:
        """Try the radii that are to be decided, the smallest first, while they are proven."""
        found, open_ = torch.zeros_like(self.margin), torch.ones_like(self.known, dtype=torch.bool)
        for eps in sorted(self.epsilons):
            index = (open_ & (self.known < eps)).nonzero().flatten()
            if len(index):
                share = self._share(index, torch.full_like(self.known[index], decided(eps)))
                found[index] = torch.where(share < 1, decided(eps), found[index])
                open_[index] = (share < 1).all(dim=1)
        return found

    def _searched(self) -> Tensor:
        """Bracket the radius at which the first margin may be used up, and close in on it."""
        found = torch.zeros_like(self.margin)
        low, high = torch.zeros_like(self.known), torch.full_like(self.known, torch.inf)
        low_share, high_share = torch.zeros_like(low), torch.full_like(low, torch.inf)
        radius = self.guess
        for step in range(_EVALUATIONS):
            index = ((high > low * (1 + PRECISION)) & radius.isfinite()).nonzero().flatten()
            if len(index) == 0:
                break
            r = radius[index]
            share = self._share(index, r)
            found[index] = torch.where(share < 1, torch.maximum(found[index], r[:, None]), found[index])
            worst = share.amax(dim=1)
            good = worst < 1
            low[index], low_share[index] = torch.where(good, r, low[index]), torch.where(good, worst, low_share[index])
            high[index], high_share[index] = (
                torch.where(good, high[index], r),
                torch.where(good, high_share[index], worst),
            )
            if step == 0:
                # Where not even the first radius beyond what is known is proven, there is nothing to gain.
                high = torch.where((self.known > 0) & (high <= self.guess), 0.0, high)
            radius = _between(low, high, low_share, high_share)
        return found

    def _share(self, index: Tensor, radius: Tensor) -> Tensor:
        """Return how much of each margin linear relaxation lets a ball use up: below 1 is a proof."""
        region = region_of(self.x[index], self.facts.p, radius, None)
        relaxed = Relaxed(self.facts, self.evaluation.of_samples(index), region)
        rise = relaxed.change(len(self.facts.network.nodes) - 1, self.rows[index]).rise
        margin = self.margin[index]
        # Compared before it is divided, so that the quotient's rounding decides nothing.
        share = torch.where(margin.isinf(), 0.0, rise / margin.clamp(min=1e-300))
        return torch.where(margin.isinf() | (rise < margin), share.clamp(max=1 - 2.0**-53), share.clamp(min=1.0))


_FIRST = 2.0**-6
"""The first radius to try where nothing is known."""


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
