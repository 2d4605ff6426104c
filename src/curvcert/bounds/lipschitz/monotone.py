r"""Residual blocks that contract: h(x) = A (x - W' D phi(W x + b)), the form of SLL layers.

For two inputs let :math:`\Delta z = W \Delta x` and :math:`\Delta a` be the change of :math:`\phi(Wx + b)`.  With
slopes in :math:`[0, \beta]`, neuron by neuron :math:`\Delta a_l \Delta z_l \ge \Delta a_l^2 / \beta`, so for
A = I, D >= 0 and :math:`r = \|D^{1/2} W\|_2^2`

.. math:: \|\Delta h\|^2 = \|\Delta x\|^2 - 2 \Delta z^T D \Delta a + \|W^T D \Delta a\|^2
          \le \|\Delta x\|^2 + (r - 2/\beta) \|D^{1/2} \Delta a\|^2.

If :math:`r \le 2/\beta` then :math:`L \le 1`.  Otherwise
:math:`\|D^{1/2} \Delta a\|^2 \le \beta^2 \|D^{1/2} W \Delta x\|^2 \le \beta^2 r \|\Delta x\|^2` gives

.. math:: L^2 \le 1 + \beta^2 r (r - 2/\beta).

Both right-hand sides grow with r, so that an upper bound on r serves.  The layer of Araujo et al. (ICLR 2023) is
:math:`D = 2T^{-1}` and :math:`\beta \le 1`: with :math:`\rho = \|T^{-1/2} W\|_2^2 = r/2` and :math:`\beta = 1` this
reads :math:`L^2 \le 1 + 4 \rho \max(\rho - 1, 0)`.  Its T makes :math:`\rho \le 1` in exact arithmetic; here that is
not assumed but proven, weight by weight, when a bound is asked for.  A T that is rounded leaves L within rounding of
1; one that is too small, by whatever cause, gives an L above 1 that holds.  One neuron, D = d and slope 1 attain the
bound: :math:`L = r - 1`.

A linear map A behind the block, such as a last layer, a pair or a logit, is a factor of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Composition, Conv2d, Dense, Diagonal, Identity, Scaled
from curvcert.operators.magnitudes import absolute_norm_upper_bound
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.rounding import UNIT_ROUNDOFF, Upper

NormOf = Callable[[AbstractLinearMap], Tensor]


@dataclass(frozen=True, eq=False)
class ResidualContraction:
    """The parts of h(x) = A (x - W' D phi(W x + b)): A, and the diagonal of D >= 0, rounded up."""

    outer: AbstractLinearMap
    weights: Tensor


def monotone_residual_constant(
    block: Block, norms: AbstractNorms[R], outer_norm: NormOf | None = None
) -> Tensor | None:
    """Bound the l2 Lipschitz constant of A (x - W' D phi(W x + b)), or None for a block of another form.

    `outer_norm` bounds A in the norm that is asked for, 2 -> 2 by default: 2 -> q, or its rows one by one.

    >>> from curvcert.activations import TANH
    >>> from curvcert.operators import NormBounds
    >>> W, zero = Dense(torch.tensor([[2.0]], dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    >>> def slope(d):  # of x - 2 d tanh(2 x), whose slopes lie between 1 - 4 d and 1
    ...     G = -1.0 * (W.T @ Diagonal(torch.tensor([d], dtype=torch.float64), (1,)))
    ...     block = Block(Identity((1,)), G, W, zero, zero, TANH)
    ...     return round(float(monotone_residual_constant(block, NormBounds())), 9)
    >>> slope(0.25), slope(0.5), slope(1.0)
    (1.0, 1.0, 3.0)
    """
    beta = block.activation.slope[1]
    form = residual_contraction_of(block)
    if form is None:
        return None
    roots = Upper(form.weights).root().bound
    norm = norm_of_weighted(roots, block.W, norms)
    r = Upper(norm).square().bound
    excess = Upper((r - 2.0 / beta * (1 - 4 * UNIT_ROUNDOFF)).clamp(min=0.0), 1)
    beyond = (excess * beta * beta * r + 1.0).root().bound
    constant = torch.where(excess.value > 0, beyond, torch.ones_like(r))
    if isinstance(form.outer, Identity) and outer_norm is None:
        return constant
    outer = norms.norm(form.outer, 2, 2) if outer_norm is None else outer_norm(form.outer)
    return (Upper(outer) * constant).bound


def residual_contraction_of(block: Block) -> ResidualContraction | None:
    """Return A and D if the block is A (x - W' D phi(W x + b)) with D >= 0 and slopes from 0 up, else None.

    Maps are compared by the weights that they hold, so that copies of one map count as the same.
    """
    alpha, beta = block.activation.slope
    if not block.is_residual or alpha < 0 or beta <= 0 or not block.activation.is_bounded:
        return None
    (h, outer), (g, inner) = _unscaled(block.H), _unscaled(block.G)
    diagonal = inner[-1] if inner and isinstance(inner[-1], Diagonal) else None
    rest = inner if diagonal is None else inner[:-1]
    (w, back), n = _unscaled(block.W.T), len(outer)
    if w != 1.0 or not back or not _same(rest[:n], outer) or not _same(rest[n:], back):
        return None
    weight = torch.ones((), dtype=block.W.dtype, device=block.W.device) if diagonal is None else diagonal.weight
    weights = -(g / h) * weight * (1 + 4 * UNIT_ROUNDOFF)
    return ResidualContraction(block.H, weights) if bool((weights >= 0).all()) else None


def norm_of_weighted(roots: Tensor, W: AbstractLinearMap, norms: AbstractNorms[R]) -> Tensor:
    """Bound the norm of diag(roots) W; the product with a weight or a kernel rounds each entry once."""
    scaled = folded(roots, W)
    if scaled is None:
        return norms.norm(Diagonal(roots.expand(W.out_shape), W.out_shape) @ W, 2, 2)
    rounding = Upper(absolute_norm_upper_bound(scaled)) * (2 * UNIT_ROUNDOFF)
    return (rounding + norms.norm(scaled, 2, 2)).bound


def folded(roots: Tensor, W: AbstractLinearMap) -> Dense | Conv2d | None:
    """Return diag(roots) W as a weight or a kernel of its own, where it is one: each channel has one root."""
    if isinstance(W, Dense):
        return Dense(roots.reshape(-1, 1) * W.weight)
    per_channel = roots.numel() == (roots.shape[0] if roots.dim() == 3 else 1)
    if isinstance(W, Conv2d) and per_channel:
        return replace(W, weight=roots.reshape(-1, 1, 1, 1) * W.weight)
    return None


def _unscaled(op: AbstractLinearMap) -> tuple[float, tuple[AbstractLinearMap, ...]]:
    """Return a map as a number and the factors of a product, none for the identity."""
    factor, product = (op.factor, op.map) if isinstance(op, Scaled) else (1.0, op)
    if isinstance(product, Identity):
        return factor, ()
    return factor, product.factors if isinstance(product, Composition) else (product,)


def _same(left: Any, right: Any) -> bool:
    """Whether two maps, or parts of maps, are equal, weights included."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        same_kind = (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        return same_kind and torch.equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if is_dataclass(left):
        return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return bool(left == right)
