r"""Norms for every sample at once, cheap and proven: what the shell certificate is made of.

Every function returns an upper bound in float64, rounding included.  Squares of numbers below :math:`2^{-537}` vanish;
what is lost with them is below `FLOOR`, which each norm adds.
"""

import torch
from torch import Tensor

from curvcert.operators.gram import gram_norm_upper_bound
from curvcert.operators.verified import spectral_norms_of_matrices_upper_bound
from curvcert.rounding import TINY, Upper, gamma, inflate, least, lengths, norm_upper_bound_of_vectors

FLOOR = 2.0**-500
"""Added where squares may have underflowed: far below anything that counts."""

STEP = gamma(2**10)
"""Relative slack of one layer's step: fewer than 2**10 sums, products, quotients and roots of numbers >= 0."""

_SQUARINGS = 5
"""Gram iterations: a spectral norm is overestimated by at most rank^(1/64), 7% at rank 100 with all values alike."""

_SMALL = 64
"""Up to this size a Gram iteration takes no longer than a factorisation, whose guesses take many small steps."""

_POWER_STEPS = 2


def stepped(x: Tensor) -> Tensor:
    """Return a step's result with its rounding and underflow covered; inf where an overflow left nothing known.

    >>> stepped(torch.tensor([1.0, torch.nan], dtype=torch.float64))
    tensor([1.0000,    inf], dtype=torch.float64)
    """
    return (inflate(x, STEP) + TINY).nan_to_num(nan=torch.inf, posinf=torch.inf)


def spectral_norms(matrices: Tensor) -> Tensor:
    r"""Bound the spectral norm of each matrix of a batch: by Gram iteration, or on a processor by a factorisation.

    >>> W = torch.diag(torch.tensor([3.0, -4.0], dtype=torch.float64))
    >>> 4.0 <= float(spectral_norms(W[None])[0]) < 4.001
    True
    """
    if matrices.device.type == "cpu" and min(matrices.shape[1:]) > _SMALL:
        return spectral_norms_of_matrices_upper_bound(matrices)
    return gram_norm_upper_bound(matrices, _SQUARINGS)


def congruent_eigenvalues(M: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    r"""Bound :math:`\lambda_{max}(D^{1/2} S D^{1/2})`, D = diag(w), for symmetric S with :math:`|S| \le M` entrywise.

    By Collatz and Wielandt: for every v > 0 it is at most :math:`\max_i (M D v)_i / v_i`.  The first v is `start`,
    (batch, n), the second its image.  `M` is (batch, n, n), `weights` >= 0 is (batch, k, n), the result (batch, k).
    With the roots of S's diagonal as the start it is never above :math:`\sum_i w_i S_{ii}`.

    >>> M, w = torch.ones(1, 2, 2, dtype=torch.float64), torch.tensor([[[1.0, 2.0]]], dtype=torch.float64)
    >>> round(float(congruent_eigenvalues(M, w, torch.ones(1, 2, dtype=torch.float64))), 9)
    3.0
    """
    v = start[:, None].clamp(min=FLOOR)
    bound = Upper(torch.full_like(weights[:, :, 0], torch.inf))
    for _ in range(_POWER_STEPS):
        image = Upper(weights) * v @ M
        bound = least(bound, (image / v).amax(2))
        v = (image.value / image.value.amax(dim=2, keepdim=True).clamp(min=FLOOR)).clamp(min=2.0**-200)
    return (bound + FLOOR).bound


def frobenius_norms(matrices: Tensor) -> Tensor:
    """Bound the Frobenius norm of each matrix of a batch, (batch, n, m) to (batch,).

    >>> 5.0 <= float(frobenius_norms(torch.tensor([[[3.0, 4.0]]], dtype=torch.float64))[0]) < 5.000001
    True
    """
    return (lengths(matrices, 1, 2) + FLOOR).bound


def vector_norms(x: Tensor, p: float) -> Tensor:
    """Bound the p-norm of each row of a (batch, n) tensor.

    >>> 5.0 <= float(vector_norms(torch.tensor([[3.0, 4.0]], dtype=torch.float64), 2)[0]) < 5.000001
    True
    """
    if p == 2:
        return (lengths(x, 1) + FLOOR).bound
    return norm_upper_bound_of_vectors(x, p, 1)


def paired_norms(u: Tensor, weights: Tensor, q: float) -> Tensor:
    r"""Bound :math:`\|w \circ u\|_q` for every covector u >= 0 (batch, pairs, n) and weight w >= 0 (batch, n, m).

    The result is (batch, pairs, m).  At q = 2 it is asked with the *squares* of u, so that many weights share them.

    >>> u, w = torch.tensor([[[3.0, 2.0]]], dtype=torch.float64), torch.tensor([[[1.0], [2.0]]], dtype=torch.float64)
    >>> norms = [paired_norms(u, w, 1.0), paired_norms(u.square(), w, 2.0), paired_norms(u, w, torch.inf)]
    >>> [round(float(norm), 9) for norm in norms]
    [7.0, 5.0, 4.0]
    """
    if q == 2:
        return ((Upper(u, 1) @ Upper(weights).square()).root() + FLOOR).bound
    if q == 1:
        return (Upper(u) @ weights).bound
    columns = [norm_upper_bound_of_vectors((Upper(u) * w[:, None]).bound, q, 2) for w in weights.unbind(dim=2)]
    return torch.stack(columns, dim=2)
