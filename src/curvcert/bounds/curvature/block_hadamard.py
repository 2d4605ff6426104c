r"""The Hadamard bound on the curvature of a block, in l2."""

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_vectorised import require_l2
from curvcert.network import Block
from curvcert.operators import Identity
from curvcert.operators.norm_rule import AbstractNorms, R


def block_curvature_hadamard(block: Block, p: float, q: float, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound the Jacobian-Lipschitz constant of a block by :math:`c \sqrt{\lambda_{max}((WW^T)^{\circ 2})}`.

    For unit v and d, :math:`\|\mathrm{diag}(s \circ Wd) Wv\|^2 \le \sum_l (W_l v)^2 (W_l d)^2`, a quadratic form
    in :math:`v \otimes d` whose nonzero eigenvalues are those of :math:`(WW^T)^{\circ 2}`.  By Schur's
    inequality, never above the SDP bound.  With a general G, the least of
    :math:`c \|G\| \sqrt{\lambda_{max}((WW^T)^{\circ 2})}` and
    :math:`c \|W\| \sqrt{\lambda_{max}((G^TG) \circ (WW^T))}`,
    and with :math:`D = \mathrm{diag}(\|G_{:l}\| \|W_l\|)` of
    :math:`c \sqrt{\lambda_{max}(D^{-1} ((G^TG) \circ (WW^T)) D^{-1})} \|DW\|`.

    Raises:
        UnsupportedNorm: unless p = q = 2.
    """
    require_l2(p, q, "hadamard")
    c, G, W = block.activation.curvature_c, block.G, block.W
    omega = norms.hadamard(W)
    if isinstance(G, Identity):
        return c * omega
    candidates = [norms.norm(G, 2, 2) * omega, norms.norm(W, 2, 2) * norms.vectorised(G, W)]
    scaled = norms.scaled_vectorised(G, W)
    if scaled is not None:
        candidates.append(scaled)
    return c * torch.stack(candidates).amin()
