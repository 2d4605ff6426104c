r"""Softmax, normalisations, quotients and products of matrices, made of affine maps, functions of every entry and
products: what both front ends call for them.

Axes are those of a sample, counted from 0.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvcert import activations
from curvcert.errors import UnsupportedModule
from curvcert.network.builder import Value
from curvcert.network.windows import along, reduced

_MOST_PAIRS = 4096
"""Pairs of entries up to which a softmax is written by their differences."""


def squared(value: Value, path: str) -> Value:
    """Return the squares of the entries."""
    return value.activate(activations.power(2.0), path)


def reciprocal(value: Value, path: str) -> Value:
    """Return one over each entry; bounds ask that no entry can be 0."""
    return value.activate(activations.power(-1.0), path)


def quotient(left: Value, right: Value, path: str) -> Value:
    """Return left / right, entry by entry."""
    return left.multiplied(reciprocal(right, path), path)


def matrix_product(left: Value, right: Value, path: str) -> Value:
    """Return left @ right along the last two axes, of which the others agree or are 1: (..., n, k) and (..., k, m).

    >>> from curvcert.network.builder import start
    >>> x = start((2, 3), torch.device("cpu"))
    >>> matrix_product(x, x.permuted((1, 0)), "gram").shape
    (2, 2)
    """
    if len(left.shape) < 2 or len(right.shape) < 2 or left.shape[-1] != right.shape[-2]:
        raise UnsupportedModule(f"{path}: matrices of shapes {left.shape} and {right.shape} have no product.")
    if left.number in left.builder.shares:
        # Rows that sum to 1 give a mean of the columns: what all of these have in common passes by.
        mean = reduced(right, [len(right.shape) - 2], True, True, path)
        apart = right.plus(mean.negative().expanded(right.shape, path), path)
        found = _matrix_product(left, apart, path)
        return found.plus(mean.expanded(found.shape, path), path)
    return _matrix_product(left, right, path)


def _matrix_product(left: Value, right: Value, path: str) -> Value:
    (n, k), m = left.shape[-2:], right.shape[-1]
    try:
        outer = tuple(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    except RuntimeError as error:
        raise UnsupportedModule(f"{path}: {error}.") from None
    rows = left.reshaped((*left.shape[:-1], 1, k), path).expanded((*outer, n, m, k), path)
    axes = (*range(len(right.shape) - 2), len(right.shape) - 1, len(right.shape) - 2)
    turned = right.permuted(axes, path)
    columns = turned.reshaped((*turned.shape[:-2], 1, m, k), path).expanded((*outer, n, m, k), path)
    return reduced(rows.multiplied(columns, path), [len(outer) + 2], False, False, path)


def softmax(value: Value, axis: int, path: str) -> Value:
    r"""Return the softmax along an axis.

    By the differences of all pairs, :math:`p_i = 1 / \sum_j e^{z_j - z_i}`, so that what all entries have in common
    goes before anything is bounded; with many of them as :math:`e^{c_i - \log \sum_j e^{c_j}}`, c what is left of z
    beside its mean.
    """
    n = value.shape[axis]
    if n * math.prod(value.shape) > _MOST_PAIRS:
        return _noted(value, log_softmax(value, axis, path).activate(activations.EXP, path), axis)
    eye = torch.eye(n, dtype=torch.float64, device=value.device)
    differences = (eye[None, :] - eye[:, None]).reshape(n * n, n)  # row i n + j is e_j - e_i
    sums = torch.eye(n, dtype=torch.float64, device=value.device).repeat_interleave(n, dim=1)
    found = along(value, axis, differences, path).activate(activations.EXP, path)
    return _noted(value, reciprocal(along(found, axis, sums, path), path), axis)


def _noted(value: Value, shares: Value, axis: int) -> Value:
    """Note what holds of a softmax: that it sums to 1, if along the last axis, and that it keeps the order."""
    if axis == len(shares.shape) - 1:
        shares.builder.shares.add(shares.number)
    return _ordered(value, shares, axis)


def _ordered(value: Value, scored: Value, axis: int) -> Value:
    """Note that the entries of a value are in the order of those of another, if they are all along one axis."""
    if math.prod(value.shape) == value.shape[axis]:
        value.builder.scores[scored.number] = value.number
    return scored


def log_softmax(value: Value, axis: int, path: str) -> Value:
    """Return the logarithm of the softmax along an axis."""
    centred = _centred(value, [axis], path)
    found = centred.plus(_log_of_sum(centred, axis, path).negative().expanded(value.shape, path), path)
    return _ordered(value, found, axis)


def log_sum_exp(value: Value, axis: int, path: str) -> Value:
    """Return log sum exp along an axis, which stays with size 1."""
    mean = reduced(value, [axis], True, True, path)
    return _log_of_sum(_centred(value, [axis], path), axis, path).plus(mean, path)


def _log_of_sum(value: Value, axis: int, path: str) -> Value:
    total = reduced(value.activate(activations.EXP, path), [axis], True, False, path)
    return total.activate(activations.LOG, path)


def _centred(value: Value, axes: Sequence[int], path: str) -> Value:
    mean = reduced(value, axes, True, True, path)
    return value.plus(mean.negative().expanded(value.shape, path), path)


def normalised(
    value: Value, axes: Sequence[int], eps: float, centred: bool, path: str, weight: Tensor | None = None
) -> Value:
    r"""Return :math:`c / \sqrt{\mathrm{mean}(c^2) + \epsilon}` over some axes, times a weight of the value's shape.

    c is the value, or with `centred` what is left of it beside its mean: LayerNorm, InstanceNorm; RMSNorm without.
    """
    if not eps > 0:
        raise UnsupportedModule(f"{path}: a normalisation needs eps > 0, got {eps}: at 0 it has no bounds.")
    c = _centred(value, axes, path) if centred else value
    mean = reduced(squared(c, path), axes, True, True, path)
    shifted = mean.shift(torch.full(mean.shape, eps, dtype=torch.float64))
    inverse = shifted.activate(activations.power(-0.5), path).expanded(value.shape, path)
    found = c.multiplied(inverse, path)
    return found if weight is None else found.times(weight.expand(value.shape), path)


def layer_norm(
    value: Value, rank: int, weight: Tensor | None, bias: Tensor | None, eps: float, path: str, centred: bool = True
) -> Value:
    """Return the LayerNorm over the last `rank` axes; the RMSNorm without `centred`."""
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    found = normalised(value, axes, eps, centred, path, weight)
    return found if bias is None else found.shift(bias)


def group_norm(value: Value, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, path: str) -> Value:
    """Return the GroupNorm of an image of any rank; with as many groups as channels, the InstanceNorm."""
    channels, *grid = value.shape
    if groups < 1 or channels % groups:
        raise UnsupportedModule(f"{path}: {channels} channels do not make {groups} groups.")
    parted = value.reshaped((groups, channels // groups, *grid), path)
    found = normalised(parted, list(range(1, len(parted.shape))), eps, True, path).reshaped(value.shape, path)
    if weight is not None:
        found = found.times(weight.reshape(-1, *(1,) * len(grid)).expand(value.shape), path)
    return found if bias is None else found.shift(bias.reshape(-1, *(1,) * len(grid)).expand(value.shape))
