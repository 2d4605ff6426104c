r"""How far a computed image of a linear map can be from the true one.

A map applied in floating point, sums in any order, gives a y with
:math:`|y - Ax| \le \gamma_K |A| |x|`, where |A| is the map of absolute values and K counts the
roundings on the way from an input to an output.
"""

import math
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from curvcert.errors import UnsupportedOperator
from curvcert.operators.base import (
    AbstractLinearMap,
    AbstractPart,
    AbstractSelection,
    Composition,
    Scaled,
    Sum,
    Transposed,
    Zero,
)
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Conv2d
from curvcert.operators.dense import Dense
from curvcert.operators.structured import AveragePool2d, Diagonal
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate


@singledispatch
def magnitude(op: AbstractLinearMap) -> AbstractLinearMap:
    """Return a map with nonnegative entries, none smaller than the absolute values of op's.

    >>> magnitude(Dense(torch.tensor([[1.0, -2.0]]))).as_matrix()
    tensor([[1., 2.]])
    """
    raise UnsupportedOperator(f"magnitude has no rule for {type(op).__name__}. Register one with magnitude.register.")


@magnitude.register(Dense | Conv2d | Diagonal)
def _(op: Dense | Conv2d | Diagonal) -> AbstractLinearMap:
    return replace(op, weight=op.weight.abs())


@magnitude.register(AbstractSelection | Zero | AveragePool2d)
def _(op: AbstractLinearMap) -> AbstractLinearMap:
    return op


@magnitude.register
def _(op: Transposed) -> AbstractLinearMap:
    return Transposed(magnitude(op.map))


@magnitude.register
def _(op: Scaled) -> AbstractLinearMap:
    return Scaled(abs(op.factor), magnitude(op.map))


@magnitude.register
def _(op: Sum) -> AbstractLinearMap:
    return Sum(tuple(magnitude(term) for term in op.terms))


@magnitude.register
def _(op: Composition) -> AbstractLinearMap:
    return Composition(tuple(magnitude(factor) for factor in op.factors))


@magnitude.register
def _(op: Circuit) -> AbstractLinearMap:
    return op.over(magnitude)


@singledispatch
def rounding_length(op: AbstractLinearMap) -> int:
    """Return K, the number of roundings between an input and an output of the map or its adjoint.

    >>> rounding_length(Dense(torch.ones(2, 5)))
    5
    """
    raise UnsupportedOperator(
        f"rounding_length has no rule for {type(op).__name__}. Register one with rounding_length.register."
    )


@rounding_length.register
def _(op: Dense) -> int:
    return max(op.weight.shape)


@rounding_length.register
def _(op: Conv2d) -> int:
    outputs, per_group, kh, kw = op.weight.shape
    wraps = 0 if op.padding_mode == "zeros" else 4
    return kh * kw * max(per_group, outputs // op.groups) + wraps


@rounding_length.register
def _(op: AveragePool2d) -> int:
    return math.prod(op.kernel_size) + 2


@rounding_length.register(AbstractPart | Zero)
def _(op: AbstractLinearMap) -> int:
    return 0


@rounding_length.register
def _(op: Diagonal) -> int:
    return 1


@rounding_length.register
def _(op: Transposed) -> int:
    return rounding_length(op.map)


@rounding_length.register
def _(op: Scaled) -> int:
    return rounding_length(op.map) + 1


@rounding_length.register
def _(op: Sum) -> int:
    return max(rounding_length(term) for term in op.terms) + len(op.terms)


@rounding_length.register
def _(op: Composition) -> int:
    return sum(rounding_length(factor) for factor in op.factors)


@rounding_length.register
def _(op: Circuit) -> int:
    # Each step adds to the longest way so far its map and the sum; the adjoint sums up what readers send back.
    most = max(sum(source == k for step in op.steps for source, _ in step) for k in range(len(op.steps)))
    return op.carried(0, lambda part, length: length + rounding_length(part) + most, max) + sum(map(len, op.steps))


def absolute_image(op: AbstractLinearMap, x: Upper | Tensor) -> Upper:
    """Return the image of x >= 0 under the map of op's absolute values.

    >>> absolute_image(Dense(torch.tensor([[1.0, -2.0]])), torch.tensor([3.0, 1.0]))
    Upper(value=tensor([5.]), roundings=3)
    """
    value, roundings = (x.value, x.roundings) if isinstance(x, Upper) else (x, 0)
    return Upper(magnitude(op).apply(value), roundings + rounding_length(op) + 1)


def absolute_row_sums_upper_bound(op: AbstractLinearMap) -> Tensor:
    """Bound the sums of absolute values along each row of op's matrix, in op's output shape."""
    return absolute_image(op, torch.ones(op.in_shape, dtype=op.dtype, device=op.device)).bound


def absolute_column_sums_upper_bound(op: AbstractLinearMap) -> Tensor:
    """Bound the sums of absolute values along each column of op's matrix, in op's input shape."""
    return absolute_row_sums_upper_bound(op.T)


def absolute_norm_upper_bound(op: AbstractLinearMap, p: float = 2) -> Tensor:
    r"""Bound :math:`\| |A| \|_p \le \|A\|_1^{1/p} \|A\|_\infty^{1 - 1/p}`, cheaply."""
    rows, columns = absolute_row_sums_upper_bound(op).amax(), absolute_column_sums_upper_bound(op).amax()
    return interpolated(columns, rows, p)


def interpolated(columns: Tensor, rows: Tensor, p: float) -> Tensor:
    r"""Bound a p -> p norm by :math:`\|A\|_1^{1/p} \|A\|_\infty^{1 - 1/p}` (Riesz and Thorin).

    Written with the quotient of the two, so that the rounding of the exponent is not magnified by their size; a
    quotient beyond 2**64 either way, where that would still matter, falls back on the larger of them.
    """
    safe = torch.where(rows > 0, rows, torch.ones_like(rows))
    quotient = columns / safe
    value = inflate(safe * quotient.pow(1.0 / p), 128 * UNIT_ROUNDOFF)
    ordinary = (quotient > 2.0**-64) & (quotient < 2.0**64)
    value = torch.where(ordinary, value, torch.maximum(rows, columns))
    return torch.where((rows > 0) & (columns > 0), value, torch.zeros_like(value))


def image_error(op: AbstractLinearMap, x: Tensor, x_error: Tensor | None = None) -> Tensor:
    r"""Bound :math:`|fl(A\hat x) - A x|`, coordinate by coordinate, where :math:`|\hat x - x| \le` x_error.

    >>> op = Dense(torch.ones(1, 2, dtype=torch.float64))
    >>> 0 < float(image_error(op, torch.ones(2, dtype=torch.float64))) < 1e-15
    True
    """
    error = Upper(x.abs()) * gamma(rounding_length(op) + 1)
    return absolute_image(op, error if x_error is None else error + x_error).bound
