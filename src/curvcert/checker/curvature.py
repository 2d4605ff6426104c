r"""Global curvature constants of all pairs of classes in l2, derived afresh.

For a scalar f, :math:`\nabla^2 f = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k`, with u the gradient with
respect to the activations.  Given entrywise bounds :math:`\bar u` and a bound :math:`\gamma` on :math:`\|u\|`, a
prefix constant L (or LipSDP's :math:`S = W X^{-1} W^T`), a term is at most c times the least of

.. math::
    \gamma L^2 \sqrt{\lambda_{max}((WW^T)^{\circ 2})}, \quad L^2 \lambda_{max}(W^T \mathrm{diag}(\bar u) W), \quad
    \gamma \sqrt{\lambda_{max}(S^{\circ 2})}, \quad \lambda_{max}(\bar U^{1/2} S \bar U^{1/2}).

The other way is by composition, :math:`K_{k+1} = \omega_k L_k^2 + L_{h_k} K_k`.
"""

import numpy as np

from curvcert.checker.chain import Chain, Piece, read_outs
from curvcert.checker.lipschitz import (
    Linear,
    Metric,
    Sizes,
    congruent,
    contraction_weights,
    functional_steps,
    last_steps,
)
from curvcert.checker.outward import (
    Array,
    Enclosed,
    U,
    gamma,
    gram,
    largest_eigenvalue,
    lengths,
    product,
    raised,
    row_lengths,
    spectral_norm,
    times,
    up,
    weighted_eigenvalue,
)

EIGENVALUE_SIDE = 1024
"""The largest matrix whose eigenvalue is bounded once for each pair of classes."""


def gradient_sizes(chain: Chain, parts: list[Linear]) -> list[Array]:
    """Bound the 2-norm of the gradient of every f_i - f_j with respect to each piece's activations."""
    rows, _, _ = read_outs(chain, None)
    found: list[Array] = [np.zeros(len(rows))] * len(parts)
    for k in range(len(parts) - 1, -1, -1):
        if chain.pieces[k].act is None:
            continue
        reach, total, candidates = parts[k].outer, np.zeros(len(rows)), []
        # The pieces in between, whatever their slopes, stretch by no more than their constants.
        stretch = parts[k].G
        for j in range(k + 1, len(parts)):
            piece = chain.pieces[j]
            if piece.act is not None:
                linked = times(piece.W, reach)
                assert linked is not None
                link = min(spectral_norm(linked), raised(parts[j].W * stretch))
                total = total + parts[j].radius * link * found[j]
                if j == k + 1 and piece.H is None:
                    candidates.append(piece.act.steepest * link * found[j])
            reach = times(parts[j].linear, reach)
            stretch = raised(stretch * parts[j].product) if j < len(parts) - 1 else stretch
        if k < len(parts) - 1:
            candidates.append(stretch * last_steps(chain, parts[-1], 2.0))
        end = Enclosed(rows) if reach is None else product(Enclosed(rows), reach)
        candidates.append(total + row_lengths(end, 2))
        found[k] = up(np.min(candidates, axis=0), 8 * len(parts) + 8)
    return found


def gradient_entries(chain: Chain, sizes: list[Array]) -> list[Array]:
    """Bound every entry of those gradients, by intervals through the transposed maps."""
    rows, _, _ = read_outs(chain, None)
    low, high = rows, rows
    found = []
    for piece, size in zip(reversed(chain.pieces), reversed(sizes), strict=True):
        if piece.act is None or piece.W is None:
            assert piece.H is not None
            low, high = _pulled(piece.H, low, high)
            found.append(np.zeros((len(rows), 0)))
            continue
        inner = (low, high) if piece.G is None else _pulled(piece.G, low, high)
        inner = np.maximum(inner[0], -size[:, None]), np.minimum(inner[1], size[:, None])
        found.append(np.maximum(np.abs(inner[0]), np.abs(inner[1])))
        corners = np.array([slope * end for slope in piece.act.slope for end in inner])
        slack = 4 * U * np.abs(corners).max(axis=0)
        below = _pulled(piece.W, corners.min(axis=0) - slack, corners.max(axis=0) + slack)
        cap = up(piece.act.steepest * size[:, None] * row_lengths(piece.W.transposed, 2)[None], 8)
        below = np.maximum(below[0], -cap), np.minimum(below[1], cap)
        if piece.H is not None:
            skip = _pulled(piece.H, low, high)
            below = _down(below[0] + skip[0]), _up(below[1] + skip[1])
        low, high = below
    return found[::-1]


def _up(x: Array) -> Array:
    return x + 4 * U * np.abs(x)


def _down(x: Array) -> Array:
    return x - 4 * U * np.abs(x)


