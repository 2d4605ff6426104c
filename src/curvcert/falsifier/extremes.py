"""The largest slope and Hessian that a simple ascent in l2 meets, one number per network: for tables and pictures.

A search is honest about its side: everything here is attained at some input, so it is a *lower* bound on
the constant.  The gap to an upper bound is what is not yet known.
"""

import torch
from torch import Tensor

from curvcert.network import Network


def largest_slope_lower_bound(network: Network, x: Tensor, steps: int = 100, rate: float = 0.1) -> float:
    r"""Ascend the spectral norm of the Jacobian from a batch of inputs, and return the largest one met.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> linear = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(linear.weight, 0.5)
    >>> net = trace(nn.Sequential(linear, nn.Tanh()).eval(), torch.zeros(1, 1))
    >>> 0.999 * 0.5 < largest_slope_lower_bound(net, torch.ones(1, 1), steps=200) <= 0.5 * (1 + 1e-12)
    True
    """
    x, best = network.require_batch(x).clone(), 0.0
    for _ in range(steps):
        with torch.enable_grad():
            x.requires_grad_()
            norm = torch.linalg.matrix_norm(network.jacobian(x).flatten(2), 2)
            if not norm.requires_grad:  # an affine network has one slope
                return float(norm.max())
            (gradient,) = torch.autograd.grad(norm.sum(), x)
        best = max(best, float(norm.detach().max()))
        x = (x + rate * _unit(gradient)).detach()
    return best


def largest_hessian_lower_bound(network: Network, x: Tensor, steps: int = 100, rate: float = 0.1) -> float:
    r"""Ascend the Hessian's norm of a scalar network over inputs and directions, and return the largest one met.

    Alternates a step of power iteration on :math:`v \mapsto \nabla^2 f(x) v` with an ascent of
    :math:`|v^T \nabla^2 f(x) v|` in x.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> linear = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(linear.weight, 0.5)
    >>> net = trace(nn.Sequential(linear, nn.Tanh()).eval(), torch.zeros(1, 1))
    >>> exact = 4 / 27**0.5 * 0.5**2
    >>> 0.99 * exact < largest_hessian_lower_bound(net, torch.full((1, 1), 0.5), steps=300) <= exact * (1 + 1e-9)
    True
    """
    x, best = network.require_batch(x).clone(), 0.0
    v = _unit(torch.ones_like(x) + 0.5 * torch.cos(torch.arange(x[0].numel()).to(x)).reshape(x.shape[1:]))
    for _ in range(steps):
        with torch.enable_grad():
            x.requires_grad_()
            slope = (network.jacobian(x)[:, 0] * v).sum()
            if not slope.requires_grad:  # nor does that of an affine network change
                return 0.0
            (product,) = torch.autograd.grad(slope, x, create_graph=True)
            form = (product * v).flatten(1).sum(dim=1)
            (gradient,) = torch.autograd.grad(form.abs().sum(), x)
        best = max(best, float(torch.linalg.vector_norm(product.detach().flatten(1), dim=1).max()))
        v = _unit(product.detach() + 1e-12 * v)
        x = (x + rate * _unit(gradient)).detach()
    return best


def _unit(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp(min=1e-300)
    return x / length.reshape(-1, *(1,) * (x.dim() - 1))
