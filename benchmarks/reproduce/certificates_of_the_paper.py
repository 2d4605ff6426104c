r"""What the paper's method certifies, with sound norms: its constants for pairs of classes, and the radii they give.

The paper bounds the vector f by its Algorithm 1 with the block bound `prop:analyticalSdp`; since
:math:`f_i - f_j = (e_i - e_j)^T f`, a pair's constant is :math:`\sqrt 2` times that.
"""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from benchmarks.reproduce.models import Subject
from curvcert.bounds.curvature import Compositional
from curvcert.bounds.curvature.portfolio import curvature_of
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.lipschitz.problem import Problem, all_pairs, make_problem, outputs_of
from curvcert.certificates.constants import pair_deviations, pair_table
from curvcert.certificates.pointwise import Pointwise, evaluate_points
from curvcert.certificates.radii import curvature_radius
from curvcert.network import Block, Network
from curvcert.operators import NormBounds
from curvcert.rounding import inflate

SQRT_2_ABOVE = math.nextafter(math.sqrt(2), 2)
ANCHORED_CHEAPLY, ANCHORED_SUBSET = 256, 200
"""Beyond the first width, on a CPU, anchored constants are computed for so many samples only."""


def paper_pair_curvature(network: Network, at: Tensor | None = None, norms: NormBounds | None = None) -> Tensor:
    r"""Bound the curvature of every pair as the paper does: :math:`\sqrt 2 K`, globally or anchored at each sample.

    Norms of the network that are known from another bound are not computed again.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).eval()
    >>> _ = nn.init.constant_(model[0].weight, 3.0)
    >>> K = paper_pair_curvature(trace(model, torch.zeros(1, 1)))
    >>> round(float(K) / (9 * 4 / 27**0.5), 9) == round(2**0.5, 9)
    True
    """
    method = Compositional(["sdp"]) if at is None else "anchored"
    problem = make_problem(network, 2, None, at, None, None, None)
    problem = problem if norms is None else replace(problem, norms=norms)
    return inflate(SQRT_2_ABOVE * curvature_of(problem, method).value, 0.0)


def paper_pair_lipschitz(network: Network) -> Tensor:
    r"""Bound the Lipschitz constant of every pair as the paper does: :math:`\sqrt 2 L` with L of the vector f."""
    return inflate(SQRT_2_ABOVE * lipschitz(network, method="liplt").value, 0.0)


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
    def __call__(self, x: Tensor, y: Tensor) -> Pointwise:
        """Evaluate a batch."""
        return evaluate_points(outputs_of(self.pairs, self.network), x, y, self.deviations)


def evaluator(network: Network) -> Evaluator:
    """Prepare the evaluation of a network's samples in l2."""
    pairs = all_pairs(network, 2)
    return Evaluator(network, pairs, pair_table(pair_deviations(pairs), network))


def paper_radii(subject: Subject, anchored: bool, batch: int = 250) -> tuple[Tensor, Tensor]:
    """Return the paper's certified radii, 0 where a sample is misclassified, and which samples are correct."""
    network, evaluate = subject.network, evaluator(subject.network)
    norms = evaluate.pairs.norms
    K = paper_pair_curvature(network, norms=norms)
    radii, correct = [], []
    for x, y in zip(subject.x.split(batch), subject.y.split(batch), strict=True):
        points = evaluate(x, y)
        here = K.expand(len(x)).clone()
        if anchored and bool(points.correct.any()):
            here[points.correct] = torch.minimum(paper_pair_curvature(network, x[points.correct], norms), K)
        pair = curvature_radius(points.margin, points.gradient_norm, here[:, None].expand_as(points.margin))
        least = pair.scatter(1, y[:, None], torch.inf).amin(dim=1)
        radii.append(torch.where(points.correct, least, 0.0))
        correct.append(points.correct)
    return torch.cat(radii), torch.cat(correct)
