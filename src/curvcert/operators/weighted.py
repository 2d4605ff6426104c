r"""Norms of diag(s) W for many weights s at once: one for each sample, or each pair of classes.

Exact for p = 1 and p = inf; at p = 2 by a verified Cholesky of :math:`D(WW^T)D` where that is small, and
always by the largest weight, or by interpolation between 1 and inf.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from curvcert.memory import spare_elements
from curvcert.norms import conjugate
from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.dense import Dense
from curvcert.operators.magnitudes import (
    absolute_image,
    absolute_row_sums_upper_bound,
    interpolated,
)
from curvcert.operators.rows import row_norms_upper_bound
from curvcert.operators.verified import congruent_eigenvalues_upper_bound
from curvcert.rounding import TINY, Upper, least, norm_upper_bound_of_vectors

GRAM_SIZE = 1024
"""Largest Gram matrix that is factorised once for each weight."""

_CHUNK_ELEMENTS = 2**22
_GLIMPSE_STEPS = 12
"""Power-iteration steps that show from below what a factorisation could give at best."""

_COPIES = 10
"""Matrices held at a time for one that is bounded."""


class WeightedNorms(Protocol):
    """What is needed of norm bounds here."""

    def norm(self, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        """Bound the p -> q norm."""

    def may_be_below(self, op: AbstractLinearMap, size: Tensor) -> bool:
        """Whether it is worth while to bound a 2 -> 2 norm that only counts below a size."""

    def gram(self, op: AbstractLinearMap) -> tuple[Tensor, Tensor]:
        """Return A A' and a bound on its error in the Frobenius norm."""

    def hadamard(self, op: AbstractLinearMap) -> Tensor:
        """Bound the root of the largest eigenvalue of (A A') squared entry by entry."""


def weighted_norm_upper_bound(W: AbstractLinearMap, s: Tensor, p: float, norms: WeightedNorms) -> Tensor:
    r"""Bound :math:`\|\mathrm{diag}(s) W\|_{p \to p}` for each s >= 0 of a batch."""
    flat = s.flatten(1)
    bound = (Upper(flat.amax(dim=1)) * norms.norm(W, p, p)).bound
    rows = (Upper(flat) * absolute_row_sums_upper_bound(W).flatten()).amax(1).bound
    if math.isinf(p):
        return torch.minimum(bound, rows)
    columns = absolute_image(W.T, s).flatten(1).amax(1).bound
    if p == 1:
        return torch.minimum(bound, columns)
    bound = torch.minimum(bound, interpolated(columns, rows, p))
    if p == 2 and W.out_size <= GRAM_SIZE:
        bound = torch.minimum(bound, Upper(_congruent_eigenvalues(*norms.gram(W), flat)).root().bound)
    return bound


def bilinear_upper_bound(
    W: AbstractLinearMap,
    d: Tensor,
    p: float,
    norms: WeightedNorms,
    gram_size: int = GRAM_SIZE,
    known: Tensor | None = None,
) -> Tensor:
    r"""Bound :math:`\sup \sum_l d_l |W_l a| |W_l b|` over :math:`\|a\|_p, \|b\|_p \le 1`, for each d >= 0 of a batch.

    At p = 2 it is :math:`\lambda_{max}(W^T D W)`, by a verified Cholesky, or at most
    :math:`\|d\|_2 \sqrt{\lambda_{max}((WW^T)^{\circ 2})}`.  For every p it is at most
    :math:`\sum_l d_l \|W_l\|_{p^*}^2`, :math:`\max_l d_l \|W\|_{p \to 2}^2` and
    :math:`\|d\|_{p^*} \|W\|_{p \to p} \|W\|_{p \to \infty}` (Hoelder); exact at p = 1 for a matrix.

    `known` is what is known of them already: no matrix is factorised that cannot give less.
    """
    flat = d.flatten(1)
    peak = flat.amax(dim=1)
    rows = row_norms_upper_bound(W, conjugate(p)).flatten()
    by_rows = (Upper(flat) * rows * rows).sum(1)
    length, bound = norm_upper_bound_of_vectors(flat, conjugate(p), 1), by_rows.bound
    if p == 2:
        bound = torch.minimum(bound, (Upper(length) * norms.hadamard(W)).bound)
        useful = torch.maximum((bound / peak.clamp(min=TINY)).sqrt(), bound / (length * rows.amax()).clamp(min=TINY))
    if p != 2 or norms.may_be_below(W, useful.amax()):
        by_peak = Upper(peak) * norms.norm(W, p, 2) * norms.norm(W, p, 2)
        holder = Upper(length) * norms.norm(W, p, p) * rows.amax()
        bound = torch.minimum(bound, least(by_peak, holder).bound)
    if p == 1 and isinstance(W, Dense):
        return torch.minimum(bound, (Upper(flat) @ Upper(W.weight.abs()).square()).amax(1).bound)
    if p == 2 and W.out_size <= gram_size:
        roots = Upper(flat).root().bound
        ceiling = bound if known is None else bound.minimum(known)
        bound = torch.minimum(bound, congruent_eigenvalues(*norms.gram(W), roots, ceiling))
    return bound


def congruent_eigenvalues(B: Tensor, error: Tensor, s: Tensor, known: Tensor) -> Tensor:
    """Bound the largest eigenvalue of diag(s) B diag(s) for each s; inf where it cannot be below what is known."""
    found = torch.full_like(s[:, 0], torch.inf)
    open_ = (_glimpsed(B, s) < known).nonzero().flatten()
    if len(open_):
        found[open_] = _congruent_eigenvalues(B, error, s[open_])
    return found


def _glimpsed(B: Tensor, s: Tensor) -> Tensor:
    """Return the growth of one vector under each diag(s) B diag(s): its largest eigenvalue is no less, but rounding."""
    v = s
    for _ in range(_GLIMPSE_STEPS):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=TINY)
        v = s * ((s * v) @ B)
    growth: Tensor = torch.linalg.vector_norm(v, dim=1)
    return growth


def _congruent_eigenvalues(B: Tensor, error: Tensor, s: Tensor) -> Tensor:
    """Bound the largest eigenvalue of diag(s) B diag(s) for each s."""
    at_once = spare_elements(B.device, _COPIES * _CHUNK_ELEMENTS) // (_COPIES * B.numel())
    return congruent_eigenvalues_upper_bound(B, error, s, at_once)
