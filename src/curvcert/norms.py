"""Vector p-norms, their duals, and the direction that a p-ball is widest in."""

import math

import torch
from torch import Tensor

from curvcert.errors import InvalidInput


def validate_p(p: float, name: str = "p") -> float:
    """Return p as a float, or raise if it is not the exponent of a norm.

    >>> validate_p(2)
    2.0
    >>> validate_p(0.5)
    Traceback (most recent call last):
    ...
    curvcert.errors.InvalidInput: p must satisfy 1 <= p <= inf, got 0.5. Use 1, 2 or math.inf, or a value between.
    """
    try:
        value = float(p)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be a number in [1, inf], got {p!r}.") from None
    if not value >= 1.0:
        raise InvalidInput(
            f"{name} must satisfy 1 <= {name} <= inf, got {p!r}. Use 1, 2 or math.inf, or a value between."
        )
    return value


def conjugate(p: float) -> float:
    """Return the Hoelder conjugate p* with 1/p + 1/p* = 1.

    >>> conjugate(1), conjugate(2), conjugate(math.inf), conjugate(4)
    (inf, 2.0, 1.0, 1.3333333333333333)
    """
    p = validate_p(p)
    if p == 1.0:
        return math.inf
    if math.isinf(p):
        return 1.0
    return p / (p - 1.0)


def vector_norm(x: Tensor, p: float, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the p-norm of x over the given dimensions (all of them by default).

    >>> float(vector_norm(torch.tensor([3.0, 4.0]), 2))
    5.0
    """
    norm: Tensor = torch.linalg.vector_norm(x, validate_p(p), dim=dim)
    return norm


def steepest_direction(g: Tensor, p: float) -> Tensor:
    """Return, for each row g, a d with ||d||_p = 1 that attains g.d = ||g||_{p*}.

    A zero row gives a zero direction.

    >>> steepest_direction(torch.tensor([[3.0, -4.0]]), 2)
    tensor([[ 0.6000, -0.8000]])
    >>> steepest_direction(torch.tensor([[3.0, -4.0]]), math.inf)
    tensor([[ 1., -1.]])
    >>> steepest_direction(torch.tensor([[3.0, -4.0]]), 1)
    tensor([[ 0., -1.]])
    """
    p = validate_p(p)
    if math.isinf(p):
        return g.sign()
    if p == 1.0:
        index = g.abs().argmax(dim=-1, keepdim=True)
        return torch.zeros_like(g).scatter(-1, index, g.gather(-1, index).sign())
    # |d_i| is proportional to |g_i|^(p* - 1); scaling g first avoids overflow.
    scale = g.abs().amax(dim=-1, keepdim=True)
    scaled = g / torch.where(scale > 0, scale, torch.ones_like(scale))
    d = scaled.sign() * scaled.abs() ** (conjugate(p) - 1.0)
    length = vector_norm(d, p, dim=-1).unsqueeze(-1)
    return d / torch.where(length > 0, length, torch.ones_like(length))
