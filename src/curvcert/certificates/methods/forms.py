"""Radii by quadratic forms about each sample, one sample at a time: for layers too wide for Taylor models.

A form for all rivals together is made first, since what most of them need is little; those that it leaves open have
forms of their own, the nearest first.  Every radius that is tried is a proof of its own, or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.certificates.methods.balls import Centres, largest_radii
from curvcert.certificates.methods.method import AbstractStep, Samples
from curvcert.certificates.radii import decided
from curvcert.propagation.expansion import Ball, Expansion, Form, Functions
from curvcert.propagation.reach import NetworkFacts


class Rivals:
    """The classes beside the label of one sample, as functions that rise above it or do not."""

    def __init__(self, facts: NetworkFacts, centre: Centres) -> None:
        """Expand the network about a single sample."""
        self.margin = centre.margin[0]
        self.others = self.margin.isfinite().nonzero().flatten().tolist()
        self._expansion = Expansion(facts, centre.evaluation)
        self._functions = Functions(self._expansion, centre.rows[0])
        steep = torch.linalg.vector_norm(self._functions.gradient, dim=1)
        self.limits = torch.where(self.margin.isfinite(), self.margin / steep.clamp(min=1e-300), torch.inf)
        """No bound from here reaches further, (classes,)."""

    def decided(self, radii: Sequence[float]) -> Tensor:
        """Return the largest of the radii, in ascending order, within which each rival is proven to stay below."""
        found = torch.zeros_like(self.margin)
        radii = [r for r in radii if r < float(self.limits.min())]
        if not radii:
            return found
        largest = Ball(self._expansion, radii[-1])
        balls = [*(Ball(self._expansion, r, larger=largest) for r in radii[:-1]), largest]
        proven = torch.zeros(len(self.margin), len(radii), dtype=torch.bool, device=self.margin.device)
        for last in range(len(radii) - 1, -1, -1):
            self._prove(proven, balls[: last + 1])
            if bool(proven[self.others, last].all()):
                break
        for k, r in enumerate(radii):
            found = torch.where(proven[:, k], r, found)
        return found

    def _prove(self, proven: Tensor, balls: Sequence[Ball]) -> None:
        """Prove what can be proven by forms over the last of some balls, until a rival is left that has its own."""
        last = len(balls) - 1
        open_ = self._open(proven[:, last])
        if open_:
            self._by_form(proven, open_, balls)
        for rival in self._open(proven[:, last]) if len(open_) > 1 else ():
            self._by_form(proven, [rival], balls)
            if not bool(proven[rival, last]):
                return

    def _open(self, proven: Tensor) -> list[int]:
        """Return the rivals that are not proven, the nearest first."""
        return sorted((k for k in self.others if not bool(proven[k])), key=lambda k: float(self.limits[k]))

    def _by_form(self, proven: Tensor, some: Sequence[int], balls: Sequence[Ball]) -> None:
        rises = Form(self._functions, some, balls[-1]).rises(some, balls)
        within = rises < self.margin[list(some), None]
        # What holds over a ball holds over smaller ones.
        within = within.flip(1).cummax(dim=1).values.flip(1)
        proven[list(some), : len(balls)] |= within

    def risen(self, radius: float, largest: Ball) -> Tensor:
        """Bound how far each rival rises over a ball, (classes,); 0 for the label."""
        found = torch.zeros_like(self.margin)
        ball, some = Ball(self._expansion, radius, larger=largest), sorted(self.others, key=lambda k: float(self.limits[k]))
        found[some] = Form(self._functions, some, ball).rises(some, [ball])[:, 0]
        for k in some:
            if bool(found[k] >= self.margin[k]) and radius < float(self.limits[k]):
                found[k] = torch.minimum(found[k], Form(self._functions, [k], ball).rises([k], [ball])[0, 0])
        return found

    def ball(self, radius: float) -> Ball:
        """Return what is left out over a ball."""
        return Ball(self._expansion, radius)


@dataclass(frozen=True, eq=False)
class ByForms(AbstractStep):
    """The visit of the quadratic certificate to networks with wide layers."""

    facts: NetworkFacts
    cost: int = 95
    way: str = "quadratic"

    def run(self, samples: Samples) -> None:
        """Decide the radii that are asked for, or search for the largest."""
        question, known = samples.question, samples.known
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        wanted = samples.undecided if question.epsilons else samples.open_ & samples.could_gain
        for index in wanted.nonzero().flatten().split(1):
            centre = Centres.about(self.facts, samples, index)
            rivals = Rivals(self.facts, centre)
            if question.epsilons:
                beyond, limit = float(centre.known[0]), float(samples.witnessed[index[0]])
                radii = [decided(eps) for eps in sorted(question.epsilons) if beyond < eps < limit]
                found[index] = rivals.decided(radii)[None]
            else:
                found[index] = self._searched(rivals, centre)
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("quadratic", found)

    def _searched(self, rivals: Rivals, centre: Centres) -> Tensor:
        limit = float(rivals.limits.min())
        if not 0 < limit < float("inf"):
            return torch.zeros_like(centre.margin)
        largest = rivals.ball(limit)

        def rises(index: Tensor, radius: Tensor) -> Tensor:
            if float(radius) >= limit:
                return torch.full_like(centre.margin, torch.inf)
            return rivals.risen(float(radius), largest)[None]

        return largest_radii(centre, rises)
