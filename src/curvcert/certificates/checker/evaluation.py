r"""Margins and gradients at the inputs, by the checker's own forward and backward pass, with their rounding bounded.

Forward, an error travels entry by entry through |W| and as a whole through the norm of W; the smaller counts.
Backward, a computed covector is off by at most :math:`\eta` in the 2-norm, and

.. math:: \eta_{k-1} = \|Dh_k\| \eta_k + \|W_k\| \|\delta \circ G_k^T g\| + \text{rounding},

:math:`\delta` bounding the error of the slopes.  What a neuron's module may be off by (torch's Softplus beyond its
threshold) counts as an error of the activation.
"""

from dataclasses import dataclass

import numpy as np

from curvcert.certificates.checker.model import Model, Piece
from curvcert.certificates.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    frobenius,
    gamma,
    lengths,
    spectral_norm,
    up,
)


@dataclass(frozen=True, eq=False)
class Vector:
    """A computed vector, a bound on each entry's error and one on their 2-norm."""

    value: Array
    error: Array
    off: float


@dataclass(frozen=True, eq=False)
class Sizes:
    """The 2-norms of a piece's maps, computed once."""

    H: float
    G: float
    W: float

    @property
    def constant(self) -> float:
        """The norms' sum: with a slope of at most s, a Lipschitz constant is H + s G W."""
        return self.H + self.G * self.W


@dataclass(frozen=True, eq=False)
class Passed:
    """One input's way through the network: the state before every piece, the pre-activations, the outputs."""

    states: tuple[Vector, ...]
    neurons: tuple[Vector | None, ...]

    @property
    def outputs(self) -> Vector:
        """The computed logits."""
        return self.states[-1]


def norms_of(model: Model) -> list[Sizes]:
    """Return the 2-norms of every piece's maps."""
    return [
        Sizes(
            0.0 if piece.H is None else spectral_norm(piece.H),
            1.0 if piece.G is None else spectral_norm(piece.G),
            0.0 if piece.W is None else spectral_norm(piece.W),
        )
        for piece in model.pieces
    ]


def forward(model: Model, sizes: list[Sizes], x: Array) -> Passed:
    """Evaluate one input."""
    states, neurons = [Vector(x, np.zeros_like(x), 0.0)], []
    for piece, size in zip(model.pieces, sizes, strict=True):
        z, state = _through(piece, size, states[-1])
        neurons.append(z)
        states.append(state)
    return Passed(tuple(states), tuple(neurons))


def _through(piece: Piece, size: Sizes, x: Vector) -> tuple[Vector | None, Vector]:
    skip = None if piece.H is None else _image(piece.H, size.H, x)
    if piece.act is None or piece.W is None or piece.b is None or piece.b_error is None:
        assert skip is not None
        return None, _shifted(skip, piece.c, piece.c_error)
    z = _shifted(_image(piece.W, size.W, x), piece.b, piece.b_error)
    value = piece.act.value.function(z.value)
    own = piece.act.value.error(value)
    steep = piece.act.steepest
    a = _vector(value, steep * z.error + own, steep * z.off + frobenius(own))
    y = a if piece.G is None else _image(piece.G, size.G, a)
    y = _shifted(y, piece.c, piece.c_error)
    if skip is None:
        return z, y
    total = y.value + skip.value
    rounding = U * np.abs(total)
    return z, _vector(total, y.error + skip.error + rounding, y.off + skip.off + frobenius(rounding))


def _image(A: Enclosed, norm: float, x: Vector) -> Vector:
    local = gamma(A.terms + 2) * (A.size @ np.abs(x.value))
    if A.error is not None:
        local = local + A.error @ np.abs(x.value)
    local = up(local, len(x.value) + 4) + TINY
    error = local + up(A.size @ x.error, len(x.value) + 4)
    return _vector(A.value @ x.value, error, frobenius(local) + norm * x.off)


def _shifted(x: Vector, offset: Array, error: Array) -> Vector:
    value = x.value + offset
    local = U * np.abs(value) + error
    return _vector(value, x.error + local, x.off + frobenius(local))


def _vector(value: Array, error: Array, off: float) -> Vector:
    error, off = up(error, 8), float(off * (1 + 32 * U))
    off = min(off, frobenius(error))
    return Vector(value, np.minimum(error, off), off)


def margins(outputs: Vector, label: int, deviations: Array) -> Array:
    """Return lower bounds on f_label - f_i, infinity for the label itself."""
    gap = outputs.value[label] - outputs.value
    lost = outputs.error[label] + outputs.error + deviations + 2 * U * np.abs(gap)
    found: Array = gap - up(lost, 8)
    found[label] = np.inf
    return found


@dataclass(frozen=True, eq=False)
class Backed:
    """The computed gradients of f_i - f_label: at the input, behind every piece, and in front of its activations.

    `behind[k]` has the rows with respect to the output of piece k, `inner[k]` those with respect to its activations;
    `drift[k]` and `inner_drift[k]` bound their error in the 2-norm, one a row.
    """

    inputs: Array
    input_drift: Array
    behind: tuple[Array, ...]
    drift: tuple[Array, ...]
    inner: tuple[Array | None, ...]
    inner_drift: tuple[Array, ...]


def backward(model: Model, sizes: list[Sizes], passed: Passed, rows: Array) -> Backed:
    """Carry the covectors `rows` back from the outputs."""
    g, eta = rows, np.zeros(len(rows))
    behind, drift, inner, inner_drift = [], [], [], []
    for piece, size, z in zip(reversed(model.pieces), reversed(sizes), reversed(passed.neurons), strict=True):
        behind.append(g)
        drift.append(eta)
        pulled = g if piece.G is None else g @ piece.G.value
        pulled_eta = eta if piece.G is None else size.G * eta + _rounding(g, piece.G)
        inner.append(None if piece.act is None else pulled)
        inner_drift.append(up(pulled_eta, 8))
        result, off = np.zeros((len(g), piece.inputs)), np.zeros(len(g))
        if piece.act is not None and piece.W is not None and z is not None:
            slopes = piece.act.first.function(z.value)
            gap = up(piece.act.c * z.error + piece.act.first.error(slopes))
            weighed = slopes * pulled
            steep = piece.act.steepest * (1 + 1e-9)
            in_front = lengths(gap * pulled, 2, 1) + steep * pulled_eta + 2 * U * steep * lengths(pulled, 2, 1)
            result = weighed @ piece.W.value
            off = size.W * up(in_front, 8) + _rounding(weighed, piece.W)
        if piece.H is not None:
            result = result + g @ piece.H.value
            off = off + size.H * eta + _rounding(g, piece.H) + 2 * U * lengths(result, 2, 1)
        g, eta = result, up(off, 16)
    order = slice(None, None, -1)
    return Backed(g, eta, tuple(behind[order]), tuple(drift[order]), tuple(inner[order]), tuple(inner_drift[order]))


def _rounding(g: Array, A: Enclosed) -> Array:
    size = gamma(A.terms + 2) * A.absolute + A.off
    return up(size * lengths(g, 2, 1), 8)


def gradient_norms(backed: Backed, dual: float) -> Array:
    """Bound the dual norms of the gradients; the drift's 2-norm is turned into the dual norm."""
    spread = np.sqrt(backed.inputs.shape[1]) * (1 + 1e-12) if dual == 1 else 1.0
    return up(lengths(backed.inputs, dual, 1) + spread * backed.input_drift, 8)
