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
from curvcert.network.builder import Value, concat
from curvcert.network.windows import reduced


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
    r"""Return the softmax along an axis: :math:`p_i = \mathrm{sigmoid}(z_i - \log \sum_{j \ne i} e^{z_j})`.

    What all entries have in common goes before anything is bounded, and every function has a largest slope.
    """
    if value.shape[axis] == 1:
        return value.times(torch.tensor(0.0), path).shift(torch.ones(value.shape))
    return _noted(value, _beside_others(value, axis, path).activate(activations.SIGMOID, path), axis)


def _beside_others(value: Value, axis: int, path: str) -> Value:
    """Return how far each entry is above the log-sum-exp of the others, of which there is one at least."""
    return value.plus(_log_of_others(_levels(value, axis, path), axis, path).negative(), path)


def _levels(value: Value, axis: int, path: str) -> list[Value]:
    """Return the log-sum-exps of pairs, of pairs of these, and so on up to that of all; what has no partner stays."""
    levels = [value]
    while (n := levels[-1].shape[axis]) > 1:
        left, right = (levels[-1].cut(axis, k, n // 2, 2, path) for k in (0, 1))
        pairs = _log_of_both(left, right, path)
        levels.append(concat([pairs, levels[-1].cut(axis, n - 1, 1, name=path)], axis, path) if n % 2 else pairs)
    return levels


def _log_of_others(levels: Sequence[Value], axis: int, path: str) -> Value:
    """Return the log-sum-exp of the others beside each entry: of its partner, and of the others beside their pair."""
    value, *above = levels
    n = value.shape[axis]
    partners = value.gathered({axis: [k ^ 1 for k in range(n - n % 2)]}, path)
    if n == 2:
        return partners
    beside = _log_of_others(above, axis, path)
    found = _log_of_both(partners, beside.gathered({axis: [k // 2 for k in range(n - n % 2)]}, path), path)
    return concat([found, beside.cut(axis, n // 2, 1, name=path)], axis, path) if n % 2 else found


def _log_of_both(left: Value, right: Value, path: str) -> Value:
    """Return log(e^u + e^v)."""
    return right.plus(left.plus(right.negative(), path).activate(activations.softplus(), path), path)


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
    if value.shape[axis] == 1:
        return value.times(torch.tensor(0.0), path)
    behind = _beside_others(value, axis, path).negative()
    return _ordered(value, behind.activate(activations.softplus(), path).negative(), axis)


def log_sum_exp(value: Value, axis: int, path: str) -> Value:
    """Return log sum exp along an axis, which stays with size 1."""
    return _levels(value, axis, path)[-1]


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
