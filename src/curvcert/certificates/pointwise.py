"""Margins and gradients at the samples, with bounds on their rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.drift import Reached, carry_gradients, carry_point
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.network import Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.norms import conjugate
from curvcert.operators import NormBounds
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Pointwise:
    """For each sample and class i: the margin f_y - f_i, rounded down, and ||grad (f_i - f_y)||, rounded up.

    `gradient` holds the computed gradients of f_i - f_y, None where there are none; their norms are inf then.
    """

    logits: Tensor
    label: Tensor
    correct: Tensor
    margin: Tensor
    gradient_norm: Tensor
    gradient: Tensor | None


def evaluate_points(
    network: Network,
    x: Tensor,
    y: Tensor | None,
    p: float,
    norms: NormBounds,
    deviations: Tensor,
    gradients: bool = True,
) -> Pointwise:
    """Evaluate a batch: one forward pass, and, if gradients are asked for, one Jacobian for all pairs of classes.

    `deviations` is what each pair's margin loses for the module's own departure from the network.
    """
    problem = Problem(network, p, p, Global(), scalars=True, norms=norms)
    evaluation = evaluate_with_error(network, x, norms)
    last = evaluation.output
    logits, error = last.value.flatten(1), last.error.flatten(1)
    label = logits.argmax(dim=1) if y is None else y
    own, own_error = logits.gather(1, label[:, None]), error.gather(1, label[:, None])
    gap = own - logits
    lost = own_error + error + 2 * UNIT_ROUNDOFF * gap.abs() + deviations[label]
    margin = gap - inflate(lost, gamma(4))
    margin = margin.scatter(1, label[:, None], torch.inf)
    correct = margin.amin(dim=1) > 0
    norm, gradient = torch.full_like(margin, torch.inf), None
    if gradients:
        norm, gradient = _gradient_norms(problem, carry_point(problem, evaluation), label)
    return Pointwise(logits, label, correct, margin, norm, gradient)


def _gradient_norms(problem: Problem, reached: list[Reached], label: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ||grad (f_i - f_y)||, inf without a derivative, and the gradients themselves."""
    covectors = carry_gradients(problem, reached)
    if covectors is None:
        shape = (len(label), problem.network.outputs)
        return torch.full(shape, torch.inf, dtype=torch.float64, device=label.device), None
    rows, drift = covectors[0].value.flatten(2), covectors[0].drift
    own = rows.gather(1, label[:, None, None].expand(-1, 1, rows.shape[2]))
    own_drift = drift.gather(1, label[:, None])
    difference = rows - own
    norm = norm_upper_bound_of_vectors(difference, conjugate(problem.p), 2)
    norm = inflate(norm * (1 + 4 * UNIT_ROUNDOFF) + drift + own_drift, gamma(8))
    return norm.scatter(1, label[:, None], 0.0), difference
