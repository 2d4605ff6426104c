r"""Softmax, normalisations, quotients and products of matrices, made of affine maps, functions of every entry and
products: what both front ends call for them.

Axes are those of a sample, counted from 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from curvcert import activations
from curvcert.errors import UnsupportedModule
from curvcert.network.builder import Value
from curvcert.network.windows import along, reduced


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
    each = _Sums({value: torch.eye(value.shape[axis], dtype=torch.float64)}, axis, path)
    return each.minus(_log_of_others(_levels(each))).made()


@dataclass(frozen=True, eq=False)
class _Sums:
    """Entries along an axis that are sums of those of some values: a matrix for each.

    Sums of sums are multiplied out, so that what a function is applied to reads functions' values directly.
    """

    parts: Mapping[Value, Tensor]
    axis: int
    path: str

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def taken(self, rows: Sequence[int]) -> "_Sums":
        """Return some of the entries."""
        return replace(self, parts={value: W[list(rows)] for value, W in self.parts.items()})

    def minus(self, other: "_Sums") -> "_Sums":
        """Return the differences, entry by entry."""
        parts = dict(self.parts)
        for value, W in other.parts.items():
            parts[value] = parts[value] - W if value in parts else -W
        return replace(self, parts=parts)

    def before(self, other: "_Sums") -> "_Sums":
        """Return these entries and then others."""
        widths = {value: W.shape[1] for part in (self.parts, other.parts) for value, W in part.items()}
        sides = [
            {
                value: part.parts.get(value, torch.zeros(len(part), n, dtype=torch.float64))
                for value, n in widths.items()
            }
            for part in (self, other)
        ]
        return replace(self, parts={value: torch.cat([side[value] for side in sides]) for value in widths})

    def made(self) -> Value:
        """Return the entries as a value."""
        terms = [along(value, self.axis, W.to(value.device), self.path) for value, W in self.parts.items() if W.any()]
        return reduce(lambda left, right: left.plus(right, self.path), terms)


def _levels(each: _Sums) -> list[_Sums]:
    """Return the log-sum-exps of pairs, of pairs of these, and so on up to that of all; what has no partner stays."""
    levels = [each]
    while (n := len(levels[-1])) > 1:
        pairs = _log_of_both(*(levels[-1].taken(range(k, n - n % 2, 2)) for k in (0, 1)))
        levels.append(pairs.before(levels[-1].taken([n - 1])) if n % 2 else pairs)
    return levels


def _log_of_others(levels: Sequence[_Sums]) -> _Sums:
    """Return the log-sum-exp of the others beside each entry: of its partner, and of the others beside their pair."""
    each, *above = levels
    n = len(each)
    partners = each.taken([k ^ 1 for k in range(n - n % 2)])
    if n == 2:
        return partners
    beside = _log_of_others(above)
    found = _log_of_both(partners, beside.taken([k // 2 for k in range(n - n % 2)]))
    return found.before(beside.taken([n // 2])) if n % 2 else found


def _log_of_both(left: _Sums, right: _Sums) -> _Sums:
    """Return log(e^u + e^v) = v + softplus(u - v)."""
    bent = left.minus(right).made().activate(activations.softplus(), left.path)
    return replace(right, parts={**right.parts, bent: torch.eye(len(right), dtype=torch.float64)})


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
    return _levels(_Sums({value: torch.eye(value.shape[axis], dtype=torch.float64)}, axis, path))[-1].made()


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
