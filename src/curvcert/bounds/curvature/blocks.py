"""The curvature of one block: every bound that applies, and the least of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_contraction import block_curvature_contraction
from curvcert.bounds.curvature.block_hadamard import block_curvature_hadamard
from curvcert.bounds.curvature.block_product import block_curvature_product
from curvcert.bounds.curvature.block_sdp import block_curvature_sdp
from curvcert.bounds.curvature.block_vectorised import block_curvature_vectorised
from curvcert.bounds.types import Side
from curvcert.errors import InvalidInput, UnsupportedBlock, UnsupportedNorm
from curvcert.network import Block
from curvcert.operators.magnitudes import image_error
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.rows import basis_vectors
from curvcert.propagation.gradient_intervals import Interval
from curvcert.rounding import UNIT_ROUNDOFF, Upper

BlockBound = Callable[[Block, float, float, AbstractNorms[R]], Tensor]

BLOCK_BOUNDS: dict[str, BlockBound[R]] = {  # type: ignore[valid-type]
    "contraction": block_curvature_contraction,
    "product": block_curvature_product,
    "vectorised": block_curvature_vectorised,
    "sdp": block_curvature_sdp,
    "hadamard": block_curvature_hadamard,
}

_LINES = 2**22
"""Entries of G up to which its rows and columns are formed where a bound does without them."""


def block_curvature(
    block: Block, p: float, q: float, norms: AbstractNorms[R], names: Sequence[str] | None = None
) -> tuple[Tensor, str]:
    """Return the least Jacobian-Lipschitz constant of a block over the named bounds, and its name.

    Without names, over all that apply; a named bound that does not apply raises.  Where the contraction bound applies
    and G has more than 2**22 entries, the others, which form its rows and columns, are skipped, and the name says so.

    >>> from curvcert.activations import TANH
    >>> from curvcert.operators import Dense, Identity, NormBounds, Zero
    >>> W, zero = Dense(torch.tensor([[3.0]], dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    >>> block = Block(Zero((1,), (1,)), Identity((1,)), W, zero, zero, TANH)
    >>> value, name = block_curvature(block, 2, 2, NormBounds(), ["sdp"])
    >>> round(float(value), 6) == round(9 * 4 / 27**0.5, 6)
    True
    """
    found: dict[str, Tensor] = {}
    for name in names or BLOCK_BOUNDS:
        if not names and "contraction" in found and block.G.in_size * block.G.out_size > _LINES:
            skipped = ", ".join(other for other in BLOCK_BOUNDS if other != "contraction")
            return found["contraction"], f"contraction (skipped for the size of G: {skipped})"
        if name not in BLOCK_BOUNDS:
            raise InvalidInput(f"Unknown block bound {name!r}. Choose from {', '.join(BLOCK_BOUNDS)}.")
        try:
            found[name] = BLOCK_BOUNDS[name](block, p, q, norms)
        except (UnsupportedBlock, UnsupportedNorm):
            if names:
                raise
    if len(found) == 1:  # Nothing to compare: in training that would wait for the device.
        ((name, value),) = found.items()
        return value, name
    values = torch.stack(list(found.values()))
    winner = int(values.detach().argmin())
    return values[winner], list(found)[winner]


def scalar_block_curvatures(block: Block, p: float, norms: AbstractNorms[R]) -> Tensor:
    r"""Bound the curvature of each output of a block, taken as a scalar function, in the p-norm.

    For the row g of G, :math:`c \sup \sum_l |g_l| |W_l a| |W_l b|`; at p = 2 that is
    :math:`c \lambda_{max}(W^T \mathrm{diag}|g| W)`, exact if the signs of :math:`\phi''` are free.

    >>> from curvcert.activations import TANH
    >>> from curvcert.operators import Dense, Identity, NormBounds, Zero
    >>> W, zero = Dense(torch.tensor([[3.0]], dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    >>> block = Block(Zero((1,), (1,)), Identity((1,)), W, zero, zero, TANH)
    >>> value = scalar_block_curvatures(block, 2, NormBounds())
    >>> round(float(value), 6) == round(9 * 4 / 27**0.5, 6)
    True
    """
    return (Upper(scalar_block_forms(block, p, norms)) * block.activation.curvature_c).bound


def scalar_block_forms(block: Block, p: float, norms: AbstractNorms[R], side: Side = "both") -> Tensor:
    r"""Bound :math:`\sup \sum_l |g_l| |W_l a| |W_l b|` over the p-ball for each row g of G: the same without c.

    From one side :math:`\max(\pm g_l \phi'', 0) / c` stands for :math:`|g_l|`, and a = b.
    """
    rows = block.G.adjoint(basis_vectors(block.G.out_shape, 0, block.G.out_size, block.G))
    if side == "both":
        return norms.bilinear(block.W, outward_size(block, rows), p)
    off = image_error(block.G.T, basis_vectors(block.G.out_shape, 0, block.G.out_size, block.G)).detach()
    # The ends round once each, by a part of what they are.
    error = (Upper(off) + Upper(rows.abs()) * (2 * UNIT_ROUNDOFF) + Upper(off) * (2 * UNIT_ROUNDOFF)).bound
    return norms.bilinear(block.W, Interval(rows - error, rows + error).weights(block.activation, side), p)


def outward_size(block: Block, rows: Tensor) -> Tensor:
    """Return |rows| of G plus what computing them as images of basis vectors may have rounded off."""
    error = image_error(block.G.T, basis_vectors(block.G.out_shape, 0, block.G.out_size, block.G))
    return (Upper(rows.abs()) + error.detach()).bound
