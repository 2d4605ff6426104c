r"""Attack certificates: a point that is misclassified, built from the gradient and a curvature constant.

Along the steepest direction of f_i - f_y the surrogate :math:`-m + g t - K t^2 / 2` is a lower bound, so beyond the
radius where it reaches 0 the class has changed.  That radius is a tie: the witness steps past it by the
smallest of a few factors that makes the misclassification clear, is brought into the box if one is given,
and is replayed.  Nothing is claimed that does not replay, and nothing that replays by luck: rounding differs from
batch to batch and from machine to machine, so the other class must lead by several times what it was here.

On ordinary networks the surrogate from x never reaches 0: K is too large for a step of that length.  From a point
nearer the boundary it does, with the same K, as less of a margin is left there.  So the ray is first walked to such a
point.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.boxes import Box
from curvcert.certificates.pointwise import Pointwise, evaluate_points
from curvcert.certificates.radii import attack_radius
from curvcert.network import Network
from curvcert.norms import steepest_direction
from curvcert.rounding import norm_upper_bound_of_vectors

_STEPS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 3e-2)
"""How far past the tie a witness may step, relative to its radius; the arithmetic of the model must see the step."""

_OTHER_ROUNDING = 4.0
"""How many times the rounding error seen here a witness's lead must exceed, so that it holds up elsewhere."""

_TRIED = (1.0, 1.25, 1.6, 2.2, 3.2, 5.0)
"""Where the class may have changed along the ray: multiples of margin over slope."""

_BACK = (1e-2, 1e-4, 1e-6)
"""How far before the crossing, relatively, the last point of a walk is: the larger K, the nearer it has to be."""

_CLOSER, _OFF_THE_ENDS = 10, 0.02
"""Points at which the crossing is closed in on, and how far they keep off the ends of its bracket."""


def attack_witnesses(
    network: Network, x: Tensor, points: Pointwise, K: Tensor, p: float, box: Box | None, way: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attack radii and witnesses: inf and NaN where none, 0 and x where already misclassified.

    `way` is the length that was walked to x: a step past the tie is relative to the whole of it.
    """
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
    best, way = best[todo], torch.zeros_like(best[todo]) if way is None else way[todo]
    least = torch.finfo(network.source_dtype).eps
    for step in (step for step in _STEPS if step == 0 or step > least):
        if len(todo) == 0:
            break
        scale = (best + step * (way + best)).reshape(-1, *(1,) * (x.dim() - 1))
        candidate = x[todo] + scale * direction
        if box is not None:
            candidate = box.part(todo).clamp(candidate)
        broken = _clearly_misclassified(network, candidate, points.label[todo])
        hit = todo[broken]
        witness[hit] = candidate[broken]
        radius[hit] = norm_upper_bound_of_vectors((candidate[broken] - x[hit]).flatten(1), p, 1)
        todo, direction, best, way = todo[~broken], direction[~broken], best[~broken], way[~broken]
    return radius, witness


def walked_witnesses(
    outputs: Problem, x: Tensor, points: Pointwise, K: Tensor, deviations: Tensor, box: Box | None
) -> tuple[Tensor, Tensor]:
    """Return attack radii and witnesses by certificates from points on the way; as `attack_witnesses`, which see.

    The way is the ray along which the margin of the nearest class falls the fastest.  `outputs` and `deviations` are
    those that `evaluate_points` takes, and K holds anywhere.
    """
    network, p = outputs.network, outputs.p
    radius, witness = torch.full_like(points.margin[:, 0], torch.inf), torch.full_like(x, torch.nan)
    if points.gradient is None:
        return radius, witness
    reach, target = (points.margin / points.gradient_norm).scatter(1, points.label[:, None], torch.inf).min(dim=1)
    todo = (points.correct & reach.isfinite() & (reach > 0)).nonzero().flatten()
    if len(todo) == 0:
        return radius, witness
    rows = points.gradient[todo, target[todo]]
    ray = _Ray(
        network, x[todo], points.label[todo], steepest_direction(rows, p), None if box is None else box.part(todo)
    )
    crossing = ray.crossing(reach[todo])
    for back in _BACK:
        left = (crossing.isfinite() & radius[todo].isinf()).nonzero().flatten()
        if len(left) == 0:
            break
        index, way = todo[left], (1 - back) * crossing
        near, own = ray.at(way.nan_to_num(posinf=0.0))[left], None if box is None else box.part(index)
        there = evaluate_points(outputs, near, points.label[index], deviations)
        found, shown = attack_witnesses(network, near, there, K[index], p, own, way[left])
        hit = there.correct & found.isfinite()
        witness[index[hit]] = shown[hit]
        radius[index[hit]] = norm_upper_bound_of_vectors((shown[hit] - x[index[hit]]).flatten(1), p, 1)
    return radius, witness


@dataclass(frozen=True, eq=False)
class _Ray:
    """Where the class changes along a direction of every sample, within the box."""

    network: Network
    x: Tensor
    label: Tensor
    direction: Tensor
    box: Box | None

    def at(self, distance: Tensor) -> Tensor:
        """Return the points at these distances."""
        points = self.x + (distance[:, None] * self.direction).reshape(self.x.shape)
        return points if self.box is None else self.box.clamp(points)

    def crossing(self, step: Tensor) -> Tensor:
        """Return distances just before the label loses its lead; inf where it leads as far as was tried."""
        low, before = torch.zeros_like(step), _lead(self.network(self.x).flatten(1), self.label)
        high, after = torch.full_like(step, torch.inf), torch.zeros_like(step)
        for times in _TRIED:
            at = torch.where(high.isinf(), times * step, high)
            lead = self._lead_at(at)
            crossed, first = lead > 0, high.isinf()
            high, after = torch.where(crossed & first, at, high), torch.where(crossed & first, lead, after)
            low, before = torch.where(crossed, low, at), torch.where(crossed, before, lead)
        for _ in range(_CLOSER):
            # Where the chord of the lead crosses 0, kept off the ends so that both of them move.
            weight = (before / (before - after)).nan_to_num(nan=0.5).clamp(_OFF_THE_ENDS, 1 - _OFF_THE_ENDS)
            at = low + weight * (high - low)
            lead = self._lead_at(at)
            crossed = lead > 0
            high, after = torch.where(crossed, at, high), torch.where(crossed, lead, after)
            low, before = torch.where(crossed, low, at), torch.where(crossed, before, lead)
        return torch.where(high.isinf(), torch.inf, low)

    def _lead_at(self, distance: Tensor) -> Tensor:
        return _lead(self.network(self.at(distance.nan_to_num(posinf=0.0))).flatten(1), self.label)


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
