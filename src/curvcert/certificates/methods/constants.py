"""Radii from constants that hold everywhere: by a Lipschitz constant, by the gradient and a curvature, by both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.curvature import CURVATURE_METHODS
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS
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

WAYS = ("lipschitz", "curvature", "combined")
"""The radii that constants give."""


def by_lipschitz(samples: Samples) -> Tensor:
    """Return m / L for every class; NaN where there is no constant."""
    return torch.where(samples.L.isnan(), torch.nan, lipschitz_radius(samples.points.margin, samples.L))


def by_curvature(samples: Samples) -> Tensor:
    """Return the radius by the gradient and K for every class; NaN where there is no constant."""
    m, g, K = samples.points.margin, samples.points.gradient_norm, samples.K
    return torch.where(K.isnan(), torch.nan, curvature_radius(m, g, K))


def by_both(samples: Samples) -> Tensor:
    """Return the radius by both constants for every class; NaN where one of them is missing."""
    m, g = samples.points.margin, samples.points.gradient_norm
    missing = samples.L.isnan() | samples.K.isnan()
    return torch.where(missing, torch.nan, combined_radius(m, g, samples.K, samples.L))


@final
@dataclass(frozen=True)
class ByConstants(AbstractStep):
    """The radii by whichever global constants there are."""

    way: str = "constants"
    cost: int = 0
    needs_gradients: bool = False

    def run(self, samples: Samples) -> None:
        """Add "lipschitz", "curvature" and "combined"."""
        (L, K), (by_L, by_K) = samples.question.constants.names, samples.question.constants.made_by
        samples.add("lipschitz", by_lipschitz(samples), L, by_L)
        samples.add("curvature", by_curvature(samples), K, by_K)
        samples.add("combined", by_both(samples), f"{K} with {L}", tuple(dict.fromkeys((*by_K, *by_L))))


@final
@dataclass(frozen=True)
class LipschitzRadius(AbstractCertificateMethod):
    """m / L, by one Lipschitz bound or the best of all."""

    name: str
    bound: str
    in_auto: bool = False
    way: str = "lipschitz"
    dear: bool = False

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply where the bound does."""
        return None if self.bound == "auto" else LIPSCHITZ_METHODS[self.bound].reason_to_skip(problem)

    @property
    def tables(self) -> Tables:
        """Lipschitz constants."""
        return Tables(L=self.bound)

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare nothing: every plan starts with the radii by constants."""
        return []


@final
@dataclass(frozen=True)
class CurvatureRadius(AbstractCertificateMethod):
    """The gradient and a curvature constant, by one bound."""

    name: str
    bound: str
    in_auto: bool = False
    way: str = "curvature"
    dear: bool = False

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply where the bound does."""
        return reason_without_curvature(problem) or CURVATURE_METHODS[self.bound].reason_to_skip(problem)

    @property
    def tables(self) -> Tables:
        """Curvature constants."""
        return Tables(K=self.bound)

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare nothing: every plan starts with the radii by constants."""
        return []
