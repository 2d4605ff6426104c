r"""Global Lipschitz constants, derived afresh: products of norms, the loop transformation, and LipSDP layer by layer.

- A block :math:`Hx + G\Phi(Wx + b)` with slopes in [alpha, beta] is :math:`\|H\| + s\|G\|\|W\|`-Lipschitz, s the
  largest absolute slope; one of the form :math:`A(x - W^T D \Phi(Wx + b))` with slopes in [0, beta] has, beside A,
  :math:`L^2 \le 1 + (\rho - 2/\beta)_+ \beta^2 \rho`, :math:`\rho = \|D^{1/2} W\|^2`.
- With :math:`\phi = \mu z + \psi`, :math:`\mu` the middle slope, :math:`\psi` is :math:`(\beta - \alpha)/2`-Lipschitz
  and a difference is the product of the :math:`\hat H_k = H_k + \mu_k G_k W_k` plus one term for each :math:`\psi`, as
  far as its own z moves.
- LipSDP: if :math:`\|\Delta a\|_X \le \|\Delta x\|` before a layer and :math:`S = W X^{-1} W^T`, then behind it the
  same holds with :math:`X' = t I - t^2 \tfrac{(\alpha + \beta)^2}{4} S (I + t \alpha\beta S)^{-1}` for any t > 0 that
  makes it positive definite: the sector inequality of every neuron with the multiplier t, and a Schur complement.
"""

from dataclasses import dataclass

import numpy as np

from curvcert.checker.chain import Chain, Piece, diagonal_between, read_outs
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
    size_of,
    spectral_norm,
    times,
    up,
)

DUAL = {1.0: np.inf, 2.0: 2.0, np.inf: 1.0}
"""The dual of every norm that is covered."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """The 2-norms of a piece's maps."""

    H: float
    G: float
    W: float


def norms_of(chain: Chain) -> list[Sizes]:
    """Return the 2-norms of every piece's maps."""
    return [
        Sizes(0.0 if piece.H is None else piece.H.norm, size_of(piece.G), 0.0 if piece.W is None else piece.W.norm)
        for piece in chain.pieces
    ]


@dataclass(frozen=True, eq=False)
class Linear:
    """A piece about its middle slope: the linear part, the radius of the slopes, G, W and constants."""

    linear: Factor
    radius: float
    outer: Factor
    G: float
    W: float
    product: float
    transformed: float
    contraction: tuple[float, float] | None = None


def linearised(piece: Piece, p: float, sizes: Sizes) -> Linear:
    """Split a piece about the middle of its slopes, with norms p -> p."""
    if piece.act is None or piece.W is None:
        constant = operator_norm(piece.H, p)
        return Linear(piece.H, 0.0, None, 0.0, 0.0, constant, constant)
    alpha, beta = piece.act.slope
    mu = 0.5 * (alpha + beta)
    radius = raised(max(beta - mu, mu - alpha))
    through = times(piece.G, piece.W)
    assert through is not None
    linear = scaled(mu, through)
    if piece.H is not None:
        linear = plus(piece.H, linear)
    H, G, W = sizes.H, sizes.G, sizes.W
    if p != 2:
        H = 0.0 if piece.H is None else operator_norm(piece.H, p)
        G, W = operator_norm(piece.G, p), operator_norm(piece.W, p)
    constant = raised(H + piece.act.steepest * G * W)
    contraction = _contraction(piece, sizes) if p == 2 else None
    if contraction is not None:
        constant = min(constant, raised(H * contraction[0] + contraction[1]))
    transformed = min(constant, raised(operator_norm(linear, p) + radius * G * W))
    return Linear(linear, radius, piece.G, G, W, constant, transformed, contraction)


def contraction_weights(piece: Piece) -> Array | None:
    """Return the d >= 0 that brings G nearest to -A W' diag(d), A = H, where G is near that at all."""
    if piece.act is None or piece.H is None or piece.W is None or piece.G is None or piece.act.slope[0] < 0:
        return None
    return diagonal_between(piece.H, piece.G, piece.W)


def _contraction(piece: Piece, sizes: Sizes) -> tuple[float, float] | None:
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
    return own, raised(off * beta * sizes.W, 8)


def _error(matrix: Enclosed) -> Array:
    return np.zeros_like(matrix.value) if matrix.error is None else matrix.error


def last_steps(chain: Chain, part: Linear, p: float) -> Array:
    """Return Lipschitz constants of every f_i - f_j as a function of the last piece's input."""
    dual = DUAL[p]
    _, outer, skip = read_outs(chain, None)
    return functional_steps(chain.pieces[-1], part, outer, skip, dual)


