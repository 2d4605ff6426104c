r"""The largest singular value over a batch of complex matrices, proven by one Cholesky factorisation for each.

If a floating-point Cholesky factorisation of the Hermitian matrix :math:`C = \lambda I - BB^*` runs to the end, then
:math:`\|B\|^2 \le \lambda` but for rounding.  One shift serves the whole batch, which is what a maximum needs.
"""

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor
from torch import linalg as la

from curvcert.errors import OutOfRange
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, power_of_two

_LOOKED_AT = 4
"""Matrices of which the eigenvalues are computed to guess the shift."""

_POWER_STEPS = 12
"""Steps of power iteration by which those are chosen."""

_STEP = 1e-12
"""The first shift is this far above the guess, relatively."""


def largest_singular_value_upper_bound(blocks: Complex128[Tensor, "batch n m"]) -> Float64[Tensor, ""]:
    r"""Bound the largest singular value over a batch of complex matrices, to about 1e-11.

    With :math:`G = fl(BB^*)`, B no higher than wide, and :math:`C = fl(\lambda I - G)`: where the factorisation of C
    completes,

    .. math:: \|B\|^2 \le \lambda + \frac{\gamma_{4(n+4)}}{1 - \gamma_{4(n+4)}} n \lambda + \gamma_{4(m+4)} \|B\|_F^2 .

    A matrix whose Gram matrix has a Frobenius norm below the shift needs no factorisation.

    >>> B = torch.diag(torch.tensor([3.0, 4.0j]))[None].to(torch.complex128)
    >>> 4.0 <= float(largest_singular_value_upper_bound(B)) < 4.0 + 1e-10
    True
    """
    wide = blocks if blocks.shape[-2] <= blocks.shape[-1] else blocks.mH.resolve_conj()
    n, m = wide.shape[-2:]
    peak = torch.view_as_real(wide).abs().amax()
    if not bool(peak.isfinite()):
        raise OutOfRange("A norm overflows float64. Rescale the weights.")
    scale = power_of_two(peak)
    wide = wide / scale
    gram = wide @ wide.mH
    shift = _verified_shift(gram)
    g = gamma(4 * (n + 4))
    forming = _squares(wide).amax() * gamma(4 * (m + 4)) + (n + m) * TINY
    slack = Upper(shift) * (g / (1 - g) * n + 4 * UNIT_ROUNDOFF) + forming
    return (slack + shift).root().bound * scale


def _squares(blocks: Tensor) -> Upper:
    """Return the squared Frobenius norm of each matrix."""
    return Upper(torch.view_as_real(blocks)).square().sum(-3, -2, -1)


def _verified_shift(gram: Tensor) -> Tensor:
    """Return a shift at which the factorisation of every matrix completes."""
    sizes = _squares(gram).root().bound
    shift, step = sizes.new_zeros(()), _STEP
    for _ in range(60):
        guess = la.eigvalsh(_most_promising(gram)).amax().clamp(min=0.0)
        shift = inflate(guess.maximum(shift), step) + TINY
        gram, sizes = gram[sizes > shift], sizes[sizes > shift]
        shifted = -gram
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        factor, info = la.cholesky_ex(shifted)
        failed = (info != 0) | ~factor.diagonal(dim1=-2, dim2=-1).real.isfinite().all(dim=-1)
        if not bool(failed.any()):
            return shift
        gram, sizes, step = gram[failed], sizes[failed], 4 * step
    raise OutOfRange("No singular value bound could be verified: the numbers overflow. Rescale the weights.")


def _most_promising(gram: Tensor) -> Tensor:
    """Return the few matrices that seem to have the largest eigenvalues."""
    if len(gram) <= _LOOKED_AT:
        return gram
    v = torch.arange(gram.shape[-1], device=gram.device).square().cos().to(gram)[:, None].expand(len(gram), -1, 1)
    for _ in range(_POWER_STEPS):
        v = gram @ v
        v = v / la.vector_norm(v, dim=-2, keepdim=True).clamp(min=TINY)
    growth = la.vector_norm(gram @ v, dim=(-2, -1))
    return gram[growth.topk(_LOOKED_AT).indices]
