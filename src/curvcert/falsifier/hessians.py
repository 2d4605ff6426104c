r"""Second derivatives by ascent: the largest :math:`u \cdot D^2f(x)[v, d]` at a point, and differences of Jacobians.

As for slopes, every derivative is autograd's, through values.  u lies in the dual q-ball, v and d in the p-ball: each
is replaced in turn by the best one for the others (at p = q = 2 a power iteration, at p = inf a sign
iteration, at p = 1 the largest entry), while x climbs.  For scalar outputs the largest value is the Hessian's norm
as a form.  Differences of Jacobians need one derivative only, and see what jumps in the second.
"""

import torch
from torch import Tensor

from curvcert.falsifier.ascent import TINY, Ascended, Rows, derivative, known, stepped
from curvcert.norms import conjugate, steepest_direction, vector_norm

_NEAREST = 1e-3
_POLISH = 2
"""Rounds at the end in which only the directions are refined."""


def climb_hessians(rows: Rows, steps: int = 10, above: bool = False) -> Ascended:
    """Climb the second derivative at a point, within the balls; a ball of radius 0 is a point.

    With `above` the form is taken at one direction, v = d, with its sign: from below none is found.

    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> from curvcert.activations import TANH
    >>> x, none = torch.full((1, 1), 0.5, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    >>> rows = Rows(single_neuron(TANH, 1.0), 2.0, 2.0, x, x, none, torch.ones_like(x), free=False, seed=0)
    >>> 0.769 < float(climb_hessians(rows, steps=40).value) <= 0.769800358920
    True
    """
    best, x, u = Ascended.nothing(rows, quotient=False), rows.start, rows.covector
    v = d = rows.directions(2)
    scale = torch.where(rows.radius.isfinite(), rows.radius, 1 + x.flatten(1).abs().amax(dim=1))
    for k in range(steps + _POLISH):
        value, u, v, d, climb = _refined_above(rows, x, u, d) if above else _refined(rows, x, u, v, d)
        best = best.improved(value, x, v if above else d, u)
        if k < steps:
            step = stepped(climb, rows.directions(60 + k), scale * 0.4 * 0.8**k)
            x = rows.project(x + step.reshape(x.shape))
    return best


def _refined(rows: Rows, x: Tensor, u: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Improve u, v and d at x; return the value that they attain, them, and its gradient in x."""
    x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad((rows.network(x).flatten(1) * u).sum(), x, create_graph=True)
        g = g.flatten(1)
        v = known(steepest_direction(derivative((g * d).sum(), x), rows.p), v)
        hv = _product((g * v).sum(), x)
        d = known(steepest_direction(hv.detach(), rows.p), d)
        form = (hv * d).sum(dim=1)
        image = derivative(form.sum(), u)
        climb = derivative(form.sum(), x)
    if not rows.free:
        return form.detach(), u.detach(), v, d, climb
    value = vector_norm(image, rows.q, dim=1)
    return value, known(steepest_direction(image, conjugate(rows.q)), u.detach()), v, d, climb


def _refined_above(rows: Rows, x: Tensor, u: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the form at d, and a better d: by power iteration on the form with a multiple of the identity added."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        with torch.enable_grad():
            (g,) = torch.autograd.grad((rows.network(x).flatten(1) * u).sum(), x, create_graph=True)
            hd = _product((g.flatten(1) * d).sum(), x)
            form = (hd * d).sum(dim=1)
            climb = derivative(form.sum(), x)
        image, here = hd.detach(), d
        shift = vector_norm(image, 2, dim=1) / vector_norm(d, 2, dim=1).clamp(min=TINY)
        d = known(steepest_direction(image + shift[:, None] * d, rows.p), d)
    return form.detach(), u, here, d, climb


def _product(value: Tensor, x: Tensor) -> Tensor:
    """Return a gradient that can be differentiated again, flattened; zeros where there is none."""
    zero = torch.zeros_like(x).flatten(1).detach()
    if not value.requires_grad:
        return zero
    (found,) = torch.autograd.grad(value, x, create_graph=True, allow_unused=True)
    return zero if found is None else found.flatten(1)


def climb_jacobian_changes(rows: Rows, anchored: bool, steps: int = 10, above: bool = False) -> Ascended:
    """Climb the change of the Jacobian between two points over their distance; the first is fixed if anchored.

    With `above` it is the rise of the slope along the step between them that is climbed.

    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> from curvcert.activations import TANH
    >>> x, none = torch.zeros(1, 1, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    >>> rows = Rows(single_neuron(TANH, 1.0), 2.0, 2.0, x + 0.5, x, none, torch.ones_like(x), free=False, seed=0)
    >>> 0.58 < float(climb_jacobian_changes(rows, anchored=True, steps=40).value) < 0.5825829085
    True
    """
    best = Ascended.nothing(rows, quotient=True)
    x, y, u, v = rows.centre, rows.start, rows.covector, rows.directions(3)
    with torch.enable_grad():
        for k in range(steps):
            x, y, u = (z.detach().requires_grad_() for z in (x, y, u))
            change = _gradient(rows, y, u) - _gradient(rows, x, u)
            distance = vector_norm((y - x).flatten(1), rows.p, dim=1)
            along = (y - x).flatten(1) / distance[:, None].clamp(min=TINY)
            v = along if above else known(steepest_direction(change.detach(), rows.p), v)
            rise = (change * v).sum(dim=1)
            image = derivative(rise.sum(), u)
            value = vector_norm(image, rows.q, dim=1) if rows.free else rise.detach()
            counted = torch.where(distance < _NEAREST, 0.0, value / distance.clamp(min=TINY)).detach()
            chosen = known(steepest_direction(image, conjugate(rows.q)), u.detach()) if rows.free else u.detach()
            best = best.improved(counted, x.detach(), (y - x).detach(), chosen)
            quotient = (rise / distance.clamp(min=_NEAREST)).sum()
            length = (y - x).detach().flatten(1).abs().amax(dim=1) * 0.4 * 0.88**k
            by_y = stepped(derivative(quotient, y), rows.directions(80 + k), length).reshape(y.shape)
            by_x = None if anchored else stepped(derivative(quotient, x), rows.directions(90 + k), length)
            x = x.detach() if by_x is None else rows.project(x.detach() + by_x.reshape(x.shape))
            y, u = y.detach() + by_y, chosen
    return best


def _gradient(rows: Rows, x: Tensor, u: Tensor) -> Tensor:
    (found,) = torch.autograd.grad((rows.network(x).flatten(1) * u).sum(), x, create_graph=True)
    return found.flatten(1)
