"""A search for slopes above a bound: sampling, then gradient ascent.  Whatever it finds is attained.

Global and local slopes are norms of Jacobians, so that no quotient of nearly equal numbers enters.  A p -> q
norm is bounded from below by Boyd's power method, which returns a direction that attains what it claims.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network import Network
from curvcert.norms import conjugate, steepest_direction, vector_norm

ROUNDING = 2e-13
"""Relative rounding of a Jacobian of a small network, and of its norm."""

_NEAREST = 1e-2
_TINY = 1e-300


@dataclass(frozen=True)
class Search:
    """What to climb: a network's slope in p -> q, or of each output by itself."""

    network: Network
    p: float
    q: float
    scalars: bool = False
    steps: int = 20
    seed: int = 0

    def everywhere(self, starts: int = 24) -> Tensor:
        """Return the largest slope found anywhere: one, or one per output."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(starts, *self.network.in_shape, dtype=torch.float64, generator=generator)
        x = x * torch.logspace(-1.5, 1.0, starts, dtype=torch.float64).reshape(-1, *(1,) * len(self.network.in_shape))
        scale = 1 + x.flatten(1).abs().amax(dim=1)
        return self._climb(x, scale, lambda y: y).amax(dim=0)

    def in_balls(self, centres: Tensor, radius: Tensor, starts: int = 6) -> Tensor:
        """Return the largest slope found in each ball: (batch,) or (batch, outputs)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = centres.repeat_interleave(starts, dim=0)
        r = radius.repeat_interleave(starts) * (1 - 1e-12)

        def project(y: Tensor) -> Tensor:
            step = (y - x).flatten(1)
            length = vector_norm(step, self.p, dim=1)
            return x + (step * (r / length.clamp(min=_TINY)).clamp(max=1.0)[:, None]).reshape(x.shape)

        noise = torch.randn(x.shape, dtype=torch.float64, generator=generator) * r.reshape(-1, *(1,) * (x.dim() - 1))
        noise[::starts] = 0.0
        found = self._climb(project(x + noise), r, project)
        return found.unflatten(0, (len(centres), starts)).amax(dim=1)

    def from_anchors(self, anchors: Tensor, starts: int = 8) -> Tensor:
        """Return the largest quotient found from each anchor, less its rounding: (batch,) or (batch, outputs)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = anchors.repeat_interleave(starts, dim=0)
        reach = torch.logspace(-1, 1.5, starts, dtype=torch.float64).repeat(len(anchors))
        reach = reach.reshape(-1, *(1,) * (x.dim() - 1))
        y = x + reach * torch.randn(x.shape, dtype=torch.float64, generator=generator)
        best = slopes(self.network, x, self.p, self.q, self.scalars)
        for k in range(self.steps):
            y = y.detach().requires_grad_()
            quotient, slack = self._quotients(x, y)
            best = torch.maximum(best, (quotient - slack).detach())
            (gradient,) = torch.autograd.grad(self._target(quotient).sum(), y)
            step = (y - x).detach().flatten(1).abs().amax(dim=1) * 0.5 * 0.9**k
            y = y.detach() + _scaled(gradient, step)
        return best.unflatten(0, (len(anchors), starts)).amax(dim=1)

    def _quotients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self.network(x).flatten(1), self.network(y).flatten(1)
        distance = vector_norm((y - x).flatten(1), self.p, dim=1)
        rise = (end - start).abs() if self.scalars else vector_norm(end - start, self.q, dim=1)
        safe = distance.clamp(min=_NEAREST)
        size = 1 + start.abs().sum(dim=1) + end.abs().sum(dim=1)
        # Nearer than that, the quotient is all rounding: it counts for nothing.
        slack = torch.where(distance < _NEAREST, torch.inf, ROUNDING * size / safe)
        return (rise / (safe[:, None] if self.scalars else safe)), (slack[:, None] if self.scalars else slack).detach()

    def _climb(self, x: Tensor, scale: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        best = slopes(self.network, x, self.p, self.q, self.scalars)
        for k in range(self.steps):
            x = x.detach().requires_grad_()
            value = slopes(self.network, x, self.p, self.q, self.scalars)
            best = torch.maximum(best, value.detach())
            target = self._target(value).sum()
            if not target.requires_grad:
                return best
            (gradient,) = torch.autograd.grad(target, x)
            x = project(x.detach() + _scaled(gradient, scale * 0.5 * 0.85**k))
        return best

    def _target(self, value: Tensor) -> Tensor:
        """Return what each start climbs: its slope, or that of one output, each start another."""
        if not self.scalars:
            return value
        index = torch.arange(len(value)) % value.shape[1]
        return value.gather(1, index[:, None])


def slopes(network: Network, x: Tensor, p: float, q: float, scalars: bool) -> Tensor:
    """Return a lower bound on ||Df(x)||_{p->q} for each x, or ||Df_i(x)||_{p*} for each x and output i."""
    J = network.jacobian(x).flatten(2)
    if scalars:
        return vector_norm(J, conjugate(p), dim=2)
    d = boyd_direction(J.detach(), p, q)
    image = (J @ d[..., None]).squeeze(-1)
    return vector_norm(image, q, dim=1) / vector_norm(d, p, dim=1).clamp(min=_TINY)


def boyd_direction(J: Tensor, p: float, q: float, steps: int = 15) -> Tensor:
    """Return directions d, one per matrix, with a large ||J d||_q / ||d||_p, by Boyd's power method from each row."""
    batch, outputs, n = J.shape
    d = steepest_direction(J, p).reshape(batch, outputs, n)
    d = torch.where(d.abs().sum(dim=-1, keepdim=True) > 0, d, torch.ones_like(d))
    for _ in range(steps):
        image = torch.einsum("bij,bkj->bki", J, d)
        u = steepest_direction(image, conjugate(q))
        following = steepest_direction(torch.einsum("bij,bki->bkj", J, u), p)
        d = torch.where(following.abs().sum(dim=-1, keepdim=True) > 0, following, d)
    image = torch.einsum("bij,bkj->bki", J, d)
    quotient = vector_norm(image, q, dim=2) / vector_norm(d, p, dim=2).clamp(min=_TINY)
    return d[torch.arange(batch), quotient.argmax(dim=1)]


def _scaled(gradient: Tensor, length: Tensor) -> Tensor:
    """Return the gradients with the given largest entries; those that vanish stay zero."""
    gradient = gradient.nan_to_num(0.0)
    peak = gradient.flatten(1).abs().amax(dim=1).clamp(min=_TINY)
    return gradient * (length / peak).reshape(-1, *(1,) * (gradient.dim() - 1)).nan_to_num(0.0, posinf=0.0)
