"""The line certificate as a method: first by global curvatures, which is cheap, in the end by bounds over balls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.certificates.constants import Tables
from curvcert.certificates.line import Line, LineQuery, line_radii
from curvcert.certificates.methods.method import (
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
    reason_without_curvature,
)
from curvcert.certificates.methods.shell import shared_layers
from curvcert.certificates.shell import Layers
from curvcert.errors import InvalidInput


@final
@dataclass(frozen=True)
class LineRadius(AbstractCertificateMethod):
    """The network along the gradient, and curvature only across it, in l2."""

    name: str = "line"
    way: str = "line"
    in_auto: bool = True

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to smooth networks in l2."""
        return reason_without_curvature(problem) if problem.p == 2 else "line: needs p = 2"

    @property
    def tables(self) -> Tables:
        """Global constants of both orders."""
        return Tables("auto", "auto", required=False)

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare both visits."""
        p = question.p
        if p != 2:
            if question.alone:
                raise InvalidInput(f"The line certificate needs p = 2, got p = {p:g}. Use method='auto' for the best.")
            return []
        if not (question.alone or question.constants.names[1]):
            return []  # no curvature: the constants' own note says why
        layers = shared_layers(question)
        line = Line(question.outputs, question.deviations)
        return [_ByLine(line, None, cost=20), _ByLine(line, layers, cost=60)]


@final
@dataclass(frozen=True, eq=False)
class _ByLine(AbstractStep):
    line: Line
    layers: Layers | None
    cost: int
    way: str = "line"

    def run(self, samples: Samples) -> None:
        question, points = samples.question, samples.points
        if points.gradient is None:
            return
        known, before = samples.known, samples.radii.get("line")
        # Nothing is left to gain where every class has an infinite radius.
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        index = samples.open_.nonzero().flatten()
        if len(index):
            limit = points.margin / points.gradient_norm.clamp(min=1e-300)
            K = question.constants.above[points.label]
            query = LineQuery(points.at, points.label, points.gradient, limit, K, known).part(index)
            found[index] = line_radii(self.line, query, question.epsilons, self.layers)
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("line", found if before is None else torch.fmax(found, before))
