r"""How far a float64 evaluation can be from the network in real arithmetic.

Errors travel in two ways, and the smaller counts: coordinate by coordinate through the maps of
absolute values, and in the 2-norm through spectral norms, which grow far slower with depth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations.base import EVALUATION_SLACK
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.network import Network
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error
from curvcert.rounding import TINY, UNIT_ROUNDOFF, gamma, inflate


@dataclass(frozen=True, eq=False)
class Computed:
    """A computed batch with bounds on its error: coordinate by coordinate, and in the 2-norm."""

    value: Tensor
    error: Tensor
    error_norm: Tensor


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The computed input of every block, the output, and every pre-activation (None without one)."""

    states: tuple[Computed, ...]
    pre_activations: tuple[Computed | None, ...]


def evaluate_with_error(network: Network, x: Tensor, norms: NormBounds) -> Evaluation:
    """Evaluate a batch, with proven bounds on what rounding did to every intermediate value."""
    x = network.require_batch(x)
    states = [Computed(x, torch.zeros_like(x), x.new_zeros(len(x)))]
    pre: list[Computed | None] = []
    for block in network.blocks:
        z, state = _step(block, states[-1], norms)
        pre.append(z)
        states.append(state)
    return Evaluation(tuple(states), tuple(pre))


def _step(block: AbstractBlock, x: Computed, norms: NormBounds) -> tuple[Computed | None, Computed]:
    if isinstance(block, MaxPool):
        # Each output is one of the inputs, or beside one by no more than the largest error.
        worst = x.error.flatten(1).amax(dim=1)
        value = block.evaluate(x.value)
        return None, _computed(value, _spread(worst, value), None)
    if isinstance(block, Affine):
        return None, _affine(block.H, x, block.c, block.c_error, norms)
    assert isinstance(block, Block)
    z = _affine(block.W, x, block.b, block.b_error, norms)
    y = _affine(block.G, _activated(block, z), block.c, block.c_error, norms)
    if not block.is_residual:
        return z, y
    skip = _affine(block.H, x, torch.zeros_like(block.c), None, norms)
    total = y.value + skip.value
    error = y.error + skip.error + UNIT_ROUNDOFF * total.abs()
    return z, _computed(total, error, inflate(y.error_norm + skip.error_norm + UNIT_ROUNDOFF * _norm(total), 0.0))


def _activated(block: Block, z: Computed) -> Computed:
    alpha, beta = block.activation.slope
    steepest = max(abs(alpha), abs(beta))
    value = block.activation.value(z.value)
    local = EVALUATION_SLACK * value.abs() + TINY
    return _computed(value, steepest * z.error + local, steepest * z.error_norm + _norm(local))


def _affine(
    A: AbstractLinearMap, x: Computed, offset: Tensor, offset_error: Tensor | None, norms: NormBounds
) -> Computed:
    value = A.apply(x.value) + offset
    local = image_error(A, x.value) + UNIT_ROUNDOFF * value.abs()
    if offset_error is not None:
        local = local + offset_error
    error = local + image_error(A, torch.zeros_like(x.value), x.error)
    return _computed(value, error, norms.norm(A, 2, 2) * x.error_norm + _norm(local))


def _computed(value: Tensor, error: Tensor, norm: Tensor | None) -> Computed:
    """Combine both bounds: no coordinate is off by more than the whole vector is."""
    error = inflate(error, gamma(16))
    size = _norm(error)
    norm = size if norm is None else torch.minimum(size, inflate(norm, gamma(16)))
    return Computed(value, torch.minimum(error, _spread(norm, error)), norm)


def _norm(x: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return inflate(size, gamma(x[0].numel() + 4)) + TINY


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *(1,) * (like.dim() - 1)).expand_as(like)
