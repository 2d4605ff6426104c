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

from curvcert.checker.gradients import gradient_entries, last_slopes, weights
from curvcert.checker.growth import Growth, stacked_size
from curvcert.checker.lipschitz import Linear, Metric, congruent, contraction_weights
from curvcert.checker.outward import (
    Array,
    Enclosed,
    U,
    gamma,
    gram,
    largest_eigenvalue,
    lengths,
    raised,
    row_lengths,
    spectral_norm,
    times,
    up,
    weighted_eigenvalue,
)
from curvcert.checker.pieces import Blocks, Piece, read_outs

EIGENVALUE_SIDE = 1024
_MOST_WORK = 2**43
"""The largest matrix whose eigenvalue is bounded once for each pair of classes, and how much work that may be."""


def hadamard(W: Enclosed) -> float:
    r"""Bound :math:`\sqrt{\lambda_{max}((WW^T)^{\circ 2})}`."""
    return _root_of_product(*gram(W), *gram(W))


def _root_of_product(B: Array, B_error: float, C: Array, C_error: float) -> float:
    entry = B * C
    peak = max(float(np.abs(B).max()) + B_error, float(np.abs(C).max()) + C_error)
    size = float(np.sqrt(np.sum(entry * entry)))
    error = raised((B_error + C_error) * peak + gamma(4) * size, len(B) + 8)
    return raised(float(np.sqrt(max(0.0, largest_eigenvalue(entry, error)))))


def unrolled(
    blocks: Blocks,
    growth: Growth,
    layers: list[Metric] | None,
    sizes: list[Array],
    values: dict[int, Array],
    side: str = "both",
) -> list[Array]:
    """Return what each block adds to the curvature of all f_i - f_j at most, from above, below or both sides."""
    entries, found = gradient_entries(blocks, sizes, values), [np.zeros(len(sizes[-1])) for _ in blocks.pieces]
    previous: Piece | None = None
    for k, (piece, part) in enumerate(zip(blocks.pieces, growth.parts, strict=True)):
        if piece.act is None or piece.W is None:
            continue
        L, metric = growth.before(k), None if layers is None else layers[k]
        if metric is not None and (previous is None or previous.G is None):
            L = min(L, raised(float(np.sqrt(metric.scale))))
        square = raised(L * L)
        omega = min(hadamard(piece.W), raised(part.W * float(row_lengths(piece.W, 2).max())))
        weighed = weights(piece.act, entries[k], side)
        best = np.minimum(sizes[k] * omega * square * piece.act.c, square * _by_entries(piece.W, weighed))
        # In l2 a sum of w_l |J_l a| |J_l b| is at most the largest w_l times the squared constant of z.
        best = np.minimum(best, np.minimum(weighed.max(axis=1), sizes[k] * piece.act.c) * growth.inner[k] ** 2)
        best = up(best, 8)
        if piece is not blocks.last:
            best = np.minimum(best, values[piece.output] * _block_curvature(piece, part) * square)
        if metric is not None and metric.matrix is not None:
            W = times(piece.W, None if previous is None else previous.G)
            assert W is not None
            best = np.minimum(best, by_jacobians(*congruent(W, metric), up(piece.act.c * sizes[k]), weighed))
        found[k] = best
        previous = piece
    return found


def _by_entries(W: Enclosed, entries: Array) -> Array:
    """Bound the largest eigenvalue of W' diag(u) W for each row u of entrywise bounds."""
    rows = row_lengths(W, 2)
    coarse = up((entries * rows * rows).sum(axis=1), entries.shape[1] + 8)
    coarse = np.minimum(coarse, up(entries.max(axis=1) * spectral_norm(W) ** 2, 8))
    coarse = np.minimum(coarse, up(lengths(entries, 2, 1) * hadamard(W), 8))
    if not _affordable(len(entries), min(W.value.shape)):
        return coarse
    return np.minimum(coarse, [weighted_eigenvalue(W, u) for u in entries])


def _affordable(count: int, side: int) -> bool:
    return side <= EIGENVALUE_SIDE and count * side**3 <= _MOST_WORK


def by_jacobians(S: Array, error: float, size: Array, entries: Array) -> Array:
    """Bound a term by a matrix above all Jacobians times their transposes, and by what that is off by."""
    found = size * _root_of_product(S, error, S, error)
    if not _affordable(len(entries), len(S)):
        return up(found, 8)
    trace = float(np.abs(np.diagonal(S)).sum()) + error
    each = []
    for u in entries:
        root = up(np.sqrt(u))
        slack = raised(float(root.max()) ** 2 * (error + 4 * U * trace), len(S) + 8)
        each.append(largest_eigenvalue(root[:, None] * S * root[None, :], slack))
    return np.minimum(up(found, 8), np.maximum(each, 0.0))


def inside(blocks: Blocks, growth: Growth) -> dict[int, float]:
    """Return curvature constants of x -> v for every value that a block reads, by composition."""
    found: dict[int, float] = {0: 0.0}
    for k, (piece, part) in enumerate(zip(blocks.pieces[:-1], growth.parts, strict=False)):
        read = [found[source] for source in piece.sources]
        K = part.transformed * stacked_size(read, 2)
        if piece.act is None:
            K = min(K, sum(norm * one for norm, one in zip(part.H_parts, read, strict=True)))
        found[piece.output] = raised(_block_curvature(piece, part) * growth.before(k) ** 2 + K, 8 + 2 * len(read))
    return found


def compositional(blocks: Blocks, growth: Growth, found: dict[int, float], side: str = "both") -> Array:
    """Return curvature constants of all f_i - f_j by composing the blocks' constants, given those `inside`.

    From one side alone it is the last block that bends less.
    """
    _, outer, _ = read_outs(blocks, None)
    last, omega = blocks.last, np.zeros(len(outer.value))
    if last.act is not None and last.W is not None:
        spread = up(outer.size - np.abs(outer.value) + 2 * U * outer.size)
        omega = _by_entries(last.W, weights(last.act, (outer.value - spread, outer.value + spread), side))
    K = stacked_size([found[source] for source in last.sources], 2)
    return up(omega * growth.before(len(growth.parts) - 1) ** 2 + last_slopes(blocks, growth.parts[-1]) * K, 16)


def _block_curvature(piece: Piece, sizes: Linear) -> float:
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


def one_hidden_layer(blocks: Blocks, side: str = "both") -> Array | None:
    r"""Bound a network with one layer by the eigenvalues of :math:`W^T \mathrm{diag}(P) W`, P the signed extremes."""
    piece = blocks.pieces[0]
    if len(blocks.pieces) > 1 or piece.act is None or piece.W is None or piece.H is not None:
        return None
    _, outer, _ = read_outs(blocks, None)
    low, high = piece.act.second.range
    spread = up(outer.size - np.abs(outer.value), 4)
    corners = np.array([(outer.value + s * spread) * h for s in (-1, 1) for h in (low, high)])
    # Each corner errs relative to itself, so that one that is 0, or of the other sign, stays so.
    slack = 8 * U * np.abs(corners)
    top = np.maximum((corners + slack).max(axis=0), 0.0)
    bottom = np.maximum((slack - corners).max(axis=0), 0.0)
    kept = {"above": [top], "below": [bottom], "both": [top, bottom]}[side]
    return np.array([max(weighted_eigenvalue(piece.W, one) for one in each) for each in zip(*kept, strict=True)])