def _pulled(A: Enclosed, low: Array, high: Array) -> tuple[Array, Array]:
    """Enclose g A for every row vector g between low and high."""
    n = len(A.value)
    centre = 0.5 * (low + high)
    radius = up(np.maximum(high - centre, centre - low))
    size = A.size
    width = radius @ size + gamma(n + 2) * (np.abs(centre) @ size)
    if A.error is not None:
        width = width + np.abs(centre) @ A.error
    middle, width = centre @ A.value, up(width, n + 8)
    return _down(middle - width), _up(middle + width)


def hadamard(W: Enclosed) -> float:
    r"""Bound :math:`\sqrt{\lambda_{max}((WW^T)^{\circ 2})}`."""
    return _root_of_product(*gram(W), *gram(W))


def _root_of_product(B: Array, B_error: float, C: Array, C_error: float) -> float:
    entry = B * C
    peak = max(float(np.abs(B).max()) + B_error, float(np.abs(C).max()) + C_error)
    size = float(np.sqrt(np.sum(entry * entry)))
    error = raised((B_error + C_error) * peak + gamma(4) * size, len(B) + 8)
    return raised(float(np.sqrt(max(0.0, largest_eigenvalue(entry, error)))))


def last_slopes(chain: Chain, part: Linear) -> Array:
    """Return Lipschitz constants of every f_i - f_j over the last piece: as it is, or about its middle slope."""
    last = chain.pieces[-1]
    rows, outer, skip = read_outs(chain, None)
    found = functional_steps(last, part, outer, skip, 2.0)
    if last.act is None or part.linear is None:
        return found
    about = row_lengths(product(Enclosed(rows), part.linear), 2) + part.radius * row_lengths(outer, 2) * part.W
    return np.minimum(found, up(about, 8))


def gradients_behind(chain: Chain, parts: list[Linear]) -> list[Array]:
    """Bound the gradients of every f_i - f_j with respect to the output of each piece but the last."""
    found = [last_slopes(chain, parts[-1])]
    for part in reversed(parts[1:-1]):
        found.append(up(found[-1] * part.transformed))
    return found[::-1]


def unrolled(
    chain: Chain,
    parts: list[Linear],
    before: list[float],
    layers: list[Metric] | None,
    sizes: list[Array],
    norms: list[Sizes],
) -> Array:
    """Return curvature constants of all f_i - f_j by the sum over layers."""
    entries, behind = gradient_entries(chain, sizes), gradients_behind(chain, parts)
    total = np.zeros(len(sizes[-1]))
    previous: Piece | None = None
    for k, piece in enumerate(chain.pieces):
        if piece.act is None or piece.W is None:
            continue
        L, metric = before[k], None if layers is None else layers[k]
        if metric is not None and (previous is None or previous.G is None):
            L = min(L, raised(float(np.sqrt(metric.scale))))
        square = raised(L * L)
        omega = min(hadamard(piece.W), raised(parts[k].W * float(row_lengths(piece.W, 2).max())))
        best = np.minimum(sizes[k] * omega * square, square * _by_entries(piece.W, entries[k]))
        best = up(best, 8) * piece.act.c
        if k < len(chain.pieces) - 1:
            best = np.minimum(best, behind[k] * _block_curvature(piece, norms[k]) * square)
        if metric is not None and metric.matrix is not None:
            W = times(piece.W, None if previous is None else previous.G)
            assert W is not None
            best = np.minimum(best, piece.act.c * _by_metric(W, metric, sizes[k], entries[k]))
        total = total + best
        previous = piece
    return up(total, 8 * len(chain.pieces) + 16)


def _by_entries(W: Enclosed, entries: Array) -> Array:
    """Bound the largest eigenvalue of W' diag(u) W for each row u of entrywise bounds."""
    rows = row_lengths(W, 2)
    coarse = up((entries * rows * rows).sum(axis=1), entries.shape[1] + 8)
    coarse = np.minimum(coarse, up(entries.max(axis=1) * spectral_norm(W) ** 2, 8))
    coarse = np.minimum(coarse, up(lengths(entries, 2, 1) * hadamard(W), 8))
    if min(W.value.shape) > EIGENVALUE_SIDE:
        return coarse
    return np.minimum(coarse, [weighted_eigenvalue(W, u) for u in entries])


def _by_metric(W: Enclosed, metric: Metric, size: Array, entries: Array) -> Array:
    S, error = congruent(W, metric)
    found = size * _root_of_product(S, error, S, error)
    if len(S) > EIGENVALUE_SIDE:
        return up(found, 8)
    trace = float(np.abs(np.diagonal(S)).sum()) + error
    each = []
    for u in entries:
        root = up(np.sqrt(u))
        slack = raised(float(root.max()) ** 2 * (error + 4 * U * trace), len(S) + 8)
        each.append(largest_eigenvalue(root[:, None] * S * root[None, :], slack))
    return np.minimum(up(found, 8), np.maximum(each, 0.0))


