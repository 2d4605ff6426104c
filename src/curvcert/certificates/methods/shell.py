"""The shell certificate as a method: bounds over balls, integrated over shells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.method import without_constants
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.method import (
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
    reason_without_curvature,
)
from curvcert.certificates.radii import combined_radius, curvature_radius, lipschitz_radius
from curvcert.certificates.shell import Layers, Query, layers_of, shell_radii


@final
@dataclass(frozen=True)
class ShellRadius(AbstractCertificateMethod):
    """Bounds over balls, integrated over shells."""

    name: str = "shell"
    way: str = "shell"
    in_auto: bool = True

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to smooth networks."""
        return reason_without_curvature(problem)

    @property
    def tables(self) -> Tables:
        """Global constants of both orders, which shells take along."""
        return Tables("auto", "auto", required=False)

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare norms, which are computed when they are needed.

        Shells cost less than anchored constants: where radii are to be decided they go first, with global ones.
        """
        if not question.network.has_constants:
            if question.alone:
                raise without_constants(question.network)
            return []  # the constants' own note says why
        layers = shared_layers(question)
        late = _ByShells(layers, cost=50)
        return [_ByShells(layers, cost=30), late] if question.epsilons and not question.alone else [late]


def shared_layers(question: Question) -> Layers:
    """Return the network ready for bounds over balls, once for all methods that use them."""
    return question.pairs.once("layers", lambda: layers_of(question.pairs, question.network))


@final
@dataclass(frozen=True, eq=False)
class _ByShells(AbstractStep):
    layers: Layers
    cost: int
    way: str = "shell"

    def run(self, samples: Samples) -> None:
        question, known = samples.question, samples.known
        before = samples.radii.get("shell")
        if before is not None and not samples.anchored:
            return  # nothing is known that was not at the first visit
        todo = samples.undecided & known.amin(dim=1).isfinite()
        if question.epsilons or not question.alone:
            todo &= samples.could_gain
        found = torch.full_like(known, torch.nan) if before is None else before.clone()
        # Nothing is left to gain where every class has an infinite radius.
        found = torch.where(samples.unbounded[:, None], known, found)
        index = todo.nonzero().flatten()
        if len(index):
            found[index] = torch.fmax(found[index], shell_radii(self.layers, _query(samples, known).part(index)))
        samples.add("shell", found)


def _query(samples: Samples, known: Tensor) -> Query:
    """Return the question to shells; radii by global constants alone set their grid."""
    points, K = samples.points, samples.question.constants.K[samples.points.label]
    m, g, L = points.margin, points.gradient_norm, samples.L
    ways = [
        torch.where(L.isnan(), 0.0, lipschitz_radius(m, L)),
        torch.where(K.isnan(), 0.0, curvature_radius(m, g, K)),
        torch.where(L.isnan() | K.isnan(), 0.0, combined_radius(m, g, K, L)),
    ]
    everywhere = torch.stack(ways).amax(dim=0).scatter(1, points.label[:, None], torch.inf)
    return Query(points.at, points.label, m, g, samples.K, L, known, everywhere, samples.question.epsilons)
