r"""Maps between images as the taps of a kernel: applied position by position, composed, and measured without a matrix.

.. math:: y_{o i} = \sum_{c, t} K_{o c t} \, x_{c, s i + t},

s the stride, x zero outside its image.  A composition of two, on images without an end, is one again:
:math:`C[s_1 u + t] = \sum K_2[u] K_1[t]` with stride :math:`s_1 s_2`.

On a torus of N positions along each axis, a multiple of s, a window becomes one small matrix for each frequency f of
its output, with the s frequencies beside each other that the stride makes one:
:math:`\|C\| = \max_f \| [\hat K(f + m N / s)]_m \| / \sqrt{s}`, :math:`\hat K(f) = \sum_t K_t e^{2 \pi i f t / N}`.
Every frequency is a row of a table of cosines and sines; there is no fast Fourier transform whose rounding would have
to be believed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.outward import ROOT_TINY, TINY, Array, U, gamma, largest_eigenvalue, raised, up

Pair = tuple[int, int]

_CHUNK = 2**22
"""Complex numbers that the matrices of some frequencies may have together."""


@dataclass(frozen=True, eq=False)
class Stencil:
    """A kernel (outputs, inputs, taps along each axis), the offset of its first tap along each axis, and its stride.

    No entry of `off`, one for each output and input, is less than what the kernel's taps there are wrong by together.
    """

    kernel: Array
    first: Pair
    stride: Pair
    off: Array

    @cached_property
    def sums(self) -> Array:
        """Bounds on the sums of the absolute values of the taps of every output and input."""
        return up(np.abs(self.kernel).sum(axis=(2, 3)) + self.off, self.kernel[0, 0].size + 4)

    def norm(self, p: float, length: Pair) -> float:
        """Bound the p -> p norm, in l2 on a torus of that many positions."""
        if p == np.inf:
            rows = np.abs(self.kernel).sum(axis=(1, 2, 3)) + self.off.sum(axis=1)
            return raised(float(rows.max()), self.kernel[0].size + 8) + TINY
        if p == 1:
            return self._columns()
        return self._by_frequency(length)

    def _columns(self) -> float:
        """Bound the sum of what one position of the image is given to; that depends on its place in a stride."""
        found = 0.0
        for a, b in np.ndindex(*self.stride):
            found = max(
                found, float(np.abs(self.kernel[:, :, a :: self.stride[0], b :: self.stride[1]]).sum((0, 2, 3)).max())
            )
        return raised(found + float(self.off.sum(axis=0).max()), self.kernel[:, 0].size + 8) + TINY

    def _by_frequency(self, length: Pair) -> float:
        joined, taps = math.prod(self.stride), sum(self.kernel.shape[2:])
        # A cosine or sine errs by 8 u at most, and a sum of that many products as sums do.
        wrong = 4 * (taps + 32) * U * self.sums + self.off
        off = raised(float(np.sqrt(joined * np.sum(wrong * wrong))), wrong.size + 8)
        top = largest_singular_value(self._symbols(length))
        return raised((top + off) / math.sqrt(joined), 8) + ROOT_TINY

    def _symbols(self, length: Pair) -> Iterator[NDArray[np.complex128]]:
        """Give the matrices of all frequencies of the output, some at a time; half of them are conjugates of others."""
        (s, r), (outputs, inputs, *_) = self.stride, self.kernel.shape
        rows, columns = length[0] // s, length[1] // r
        h, w = (
            _waves(n, first, taps) for n, first, taps in zip(length, self.first, self.kernel.shape[2:], strict=True)
        )
        at_once = max(1, _CHUNK // (outputs * inputs * s * length[1]))
        half = rows // 2 + 1
        for start in range(0, half, at_once):
            f = np.arange(start, min(start + at_once, half))
            wanted = (f[None] + rows * np.arange(s)[:, None]).reshape(-1)
            along = np.tensordot(self.kernel, h[wanted], axes=(2, 1))  # outputs, inputs, taps, s f
            whole = np.tensordot(along, w, axes=(2, 1)).reshape(outputs, inputs, s, len(f), r, columns)
            yield whole.transpose(3, 5, 0, 1, 2, 4).reshape(len(f) * columns, outputs, -1)

    def behind(self, second: "Stencil") -> "Stencil":
        """Return the composition: this one first."""
        (o, m, *taps), (_, c, *own) = second.kernel.shape, self.kernel.shape
        first = tuple(a + s * b for a, s, b in zip(self.first, self.stride, second.first, strict=True))
        size = [n + s * (k - 1) for n, s, k in zip(own, self.stride, taps, strict=True)]
        kernel = np.zeros((o, c, *size))
        flat = self.kernel.reshape(m, -1)
        for a, b in np.ndindex(*taps):
            i, j = a * self.stride[0], b * self.stride[1]
            kernel[:, :, i : i + own[0], j : j + own[1]] += (second.kernel[:, :, a, b] @ flat).reshape(o, c, *own)
        terms = m * math.prod(taps)
        # The sums count the errors of both kernels; those of the products come on top.
        off = second.sums @ self.sums - np.abs(second.kernel).sum((2, 3)) @ np.abs(self.kernel).sum((2, 3))
        off = np.maximum(off, 0.0) + gamma(2 * terms + 64 + 4 * self.kernel[0, 0].size) * (second.sums @ self.sums)
        stride = self.stride[0] * second.stride[0], self.stride[1] * second.stride[1]
        return Stencil(kernel, (first[0], first[1]), stride, up(off, m + 8) + TINY)

    def times(self, factor: float) -> "Stencil":
        """Return a multiple."""
        kernel = factor * self.kernel
        return Stencil(kernel, self.first, self.stride, up(abs(factor) * (self.off + 2 * U * self.sums)) + TINY)

    def plus(self, other: "Stencil") -> "Stencil":
        """Return a sum of two with one stride."""
        first = tuple(min(pair) for pair in zip(self.first, other.first, strict=True))
        ends = [
            max(a + n, b + m)
            for a, n, b, m in zip(self.first, self.kernel.shape[2:], other.first, other.kernel.shape[2:], strict=True)
        ]
        kernel = np.zeros((*self.kernel.shape[:2], *(end - start for start, end in zip(first, ends, strict=True))))
        for one in (self, other):
            (a, b), (h, w) = (x - y for x, y in zip(one.first, first, strict=True)), one.kernel.shape[2:]
            kernel[:, :, a : a + h, b : b + w] += one.kernel
        off = self.off + other.off + 2 * U * (self.sums + other.sums)
        return Stencil(kernel, (first[0], first[1]), self.stride, up(off) + TINY)


def unit(channels: int) -> Stencil:
    """Return the identity."""
    return Stencil(np.eye(channels)[:, :, None, None], (0, 0), (1, 1), np.zeros((channels, channels)))


def _waves(length: int, first: int, taps: int) -> NDArray[np.complex128]:
    """Return exp(2 pi i f t / N) for all f and the offsets t of the taps, the argument reduced exactly."""
    turns = np.arange(length)[:, None] * (first + np.arange(taps))[None] % length
    turns = np.where(turns > length // 2, turns - length, turns)
    angle = turns * (2 * np.pi / length)
    found: NDArray[np.complex128] = np.cos(angle) + 1j * np.sin(angle)
    return found


def largest_singular_value(batches: Iterator[NDArray[np.complex128]]) -> float:
    r"""Bound the largest singular value of all matrices of all batches, each a stack of matrices of one shape.

    As for real matrices (`outward.largest_eigenvalue`), with complex products: if the Cholesky factorisation of
    :math:`\lambda I - G` runs to its end for every Gram matrix G of n rows, none has an eigenvalue above
    :math:`\lambda + \gamma_{4(n+4)} / (1 - \gamma_{4(n+4)}) \, tr(\lambda I - G)`.  Matrices whose Frobenius norm is
    below what is known already need no factorisation.
    """
    top = 0.0
    for B in batches:
        B = B if B.shape[1] <= B.shape[2] else B.transpose(0, 2, 1)
        n, m = B.shape[1:]
        squares = up((B.real**2 + B.imag**2).sum(axis=(1, 2)), 2 * n * m + 8) + TINY
        G = B @ B.conj().transpose(0, 2, 1)
        error = gamma(4 * (m + 4)) * float(squares.max()) + n * TINY
        if not np.isfinite(squares).all():
            return float(np.inf)
        quick = np.minimum(squares, up(np.sqrt((np.abs(G) ** 2).sum(axis=(1, 2))), n * n + 8) + error)
        left = np.flatnonzero(quick > top)
        if len(left):
            top = max(top, min(float(quick.max()), _proven(G[left]) + error))
    return raised(math.sqrt(top), 8) + ROOT_TINY


def _proven(G: NDArray[np.complex128]) -> float:
    """Bound the largest eigenvalue of computed Hermitian matrices."""
    n = G.shape[1]
    G = 0.5 * (G + G.conj().transpose(0, 2, 1))
    guess = float(np.linalg.eigvalsh(G)[:, -1].max()) + ROOT_TINY
    g = gamma(4 * (n + 4))
    for step in range(40):
        shift = guess * (1 + 1e-14 * 4.0**step)
        C = shift * np.eye(n) - G
        try:
            R = np.linalg.cholesky(C)
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(R).all():
            trace = float(np.abs(np.diagonal(C, axis1=1, axis2=2)).sum(axis=1).max())
            return raised(shift + 2 * g * trace + 4 * U * shift, n + 8) + float(n * TINY)
    return float(np.inf)


@dataclass(frozen=True, eq=False)
class Window:
    """A stencil between two images of given shapes (channels, height, width)."""

    stencil: Stencil
    source: tuple[int, int, int]
    target: tuple[int, int, int]

    @property
    def shape(self) -> Pair:
        """How many numbers it gives, and how many it reads."""
        return math.prod(self.target), math.prod(self.source)

    @cached_property
    def terms(self) -> int:
        """Bounds the roundings of one number of an image: those of a sum over channels, and of one over taps."""
        outputs, inputs, *taps = self.stencil.kernel.shape
        return int(max(outputs, inputs) + math.prod(taps))

    @cached_property
    def absolute(self) -> float:
        """A bound on the 2-norm of the map of absolute values, by its sums along rows and columns."""
        rows = float(self.stencil.sums.sum(axis=1).max())
        return raised(math.sqrt(rows * self._tallest), sum(self.stencil.sums.shape) + 8) + ROOT_TINY

    @property
    def _tallest(self) -> float:
        return float(self.stencil.sums.sum(axis=0).max())

    @cached_property
    def off(self) -> float:
        """A bound on the 2-norm of the error of the matrix."""
        wrong = self.stencil.off
        return raised(math.sqrt(float(wrong.sum(axis=1).max()) * float(wrong.sum(axis=0).max())), sum(wrong.shape) + 8)

    @property
    def is_pointwise(self) -> bool:
        """Whether it mixes channels and nothing else."""
        stencil = self.stencil
        return stencil.first == (0, 0) and stencil.kernel.shape[2:] == (1, 1) and stencil.stride == (1, 1)

    @property
    def reads_beyond(self) -> bool:
        """Whether it reads positions outside its image, where it finds zeros."""
        return any(below or above for below, above in map(self._beyond, (0, 1)))

    def _beyond(self, axis: int) -> Pair:
        first, taps = self.stencil.first[axis], self.stencil.kernel.shape[2 + axis]
        last = self.stencil.stride[axis] * (self.target[1 + axis] - 1) + first + taps - 1
        return max(0, -first), max(0, last - self.source[1 + axis] + 1)

    def needed(self, axis: int) -> int:
        """Return how long a circle is along an axis on which it reads what it does on its image."""
        below, above = self._beyond(axis)
        return self.source[1 + axis] + max(below, above)

    def norm_in(self, p: float) -> float:
        """Bound the p -> p norm, in l2 on the shortest torus."""
        if p not in self._norms:
            length = [-(-self.needed(axis) // s) * s for axis, s in enumerate(self.stencil.stride)]
            self._norms[p] = self.stencil.norm(p, (length[0], length[1]))
        return self._norms[p]

    @cached_property
    def _norms(self) -> dict[float, float]:
        return {}

    @property
    def norm(self) -> float:
        """A bound on the 2-norm."""
        return self.norm_in(2.0)

    def on(self, x: Array) -> Array:
        """Return the image of a flat vector."""
        return self._on(self.stencil.kernel, x)

    def size_on(self, x: Array) -> Array:
        """Return the image of a vector x >= 0 under the absolute values, with their errors."""
        found = self._on(np.abs(self.stencil.kernel), x)
        return found if not self.stencil.off.any() else found + self.error_on(x)

    def error_on(self, x: Array) -> Array:
        """Bound what the errors of the entries make of a vector x >= 0."""
        if not self.stencil.off.any():
            return np.zeros(self.shape[0])
        return np.full(self.shape[0], self.off * float(np.sqrt(np.sum(x * x))) * (1 + gamma(x.size + 8)))

    def _on(self, kernel: Array, x: Array) -> Array:
        image, result = x.reshape(self.source), np.zeros(self.target)
        for a, b in np.ndindex(*kernel.shape[2:]):
            (to_h, from_h), (to_w, from_w) = self._met(0, a), self._met(1, b)
            read = image[:, from_h, from_w]
            if not read.size:
                continue
            result[:, to_h, to_w] += (kernel[:, :, a, b] @ read.reshape(len(read), -1)).reshape(-1, *read.shape[1:])
        return result.reshape(-1)

    def pulled(self, rows: Array) -> Array:
        """Return g A for every row vector g."""
        return self._pulled(self.stencil.kernel, rows)

    def size_pulled(self, rows: Array) -> Array:
        """Return the same for the entries' absolute values, without their errors, and g >= 0."""
        return self._pulled(np.abs(self.stencil.kernel), rows)

    @cached_property
    def row_lengths(self) -> Array:
        """Bounds on the 2-norms of the rows."""
        found = np.sqrt(self._on(self.stencil.kernel**2, np.ones(self.shape[1])))
        return up(found + self.off, self.stencil.kernel[0].size + 16) + ROOT_TINY

    @cached_property
    def column_lengths(self) -> Array:
        """Bounds on the 2-norms of the columns."""
        found = np.sqrt(self._pulled(self.stencil.kernel**2, np.ones((1, self.shape[0])))[0])
        return up(found + self.off, self.stencil.kernel[:, 0].size + 16) + ROOT_TINY

    @cached_property
    def hadamard(self) -> float:
        r"""A bound on :math:`\sup \|Wa \circ Wb\|` over vectors of length 1.

        On an image without an end, of whose rows and columns these are some, it is
        :math:`\sqrt{\lambda_{max}((WW^T)^{\circ 2})}` at most, and the rows of two positions meet in the lag between
        them, a multiple of the stride: with :math:`R_\tau = \sum_u K[u + \tau] K[u]^T` that is the root of the largest
        eigenvalue of :math:`\sum_\tau R_\tau^{\circ 2}`, which rises with every entry.
        """
        kernel, (s, r) = self.stencil.kernel, self.stencil.stride
        outputs, _, height, width = kernel.shape
        M = np.zeros((outputs, outputs))
        size = up(np.abs(kernel))
        for a in range(-((height - 1) // s) * s, height, s):
            for b in range(-((width - 1) // r) * r, width, r):
                here = slice(max(a, 0), min(height, height + a)), slice(max(b, 0), min(width, width + b))
                there = slice(max(-a, 0), min(height, height - a)), slice(max(-b, 0), min(width, width - b))
                left, right = kernel[:, :, *here].reshape(outputs, -1), kernel[:, :, *there].reshape(outputs, -1)
                spread = gamma(left.shape[1] + 2) * (
                    size[:, :, *here].reshape(outputs, -1) @ size[:, :, *there].reshape(outputs, -1).T
                )
                M += up(np.abs(left @ right.T) + up(spread, left.shape[1] + 4)) ** 2
        M = up(M, 4 * height * width + 8)
        top = max(0.0, largest_eigenvalue(np.maximum(M, M.T)))
        # An error E of the matrix moves Wa o Wb by at most 2 |W| |E| + |E|^2.
        return raised(math.sqrt(top) + self.off * (2 * self.absolute + self.off), 8) + ROOT_TINY

    def _pulled(self, kernel: Array, rows: Array) -> Array:
        result = np.zeros((len(rows), *self.source))
        rows = rows.reshape(len(rows), *self.target)
        for a, b in np.ndindex(*kernel.shape[2:]):
            (to_h, from_h), (to_w, from_w) = self._met(0, a), self._met(1, b)
            given = np.ascontiguousarray(rows[:, :, to_h, to_w])
            if not given.size:
                continue
            sent = np.ascontiguousarray(kernel[:, :, a, b].T) @ given.reshape(*given.shape[:2], -1)
            result[:, :, from_h, from_w] += sent.reshape(len(rows), -1, *given.shape[2:])
        return result.reshape(len(rows), -1)

    def _met(self, axis: int, tap: int) -> tuple[slice, slice]:
        """Return the places along an axis where a tap is inside the image: of the output, and of the image."""
        offset, s = self.stencil.first[axis] + tap, self.stencil.stride[axis]
        low = max(0, -(offset // s))
        high = min(self.target[1 + axis], -((offset - self.source[1 + axis]) // s))
        high = max(high, low)
        return slice(low, high), slice(
            low * s + offset, (high - 1) * s + offset + 1 if high > low else low * s + offset, s
        )
