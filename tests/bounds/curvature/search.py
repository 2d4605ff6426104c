"""A search for curvature above a bound, by ascent on second derivatives and on quotients; what it finds is attained.

Second derivatives come from autograd through the network's values, not from the formulas that the bounds use.
The value at x is the trilinear form u . D2f(x)[v, d] with u in the dual q-ball and v, d in the p-ball: each
factor is replaced in turn by the best one for the other two (at p = q = 2 a power iteration, at p = inf a sign
iteration, at p = 1 the largest entry), and x climbs.  Every number returned is attained by some u, v, d.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network import Network
from curvcert.norms import conjugate, steepest_direction, vector_norm

ROUNDING = 1e-12
"""Relative rounding of a second derivative of a small network, and of its norm."""

_NEAREST = 1e-2
_TINY = 1e-300

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CurvatureSearch:
    """What to climb: the curvature of a network in p -> q, or of each output by itself."""

    network: Network
    p: float
    q: float
    scalars: bool = False
    steps: int = 12
    seed: int = 0

    def everywhere(self, starts: int = 16) -> Tensor:
        """Return the largest second derivative found anywhere: one number, or one per output."""
        x = self._noise(starts, self._rows * starts)
        scale = torch.logspace(-1.5, 0.7, starts, dtype=torch.float64).repeat_interleave(self._rows)
        x = x * _column(scale, x)
        return self._climb(x, 1 + x.flatten(1).abs().amax(dim=1), lambda y: y).amax(dim=0)

    def in_balls(self, centres: Tensor, radius: Tensor, starts: int = 4) -> Tensor:
        """Return the largest second derivative found in each ball: (batch,) or (batch, outputs)."""
        rows = self._rows * starts
        x = centres.repeat_interleave(rows, dim=0)
        r = radius.repeat_interleave(rows) * (1 - 1e-12)

        def project(y: Tensor) -> Tensor:
            step = (y - x).flatten(1)
            length = vector_norm(step, self.p, dim=1)
            return x + (step * (r / length.clamp(min=_TINY)).clamp(max=1.0)[:, None]).reshape(x.shape)

        noise = self._noise(len(centres) * starts, len(x)) * _column(r, x)
        noise[: self._rows] = 0.0
        found = self._climb(project(x + noise), r, project)
        return found.unflatten(0, (len(centres), starts)).amax(dim=1)

    def from_anchors(self, anchors: Tensor, starts: int = 8) -> Tensor:
        """Return the largest quotient of Jacobians found from each anchor: (batch,) or (batch, outputs)."""
        x = anchors.repeat_interleave(self._rows * starts, dim=0)
        y = x + self._reach(len(anchors), starts, x) * self._noise(len(anchors) * starts, len(x))
        found = self._climb_quotient(x, y, lambda x, y: (x, y), move_x=False)
        at = self._climb(x, torch.zeros(len(x), dtype=torch.float64), lambda y: y)
        return torch.maximum(found, at).unflatten(0, (len(anchors), starts)).amax(dim=1)

    def quotients(self, starts: int = 16) -> Tensor:
        """Return the largest quotient of Jacobians found between any two points: needs only one derivative."""
        x = self._noise(starts, self._rows * starts)
        x = x * _column(torch.logspace(-1.5, 0.5, starts, dtype=torch.float64).repeat_interleave(self._rows), x)
        y = x + self._reach(1, starts, x) * self._noise(starts, len(x), 1)
        return self._climb_quotient(x, y, lambda x, y: (x, y), move_x=True).amax(dim=0)

    @property
    def _rows(self) -> int:
        return self.network.outputs if self.scalars else 1

    def _noise(self, starts: int, total: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 7919 * salt)
        noise = torch.randn(starts, *self.network.in_shape, dtype=torch.float64, generator=generator)
        return noise.repeat_interleave(total // starts, dim=0)

    def _reach(self, batch: int, starts: int, like: Tensor) -> Tensor:
        reach = torch.logspace(-1.3, 1.0, starts, dtype=torch.float64).repeat_interleave(self._rows).repeat(batch)
        return _column(reach, like)

    def _covectors(self, count: int) -> Tensor:
        """Return the first u: one output each in turn if they are scalars, all of them alike if not."""
        if self.scalars:
            return torch.eye(self.network.outputs, dtype=torch.float64).repeat(count // self.network.outputs, 1)
        return torch.ones(count, self.network.outputs, dtype=torch.float64)

    def _climb(self, x: Tensor, scale: Tensor, project: Project) -> Tensor:
        u = self._covectors(len(x))
        v = steepest_direction(
            self._noise(1, len(x), 2).flatten(1) + 0.1 * self._noise(len(x), len(x), 3).flatten(1), self.p
        )
        d = v
        best = x.new_zeros(len(x))
        for k in range(self.steps):
            value, u, v, d, gradient = self._refined(x, u, v, d)
            best = torch.maximum(best, value)
            x = project(x + _scaled(gradient.reshape(x.shape), scale * 0.4 * 0.8**k))
        for _ in range(3):
            value, u, v, d, _ = self._refined(x, u, v, d)
            best = torch.maximum(best, value)
        return best.unflatten(0, (-1, self._rows)) if self.scalars else best

    def _refined(self, x: Tensor, u: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Improve u, v and d at x; return the value that they attain, them, and the gradient of the value in x."""
        x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
        (g,) = torch.autograd.grad((self.network(x).flatten(1) * u).sum(), x, create_graph=True)
        g = g.flatten(1)
        if not g.requires_grad:
            return x.new_zeros(len(x)), u.detach(), v, d, torch.zeros_like(g)
        d = _or(steepest_direction(_grad((g * v).sum(), x), self.p), d)
        v = _or(steepest_direction(_grad((g * d).sum(), x), self.p), v)
        (hv,) = torch.autograd.grad((g * v).sum(), x, create_graph=True, allow_unused=True)
        if hv is None:
            return x.new_zeros(len(x)), u.detach(), v, d, torch.zeros_like(g)
        hv = hv.flatten(1)
        d = _or(steepest_direction(hv.detach(), self.p), d)
        form = (hv * d).sum(dim=1)
        if not form.requires_grad:
            return form.detach().abs(), u.detach(), v, d, torch.zeros_like(g)
        by_x, w = torch.autograd.grad(form.sum(), (x, u), allow_unused=True)
        gradient = torch.zeros_like(g) if by_x is None else by_x.flatten(1).nan_to_num(0.0)
        if self.scalars or w is None:
            return form.detach(), u.detach(), v, d, gradient
        value = vector_norm(w.detach(), self.q, dim=1)
        return value, _or(steepest_direction(w.detach(), conjugate(self.q)), u.detach()), v, d, gradient

    def _climb_quotient(
        self, x: Tensor, y: Tensor, project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], move_x: bool
    ) -> Tensor:
        u = self._covectors(len(x))
        v = steepest_direction(self._noise(len(x), len(x), 4).flatten(1), self.p)
        best = x.new_zeros(len(x))
        for k in range(self.steps):
            x, y, u = x.detach().requires_grad_(), y.detach().requires_grad_(), u.detach().requires_grad_()
            change, size = self._change(x, y, u)
            v = _or(steepest_direction(change.detach(), self.p), v)
            distance = vector_norm((y - x).flatten(1), self.p, dim=1)
            rise = (change * v).sum(dim=1)
            if not rise.requires_grad:
                break
            (w,) = torch.autograd.grad(rise.sum(), u, retain_graph=True)
            value = rise.detach() if self.scalars else vector_norm(w.detach(), self.q, dim=1)
            # Nearer than that, the quotient is all rounding: it counts for nothing.
            value = (value - ROUNDING * size) / distance.detach().clamp(min=_TINY)
            best = torch.maximum(best, torch.where(distance.detach() < _NEAREST, 0.0, value))
            by_x, by_y = torch.autograd.grad((rise / distance.clamp(min=_NEAREST)).sum(), (x, y))
            step = (y - x).detach().flatten(1).abs().amax(dim=1) * 0.4 * 0.85**k
            if not self.scalars:
                u = _or(steepest_direction(w.detach(), conjugate(self.q)), u.detach())
            y = y.detach() + _scaled(by_y, step)
            x = x.detach() + _scaled(by_x, step) if move_x else x.detach()
            x, y = project(x, y)
        return best.unflatten(0, (-1, self._rows)) if self.scalars else best

    def _change(self, x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the difference of the gradients of u . f, and the size that its rounding is relative to."""
        at_x, at_y = (
            torch.autograd.grad((self.network(z).flatten(1) * u).sum(), z, create_graph=True)[0].flatten(1)
            for z in (x, y)
        )
        return at_y - at_x, (at_x.abs() + at_y.abs()).sum(dim=1).detach()


def _grad(value: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x).flatten(1) if found is None else found.flatten(1)


def _or(found: Tensor, otherwise: Tensor) -> Tensor:
    """Return the directions found, or the old ones where none was (a zero, or NaN)."""
    good = found.isfinite().all(dim=1, keepdim=True) & (found.abs().sum(dim=1, keepdim=True) > 0)
    return torch.where(good, found, otherwise)


def _column(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.reshape(-1, *(1,) * (like.dim() - 1))


def _scaled(gradient: Tensor, length: Tensor) -> Tensor:
    """Return the gradients with the given largest entries; those that vanish stay zero."""
    gradient = gradient.nan_to_num(0.0)
    peak = gradient.flatten(1).abs().amax(dim=1).clamp(min=_TINY)
    return gradient * _column(length / peak, gradient).nan_to_num(0.0, posinf=0.0)
