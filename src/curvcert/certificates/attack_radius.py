r"""Attack certificates: a point that is misclassified, built from the gradient and a curvature constant.

Along the steepest direction of f_i - f_y the surrogate :math:`-m + g t - K t^2 / 2` is a lower bound, so beyond the
radius where it reaches 0 the class has changed.  That radius is a tie: the witness steps past it by the
smallest of a few factors that makes the misclassification clear, is brought into the box if one is given,
and is replayed.  Nothing is claimed that does not replay, and nothing that replays by luck: rounding differs from
batch to batch and from machine to machine, so the other class must lead by several times what it was here.
"""

import torch
from torch import Tensor

from curvcert.boxes import Box
from curvcert.certificates.pointwise import Pointwise
from curvcert.certificates.radii import attack_radius
from curvcert.network import Network
from curvcert.norms import steepest_direction
from curvcert.rounding import norm_upper_bound_of_vectors

_STEPS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 3e-2)
"""How far past the tie a witness may step, relative to its radius; the arithmetic of the model must see the step."""

_OTHER_ROUNDING = 4.0
"""How many times the rounding error seen here a witness's lead must exceed, so that it holds up elsewhere."""


def attack_witnesses(
    network: Network, x: Tensor, points: Pointwise, K: Tensor, p: float, box: Box | None
) -> tuple[Tensor, Tensor]:
    """Return attack radii and witnesses: inf and NaN where none, 0 and x where already misclassified."""
    radius = torch.where(points.correct, torch.inf, 0.0).to(torch.float64)
    witness = torch.where(points.correct.reshape(-1, *(1,) * (x.dim() - 1)), torch.nan, x)
    if points.gradient is None:
        return radius, witness
    # The margin's upper side: what was taken off for rounding goes back on twice over.
    own = points.logits.gather(1, points.label[:, None])
    margin = (own - points.logits) + ((own - points.logits) - points.margin).clamp(min=0.0, max=1.0)
    reach = attack_radius(margin, points.gradient_norm, K).scatter(1, points.label[:, None], torch.inf)
    best, target = reach.min(dim=1)
    todo = (best.isfinite() & points.correct).nonzero().flatten()
    rows = points.gradient[todo, target[todo]]
    direction = steepest_direction(rows, p).reshape(len(todo), *network.in_shape)
    least = torch.finfo(network.source_dtype).eps
    for step in (step for step in _STEPS if step == 0 or step > least):
        if len(todo) == 0:
            break
        scale = (best[todo] * (1 + step)).reshape(-1, *(1,) * (x.dim() - 1))
        candidate = x[todo] + scale * direction
        if box is not None:
            candidate = box.part(todo).clamp(candidate)
        broken = _clearly_misclassified(network, candidate, points.label[todo])
        hit = todo[broken]
        witness[hit] = candidate[broken]
        radius[hit] = norm_upper_bound_of_vectors((candidate[broken] - x[hit]).flatten(1), p, 1)
        todo, direction = todo[~broken], direction[~broken]
    return radius, witness


def replays(network: Network, points: Tensor, label: Tensor) -> Tensor:
    """Tell which points are strictly misclassified, in float64 and in the arithmetic of the model's own dtype."""
    strict = _lead(network(points).flatten(1), label) > 0
    if network.source_dtype == torch.float64 or not bool(strict.any()):
        return strict
    return strict & (_lead(network.in_source_dtype(points).flatten(1).double(), label) > 0)


def _clearly_misclassified(network: Network, points: Tensor, label: Tensor) -> Tensor:
    """Tell which points are misclassified by more than rounding: these replay elsewhere too.

    What the logits of the model's own arithmetic are off from those of float64 is what rounding did here.
    """
    exact, own = network(points).flatten(1), network.in_source_dtype(points).flatten(1).double()
    off = (own - exact).abs().amax(dim=1)
    least = torch.finfo(network.source_dtype).eps * exact.abs().amax(dim=1)
    return _lead(exact, label) > _OTHER_ROUNDING * torch.maximum(off, least)


def _lead(logits: Tensor, label: Tensor) -> Tensor:
    """Return by how much the best of the other classes is above the label."""
    others = logits.scatter(1, label[:, None], -torch.inf)
    return others.amax(dim=1) - logits.gather(1, label[:, None]).squeeze(1)
