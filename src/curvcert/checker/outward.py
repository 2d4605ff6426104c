r"""Outward-rounded float64: matrices with entrywise errors, and eigenvalues bounded by Cholesky factorisations.

A sum of n products in any order of summation errs by at most :math:`\gamma_n = nu/(1 - nu)` times the sum of the
absolute values, :math:`u = 2^{-53}`.  Every function here returns a number on the stated side of the truth.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

U = 2.0**-53
TINY = 2.0**-1000
"""More than gradual underflow can lose in a sum of the sizes that are met here."""

ROOT_TINY = 2.0**-500


def gamma(n: int) -> float:
    """Return nu / (1 - nu), rounded up.

    >>> 10 * 2.0**-53 < gamma(10) < 10.001 * 2.0**-53
    True
    """
    return n * U / (1 - n * U) * (1 + 4 * U)


def up(x: Array, roundings: int = 4) -> Array:
    """Return an upper bound on what x >= 0 stands for, after at most that many roundings.

    >>> bool(up(np.ones(1))[0] > 1.0)
    True
    """
    return x * (1 + 2 * gamma(roundings + 2))


def raised(x: float, roundings: int = 4) -> float:
    """Return `up` of one number."""
    return float(x * (1 + 2 * gamma(roundings + 2)))


@dataclass(frozen=True, eq=False)
class Enclosed:
    """A matrix known entry by entry: |true - value| <= error; no error means exact."""

    value: Array
    error: Array | None = None

    @property
    def size(self) -> Array:
        """Upper bounds on the entries' absolute values."""
        return np.abs(self.value) if self.error is None else up(np.abs(self.value) + self.error, 1)

    @cached_property
    def terms(self) -> int:
        """The largest number of entries in a row or column that are not zero: a zero term adds no rounding."""
        nonzero = self.value != 0
        return int(max(nonzero.sum(axis=0).max(initial=0), nonzero.sum(axis=1).max(initial=0)))

    @cached_property
    def absolute(self) -> float:
        """A bound on the 2-norm of the matrix of absolute values, by its sums along rows and columns."""
        rows, columns = self.size.sum(axis=1).max(initial=0.0), self.size.sum(axis=0).max(initial=0.0)
        return raised(float(np.sqrt(rows * columns)), sum(self.value.shape)) + ROOT_TINY

    @property
    def shape(self) -> tuple[int, int]:
        """How many numbers it gives, and how many it reads."""
        rows, columns = self.value.shape
        return rows, columns

    def on(self, x: Array) -> Array:
        """Return the image of a vector."""
        found: Array = self.value @ x
        return found

    def size_on(self, x: Array) -> Array:
        """Return the image of a vector x >= 0 under the entries' sizes."""
        found: Array = self.size @ x
        return found

    def error_on(self, x: Array) -> Array:
        """Bound what the errors of the entries make of a vector x >= 0."""
        return np.zeros(len(self.value)) if self.error is None else self.error @ x

    def pulled(self, rows: Array) -> Array:
        """Return g A for every row vector g."""
        found: Array = rows @ self.value
        return found

    def norm_in(self, p: float) -> float:
        """Bound the p -> p norm, p one of 1, 2 and infinity."""
        if p == 2:
            return self.norm
        return float(row_lengths(self if p == np.inf else self.transposed, 1).max())

    @property
    def off(self) -> float:
        """The Frobenius norm of the error, rounded up."""
        return 0.0 if self.error is None else frobenius(self.error)

    @cached_property
    def norm(self) -> float:
        """A bound on the 2-norm."""
        return spectral_norm(self)

    @property
    def transposed(self) -> "Enclosed":
        """The transposed matrix."""
        return Enclosed(self.value.T, None if self.error is None else self.error.T)


Factor = Enclosed | None
"""A matrix, or None for the identity."""


def times(left: Factor, right: Factor) -> Factor:
    """Return the product of two factors."""
    if left is None or right is None:
        return right if left is None else left
    return product(left, right)


def product(left: Enclosed, right: Enclosed) -> Enclosed:
    """Return the product of two matrices with a bound on its error.

    >>> found = product(Enclosed(np.array([[0.1, 0.2]])), Enclosed(np.array([[3.0], [5.0]])))
    >>> bool(abs(found.value[0, 0] - 1.3) < 1e-15), bool(0 < found.error[0, 0] < 1e-14)
    (True, True)
    """
    n = left.value.shape[1]
    size = np.abs(left.value) @ np.abs(right.value)
    error = gamma(n + 1) * size
    if left.error is not None:
        error = error + left.error @ right.size
    if right.error is not None:
        error = error + np.abs(left.value) @ right.error
    return Enclosed(left.value @ right.value, up(error, n + 4) + TINY)


def plus(left: Enclosed, right: Enclosed) -> Enclosed:
    """Return the sum of two matrices with a bound on its error."""
    value = left.value + right.value
    error = U * np.abs(value)
    for part in (left.error, right.error):
        error = error if part is None else error + part
    return Enclosed(value, up(error) + TINY)


def beside(parts: list[Enclosed]) -> Enclosed:
    """Return matrices side by side."""
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, 1)


def below(parts: list[Enclosed]) -> Enclosed:
    """Return matrices on top of each other."""
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, 0)


def _joined(parts: list[Enclosed], axis: int) -> Enclosed:
    value = np.concatenate([part.value for part in parts], axis=axis)
    if all(part.error is None for part in parts):
        return Enclosed(value)
    errors = [np.zeros_like(part.value) if part.error is None else part.error for part in parts]
    return Enclosed(value, np.concatenate(errors, axis=axis))


