"""Projected gradient ascent on the margin: the search that tells how far a certificate is from the truth."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.boxes import Box, BoxSides
from curvcert.errors import InvalidInput
from curvcert.norms import validate_p, vector_norm

Classifier = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Attack:
    """What an attack found: which samples broke, and the broken points (NaN where none)."""

    broken: Tensor
    points: Tensor


def pgd(
    classifier: Classifier,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    p: float = 2,
    steps: int = 100,
    restarts: int = 10,
    box: BoxSides | Box | None = None,
    seed: int = 0,
) -> Attack:
    r"""Search the p-ball of radius eps about each x for a point that is not classified as y.

    Ascends :math:`\max_{i \ne y} f_i - f_y` by normalised gradients (signs for p = inf, the largest coordinates
    for p = 1), with steps that shrink from eps to eps/steps; the first start is x itself, the others are random.
    Samples leave the search once broken.  Deterministic by seed; no global random state is touched.  With a box, no
    point leaves it, so x must lie in it; its sides are numbers, or tensors of the shape of an input or of x.

    >>> linear = lambda x: torch.stack([x[:, 0], -x[:, 0]], dim=1)
    >>> attack = pgd(linear, torch.tensor([[0.5], [0.5]]), torch.tensor([0, 0]), torch.tensor([0.4, 0.6]), restarts=1)
    >>> attack.broken
    tensor([False,  True])
    """
    p = validate_p(p)
    if p not in (1.0, 2.0, math.inf):
        raise InvalidInput(f"pgd covers p = 1, 2 and inf, got {p:g}.")
    if steps < 1 or restarts < 1:
        raise InvalidInput(f"pgd needs at least one step and one restart, got {steps} and {restarts}.")
    radius = _radii(eps, x)
    inside = _box_around(x, box)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    points = torch.full_like(x, torch.nan)
    _require_labels(classifier(x[:1]), x, y)
    broken = _objective(classifier, x, y) > 0
    points[broken] = x[broken]
    for restart in range(restarts):
        todo = (~broken).nonzero().flatten()
        if len(todo) == 0:
            break
        start = torch.zeros_like(x[todo])
        if restart > 0:
            noise = torch.randn(start.shape, generator=generator, dtype=torch.float64).to(start)
            start = _project(noise * _column(radius[todo], start), radius[todo], p)
        found, where = _climb(
            classifier, x[todo], y[todo], radius[todo], start, p, steps, inside if inside is None else inside.part(todo)
        )
        points[todo[found]] = where[found]
        broken[todo[found]] = True
    return Attack(broken, points)


def _radii(eps: float | Tensor, x: Tensor) -> Tensor:
    radius = torch.as_tensor(eps, dtype=x.dtype, device=x.device)
    if radius.shape not in ((), (len(x),)) or not bool((radius >= 0).all()):
        raise InvalidInput(f"eps is one radius of at least 0, or one per sample ({len(x)}), got {eps!r}.")
    return radius.expand(len(x))


def _box_around(x: Tensor, box: BoxSides | Box | None) -> Box | None:
    if box is None:
        return None
    found = Box.of(box, x.shape[1:])
    if not bool(found.contains(x).all()):
        raise InvalidInput(
            f"x lies in {float(x.min()):g} .. {float(x.max()):g}, outside of the box {found}. Pass that of the inputs."
        )
    return found


def _require_labels(logits: Tensor, x: Tensor, y: Tensor) -> None:
    if y.shape != (len(x),) or y.dtype.is_floating_point or y.dtype in (torch.bool, torch.complex64):
        raise InvalidInput(f"y is one whole number per sample ({len(x)}), got shape {tuple(y.shape)} of {y.dtype}.")
    classes = logits.shape[1]
    if bool(((y < 0) | (y >= classes)).any()):
        raise InvalidInput(f"Labels lie in 0 .. {classes - 1}, got {int(y.min())} .. {int(y.max())}.")


def _climb(
    classifier: Classifier,
    x: Tensor,
    y: Tensor,
    radius: Tensor,
    delta: Tensor,
    p: float,
    steps: int,
    box: Box | None,
) -> tuple[Tensor, Tensor]:
    found = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    best = torch.full_like(x, torch.nan)
    for step in range(steps):
        with torch.enable_grad():
            point = _boxed(x + delta, box).detach().requires_grad_()
            value = _objective(classifier, point, y)
            (gradient,) = torch.autograd.grad(value.sum(), point)
        hit = (value > 0) & ~found
        best[hit], found = point.detach()[hit], found | hit
        if bool(found.all()):
            break
        size = radius * max(2.0 * (1 - step / steps), 1.0 / steps) * 0.5
        delta = point.detach() - x + _column(size, x) * _ascent(gradient, p)
        delta = _boxed(x + _project(delta, radius, p), box) - x
    last = _boxed(x + delta, box)
    hit = (_objective(classifier, last, y) > 0) & ~found
    best[hit] = last[hit]
    return found | hit, best


def _objective(classifier: Classifier, x: Tensor, y: Tensor) -> Tensor:
    logits = classifier(x)
    own = logits.gather(1, y[:, None]).squeeze(1)
    return logits.scatter(1, y[:, None], -torch.inf).amax(dim=1) - own


def _ascent(gradient: Tensor, p: float) -> Tensor:
    flat = gradient.flatten(1)
    if math.isinf(p):
        direction = flat.sign()
    elif p == 2:
        direction = flat / vector_norm(flat, 2, dim=1).clamp(min=1e-30)[:, None]
    else:
        # In l1 a step goes into the few steepest coordinates.
        k = max(1, flat.shape[1] // 100)
        top = flat.abs().topk(k, dim=1).indices
        direction = torch.zeros_like(flat).scatter(1, top, flat.gather(1, top).sign() / k)
    return direction.reshape(gradient.shape)


def _project(delta: Tensor, radius: Tensor, p: float) -> Tensor:
    """Return the nearest point of the p-ball, in l2."""
    flat = delta.flatten(1)
    if math.isinf(p):
        projected = torch.maximum(torch.minimum(flat, radius[:, None]), -radius[:, None])
    elif p == 2:
        length = vector_norm(flat, 2, dim=1)
        projected = flat * (radius / length.clamp(min=1e-30)).clamp(max=1.0)[:, None]
    else:
        projected = _project_l1(flat, radius)
    return projected.reshape(delta.shape)


def _project_l1(flat: Tensor, radius: Tensor) -> Tensor:
    """Project onto the l1 ball by soft thresholding (Duchi et al. 2008)."""
    size = flat.abs()
    ordered = size.sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - radius[:, None]
    count = torch.arange(1, flat.shape[1] + 1, device=flat.device)
    rho = (ordered * count > excess).sum(dim=1, keepdim=True).clamp(min=1)
    threshold = (excess.gather(1, rho - 1) / rho).clamp(min=0.0)
    shrunk = flat.sign() * (size - threshold).clamp(min=0.0)
    return torch.where(size.sum(dim=1, keepdim=True) <= radius[:, None], flat, shrunk)


def _boxed(x: Tensor, box: Box | None) -> Tensor:
    return x if box is None else box.clamp(x)


def _column(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *(1,) * (like.dim() - 1))