def compositional(chain: Chain, parts: list[Linear], before: list[float], sizes: list[Sizes]) -> Array:
    """Return curvature constants of all f_i - f_j by composing the pieces' constants."""
    _, outer, _ = read_outs(chain, None)
    K = 0.0
    for piece, part, L, size in zip(chain.pieces[:-1], parts, before, sizes, strict=False):
        K = raised(_block_curvature(piece, size) * L * L + part.transformed * K, 8)
    last, omega = chain.pieces[-1], np.zeros(len(outer.value))
    if last.act is not None and last.W is not None:
        omega = last.act.c * _by_entries(last.W, outer.size)
    return up(omega * before[-1] ** 2 + last_slopes(chain, parts[-1]) * K, 16)


def _block_curvature(piece: Piece, sizes: Sizes) -> float:
    """Bound the Jacobian-Lipschitz constant of one piece: the least of the Hadamard forms and the product."""
    if piece.act is None or piece.W is None:
        return 0.0
    rows = row_lengths(piece.W, 2)
    weighed = Enclosed(rows[:, None] * piece.W.value, 2 * U * np.abs(rows[:, None] * piece.W.value))
    by_rows = spectral_norm(weighed) + float(rows.max()) * piece.W.off
    found = sizes.G * min(hadamard(piece.W), sizes.W * float(rows.max()), by_rows)
    if piece.G is not None:
        inner, outer = gram(piece.W), gram(piece.G.transposed)
        found = min(found, sizes.W * _root_of_product(*outer, *inner), _scaled_vectorised(piece, outer, inner))
        found = min([found, *(_weighed(piece, N) for N in _diagonals(piece, rows))])
    return raised(piece.act.c * found, 8)


def _diagonals(piece: Piece, rows: Array) -> list[Array]:
    """Return diagonals for `_weighed` where the piece is a contraction; any positive one gives a bound."""
    d = contraction_weights(piece)
    if d is None:
        return []
    w = np.maximum(rows, 1e-100)
    found = [np.sqrt(d), *(d * w / (d * w**3) ** t for t in (0.5, 0.75))]
    return [np.where((N > 1e-50) & (N < 1e50), N, 1.0) for N in found]


def _weighed(piece: Piece, N: Array) -> float:
    r"""Bound :math:`\|G N^{-1}\| \sqrt{\lambda_{max}((VV^T)^{\circ 2})}`, :math:`V = N^{1/2} W`, N as given."""
    assert piece.G is not None
    assert piece.W is not None
    outer = piece.G.value / N
    outer_error = U * np.abs(outer) if piece.G.error is None else U * np.abs(outer) + piece.G.error / N
    root = np.sqrt(N)
    inner = root[:, None] * piece.W.value
    inner_error = (
        4 * U * np.abs(inner) if piece.W.error is None else 4 * U * np.abs(inner) + up(root)[:, None] * piece.W.error
    )
    return raised(spectral_norm(Enclosed(outer, up(outer_error))) * hadamard(Enclosed(inner, up(inner_error))))


def _scaled_vectorised(piece: Piece, outer: tuple[Array, float], inner: tuple[Array, float]) -> float:
    assert piece.G is not None
    assert piece.W is not None
    d = row_lengths(piece.G.transposed, 2) * row_lengths(piece.W, 2)
    d = np.where(d > 1e-100, d, 1.0)
    B, C = outer[0] / d[:, None], inner[0] / d[None, :]
    low = float(d.min())
    root = _root_of_product(
        B, raised(outer[1] / low + 2 * U * np.abs(B).sum()), C, raised(inner[1] / low + 2 * U * np.abs(C).sum())
    )
    weighed = d[:, None] * piece.W.value
    width = spectral_norm(Enclosed(weighed, 2 * U * np.abs(weighed))) + float(d.max()) * piece.W.off
    return raised(root * width)


def one_hidden_layer(chain: Chain) -> Array | None:
    r"""Bound a network with one layer by the eigenvalues of :math:`W^T \mathrm{diag}(P) W`, P the signed extremes."""
    piece = chain.pieces[0]
    if len(chain.pieces) > 1 or piece.act is None or piece.W is None or piece.H is not None:
        return None
    _, outer, _ = read_outs(chain, None)
    low, high = piece.act.second.range
    spread = outer.size - np.abs(outer.value)
    corners = np.array([(outer.value + s * spread) * h for s in (-1, 1) for h in (low, high)])
    slack = 8 * U * np.abs(corners).max(axis=0)
    top = np.maximum(corners.max(axis=0) + slack, 0.0)
    bottom = np.maximum(slack - corners.min(axis=0), 0.0)
    return np.array(
        [
            max(weighted_eigenvalue(piece.W, t), weighted_eigenvalue(piece.W, b))
            for t, b in zip(top, bottom, strict=True)
        ]
    )
