r"""Norms of the vectorised Jacobian, a Khatri-Rao product that is never formed.

The Jacobian of :math:`G\Phi(Wx)` is linear in :math:`\Phi'`: its vectorisation is :math:`A\Phi'` with
columns :math:`G_{:l} \otimes W_{l:}`, so that :math:`A^T A = (G^T G) \circ (WW^T)`, a matrix of the size
of the hidden layer.  With G replaced by W' the same product measures the second-order form
:math:`\sum_l u_l (W_l a)(W_l b)`.
"""

from typing import Protocol

import torch
from torch import Tensor

from curvcert.operators.base import AbstractLinearMap, Identity, Reshape, Scaled
from curvcert.operators.conv import Conv2d
from curvcert.operators.rows import column_norms_upper_bound, row_norms_upper_bound
from curvcert.operators.scaled_conv import scaled_conv
from curvcert.operators.verified import largest_eigenvalue_upper_bound
from curvcert.rounding import Upper, gamma, inflate, least, norm_upper_bound_of_vectors

_EXPLICIT_CONV = 2048


class GramNorms(Protocol):
    """What is needed of norm bounds here: spectral norms and Gram matrices."""

    def spectral(self, op: AbstractLinearMap) -> Tensor:
        """Bound the 2 -> 2 norm."""

    def gram(self, op: AbstractLinearMap) -> tuple[Tensor, Tensor]:
        """Return A A' and a bound on its error."""

    def gram_fits(self, n: int) -> bool:
        """Whether Gram matrices of size n fit into memory."""


def hadamard_norm_upper_bound(W: AbstractLinearMap, norms: GramNorms) -> Tensor:
    r"""Bound :math:`\sqrt{\lambda_{max}((WW^T)^{\circ 2})}`.

    By a verified Cholesky where the Gram matrix fits, in closed form for convolutions, and otherwise by
    Schur's inequality :math:`\lambda_{max}(B \circ B) \le \max_i B_{ii} \lambda_{max}(B)`.
    """
    if isinstance(W, Scaled):
        return (Upper(hadamard_norm_upper_bound(W.map, norms)) * abs(W.factor) * abs(W.factor)).bound
    if isinstance(W, Identity | Reshape):
        return torch.ones((), dtype=W.dtype, device=W.device)
    scaled = scaled_conv(W)
    closed = scaled is not None and scaled[0].padding_mode == "zeros"
    if norms.gram_fits(W.out_size) and not (closed and W.out_size > _EXPLICIT_CONV):
        B, error = norms.gram(W)
        return root_of_product(B, error, B, error)
    schur = (Upper(row_norms_upper_bound(W, 2).amax()) * norms.spectral(W)).bound
    if scaled is not None and closed:
        return torch.minimum(schur, conv_hadamard_norm_upper_bound(*scaled))
    return schur


def conv_hadamard_norm_upper_bound(conv: Conv2d, roundings: int = 0) -> Tensor:
    r"""Bound :math:`\sqrt{\lambda_{max}((WW^T)^{\circ 2})}` of a convolution on an image of any size.

    The eigenvalue is the largest :math:`\|\sum_l u_l W_l \otimes W_l\|_F^2` over unit u.  Rows of W are rows
    of the convolution on the infinite plane with some entries dropped, which lowers that norm.  There,
    rows at distance :math:`\tau` have the inner product :math:`R_{oo'}(\tau) = \sum_{c,u} K_{oc}(u + \tau)
    K_{o'c}(u)` of the dilated kernel, :math:`\tau` a multiple of the stride, and the block Toeplitz matrix
    of their squares, being nonnegative, has the norm of :math:`\sum_\tau R(\tau)^{\circ 2}`.

    `roundings` is how often each weight was rounded.

    >>> K = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    >>> 1.0 <= float(conv_hadamard_norm_upper_bound(Conv2d(K, (1, 4, 4)))) < 1.000001
    True
    """
    (d_h, d_w), (s_h, s_w) = conv.dilation, conv.stride
    kernels = conv.weight.unflatten(0, (conv.groups, -1))
    kh, kw = kernels.shape[-2:]
    total = torch.zeros(conv.groups, kernels.shape[1], kernels.shape[1], dtype=conv.dtype, device=conv.device)
    error = torch.zeros_like(total)
    g = gamma(kernels.shape[2] * kh * kw + 4 + 4 * roundings)
    for a in range(-kh + 1, kh):
        for b in range(-kw + 1, kw):
            if (a * d_h) % s_h or (b * d_w) % s_w:
                continue
            high, low = _overlap(a, kh), _overlap(b, kw)
            left = kernels[..., high[0], low[0]].flatten(2)
            right = kernels[..., high[1], low[1]].flatten(2)
            R, size = left @ right.mT, left.abs() @ right.abs().mT
            total = total + R.square()
            error = error + 2 * g * size.square()
    slack = inflate(torch.linalg.vector_norm(error, dim=(-2, -1)).amax(), 1e-9)
    symmetric = (total + total.mT) / 2
    size = norm_upper_bound_of_vectors(symmetric.flatten(1), 2, 1).amax()
    off = Upper(size) * gamma(4 * kh * kw + 8) + slack
    return Upper(largest_eigenvalue_upper_bound(symmetric, off.bound)).root().bound


