"""Norms of the rows of a map's matrix, bounded without forming the matrix where that can be."""

import math
from functools import singledispatch
from typing import TypeGuard

import torch
from torch import Tensor

from curvcert.operators.base import (
    AbstractLinearMap,
    AbstractReordering,
    AbstractSelection,
    Composition,
    Scaled,
    Transposed,
    Zero,
    compose,
)
from curvcert.operators.conv import Conv2d, overlaps
from curvcert.operators.dense import Dense
from curvcert.operators.magnitudes import (
    absolute_image,
    absolute_row_sums_upper_bound,
    rounding_length,
)
from curvcert.operators.scaled_conv import scaled_conv
from curvcert.operators.structured import AveragePool2d, Diagonal
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, norm_upper_bound_of_vectors, root_below

_CHUNK_ELEMENTS = 2**25
"""Rows are formed in pieces of about this many numbers."""

_EXACT_POWER = 4
"""Beyond this r the norms of rows of a convolution are those of whole kernels, more than they are at a border."""


@singledispatch
def row_norms_upper_bound(op: AbstractLinearMap, r: float) -> Tensor:
    r"""Bound the r-norm of every row of op's float64 matrix; the result has op's output shape.

    The general rule forms the rows in pieces, as images of basis vectors under the adjoint, and
    adds their rounding error :math:`\gamma_K (|A| 1)_i`.

    >>> rows = row_norms_upper_bound(Dense(torch.tensor([[3.0, 4.0]], dtype=torch.float64)), 2)
    >>> 5.0 <= float(rows) < 5.000001
    True
    """
    if isinstance(op, AbstractSelection):
        return torch.ones(op.out_shape, dtype=op.dtype, device=op.device)
    pieces = []
    chunk = max(1, _CHUNK_ELEMENTS // max(op.in_size, op.out_size))
    for start in range(0, op.out_size, chunk):
        basis = basis_vectors(op.out_shape, start, min(start + chunk, op.out_size), op)
        pieces.append(norm_upper_bound_of_vectors(op.adjoint(basis).flatten(1), r, 1))
    error = Upper(absolute_row_sums_upper_bound(op)) * gamma(rounding_length(op))
    return (error + torch.cat(pieces).reshape(op.out_shape)).bound


def column_norms_upper_bound(op: AbstractLinearMap, r: float) -> Tensor:
    """Bound the r-norm of every column of op's float64 matrix; the result has op's input shape.

    >>> columns = column_norms_upper_bound(Dense(torch.tensor([[3.0], [4.0]], dtype=torch.float64)), 2)
    >>> 5.0 <= float(columns) < 5.000001
    True
    """
    return row_norms_upper_bound(op.T, r)


def basis_vectors(shape: tuple[int, ...], start: int, stop: int, like: AbstractLinearMap) -> Tensor:
    """Return basis vectors number start to stop (excluded) of the space of tensors of that shape."""
    basis = torch.zeros(stop - start, math.prod(shape), dtype=like.dtype, device=like.device)
    basis.diagonal(start).fill_(1.0)
    return basis.reshape(-1, *shape)


@row_norms_upper_bound.register
def _(op: Dense, r: float) -> Tensor:
    return norm_upper_bound_of_vectors(op.weight, r, 1)


@row_norms_upper_bound.register
def _(op: Zero, r: float) -> Tensor:
    return torch.zeros(op.out_shape, dtype=op.dtype, device=op.device)


@row_norms_upper_bound.register
def _(op: Diagonal, r: float) -> Tensor:
    return op.weight.abs().expand(op.shape)


@row_norms_upper_bound.register
def _(op: Scaled, r: float) -> Tensor:
    return (Upper(row_norms_upper_bound(op.map, r)) * abs(op.factor)).bound


@row_norms_upper_bound.register
def _(op: Composition, r: float) -> Tensor:
    first, *inner, last = op.factors
    if isinstance(last, AbstractReordering):
        return row_norms_upper_bound(compose(first, *inner), r)
    if isinstance(first, AbstractReordering):
        return first.apply(row_norms_upper_bound(compose(*inner, last), r))
    if r > _EXACT_POWER:
        return row_norms_upper_bound.dispatch(object)(op, r)
    for conv, transposed in ((scaled_conv(op), False), (scaled_conv(op.T), True)):
        if conv is not None:
            # Weights that underflow are below any that norms are bounded for.
            return (Upper(_conv_line_norms(conv[0], r, transposed), 4 * conv[1]) + TINY).bound
    if isinstance(first, Diagonal):
        return (Upper(row_norms_upper_bound(compose(*inner, last), r)) * first.weight.abs()).bound
    if isinstance(first, Transposed) and _has_windows_apart(first.map):
        # Each row is a share of one row behind it.
        return absolute_image(first, row_norms_upper_bound(compose(*inner, last), r)).bound
    if r == 2 and _has_windows_apart(last):
        # The rows of the pooling are orthogonal and of one length.
        behind = row_norms_upper_bound(compose(first, *inner), r)
        return (Upper(behind) / root_below(math.prod(last.kernel_size))).bound
    return row_norms_upper_bound.dispatch(object)(op, r)


def _has_windows_apart(op: AbstractLinearMap) -> TypeGuard[AveragePool2d]:
    return isinstance(op, AveragePool2d) and not overlaps(op.as_conv)


@row_norms_upper_bound.register
def _(op: AveragePool2d, r: float) -> Tensor:
    return inflate(row_norms_upper_bound(op.as_conv, r), 4 * UNIT_ROUNDOFF)


@row_norms_upper_bound.register
def _(op: Conv2d, r: float) -> Tensor:
    return _conv_line_norms(op, r, transposed=False)


@row_norms_upper_bound.register
def _(op: Transposed, r: float) -> Tensor:
    inner = op.map
    match inner:
        case Dense():
            return norm_upper_bound_of_vectors(inner.weight, r, 0)
        case Conv2d():
            return _conv_line_norms(inner, r, transposed=True)
        case AveragePool2d():
            return inflate(_conv_line_norms(inner.as_conv, r, transposed=True), 4 * UNIT_ROUNDOFF)
        case Diagonal():
            return row_norms_upper_bound(inner, r)
        case AbstractSelection():
            # How often each coordinate is taken: columns of ones.
            counts = inner.adjoint(torch.ones(inner.out_shape, dtype=op.dtype, device=op.device))
            return torch.where(counts > 1, inflate(counts.pow(1 / r), 4 * UNIT_ROUNDOFF), counts)
        case _:
            return row_norms_upper_bound.dispatch(object)(op, r)


def _conv_line_norms(conv: Conv2d, r: float, transposed: bool) -> Tensor:
    r"""Bound row (or column) norms of a convolution, position by position.

    As long as no two taps meet in one entry, a row's :math:`\sum |K|^r` over the taps that fall
    into the image is the convolution of an image of ones with the kernel :math:`|K|^r`.
    """
    wraps = conv.padding_mode == "circular"
    meet = wraps and any(e >= n for e, n in zip(conv.extent, conv.in_shape[1:], strict=True))
    # Periodic continuation shows an entry to more outputs than the kernel has taps.
    if meet or (wraps and r > _EXACT_POWER):
        op = conv.T if transposed else conv
        return row_norms_upper_bound.dispatch(object)(op, r)
    if r > _EXACT_POWER:
        return _whole_kernel_norms(conv, r, transposed)
    peak = conv.weight.abs().amax()
    if float(peak) == 0.0:
        return torch.zeros(conv.in_shape if transposed else conv.out_shape, dtype=conv.dtype, device=conv.device)
    kernel = Conv2d(
        (conv.weight.abs() / peak).pow(r), conv.in_shape, conv.stride, conv.padding, conv.dilation,
        conv.groups, conv.padding_mode,
    )  # fmt: skip
    total = absolute_row_sums_upper_bound(kernel.T if transposed else kernel)
    # A power below the underflow threshold may vanish; its root is below 2**-250 of the peak.
    return inflate(peak * (total.pow(1.0 / r) + 2.0**-250), 64 * UNIT_ROUNDOFF)


def _whole_kernel_norms(conv: Conv2d, r: float, transposed: bool) -> Tensor:
    """Bound line norms by the norm of all taps together, whether they fall into the image or not."""
    weight = conv.weight
    if transposed:
        per_channel = weight.unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)
        shape = conv.in_shape
    else:
        per_channel, shape = weight.flatten(1), conv.out_shape
    return norm_upper_bound_of_vectors(per_channel, r, 1)[:, None, None].expand(shape)