def columns_of(matrix: Enclosed, start: int, stop: int) -> Enclosed:
    """Return some columns of a matrix."""
    error = None if matrix.error is None else matrix.error[:, start:stop]
    return Enclosed(matrix.value[:, start:stop], error)


def scaled(factor: float, matrix: Enclosed) -> Enclosed:
    """Return a multiple of a matrix; a power of two does not round."""
    value = factor * matrix.value
    error = None if matrix.error is None else abs(factor) * matrix.error
    if abs(np.frexp(factor)[0]) != 0.5:
        error = U * np.abs(value) + (0.0 if error is None else error)
    return Enclosed(value, None if error is None else up(error) + TINY)


def frobenius(x: Array) -> float:
    """Bound the root of the sum of squares."""
    return raised(float(np.sqrt(np.sum(x * x))), x.size + 4) + ROOT_TINY


def lengths(x: Array, p: float, axis: int) -> Array:
    """Bound the p-norms of vectors along an axis, p one of 1, 2 and infinity."""
    size = np.abs(x)
    if p == np.inf:
        longest: Array = size.max(axis=axis)
        return longest
    if p == 1:
        return up(size.sum(axis=axis), x.shape[axis]) + TINY
    return up(np.sqrt((size * size).sum(axis=axis)), x.shape[axis] + 4) + ROOT_TINY


def row_lengths(matrix: Enclosed, p: float) -> Array:
    """Bound the p-norms of a matrix's rows."""
    found = lengths(matrix.value, p, 1)
    return found if matrix.error is None else up(found + lengths(matrix.error, p, 1))


def largest_eigenvalue(symmetric: Array, error: float = 0.0) -> float:
    r"""Bound the largest eigenvalue of every symmetric matrix within `error` (2-norm) of the given one.

    If the floating-point Cholesky factorisation of :math:`C = \lambda I - S` runs to its end, then
    :math:`\lambda_{max}(S) \le \lambda + \gamma_{n+2} / (1 - \gamma_{n+2}) \, tr(C)` (Rump 2006), whatever
    :math:`\lambda` is: the guess needs no proof.

    >>> 3.0 <= largest_eigenvalue(np.array([[2.0, 1.0], [1.0, 2.0]])) < 3.000000001
    True
    """
    n = len(symmetric)
    symmetric = np.where(np.tri(n, dtype=bool), symmetric, symmetric.T)
    if not np.isfinite(symmetric).all() or not np.isfinite(error):
        return float(np.inf)
    try:
        spectrum = np.linalg.eigvalsh(symmetric)
    except np.linalg.LinAlgError:
        return float(np.inf)
    width = float(max(abs(spectrum[0]), abs(spectrum[-1]))) + ROOT_TINY
    g = gamma(n + 2)
    for step in range(40):
        shift = float(spectrum[-1]) + width * 1e-14 * 4.0**step
        C = -symmetric
        C[np.diag_indices(n)] += shift
        try:
            R = np.linalg.cholesky(C)
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(R).all():
            trace = float(np.abs(np.diagonal(C)).sum())
            excess = raised(g / (1 - g) * trace + 2 * U * float(np.abs(np.diagonal(C)).max()), n + 8)
            total = shift + excess + error + n * TINY
            return total + 4 * U * (abs(shift) + excess + error)
    return float(np.inf)


def gram(matrix: Enclosed) -> tuple[Array, float]:
    """Return A A' and a bound on its error in the Frobenius norm."""
    value, size, off = matrix.value, frobenius(matrix.value), matrix.off
    error = gamma(value.shape[1] + 1) * size * size + off * (2 * size + off)
    return value @ value.T, raised(error, 8) + value.shape[0] * TINY


def spectral_norm(matrix: Enclosed) -> float:
    """Bound the largest singular value, through the smaller of the two Gram matrices.

    >>> 5.0 <= spectral_norm(Enclosed(np.array([[3.0, 4.0]]))) < 5.000000001
    True
    """
    short = matrix if matrix.value.shape[0] <= matrix.value.shape[1] else matrix.transposed
    plain = Enclosed(short.value)
    return raised(float(np.sqrt(max(0.0, largest_eigenvalue(*gram(plain))))) + matrix.off) + ROOT_TINY


def operator_norm(matrix: Factor, p: float) -> float:
    """Bound the p -> p norm, p one of 1, 2 and infinity.

    >>> A = Enclosed(np.array([[1.0, -2.0], [0.0, 3.0]]))
    >>> round(operator_norm(A, 1), 9), round(operator_norm(A, np.inf), 9), operator_norm(None, 2)
    (5.0, 3.0, 1.0)
    """
    return 1.0 if matrix is None else matrix.norm_in(p)


def weighted_eigenvalue(matrix: Enclosed, weights: Array) -> float:
    r"""Bound the largest eigenvalue of :math:`W^T \mathrm{diag}(d) W`, d >= 0, on the smaller side.

    >>> round(weighted_eigenvalue(Enclosed(np.diag([1.0, 2.0])), np.array([9.0, 1.0])), 9)
    9.0
    """
    if not weights.any():
        return 0.0
    root = up(np.sqrt(weights))
    value = root[:, None] * matrix.value
    error = U * np.abs(value) if matrix.error is None else U * np.abs(value) + root[:, None] * matrix.error
    return raised(spectral_norm(Enclosed(value, up(error) + TINY)) ** 2)
