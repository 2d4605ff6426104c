r"""Guesses of largest eigenvalues and of norms, from below, by iteration: they say what a proof is worth trying for.

Lanczos iteration, for a batch at once and with one look at the result.

After m steps from a vector v the eigenvalues of :math:`V S V^T`, V an orthonormal basis of the span of
:math:`v, Sv, \dots, S^{m-1} v`, approximate those of S from within; no guess is above the truth but for rounding.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvcert.operators.base import AbstractLinearMap
from curvcert.rounding import TINY

_BREAKDOWN = 1e-13
"""Of the size of a matrix with entries of about 1: a direction that is left with less than this is rounding alone."""

_GLIMPSE_STEPS = 8
"""Power-iteration steps of a norm that is only glimpsed."""


def glimpsed_norm(op: AbstractLinearMap) -> Tensor:
    """Return the growth of one vector, after steps of power iteration: the 2 -> 2 norm is no less, but for rounding."""
    v = torch.cos(torch.arange(op.in_size, dtype=op.dtype, device=op.device)).reshape(1, *op.in_shape)
    for _ in range(_GLIMPSE_STEPS):
        v = op.adjoint(op.apply(v))
        v = v / torch.linalg.vector_norm(v).clamp(min=TINY)
    growth: Tensor = torch.linalg.vector_norm(op.apply(v))
    return growth


def largest_eigenvalue_guesses(symmetric: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    r"""Guess the largest eigenvalue of each matrix (batch, n, n), and how far below the truth the guess may be.

    Entries are at most about 1.  With the residual r of the leading vector and its distance :math:`\delta` from the
    second eigenvalue found, the guess is off by about :math:`\min(r, r^2 / \delta)`.  Both come back on the host,
    (batch,) each: nothing waits for the device before the end.

    >>> S = torch.diag(torch.arange(1.0, 5.0, dtype=torch.float64))[None] / 4
    >>> guess, below = largest_eigenvalue_guesses(S, steps=4)
    >>> abs(float(guess) - 1) < 1e-14, float(below) < 1e-14
    (True, True)
    """
    n = symmetric.shape[-1]
    return _top_of(*_iterate(symmetric, min(steps, n)), n)


def congruent_eigenvalue_guesses(B: Tensor, s: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the same of diag(s) B diag(s) for every row of s: one product with B serves all of them."""
    return _top_of(*_three_terms(lambda v: s * ((s * v) @ B), s, min(steps, len(B))), len(B))


def quick_eigenvalue_guesses(symmetric: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the same as `largest_eigenvalue_guesses`, by a recursion that keeps no vectors."""
    n = symmetric.shape[-1]
    start = torch.cos(torch.arange(n, dtype=symmetric.dtype, device=symmetric.device)).expand(len(symmetric), n)
    return _top_of(*_three_terms(lambda v: _times(symmetric, v), start, min(steps, n)), n)


def _three_terms(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return what `_iterate` does, with no vector kept but the last two.

    Rounding brings directions back that were left: eigenvalues repeat, but none is too large.
    """
    v = start / torch.linalg.vector_norm(start, dim=1, keepdim=True).clamp(min=TINY)
    before, length = torch.zeros_like(v), v.new_zeros(len(v))
    diagonal, lengths = list[Tensor](), list[Tensor]()
    for _ in range(steps):
        w = product(v) - length[:, None] * before
        along = (w * v).sum(dim=1)
        w = w - along[:, None] * v
        length = torch.linalg.vector_norm(w, dim=1)
        diagonal.append(along)
        lengths.append(length)
        # At the end of the basis only zeros follow.
        before, v = v, w / torch.where(length > _BREAKDOWN * v.shape[1], length, torch.inf)[:, None]
    left = torch.stack(lengths, dim=1)
    return torch.diag_embed(torch.stack(diagonal, dim=1)) + torch.diag_embed(left[:, :-1], 1), left


def _top_of(projected: Tensor, lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue of what an iteration found, and how far below the truth it may be."""
    projected, lengths = projected.cpu(), lengths.cpu()
    used = 1 + (lengths[:, :-1] > _BREAKDOWN * n).cumprod(dim=1).sum(dim=1)
    T = (projected + projected.triu(1).mT).nan_to_num(0.0, 0.0, 0.0)
    unused = torch.arange(T.shape[-1]) >= used[:, None]
    # Directions that were never reached go below everything else.
    lowest = -1 - 2 * T.abs().sum(dim=-1).amax(dim=-1, keepdim=True)
    T.diagonal(dim1=-2, dim2=-1).copy_(torch.where(unused, lowest, T.diagonal(dim1=-2, dim2=-1)))
    values, vectors = torch.linalg.eigh(T)
    last = (used - 1)[:, None]
    residual = (lengths.gather(1, last) * vectors[:, :, -1].abs().gather(1, last)).squeeze(1)
    gap = values[:, -1] - values[:, -2] if values.shape[1] > 1 else torch.full_like(residual, math.inf)
    below = torch.minimum(residual, residual.square() / gap.clamp(min=1e-300))
    return values[:, -1], below.nan_to_num(math.inf, math.inf)


def _iterate(symmetric: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the upper half of V S V', and the length of what each step leaves for the next."""
    batch, n = symmetric.shape[:2]
    V, H = symmetric.new_zeros(batch, steps, n), symmetric.new_zeros(batch, steps, steps)
    lengths = symmetric.new_zeros(batch, steps)
    chirp = torch.arange(n, dtype=symmetric.dtype, device=symmetric.device)
    # A little of every direction: any fixed vector that no structure of the matrix makes a special one.
    v = 0.25 + torch.cos(0.61803398875 * chirp.square())
    v = (v / torch.linalg.vector_norm(v)).expand(batch, n)
    for j in range(steps):
        V[:, j] = v
        w = _times(symmetric, v)
        before = V[:, : j + 1]
        first = _times(before, w)
        w = w - _times(before.mT, first)
        second = _times(before, w)
        w = w - _times(before.mT, second)
        H[:, : j + 1, j] = first + second
        length = torch.linalg.vector_norm(w, dim=1)
        lengths[:, j] = length
        # At the end of the basis only zeros follow.
        v = w / torch.where(length > _BREAKDOWN * n, length, torch.inf)[:, None]
    return H, lengths


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the product of each matrix and its vector; of a single one as a product of a matrix and a vector."""
    if len(matrices) == 1:
        return (matrices[0] @ vectors[0])[None]
    return (matrices @ vectors[:, :, None]).squeeze(2)
