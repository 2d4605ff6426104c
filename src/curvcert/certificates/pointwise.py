"""Margins and gradients at the samples, with bounds on their rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_points
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.propagation.analysis import AtPoints
from curvcert.rounding import UNIT_ROUNDOFF, Upper


@dataclass(frozen=True, eq=False)
class Pointwise:
    """For each sample and class i: the margin f_y - f_i, rounded down, and ||grad (f_i - f_y)||, rounded up.

    `gradient` holds the computed gradients of f_i - f_y, None where there are none; their norms are inf then.  `at` is
    what else holds at the samples: their one evaluation.
    """

    at: AtPoints
    logits: Tensor
    label: Tensor
    correct: Tensor
    margin: Tensor
    gradient_norm: Tensor
    gradient: Tensor | None


def evaluate_points(
    outputs: Problem, x: Tensor, y: Tensor | None, deviations: Tensor, gradients: bool = True
) -> Pointwise:
    """Evaluate a batch: one forward pass, and, if gradients are asked for, one Jacobian for all pairs of classes.

    `outputs` is the problem of the classes, each a scalar; `deviations` is what each pair's margin loses for the
    module's own departure from the network.
    """
    at = at_points(outputs, x)
    last = at.evaluation.output
    logits, error = last.value.flatten(1), last.error.flatten(1)
    label = logits.argmax(dim=1) if y is None else y
    own, own_error = logits.gather(1, label[:, None]), error.gather(1, label[:, None])
    gap = own - logits
    lost = Upper(own_error) + error + 2 * UNIT_ROUNDOFF * gap.abs() + deviations[label]
    margin = gap - lost.bound
    margin = margin.scatter(1, label[:, None], torch.inf)
    correct = margin.amin(dim=1) > 0
    norm, gradient = torch.full_like(margin, torch.inf), None
    if gradients:
        norm, gradient = _gradient_norms(at, outputs.p, label)
    return Pointwise(at, logits, label, correct, margin, norm, gradient)


def _gradient_norms(at: AtPoints, p: float, label: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ||grad (f_i - f_y)||, inf without a derivative, and the gradients themselves."""
    outputs, device = at.facts.network.outputs, label.device
    if at.gradients is None:
        return torch.full((len(label), outputs), torch.inf, dtype=torch.float64, device=device), None
    found = at.gradients[0].differences(label, torch.arange(outputs, device=device).expand(len(label), -1))
    return found.largest(p).scatter(1, label[:, None], 0.0), found.value.flatten(2)
