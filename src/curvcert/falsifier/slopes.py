r"""Slopes by ascent: the largest :math:`|u \cdot Df(x) v|` at a point, and :math:`|u \cdot (f(y) - f(x))|` between two.

All derivatives are autograd's, through the network's values: nothing here knows the formulas of the bounds.  u is
in the dual q-ball and v in the p-ball; each is replaced in turn by the best one for the other (Boyd's power
method), while x climbs.  Every number returned is attained, up to rounding.
"""

import torch

from curvcert.falsifier.ascent import TINY, Ascended, Rows, derivative, known, stepped
from curvcert.norms import conjugate, steepest_direction, vector_norm

_NEAREST = 1e-3


def climb_slopes(rows: Rows, steps: int = 10) -> Ascended:
    """Climb the slope at a point, within the balls.

    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> from curvcert.activations import TANH
    >>> x, none = torch.full((1, 1), 0.5, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    >>> rows = Rows(single_neuron(TANH, 3.0), 2.0, 2.0, x, x, none, torch.ones_like(x), free=False, seed=0)
    >>> 2.99 < float(climb_slopes(rows, steps=40).value) <= 3.0
    True
    """
    best, x, u = Ascended.nothing(rows, quotient=False), rows.start, rows.covector
    v = rows.directions(1)
    scale = _scale(rows)
    with torch.enable_grad():
        for k in range(steps):
            x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
            (g,) = torch.autograd.grad((rows.network(x).flatten(1) * u).sum(), x, create_graph=True)
            v = known(steepest_direction(g.detach().flatten(1), rows.p), v)
            slope = (g.flatten(1) * v).sum(dim=1)
            image = derivative(slope.sum(), u)
            value = vector_norm(image, rows.q, dim=1) if rows.free else slope.detach()
            u = known(steepest_direction(image, conjugate(rows.q)), u.detach()) if rows.free else u.detach()
            best = best.improved(value, x.detach(), v, u)
            climb = derivative(slope.sum(), x)
            step = stepped(climb, rows.directions(20 + k), scale * 0.5 * 0.85**k)
            x = rows.project(x.detach() + step.reshape(x.shape))
    return best


def climb_rises(rows: Rows, steps: int = 10) -> Ascended:
    """Climb the rise from the fixed centre to a free point, over their distance.

    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> from curvcert.activations import TANH
    >>> x, none = torch.full((1, 1), 2.0, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    >>> rows = Rows(single_neuron(TANH, 1.0), 2.0, 2.0, x - 1, x, none, torch.ones_like(x), free=False, seed=0)
    >>> 0.58 < float(climb_rises(rows, steps=40).value) < 0.5815729373
    True
    """
    best, y, x = Ascended.nothing(rows, quotient=True), rows.start, rows.centre
    start = rows.network(x).flatten(1).detach()
    u = rows.covector
    with torch.enable_grad():
        for k in range(steps):
            y = y.detach().requires_grad_()
            rise = rows.network(y).flatten(1) - start
            distance = vector_norm((y - x).flatten(1), rows.p, dim=1)
            if rows.free:
                u = known(steepest_direction(rise.detach(), conjugate(rows.q)), u)
            quotient = (rise * u).sum(dim=1).abs() / distance.clamp(min=_NEAREST)
            counted = torch.where(distance < _NEAREST, 0.0, quotient).detach()
            best = best.improved(counted, x, (y - x).detach(), u)
            length = (y - x).detach().flatten(1).abs().amax(dim=1) * 0.5 * 0.88**k
            step = stepped(derivative(quotient.sum(), y), rows.directions(40 + k), length)
            y = y.detach() + step.reshape(y.shape)
    return best


def _scale(rows: Rows) -> torch.Tensor:
    """Return how far a first step may go: across the ball, or about as far as the start is from 0."""
    free = 1 + rows.start.flatten(1).abs().amax(dim=1)
    return torch.where(rows.radius.isfinite(), rows.radius, free).clamp(min=TINY)
