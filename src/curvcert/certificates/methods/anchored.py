"""Radii by curvature constants with the sample fixed, which replace global ones where they are smaller."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.curvature.anchored import anchored_curvature_at
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.batching import piece_size
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Anchor, Global
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.constants import by_both, by_curvature
from curvcert.certificates.methods.method import AbstractCertificateMethod, AbstractStep, Question, Samples
from curvcert.errors import UnsupportedModule
from curvcert.network.nodes import ElementwiseNode

_BATCH = 64

WIDTH = 256
"""The widest layer for which "auto" computes anchored constants beside shells: an eigenproblem per pair and layer."""


@final
@dataclass(frozen=True)
class AnchoredRadius(AbstractCertificateMethod):
    """The gradient and a curvature constant from the sample on."""

    name: str = "anchored"
    way: str = "anchored"
    in_auto: bool = True

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
            samples.K, samples.anchored = _anchored_constants(samples, undecided), True
            samples.add("anchored", by_curvature(samples))
            samples.add("combined", by_both(samples), f"anchored with {samples.question.constants.names[0]}")


def _anchored_constants(samples: Samples, todo: Tensor) -> Tensor:
    """Return the constants with anchored ones where they are smaller; one label at a time, for its pairs."""
    K, label = samples.K.clone(), samples.points.label
    for one in label[todo].unique().tolist():
        problem, others = _pairs_with(samples.question, one)
        for part in (todo & (label == one)).nonzero().flatten().split(min(_BATCH, piece_size(problem))):
            at_samples = replace(problem, scope=Anchor(samples.x[part]))
            evaluation = samples.points.at.evaluation.of_samples(part).read_out(problem.network, problem.norms)
            bound = anchored_curvature_at(at_samples, over_balls(at_samples, evaluation)).value
            K[part[:, None], others] = torch.minimum(K[part[:, None], others], bound)
    return K


def _pairs_with(question: Question, label: int) -> tuple[Problem, Tensor]:
    """Return the problem of the scalars f_i - f_label, and the classes i."""
    network, p = question.network, question.p
    others = torch.tensor([i for i in range(network.outputs) if i != label], device=network.device)
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    rows = network.read_out(eye[others] - eye[label])
    return Problem(rows, p, p, Global(), scalars=True, norms=question.pairs.norms), others
