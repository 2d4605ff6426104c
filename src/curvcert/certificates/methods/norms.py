r"""Radii carried over from other norms: balls of one norm lie in those of another.

With n inputs, :math:`r_p \ge r_q` for :math:`q \ge p`, and :math:`r_p \ge r_q n^{1/p - 1/q}` for :math:`p \ge q`.  What
another norm proves is all by the same methods, as if it had been asked for; its radii are rounded down once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.method import AbstractCertificateMethod, AbstractStep, Question, Samples
from curvcert.certificates.pointwise import evaluate_points
from curvcert.certificates.radii import decided
from curvcert.rounding import UNIT_ROUNDOFF

CARRIED = (1.0, 2.0, math.inf)
"""The norms whose certificates are carried over."""


def carried_share(p: float, q: float, inputs: int) -> float:
    """Return how much of a radius in the q-norm is proven in the p-norm, rounded down.

    >>> carried_share(1, 2, 100), round(carried_share(math.inf, 2, 100), 12)
    (1.0, 0.1)
    """
    if p <= q:
        return 1.0
    exponent = (0.0 if math.isinf(p) else 1 / p) - 1 / q
    # The exponent and the power are within a few units of true ones; log n is far below 64.
    return float(inputs**exponent * (1 - 256 * UNIT_ROUNDOFF))


@final
@dataclass(frozen=True)
class CarriedRadius(AbstractCertificateMethod):
    """The best of the other norms' certificates."""

    name: str = "norms"
    way: str = "norms"
    in_auto: bool = True
    checkable: bool = False

    @property
    def tables(self) -> Tables:
        """It needs no constants of this norm."""
        return Tables()

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Ask in the other norms; beside everything else only in l2, where constants and shells are at their best."""
        others = [q for q in CARRIED if q != question.p and (question.alone or q == 2)]
        return [_ByOtherNorm(question, q) for q in others]


@final
@dataclass(frozen=True, eq=False)
class _ByOtherNorm(AbstractStep):
    question: Question
    q: float
    way: str = "norms"
    cost: int = 60
    needs_gradients: bool = False

    def run(self, samples: Samples) -> None:
        known, before = samples.known, samples.radii.get("norms")
        share = carried_share(self.question.p, self.q, samples.x[0].numel())
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        index = samples.open_.nonzero().flatten()
        if len(index):
            found[index] = share * self._radii(samples, index, share)
        if not self.question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("norms", found if before is None else torch.fmax(found, before))

    def _radii(self, samples: Samples, index: Tensor, share: float) -> Tensor:
        """Return the radii of every class in the other norm, (batch, classes)."""
        question, plan = self.question.pairs.once(f"norm {self.q:g}", lambda: self._asked(share))
        useful = any(step.needs_gradients for step in plan)
        x, label = samples.x[index], samples.points.label[index]
        points = evaluate_points(question.outputs, x, label, question.deviations, useful)
        there = Samples(question, x, points, None if samples.box is None else samples.box.part(index))
        for step in plan:
            step.run(there)
        return there.known * (1 - 4 * UNIT_ROUNDOFF)

    def _asked(self, share: float) -> tuple[Question, Sequence[AbstractStep]]:
        epsilons = tuple(decided(eps) / share for eps in self.question.epsilons)
        return self.question.elsewhere(self.q, epsilons, self._wanted)

    def _wanted(self, method: AbstractCertificateMethod) -> bool:
        """Whether to carry a method's radii over: beside everything else not those that are as good here."""
        return not isinstance(method, CarriedRadius) and (self.question.alone or not method.at_home_everywhere)