def functional_steps(piece: Piece, part: Linear, outer: Enclosed, skip: Enclosed | None, dual: float) -> Array:
    """Return Lipschitz constants of functionals of a piece, given as rows of maps behind its G and its H."""
    step = np.zeros(len(outer.value)) if skip is None else row_lengths(skip, dual)
    if piece.act is None:
        return step
    found = step + piece.act.steepest * row_lengths(outer, dual) * part.W
    if part.contraction is not None and skip is not None:
        own, off = part.contraction
        # A difference of two outputs has length sqrt(2).
        found = np.minimum(found, step * own + 1.5 * off)
    return up(found, 8)


@dataclass(frozen=True, eq=False)
class Reached:
    """Lipschitz constants in p -> p: of x -> x_k, the input of every piece, and of x -> W x_k, 0 without a W."""

    before: list[float]
    inner: list[float]


def reached(chain: Chain, parts: list[Linear], p: float) -> Reached:
    """Carry the loop transformation on what the activations are applied to, and on the inputs of the pieces."""
    found = Reached([1.0], [])
    for k, (piece, part) in enumerate(zip(chain.pieces, parts, strict=True)):
        L = found.before[-1]
        inner = 0.0
        if piece.act is not None:
            inner = min(_sum(parts[:k], found.inner, piece.W, p), raised(part.W * L))
        found.inner.append(inner)
        if k == len(parts) - 1:
            break
        constant = raised(L * part.product)
        if piece.act is not None and piece.H is None:
            constant = min(constant, raised(piece.act.steepest * part.G * inner))
        if piece.act is None or piece.H is not None or piece.G is not None:
            constant = min(constant, _sum(parts[: k + 1], found.inner, None, p))
        found.before.append(constant)
    return found


def _sum(parts: list[Linear], inner: list[float], tail: Factor, p: float) -> float:
    """Bound what comes through pieces and a last map: all of it about the middle slopes, and each psi's share."""
    total = 0.0
    for part, Z in zip(reversed(parts), reversed(inner[: len(parts)]), strict=True):
        if part.radius:
            total += part.radius * operator_norm(times(tail, part.outer), p) * Z
        tail = times(tail, part.linear)
    return raised(total + operator_norm(tail, p), 8 * (len(parts) + 2))


def pair_constants(chain: Chain, parts: list[Linear], found: Reached, p: float) -> Array:
    """Return Lipschitz constants of all f_i - f_j, i < j: the loop transformation and the product, the least."""
    dual, last = DUAL[p], chain.pieces[-1]
    rows, outer, skip = read_outs(chain, None)
    total, tail = np.zeros(len(rows)), Enclosed(rows)
    for part, Z in zip(reversed(parts), reversed(found.inner), strict=True):
        if part.radius:
            reach = times(tail, part.outer)
            assert reach is not None
            total = total + part.radius * row_lengths(reach, dual) * Z
        if part.linear is not None:
            tail = product(tail, part.linear)
    total = up(total + row_lengths(tail, dual), 8 * (len(parts) + 2))
    total = np.minimum(total, up(last_steps(chain, parts[-1], p) * found.before[-1], 8))
    if last.act is None:
        return total
    step = np.zeros(len(rows)) if skip is None else row_lengths(skip, dual) * found.before[-1]
    return np.minimum(total, up(step + last.act.steepest * row_lengths(outer, dual) * found.inner[-1], 8))


@dataclass(frozen=True, eq=False)
class Metric:
    """Upper bounds, in the order of symmetric matrices, on the inverse of X: a multiple of I, and a matrix."""

    scale: float
    matrix: Array | None = None


def metrics(chain: Chain) -> list[Metric] | None:
    """Return bounds on the inverses of LipSDP's matrices before every layer and behind the last; None with skips."""
    if any(piece.act is None or piece.H is not None for piece in chain.pieces):
        return None
    found, before = [Metric(1.0)], None
    for piece in chain.pieces:
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


def lipsdp_constants(chain: Chain, last: Metric) -> Array:
    """Return the constants of all f_i - f_j by the metric behind the last layer."""
    _, outer, _ = read_outs(chain, None)
    if last.matrix is None:
        return up(row_lengths(outer, 2) * np.sqrt(last.scale), 8)
    S, error = congruent(outer, last)
    return up(np.sqrt(np.maximum(np.diagonal(S), 0.0) + error), 8)
