r"""Lipschitz constants of blocks, and LipSDP layer by layer, derived afresh; `growth.py` puts the blocks together.

- A block :math:`Hx + G\Phi(Wx + b)` with slopes in [alpha, beta] is :math:`\|H\| + s\|G\|\|W\|`-Lipschitz, s the
  largest absolute slope; one of the form :math:`A(x - W^T D \Phi(Wx + b))` with slopes in [0, beta] has, beside A,
  :math:`L^2 \le 1 + (\rho - 2/\beta)_+ \beta^2 \rho`, :math:`\rho = \|D^{1/2} W\|^2`.
- LipSDP: if :math:`\|\Delta a\|_X \le \|\Delta x\|` before a layer and :math:`S = W X^{-1} W^T`, then behind it the
  same holds with :math:`X' = t I - t^2 \tfrac{(\alpha + \beta)^2}{4} S (I + t \alpha\beta S)^{-1}` for any t > 0 that
  makes it positive definite: the sector inequality of every neuron with the multiplier t, and a Schur complement.
"""

from dataclasses import dataclass

import numpy as np

from curvcert.checker.chain import diagonal_between
from curvcert.checker.outward import (
    Array,
    Enclosed,
    Factor,
    U,
    frobenius,
    gamma,
    largest_eigenvalue,
    operator_norm,
    plus,
    product,
    raised,
    row_lengths,
    scaled,
    spectral_norm,
    times,
    up,
)
from curvcert.checker.pieces import Blocks, Piece, read_outs

DUAL = {1.0: np.inf, 2.0: 2.0, np.inf: 1.0}
"""The dual of every norm that is covered."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A block about its middle slope: the linear part, the radius of the slopes, G, and norms p -> p.

    `H_parts` and `W_parts` are the norms of what belongs to each value that the block reads.  `product` is the block's
    constant by the norms of its maps, or its own rule; `transformed` the one about the middle slope, if that is less;
    `steepest` the largest absolute slope.
    """

    linear: Enclosed
    radius: float
    outer: Factor
    hidden: int
    H: float
    G: float
    W: float
    H_parts: tuple[float, ...]
    W_parts: tuple[float, ...]
    product: float
    transformed: float
    steepest: float = 0.0
    contraction: tuple[float, float] | None = None


def linearised(piece: Piece, p: float) -> Linear:
    """Split a block about the middle of its slopes, with norms p -> p."""
    H = 0.0 if piece.H is None else operator_norm(piece.H, p)
    H_parts = _norms_of_parts(piece, piece.H, p)
    if piece.act is None or piece.W is None:
        assert piece.H is not None
        return Linear(piece.H, 0.0, None, 0, H, 0.0, 0.0, H_parts, (), H, H)
    alpha, beta = piece.act.slope
    mu = 0.5 * (alpha + beta)
    radius = raised(max(beta - mu, mu - alpha))
    through = times(piece.G, piece.W)
    assert through is not None
    linear = scaled(mu, through)
    if piece.H is not None:
        linear = plus(piece.H, linear)
    G, W, W_parts = operator_norm(piece.G, p), operator_norm(piece.W, p), _norms_of_parts(piece, piece.W, p)
    steep = piece.act.steepest
    constant = raised(H + steep * G * W)
    contraction = _contraction(piece, W) if p == 2 else None
    if contraction is not None:
        constant = min(constant, raised(H * contraction[0] + contraction[1]))
    transformed = min(constant, raised(operator_norm(linear, p) + radius * G * W))
    hidden = len(piece.W.value)
    return Linear(linear, radius, piece.G, hidden, H, G, W, H_parts, W_parts, constant, transformed, steep, contraction)


def _norms_of_parts(piece: Piece, A: Enclosed | None, p: float) -> tuple[float, ...]:
    if A is None:
        return (0.0,) * len(piece.sizes)
    return tuple(operator_norm(part, p) for part in piece.split(A))


def contraction_weights(piece: Piece) -> Array | None:
    """Return the d >= 0 that brings G nearest to -A W' diag(d), A = H, where G is near that at all."""
    if piece.act is None or piece.H is None or piece.W is None or piece.G is None or piece.act.slope[0] < 0:
        return None
    return diagonal_between(piece.H, piece.G, piece.W)


def _contraction(piece: Piece, size: float) -> tuple[float, float] | None:
    """Return L and E: A (x - W' D phi(Wx + b)) is |A| L-Lipschitz for each functional of A, and the piece is off by E.

    D is read off G; what G differs from -A W' D by is bounded, and paid for.
    """
    d = contraction_weights(piece)
    if d is None or piece.act is None or piece.H is None or piece.W is None or piece.G is None:
        return None
    beta, W = piece.act.slope[1], piece.W.value
    exact = product(piece.H, Enclosed(W.T * d, 2 * U * np.abs(W.T * d) + d * _error(piece.W).T))
    off = raised(frobenius(piece.G.value + exact.value) + piece.G.off + exact.off + 4 * U * frobenius(exact.value), 8)
    root = up(np.sqrt(d))
    weighed = root[:, None] * W
    rho = spectral_norm(Enclosed(weighed, up(4 * U * np.abs(weighed) + root[:, None] * _error(piece.W))))
    rho = raised(rho**2, 8)
    excess = max(0.0, rho - 2 / beta * (1 - 8 * U))
    own = raised(float(np.sqrt(1 + excess * beta * beta * rho)), 8) if excess > 0 else 1.0
    return own, raised(off * beta * size, 8)


def _error(matrix: Enclosed) -> Array:
    return np.zeros_like(matrix.value) if matrix.error is None else matrix.error


