r"""The analytic SDP bound on the curvature of a block, in l2."""

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_vectorised import require_l2
from curvcert.network import Block
from curvcert.operators import Diagonal
from curvcert.operators.norm_rule import AbstractNorms, R


def block_curvature_sdp(
    block: Block, p: float, q: float, norms: AbstractNorms[R], constants: Tensor | None = None
) -> Tensor:
    r"""Bound the Jacobian-Lipschitz constant of h(x) = Hx + G Phi(Wx + b) in l2 by :math:`\|G\|_2 \|C T W\|_2`.

    :math:`T = \mathrm{diag}(\|W_l\|_2)` and C holds a curvature constant for each neuron (`constants`), by
    default the activation's c.  The theorem is about Phi(Wx); H leaves the Jacobian's differences, and a
    linear map G behind it multiplies them.  For G = I never above the vectorised bound.

    Reference: Entesari et al. (ICML 2024), `prop:analyticalSdp` and its corollary.  (Its proof once says
    :math:`T_{ll} = \|W_l\|^2`; the statement is right.)

    Raises:
        UnsupportedNorm: unless p = q = 2.
    """
    require_l2(p, q, "sdp")
    T, G = norms.row_norms(block.W, 2), norms.norm(block.G, 2, 2)
    if constants is None:
        return block.activation.curvature_c * G * norms.norm(Diagonal(T, block.W.out_shape) @ block.W, 2, 2)
    # The product of two numbers rounds by less than this, whatever they are.
    weights = (constants * T * (1.0 + 4 * torch.finfo(T.dtype).eps)).expand(block.W.out_shape)
    return G * norms.norm(Diagonal(weights, block.W.out_shape) @ block.W, 2, 2)
