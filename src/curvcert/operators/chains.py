r"""Spectral norms of products of maps, through Gram matrices that are applied, not multiplied out.

For a product A with a small end (or a small space in the middle), :math:`A^T A` is found by
applying A and its adjoint to basis vectors, with the rounding error of every stage tracked.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.operators.base import AbstractLinearMap, Composition
from curvcert.operators.magnitudes import absolute_norm_upper_bound, rounding_length
from curvcert.operators.rows import basis_vectors
from curvcert.operators.verified import (
    dominating_factor,
    largest_eigenvalue_upper_bound,
    spectral_norm_of_matrix_upper_bound,
    symmetrised,
)
from curvcert.rounding import TINY, Upper, gamma, lengths, norm_upper_bound_of_vectors

NormFunction = Callable[[AbstractLinearMap], Tensor]

_CHUNK_ELEMENTS = 2**25


MATRIX_ELEMENTS = 2**25
"""The largest matrix of a product that is held, so that a longer product goes on from it."""


@final
@dataclass(frozen=True, eq=False)
class ChainMatrix:
    """The matrix of a product of maps, with a bound on its error in the Frobenius norm.

    The norms of all intervals of a chain, each one factor longer than one before, then take one stage each.
    """

    factors: tuple[AbstractLinearMap, ...]
    matrix: Tensor
    error: Tensor

    def begins(self, factors: tuple[AbstractLinearMap, ...]) -> bool:
        """Whether this is the product of the first of these factors."""
        return len(self.factors) <= len(factors) and all(map(operator.is_, self.factors, factors))

    def times(self, factor: AbstractLinearMap, norm: NormFunction, absolute: NormFunction) -> "ChainMatrix":
        r"""Return MA, its rows sent through the adjoint of A.

        With K roundings in a stage its error is at most :math:`\|A\|_2 e + \gamma_K \||A|\|_2 \|M\|_F`.
        """
        checkpoint()
        size, length = norm_upper_bound_of_vectors(self.matrix.flatten(), 2, 0), rounding_length(factor)
        # What underflows is off by less than the least float, once per rounding.
        local = Upper(size) * absolute(factor) * gamma(length) + length * len(self.matrix) * factor.in_size * TINY
        rows = factor.adjoint(self.matrix.reshape(-1, *factor.out_shape)).flatten(1)
        return ChainMatrix((*self.factors, factor), rows, (Upper(self.error) * norm(factor) + local).bound)

    def norm_upper_bound(self) -> Tensor:
        """Bound the largest singular value of the product."""
        return (Upper(spectral_norm_of_matrix_upper_bound(self.matrix)) + self.error).bound


def empty_chain(op: AbstractLinearMap) -> ChainMatrix:
    """Return the product of no factors on the space that op maps to: the identity."""
    eye = torch.eye(op.out_size, dtype=op.dtype, device=op.device)
    return ChainMatrix((), eye, torch.zeros((), dtype=op.dtype, device=op.device))


def outer_gram_bytes(n: int) -> int:
    """Return the memory for a Gram matrix of size n, its shifted copy and its factor."""
    return 4 * 8 * n * n


def inner_gram_bytes(n: int) -> int:
    """Return the memory for the two Gram matrices about a middle space of size n, and their product."""
    return 6 * 8 * n * n


def gram_norm_of_chain_upper_bound(op: AbstractLinearMap, norm: NormFunction) -> Tensor:
    r"""Bound :math:`\|A\|_2 = \sqrt{\lambda_{max}(A^T A)}` with the Gram matrix on the smaller end.

    `norm` bounds the spectral norm of a single stage; it enters the error term alone.
    """
    gram, error = gram_matrix(op.T if op.in_size <= op.out_size else op, norm)
    return Upper(largest_eigenvalue_upper_bound(gram, error)).root().bound


def middle_gram_norm_upper_bound(left: AbstractLinearMap, right: AbstractLinearMap, norm: NormFunction) -> Tensor:
    r"""Bound :math:`\|BA\|_2` with Gram matrices on the space between A and B.

    With :math:`R R^T \succeq B^T B`, :math:`\|BA\|^2 \le \lambda_{max}(R^T (AA^T) R)`.
    """
    R = dominating_factor(*gram_matrix(left.T, norm))
    S, error = gram_matrix(right, norm)
    n = left.in_size
    size = Upper(R).square().sum()
    off = size * error + size * lengths(S) * gamma(2 * n + 2) + 2 * n**3 * TINY
    return Upper(largest_eigenvalue_upper_bound(R.mT @ (S @ R), off.bound)).root().bound


def gram_matrix(op: AbstractLinearMap, norm: NormFunction) -> tuple[Tensor, Tensor]:
    """Return A A', exactly symmetric, and a bound on its error in the Frobenius norm."""
    matrix, error = tracked_matrix(op @ op.T, norm)
    mean, averaging = symmetrised(matrix)
    return mean, (Upper(error) + averaging).bound


def tracked_matrix(op: AbstractLinearMap, norm: NormFunction) -> tuple[Tensor, Tensor]:
    r"""Return op's matrix, computed stage by stage, and a bound on its error in the Frobenius norm.

    Stage A with K roundings turns a computed P into one with an error of at most
    :math:`e' = \|A\|_2 e + \gamma_K \||A|\|_2 \|P\|_F`, and what underflows.
    """
    stages = tuple(reversed(op.factors)) if isinstance(op, Composition) else (op,)
    widest = max(op.in_size, *(stage.out_size for stage in stages))
    chunk = max(1, min(op.in_size, _CHUNK_ELEMENTS // widest))
    matrix = torch.empty(op.out_size, op.in_size, dtype=op.dtype, device=op.device)
    squares = torch.zeros(len(stages), dtype=op.dtype, device=op.device)
    for start in range(0, op.in_size, chunk):
        checkpoint()
        stop = min(start + chunk, op.in_size)
        P = basis_vectors(op.in_shape, start, stop, op)
        for k, stage in enumerate(stages):
            squares[k] += P.square().sum()
            P = stage.apply(P)
        matrix[:, start:stop] = P.flatten(1).mT
    # What underflows is off by less than the least float, once per rounding.
    sizes = (Upper(squares, op.in_size * widest) + op.in_size * widest * TINY).root()
    error = Upper(torch.zeros((), dtype=op.dtype, device=op.device))
    for k, stage in enumerate(stages):
        length = rounding_length(stage)
        local = sizes[k] * absolute_norm_upper_bound(stage) * gamma(length)
        error = error * norm(stage) + local + length * op.in_size * stage.out_size * TINY
    return matrix, error.bound
