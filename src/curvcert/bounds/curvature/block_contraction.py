r"""The curvature of A (x - W' D phi(W x + b)), the form of SLL layers, in l2.

With G = -A W' D the form that a block bound majorises is, for unit e, u and v,

.. math:: c \sum_l d_l\, |W_l A^T e|\, |W_l u|\, |W_l v| \le c \|A\| \sup_{e, u, v} \sum_l d_l |W_l e| |W_l u| |W_l v|,

the same map W three times.  For any positive diagonal M, by Cauchy and Schwarz,

.. math:: \sum_l (m_l |W_l e|) \Big(\frac{d_l}{m_l} |W_l u| |W_l v|\Big)
          \le \|M W\|_2 \sqrt{\lambda_{max}\big((VV^T)^{\circ 2}\big)}, \qquad V = (D / M)^{1/2} W,

where the second factor is that of the Hadamard bound.  Neither needs a column of W' D: D is folded into the weight or
the kernel.  M = D^{1/2} makes the first factor the contraction's own :math:`\|D^{1/2} W\|`, at most
:math:`\sqrt 2` for an SLL layer.  Were the rows of W orthogonal, of lengths :math:`w_l`, the supremum would be the
largest :math:`d_l w_l^3`, and every :math:`m_l = (d_l w_l^3)^t / w_l` would attain it; t = 1/2 and t = 3/4 are tried.
"""

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_vectorised import require_l2
from curvcert.bounds.lipschitz.monotone import folded, norm_of_weighted, residual_contraction_of
from curvcert.errors import UnsupportedBlock
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Diagonal, Identity
from curvcert.operators.magnitudes import absolute_norm_upper_bound
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import UNIT_ROUNDOFF, Upper, least

_EXPONENTS = (0.5, 0.75)


def block_curvature_contraction(block: Block, p: float, q: float, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound the Jacobian-Lipschitz constant of A (x - W' D phi(W x + b)).

    The least, over a few diagonals M, of
    :math:`c \|A\| \|MW\| \sqrt{\lambda_{max}((VV^T)^{\circ 2})}` with :math:`V = (D/M)^{1/2} W`.

    >>> from curvcert.activations import TANH
    >>> from curvcert.operators import NormBounds
    >>> W, zero = Dense(torch.tensor([[2.0]], dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    >>> G = -1.0 * (W.T @ Diagonal(torch.tensor([0.25], dtype=torch.float64), (1,)))
    >>> block = Block(Identity((1,)), G, W, zero, zero, TANH)  # x - tanh(2 x) / 2
    >>> value = block_curvature_contraction(block, 2, 2, NormBounds())
    >>> round(float(value), 6) == round(2 * 4 / 27**0.5, 6)
    True

    Raises:
        UnsupportedNorm: unless p = q = 2.
        UnsupportedBlock: if the block has another form.
    """
    require_l2(p, q, "contraction")
    form = contraction_form(block, norms)
    if form is None:
        raise UnsupportedBlock(f"{block.name}: the contraction bound needs a block A (x - W' D phi(W x + b)), D >= 0.")
    return (Upper(form) * block.activation.curvature_c).bound


def contraction_form(block: Block, norms: AbstractNorms[R]) -> Tensor | None:
    r"""Bound :math:`\|A\| \sup \sum_l d_l |W_l e| |W_l u| |W_l v|`, or None for a block of another form."""
    form = residual_contraction_of(block)
    if form is None:
        return None
    d, W = form.weights, block.W
    values = [
        Upper(norm_of_weighted(M, W, norms)) * _hadamard_of_weighted(_quotient_roots(d, M), W, norms)
        for M in _diagonals(d, W)
    ]
    inner = least(*values)
    return (inner if isinstance(form.outer, Identity) else inner * norms.norm(form.outer, 2, 2)).bound


def _diagonals(d: Tensor, W: AbstractLinearMap) -> list[Tensor]:
    """Return the diagonals M to try: any positive one gives a bound, so that their rounding does not matter.

    A neuron with d = 0 adds nothing, and has m = 0.
    """
    found = [d.sqrt()]
    lengths = _row_lengths(W)
    if lengths is not None:
        found += [(d * lengths**3).pow(t) / lengths for t in _EXPONENTS]
    return [torch.where(d > 0, torch.where((M > 0) & M.isfinite(), M, 1.0), 0.0) for M in found]


def _row_lengths(W: AbstractLinearMap) -> Tensor | None:
    """Return the lengths of the rows of W, one per channel for a convolution, or None for a map of another kind."""
    if not isinstance(W, Dense | Conv2d):
        return None
    lengths: Tensor = torch.linalg.vector_norm(W.weight.flatten(1), dim=1)
    return lengths.reshape(-1, *(1,) * (len(W.out_shape) - 1))


def _quotient_roots(d: Tensor, M: Tensor) -> Tensor:
    """Return the roots of d / M, rounded up, 0 where d is 0."""
    return (Upper(torch.where(d > 0, d, 0.0)) / torch.where(M > 0, M, 1.0)).root().bound


def _hadamard_of_weighted(roots: Tensor, W: AbstractLinearMap, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound :math:`\sup \|Vu \circ Vv\|_2` over unit u and v, V = diag(roots) W.

    Folded into a weight or a kernel V is off by E with :math:`|E| \le 2u|V|`, which moves the supremum by at most
    :math:`(4u + 4u^2) \sup \|(|V| |u|) \circ (|V| |v|)\|_2`, and that supremum is at most :math:`\||V|\|_2^2`.
    """
    V = folded(roots, W)
    if V is None:
        return norms.hadamard(Diagonal(roots.expand(W.out_shape), W.out_shape) @ W)
    return (Upper(absolute_norm_upper_bound(V)).square() * (5 * UNIT_ROUNDOFF) + norms.hadamard(V)).bound