def _overlap(lag: int, size: int) -> tuple[slice, slice]:
    return slice(max(lag, 0), size + min(lag, 0)), slice(max(-lag, 0), size + min(-lag, 0))


def vectorised_norm_upper_bound(G: AbstractLinearMap, W: AbstractLinearMap, norms: GramNorms) -> Tensor:
    r"""Bound :math:`\|A\|_2 = \sqrt{\lambda_{max}((G^T G) \circ (WW^T))}`.

    For G = I it is the largest row of W; where the Gram matrices don't fit, by Schur's inequality.
    """
    rows = row_norms_upper_bound(W, 2).amax()
    if isinstance(G, Identity):
        return rows
    if norms.gram_fits(W.out_size):
        return root_of_product(*norms.gram(G.T), *norms.gram(W))
    columns = column_norms_upper_bound(G, 2).amax()
    return least(Upper(rows) * norms.spectral(G), Upper(columns) * norms.spectral(W)).bound


def scaled_vectorised_norms(G: AbstractLinearMap, W: AbstractLinearMap, norms: GramNorms) -> tuple[Tensor, Tensor]:
    r"""Return :math:`d_l = \|G_{:l}\| \|W_l\|` and a bound on
    :math:`\sqrt{\lambda_{max}(D^{-1} ((G^TG) \circ (WW^T)) D^{-1})}`.

    D is taken as computed: the identity holds for every positive diagonal.
    """
    d = (column_norms_upper_bound(G, 2) * row_norms_upper_bound(W, 2)).flatten()
    d = torch.where(d > 0, d, torch.ones_like(d))
    (B, B_error), (C, C_error) = norms.gram(G.T), norms.gram(W)
    product, error = _product(B, B_error, C, C_error)
    smallest = d.amin()
    scaled = product / d[:, None] / d[None, :]
    slack = Upper(error) / smallest / smallest + Upper(norm_upper_bound_of_vectors(scaled.flatten(), 2, 0)) * gamma(4)
    return d.reshape(W.out_shape), Upper(largest_eigenvalue_upper_bound(scaled, slack.bound)).root().bound


def root_of_product(B: Tensor, B_error: Tensor, C: Tensor, C_error: Tensor) -> Tensor:
    """Bound the root of the largest eigenvalue of B o C, both known to within errors in the Frobenius norm."""
    return Upper(largest_eigenvalue_upper_bound(*_product(B, B_error, C, C_error))).root().bound


def _product(B: Tensor, B_error: Tensor, C: Tensor, C_error: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return B o C and a bound on its error: :math:`\|E \circ C\|_F \le \|E\|_F \max |C|`.

    The given errors bound Frobenius norms.
    """
    product = B * C
    b, c = Upper(B.abs().amax()) + B_error, Upper(C.abs().amax()) + C_error
    forming = Upper(norm_upper_bound_of_vectors(product.flatten(), 2, 0)) * gamma(2)
    return product, (c * B_error + b * C_error + forming).bound
