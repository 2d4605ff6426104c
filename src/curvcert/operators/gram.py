r"""Gram iteration: a spectral norm bound that is proven *and* differentiable.

Squaring :math:`M \leftarrow M^T M` doubles the exponents of the singular values, so that
:math:`\sigma \le \|M_T\|_F^{2^{-T}}` with an overestimate of at most :math:`rank^{2^{-(T+1)}}`
(Delattre et al., ICML 2023).  Here with the rounding error of every product accounted for.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from curvcert.rounding import TINY, gamma, inflate, power_of_two


def gram_norm_upper_bound(matrix: Float64[Tensor, "*batch n m"], iterations: int = 9) -> Float64[Tensor, "*batch"]:
    r"""Bound the largest singular value of each matrix, differentiably.

    Each step scales by a power of two s (exact) and unwinds

    .. math:: \sigma(M_t) \le s_t \sqrt{\sigma(M_{t+1}) + \gamma_k \|M_t / s_t\|_F^2},

    k the inner dimension of the product.  9 iterations leave 0.6% on an orthogonal matrix and
    1e-10 on a Gaussian one; gradients are finite at zero.

    >>> W = torch.diag(torch.tensor([3.0, -4.0], dtype=torch.float64))
    >>> 4.0 <= float(gram_norm_upper_bound(W)) < 4.0 + 1e-9
    True
    """
    M = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT
    scales: list[Tensor] = []
    errors: list[Tensor] = []
    for _ in range(iterations):
        frobenius = _frobenius_upper_bound(M)
        scale = power_of_two(frobenius)
        M = M / scale[..., None, None]
        underflow = torch.where(frobenius > 0, M.shape[-2] * TINY, 0.0)
        errors.append(gamma(M.shape[-2]) * (frobenius / scale).square() + underflow)
        scales.append(scale)
        M = M.mT @ M
    sigma = _frobenius_upper_bound(M)
    for scale, error in zip(reversed(scales), reversed(errors), strict=True):
        sigma = inflate(scale * _safe_sqrt(inflate(sigma + error, 0.0)), 0.0)
    return sigma


def _frobenius_upper_bound(M: Tensor) -> Tensor:
    peak = power_of_two(M.abs().amax(dim=(-2, -1)))
    total = (M / peak[..., None, None]).square().sum(dim=(-2, -1))
    # Squares below the underflow threshold vanish: TINY covers them.
    total = inflate(total, gamma(M.shape[-1] * M.shape[-2] + 2)) + torch.where(total > 0, TINY, 0.0)
    return inflate(peak * _safe_sqrt(total), 0.0)


def _safe_sqrt(x: Tensor) -> Tensor:
    """Return the square root with gradient 0, not infinity, at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))
