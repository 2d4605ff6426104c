r"""The vectorised bound on the curvature of a block, in l2."""

from torch import Tensor

from curvcert.errors import UnsupportedNorm
from curvcert.network import Block
from curvcert.operators.norm_rule import AbstractNorms, R


def block_curvature_vectorised(block: Block, p: float, q: float, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound the Jacobian-Lipschitz constant of a block by :math:`c \|A\|_2 \|W\|_2`.

    A is the matrix of the vectorised Jacobian, :math:`A^T A = (G^T G) \circ (WW^T)`; it is never formed.
    Never above the product bound with :math:`\|W\|_{2 \to \infty}`.

    Reference: Entesari et al. (ICML 2024), `prop:vectorizedLipschitzIsBetter`.

    Raises:
        UnsupportedNorm: unless p = q = 2.
    """
    require_l2(p, q, "vectorised")
    return block.activation.curvature_c * norms.vectorised(block.G, block.W) * norms.norm(block.W, 2, 2)


def require_l2(p: float, q: float, name: str) -> None:
    """Raise unless both norms are Euclidean."""
    if p != 2 or q != 2:
        raise UnsupportedNorm(f"The {name} block bound needs p = q = 2, got p = {p:g}, q = {q:g}. Use 'product'.")