def functional_steps(piece: Piece, part: Linear, outer: Enclosed, skip: Enclosed | None, dual: float) -> Array:
    """Return Lipschitz constants of functionals of a piece, given as rows of maps behind its G and its H."""
    step = np.zeros(len(outer.value)) if skip is None else row_lengths(skip, dual)
    if piece.act is None:
        return step
    found = step + part.steepest * row_lengths(outer, dual) * part.W
    if part.contraction is not None and skip is not None:
        own, off = part.contraction
        # A difference of two outputs has length sqrt(2).
        found = np.minimum(found, step * own + 1.5 * off)
    return up(found, 8)


@dataclass(frozen=True, eq=False)
class Metric:
    """Upper bounds, in the order of symmetric matrices, on the inverse of X: a multiple of I, and a matrix."""

    scale: float
    matrix: Array | None = None


def metrics(blocks: Blocks) -> list[Metric] | None:
    """Return bounds on the inverses of LipSDP's matrices before every layer and behind the last.

    None with skips, and for what is no chain.
    """
    if not blocks.is_chain or any(piece.act is None or piece.H is not None for piece in blocks.pieces):
        return None
    found, before = [Metric(1.0)], None
    for piece in blocks.pieces:
        W = times(piece.W, before)
        assert W is not None
        found.append(_next_metric(piece, W, found[-1]))
        before = piece.G
    return found


def congruent(W: Enclosed, metric: Metric) -> tuple[Array, float]:
    """Return W Y W' and a bound on its error in the 2-norm."""
    size, off = frobenius(W.value), W.off
    if metric.matrix is None:
        S = metric.scale * (W.value @ W.value.T)
        error = metric.scale * (gamma(W.value.shape[1] + 4) * size * size + off * (2 * size + off))
        return S, raised(error, 8)
    Y = frobenius(metric.matrix)
    S = W.value @ metric.matrix @ W.value.T
    error = gamma(2 * W.value.shape[1] + 4) * size * size * Y + off * (2 * size + off) * metric.scale
    return S, raised(error, 8)


def _next_metric(piece: Piece, W: Enclosed, metric: Metric) -> Metric:
    assert piece.act is not None
    S, error = congruent(W, metric)
    top = largest_eigenvalue(S, error)
    alpha, beta = piece.act.slope
    scale = raised(piece.act.steepest**2 * top, 8)
    if not (beta > abs(alpha) * (1 + 1e-6) and beta - alpha > 1e-6 * beta and 1e-100 < top < 1e100):
        return Metric(scale)
    matrix = _schur(S, error, top, alpha, beta)
    return Metric(scale, matrix)


def _schur(S: Array, error: float, top: float, alpha: float, beta: float) -> Array | None:
    """Return a matrix above the inverse of X' = t I - k S (I + tau S)^-1, or None if that cannot be shown.

    S (I + tau S)^-1 = (I - (I + tau S)^-1) / tau rises with S, so S is first raised by its error, and the inverse is
    bounded from the side that makes X' smaller: what is below a feasible X' is feasible.
    """
    n = len(S)
    shift = raised(error + 4 * U * top, 8)
    S = 0.5 * (S + S.T) + 2 * shift * np.eye(n)
    top = raised(top + 3 * shift, 8)
    t = 2 / (beta * (beta - alpha) * top)
    tau, k = t * alpha * beta, t * t * 0.25 * (alpha + beta) ** 2
    damped, off = S, 0.0
    if tau != 0:
        if not 1 + tau * top > 1e-3:
            return None
        found = _inverse(np.eye(n) + tau * S, gamma(8) * (1 + abs(tau) * top))
        if found is None:
            return None
        damped = (np.eye(n) - found[0]) / tau + found[1] / abs(tau) * np.eye(n)
        off = gamma(8) * (frobenius(found[0]) + found[1] + np.sqrt(n)) / abs(tau)
    X = t * np.eye(n) - k * damped
    forming = gamma(8) * (t * np.sqrt(n) + k * frobenius(damped)) + k * off
    # The smallest eigenvalue of X: positive by the choice of t, and shown.
    if not -largest_eigenvalue(-X, raised(forming, 8)) > 0:
        return None
    found = _inverse(X, raised(forming, 8))
    if found is None:
        return None
    above: Array = found[0] + found[1] * np.eye(n)
    return above


def _inverse(A: Array, error: float) -> tuple[Array, float] | None:
    r"""Return a symmetric B and a bound on its distance from the inverse of every matrix within `error` of A.

    With :math:`R = I - AB`: :math:`\|A^{-1} - B\| \le \|B\| \|R\| / (1 - \|R\|)`.
    """
    n = len(A)
    try:
        B: Array = np.asarray(np.linalg.inv(A), np.float64)
    except np.linalg.LinAlgError:
        return None
    B = 0.5 * (B + B.T)
    B = np.where(np.tri(n, dtype=bool), B, B.T)
    if not np.isfinite(B).all():
        return None
    size = float(np.abs(B).sum(axis=1).max()) * (1 + gamma(2 * n))
    rest = np.eye(n) - A @ B
    r = frobenius(rest) + gamma(n + 2) * (frobenius(A) * frobenius(B) + np.sqrt(n)) + error * size
    if not r < 0.5:
        return None
    distance = raised(size * r / (1 - r), 16)
    return B, raised(distance + 8 * U * size)


def lipsdp_constants(blocks: Blocks, last: Metric) -> Array:
    """Return the constants of all f_i - f_j by the metric behind the last layer."""
    _, outer, _ = read_outs(blocks, None)
    if last.matrix is None:
        return up(row_lengths(outer, 2) * np.sqrt(last.scale), 8)
    S, error = congruent(outer, last)
    return up(np.sqrt(np.maximum(np.diagonal(S), 0.0) + error), 8)
