r"""How far a float64 evaluation can be from the network in real arithmetic.

Errors travel in two ways, and the smaller counts: coordinate by coordinate through the maps of
absolute values, and in the 2-norm through spectral norms, which grow far slower with depth.
"""

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.activations.declaration import ROUNDING as DECLARED_ROUNDING
from curvcert.errors import UnsupportedBlock
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.network import Network
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import magnitude, rounding_length
from curvcert.rounding import TINY, UNIT_ROUNDOFF, gamma, inflate, norm_upper_bound_of_vectors


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


def evaluate_with_error(network: Network, x: Tensor, norms: NormBounds | None = None) -> Evaluation:
    """Evaluate a batch, with proven bounds on what rounding did to every intermediate value.

    Without `norms` errors travel coordinate by coordinate only: no norm is computed, deep networks get more slack.

    >>> from curvcert.activations import TANH
    >>> from curvcert.operators import Dense, Identity, Zero
    >>> ones, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    >>> network = Network((Block(Zero((1,), (1,)), Identity((1,)), Dense(ones), zero, zero, TANH),))
    >>> 0 < float(evaluate_with_error(network, ones).states[-1].error) < 1e-14
    True
    """
    x = network.require_batch(x)
    states = [Computed(x, torch.zeros_like(x), x.new_zeros(len(x)))]
    pre: list[Computed | None] = []
    for block in network.blocks:
        z, state = _step(block, states[-1], norms)
        pre.append(z)
        states.append(state)
    return Evaluation(tuple(states), tuple(pre))


@singledispatch
def _step(block: AbstractBlock, x: Computed, norms: NormBounds | None) -> tuple[Computed | None, Computed]:
    """Return the pre-activation, if there is one, and the output of a block."""
    raise UnsupportedBlock(f"evaluate_with_error has no rule for {type(block).__name__}.")


@_step.register(MaxPool)
def _(block: MaxPool, x: Computed, norms: NormBounds | None) -> tuple[None, Computed]:
    # Each output is one of the inputs, or beside one by no more than the largest error.
    worst = x.error.flatten(1).amax(dim=1)
    value = block.evaluate(x.value)
    return None, _computed(value, _spread(worst, value), None)


@_step.register(Affine)
def _(block: Affine, x: Computed, norms: NormBounds | None) -> tuple[None, Computed]:
    return None, _affine(block.H, x, block.c, block.c_error, norms)


@_step.register(Block)
def _(block: Block, x: Computed, norms: NormBounds | None) -> tuple[Computed, Computed]:
    z = _affine(block.W, x, block.b, block.b_error, norms)
    y = _affine(block.G, _activated(block.activation, z), block.c, block.c_error, norms)
    if not block.is_residual:
        return z, y
    skip = _affine(block.H, x, torch.zeros_like(block.c), None, norms)
    total = y.value + skip.value
    error = y.error + skip.error + UNIT_ROUNDOFF * total.abs()
    return z, _computed(total, error, y.error_norm + skip.error_norm + UNIT_ROUNDOFF * _norm(total))


def _activated(activation: Activation, z: Computed) -> Computed:
    alpha, beta = activation.slope
    steepest = max(abs(alpha), abs(beta))
    value = activation.value(z.value)
    local = _activation_error(activation, value)
    return _computed(value, steepest * z.error + local, steepest * z.error_norm + _norm(local))


def _activation_error(activation: Activation, value: Tensor) -> Tensor:
    """Bound the rounding of phi itself; a value that cancels (sin, GELU, softplus - log 2) errs absolutely."""
    if activation.profiles is not None:
        return activation.profiles[0].slack(value)
    return DECLARED_ROUNDING * (1 + value.abs())


def _affine(
    A: AbstractLinearMap, x: Computed, offset: Tensor, offset_error: Tensor | None, norms: NormBounds | None
) -> Computed:
    value = A.apply(x.value) + offset
    size, g = magnitude(A), gamma(rounding_length(A) + 1)
    local = inflate(g * size.apply(x.value.abs()), g) + UNIT_ROUNDOFF * value.abs()
    if offset_error is not None:
        local = local + offset_error
    error = local + inflate(size.apply(x.error), g)
    return _computed(value, error, None if norms is None else norms.norm(A, 2, 2) * x.error_norm + _norm(local))


def _computed(value: Tensor, error: Tensor, norm: Tensor | None) -> Computed:
    """Combine both bounds: no coordinate is off by more than the whole vector is.

    TINY stands for what underflow lost.  Where a value overflowed, nothing is known of the whole sample.
    """
    error = inflate(error, gamma(16)) + TINY
    size = _norm(error)
    # NaN or infinity in any coordinate shows here.
    total = size + value.abs().flatten(1).amax(dim=1)
    if norm is not None:
        size = torch.minimum(size, inflate(norm, gamma(16)) + TINY * value[0].numel())
        total = total + size
    known = total < torch.inf
    size = torch.where(known, size, torch.inf)
    return Computed(
        value, torch.where(_spread(known, error), torch.minimum(error, _spread(size, error)), torch.inf), size
    )


def _norm(x: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(x.flatten(1), 2, 1)


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *(1,) * (like.dim() - 1)).expand_as(like)
