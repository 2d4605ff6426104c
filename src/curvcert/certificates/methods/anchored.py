"""Radii by constants with the sample fixed: curvatures, which replace global ones where they are smaller, and m / L(x).

An anchored Lipschitz constant bounds how far f moves from x, and no gradient on the way: it makes a radius of its own,
and never stands in for the L of another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.curvature.anchored import anchored_curvature_bound
from curvcert.bounds.lipschitz.anchored_paths import reason_against_paths
from curvcert.bounds.lipschitz.portfolio import LIPSCHITZ_METHODS, lipschitz_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Anchor, Global
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.constants import by_both, by_curvature
from curvcert.certificates.methods.method import (
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
    reason_without_curvature,
)
from curvcert.certificates.radii import lipschitz_radius
from curvcert.errors import UnsupportedModule
from curvcert.network.nodes import ElementwiseNode

_BATCH = 64

_SEEN = LIPSCHITZ_METHODS["anchored"]

_FLATTER = 2.5
""""auto" expects L(x) to be no less than L over this: m / L(x) is tried where that could raise a radius."""

WIDTH = 256
"""The widest layer for which "auto" computes anchored constants beside shells: an eigenproblem per pair and layer."""


@final
@dataclass(frozen=True)
class AnchoredRadius(AbstractCertificateMethod):
    """The gradient and a curvature constant from the sample on."""

    name: str = "anchored"
    way: str = "anchored"
    in_auto: bool = True
    dear: bool = False

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to smooth networks."""
        return reason_without_curvature(problem)

    @property
    def tables(self) -> Tables:
        """Global curvatures, which anchored ones never exceed."""
        return Tables(K="auto")

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare nothing; leave wide networks to shells where the best is asked for."""
        nodes = question.network.nodes
        widest = max((torch.Size(n.shape).numel() for n in nodes if isinstance(n, ElementwiseNode)), default=0)
        if not question.constants.names[1]:
            return []  # no curvature: the constants' own note says why
        if not question.alone and widest > WIDTH:
            raise UnsupportedModule(f"a layer of {widest} neurons (over {WIDTH}), and shells apply")
        return [_ByAnchored()]


@final
@dataclass(frozen=True)
class _ByAnchored(AbstractStep):
    way: str = "anchored"
    cost: int = 40

    def run(self, samples: Samples) -> None:
        undecided = samples.undecided
        if bool(undecided.any()):
            found = _anchored_constants(samples, undecided)
            samples.K, samples.below = torch.minimum(samples.K, found), torch.minimum(samples.below, found)
            samples.anchored = True
            samples.add("anchored", by_curvature(samples))
            tables = samples.question.constants
            samples.add(
                "combined", by_both(samples), f"anchored with {tables.names[0]}", ("anchored", *tables.made_by[0])
            )


@final
@dataclass(frozen=True)
class AnchoredLipschitzRadius(AbstractCertificateMethod):
    """m / L(x), by a Lipschitz constant from the sample on."""

    name: str = "anchored-lipschitz"
    way: str = "anchored-lipschitz"
    in_auto: bool = True
    dear: bool = False

    @property
    def tables(self) -> Tables:
        """Global Lipschitz constants, which anchored ones never exceed."""
        return Tables(L="auto")

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare nothing; where the best is asked for, leave networks on which it is no more than the global radius.

        That is so without paths, as a rule, and where no activation has slopes that are seen from a point.
        """
        if not question.network.has_constants:
            return []  # the constants' own note says why
        if not question.alone:
            why = reason_against_paths(question.pairs)
            if why is not None:
                raise UnsupportedModule(why)
            nodes = [node for node in question.network.nodes if isinstance(node, ElementwiseNode)]
            if all(node.activation.curvature is None for node in nodes):
                return []
        return [_ByAnchoredLipschitz()]


@final
@dataclass(frozen=True)
class _ByAnchoredLipschitz(AbstractStep):
    way: str = "anchored-lipschitz"
    cost: int = 65

    def run(self, samples: Samples) -> None:
        known, todo = samples.known, samples.undecided
        if not samples.question.alone:
            m, L = samples.points.margin, samples.L.scatter(1, samples.points.label[:, None], 0.0)
            todo = todo & samples.could_gain & (_FLATTER * lipschitz_radius(m, L).amin(dim=1) > known.amin(dim=1))
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        _anchored_radii(samples, (todo & ~samples.unbounded).nonzero().flatten(), found)
        by = samples.question.constants.made_by[0]
        samples.add("anchored-lipschitz", found, "anchored-lipschitz", ("anchored-lipschitz", *by))


def _anchored_radii(samples: Samples, index: Tensor, found: Tensor) -> None:
    """Fill in m / L(x) for some samples, every class beside the label."""
    label = samples.points.label
    for one in label[index].unique().tolist():
        problem, others = _pairs_with(samples.question, one)
        for part in index[label[index] == one].split(_BATCH):
            L = lipschitz_of(_at_samples(problem, samples, part), among=(_SEEN,)).value
            L = torch.fmin(L, samples.L[part[:, None], others])
            found[part[:, None], others] = lipschitz_radius(samples.points.margin[part[:, None], others], L)


def _anchored_constants(samples: Samples, todo: Tensor) -> Tensor:
    """Return anchored constants, one label at a time, for its pairs; inf where there are none."""
    K, label = torch.full_like(samples.K, torch.inf), samples.points.label
    for one in label[todo].unique().tolist():
        problem, others = _pairs_with(samples.question, one)
        terms = {a: table[one, others] for a, table in samples.question.constants.terms().items()}
        for part in (todo & (label == one)).nonzero().flatten().split(_BATCH):
            bound = anchored_curvature_bound(_at_samples(problem, samples, part), terms).value
            K[part[:, None], others] = bound
    return K


def _at_samples(problem: Problem, samples: Samples, part: Tensor) -> Problem:
    """Return the problem of some pairs at some of the samples, which are not evaluated again."""
    evaluation = samples.points.at.evaluation.of_samples(part).read_out(problem.network, problem.norms)
    return problem.over(Anchor(evaluation.values[0].value), evaluation)


def _pairs_with(question: Question, label: int) -> tuple[Problem, Tensor]:
    """Return the problem of the scalars f_i - f_label, and the classes i; once for all batches."""
    return question.pairs.once(f"pairs with {label}", lambda: _read_out_pairs(question, label))


def _read_out_pairs(question: Question, label: int) -> tuple[Problem, Tensor]:
    network, p = question.network, question.p
    others = torch.tensor([i for i in range(network.outputs) if i != label], device=network.device)
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    rows = network.read_out(eye[others] - eye[label])
    return Problem(rows, p, p, Global(), scalars=True, norms=question.pairs.norms), others
