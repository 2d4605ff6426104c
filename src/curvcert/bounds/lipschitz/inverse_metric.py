r"""The step of the LipSDP recursion (`lipsdp_recursion.py`): from S to a matrix that dominates :math:`X^{-1}`.

For one real S, or for a batch of Hermitian ones that share one multiplier t, as at the frequencies of a torus.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate, power_of_two

_WORKABLE = 1e-60
"""Slopes beyond this or its inverse are left to the multiple of the identity: their squares could underflow."""


def gains(alpha: float, beta: float) -> bool:
    """Whether a matrix says more of activations of these slopes than a multiple of the identity does.

    Slopes about a centre near 0, or a single slope, leave nothing to gain.
    """
    workable = _WORKABLE < beta < 1 / _WORKABLE
    return workable and beta > abs(alpha) * (1 + 1e-6) and beta - alpha > 1e-6 * beta


def inverse_metric(S: Tensor, error: Tensor, largest: Tensor, alpha: float, beta: float) -> Tensor | None:
    r"""Return :math:`Y \succeq X^{-1}` behind activations of slopes that gain, or None where it cannot be verified.

    For one S or a batch of them, which may be complex, each within `error` in the 2-norm and with eigenvalues of at
    most `largest`.
    """
    step = Step.of(S, error, largest, alpha, beta)
    if step is None:
        return None
    matrix = multiple(step.coefficient, _raised(step.Z, -1.0))
    rounding = (Upper(symmetric_norm(matrix)) + step.identity) * (4 * UNIT_ROUNDOFF)
    return _raised(matrix, (rounding + step.identity).bound)


def dominating(S: Tensor, error: Tensor) -> Tensor:
    """Return Hermitian matrices no less than those within `error` of the given ones, in the 2-norm."""
    mean = (S + S.mH) / 2
    return _raised(mean, (Upper(_largest_frobenius(mean)) * (4 * UNIT_ROUNDOFF) + error).bound)


@final
@dataclass(frozen=True, eq=False)
class Step:
    r"""What is verified of one step: :math:`Z \succeq (I - c S)^{-1}`, and numbers no less than
    :math:`1/t` and :math:`(\alpha + \beta)^2 / (4 c)`.
    """

    Z: Tensor
    identity: Tensor
    coefficient: Tensor

    @classmethod
    def of(cls, S: Tensor, error: Tensor, largest: Tensor, alpha: float, beta: float) -> "Step | None":
        """Verify that the step is feasible; None where that fails."""
        form = _Dominating.of(S, error, largest, alpha, beta)
        Z = _inverse_beside(form, alpha, beta)
        if Z is None:
            return None
        # X scales like 1/S.
        identity = (Upper(form.scale) / form.t).bound
        coefficient = inflate(form.scale * (alpha + beta) ** 2 / (form.t * (beta - alpha) ** 2), gamma(8))
        return cls(Z, identity, coefficient)


@dataclass(frozen=True, eq=False)
class _Dominating:
    r"""A matrix that dominates :math:`S / scale`, a bound `top` on its largest eigenvalue, and the multiplier t."""

    matrix: Tensor
    top: float
    scale: Tensor
    t: float

    @classmethod
    def of(cls, S: Tensor, error: Tensor, largest: Tensor, alpha: float, beta: float) -> "_Dominating":
        """Shift S up by its error; X scales like 1/S, and a power of two does not round."""
        scale = power_of_two(largest)
        mean = (S + S.mH) / (2 * scale)
        averaging = 2 * UNIT_ROUNDOFF * _largest_frobenius(mean)
        # The shift covers the error of S and its own rounding.
        shift = (Upper(error) / scale + averaging + Upper(largest) / scale * (4 * UNIT_ROUNDOFF)).bound
        top = float((Upper(largest) / scale + 2 * shift).bound)
        return cls(_raised(mean, shift), top, scale, 2.0 / (beta * (beta - alpha) * top))


def _inverse_beside(form: _Dominating, alpha: float, beta: float) -> Tensor | None:
    r"""Return :math:`(I - c S)^{-1}` or more, or None where it cannot be verified that the step is feasible."""
    tau, c = form.t * alpha * beta, form.t * (beta - alpha) ** 2 / 4 * (1 + gamma(8))
    if not 1 + min(tau, 0.0) * form.top * (1 + gamma(8)) > gamma(8):
        return None
    A = _raised(-c * form.matrix, 1.0)
    error = ((Upper(symmetric_norm(form.matrix)) * c + 1.0) * gamma(4)).bound
    if not 1 - c * form.top * (1 + gamma(8)) > float(error):
        return None
    Z, Z_error = _inverse(A, error)
    Z = _raised(Z, (Upper(symmetric_norm(Z)) * (4 * UNIT_ROUNDOFF) + Z_error).bound)
    return Z if bool(torch.isfinite(Z).all()) else None


def multiple(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return a nonnegative multiple of a symmetric matrix, or more."""
    return _raised(factor * matrix, (Upper(symmetric_norm(matrix)) * factor * (4 * UNIT_ROUNDOFF)).bound)


def _raised(matrix: Tensor, by: Tensor | float) -> Tensor:
    """Return the matrix and a multiple of the identity; `by` has room for the rounding of the sum."""
    raised = matrix.clone()
    raised.diagonal(dim1=-2, dim2=-1).add_(by)
    return raised


def _inverse(A: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a symmetric B and a bound on its distance from the inverse of any matrix within `error` of A.

    From the residual :math:`R = I - AB`: :math:`\|A^{-1} - B\| = \|BR(I - R)^{-1}\| \le \|B\| \|R\| / (1 - \|R\|)`.
    """
    n = A.shape[-1]
    R, info = torch.linalg.cholesky_ex(A)
    if bool((info != 0).any()):
        return A, torch.full_like(error, torch.inf)
    B = torch.cholesky_inverse(R)
    B = (B + B.mH) / 2
    size = _largest_frobenius(B)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    forming = (Upper(_largest_frobenius(A)) * size + _largest_frobenius(eye)) * gamma(4 * (n + 4))
    r = (forming + _largest_frobenius(eye - A @ B) + Upper(error) * size).bound
    if not float(r) < 0.5:
        return B, torch.full_like(r, torch.inf)
    return B, (Upper(size) * r / ((1 - r) * (1 - 2 * UNIT_ROUNDOFF))).bound


def _largest_frobenius(A: Tensor) -> Tensor:
    """Bound the Frobenius norm of each matrix of a batch, by the largest."""
    return inflate(torch.linalg.vector_norm(A, dim=(-2, -1)).amax(), gamma(2 * A.shape[-2] * A.shape[-1] + 8))


def symmetric_norm(A: Tensor) -> Tensor:
    """Bound the 2-norm of |A|, and so that of A, by the largest sum of a row."""
    # The absolute value of a complex number rounds twice at most.
    return Upper(A.abs(), 2).sum(-1).amax().bound
