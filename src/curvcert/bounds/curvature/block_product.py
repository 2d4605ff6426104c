r"""The product bound on the curvature of a block, for any norms."""

import math

import torch
from torch import Tensor

from curvcert.network import Block
from curvcert.operators import Identity
from curvcert.operators.norm_rule import AbstractNorms, R


def block_curvature_product(block: Block, p: float, q: float, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound the Jacobian-Lipschitz constant of a block by norms of its parts.

    By Hoelder on :math:`\sum_l s_l (G^T u)_l (Wv)_l (Wd)_l` with 1/a + 1/b + 1/c' = 1,

    .. math:: \|Dh(x) - Dh(y)\|_{p \to q} \le c \|G\|_{a^* \to q} \|W\|_{p \to b} \|W\|_{p \to c'} \|x - y\|_p,

    the least over (b, c') = (q, inf), (p, inf), (inf, inf), (2, 2) and, for p >= 2, (p, p).

    Reference: Entesari et al. (ICML 2024), `prop:naiveJacLip`, which is the case (q, inf) with q = p*.
    Erratum: there the norms of G and W are p*-operator norms, which is unsound for p > 2
    (f = tanh(sum x), n = 20, p = inf: 15.4, and the truth is at least 307.9).
    """
    if isinstance(block.G, Identity) and p == q:
        # Here (q, inf) is the least: ||W||_{p -> b} ||I||_{a* -> q} is at least ||W||_{p -> q} for the others.
        return block.activation.curvature_c * norms.norm(block.W, p, p) * norms.norm(block.W, p, math.inf)
    pairs = {(q, math.inf), (p, math.inf), (math.inf, math.inf), (2.0, 2.0)} | ({(p, p)} if p >= 2 else set())
    values = []
    for b, c in sorted(pairs):
        inverse = 1.0 / b + 1.0 / c
        dual_a = math.inf if inverse == 0.0 else max(1.0, 1.0 / inverse)
        values.append(norms.norm(block.G, dual_a, q) * norms.norm(block.W, p, b) * norms.norm(block.W, p, c))
    return block.activation.curvature_c * torch.stack(values).amin()
