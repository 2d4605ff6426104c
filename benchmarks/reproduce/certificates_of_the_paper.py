"""What the paper's method certifies, with sound norms: the radii that its constants (`paper_bounds.py`) give."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from benchmarks.reproduce.models import Subject
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature, paper_pair_lipschitz
from curvcert.bounds.lipschitz.problem import Problem, all_pairs, outputs_of
from curvcert.certificates.constants import pair_deviations, pair_table
from curvcert.certificates.pointwise import Pointwise, evaluate_points
from curvcert.certificates.radii import curvature_radius, lipschitz_radius
from curvcert.network import Block, Network

ANCHORED_CHEAPLY, ANCHORED_SUBSET = 256, 200
"""Beyond the first width, on a CPU, anchored constants are computed for so many samples only."""


def widest_layer(network: Network) -> int:
    """Return the number of neurons of the widest layer."""
    return max((block.W.out_size for block in network.blocks if isinstance(block, Block)), default=0)


@final
@dataclass(frozen=True, eq=False)
class Evaluator:
    """Margins and gradients of a network's samples, with what every pair's margin loses for rounding."""

    network: Network
    pairs: Problem
    deviations: Tensor

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor, gradients: bool = True) -> Pointwise:
        """Evaluate a batch."""
        return evaluate_points(outputs_of(self.pairs, self.network), x, y, self.deviations, gradients)


def evaluator(network: Network) -> Evaluator:
    """Prepare the evaluation of a network's samples in l2."""
    pairs = all_pairs(network, 2)
    return Evaluator(network, pairs, pair_table(pair_deviations(pairs), network))


def plain_radii(subject: Subject, batch: int = 250) -> tuple[Tensor, Tensor]:
    r"""Return the radii :math:`m / (\sqrt 2 L)` of the samples, 0 where misclassified, and which are correct.

    For a 1-Lipschitz network, whose L the paper's recursion gives too, this is what its authors certify by.
    """
    evaluate = evaluator(subject.network)
    L = paper_pair_lipschitz(PaperBounds(subject.network, evaluate.pairs.norms))
    parts = [
        evaluate(x, y, gradients=False) for x, y in zip(subject.x.split(batch), subject.y.split(batch), strict=True)
    ]
    radii = [_least(lipschitz_radius(points.margin, L.expand_as(points.margin)), points) for points in parts]
    return torch.cat(radii), torch.cat([points.correct for points in parts])


def _least(pairs: Tensor, points: Pointwise) -> Tensor:
    """Return the least radius over the classes beside the label; 0 for a sample that is misclassified."""
    least = pairs.scatter(1, points.label[:, None], torch.inf).amin(dim=1)
    return torch.where(points.correct, least, 0.0)


def paper_radii(subject: Subject, anchored: bool, batch: int = 250) -> tuple[Tensor, Tensor]:
    """Return the paper's certified radii, 0 where a sample is misclassified, and which samples are correct.

    The anchored ones are by its anchored recursion alone, which no theorem puts below the global one.
    """
    network, evaluate = subject.network, evaluator(subject.network)
    bounds = PaperBounds(network, evaluate.pairs.norms)
    K = paper_pair_curvature(bounds)
    radii, correct = [], []
    for x, y in zip(subject.x.split(batch), subject.y.split(batch), strict=True):
        points = evaluate(x, y)
        here = K.expand(len(x)).clone()
        if anchored and bool(points.correct.any()):
            here[points.correct] = paper_pair_curvature(bounds, x[points.correct])
        pair = curvature_radius(points.margin, points.gradient_norm, here[:, None].expand_as(points.margin))
        radii.append(_least(pair, points))
        correct.append(points.correct)
    return torch.cat(radii), torch.cat(correct)
