r"""Curvature constants with one point fixed, derived afresh: one input, all classes beside its label, in l2.

With the quotients :math:`c_l` of phi' as seen from the neurons' values at x, two recursions hold step by step:

.. math::
    K_{k+1}(x) &\le L_{h_k} K_k(x) + \|Dx_k(x)\| \, \omega_k(x) L_k(x), \\
    K_{k+1}(x) &\le \|Dh_k(x_k)\| K_k(x) + L_k \, \omega_k(x) L_k(x),

:math:`L_{h_k}` and :math:`L_k` global and :math:`L_k(x)` anchored: write
:math:`Dh(x_k') Dx_k' - Dh(x_k) Dx_k` as :math:`Dh(x_k') (Dx_k' - Dx_k) + (Dh(x_k') - Dh(x_k)) Dx_k`, or the other way
round.  Unrolled with the gradient u at x,
:math:`K(x) \le \sum_k L_k L_k(x) \lambda_{max}(W^T \mathrm{diag}(c \circ |u|) W)`.  What holds everywhere holds from
x on too: it takes the place of any step or term that is larger.
"""

from dataclasses import dataclass, replace

import numpy as np

from curvcert.checker.curvature import EIGENVALUE_SIDE
from curvcert.checker.evaluation import Backed, Passed, Vector
from curvcert.checker.facts import Facts
from curvcert.checker.growth import Growth, stacked_size
from curvcert.checker.jacobians import Jacobian, jacobians_at, slopes_at
from curvcert.checker.lipschitz import Linear, functional_steps
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    gram,
    lengths,
    plus,
    product,
    raised,
    row_lengths,
    spectral_norm,
    times,
    up,
    weighted_eigenvalue,
)
from curvcert.checker.pieces import Piece, read_outs
from curvcert.checker.quotients import curvature_quotients, steepest_quotients

_JACOBIAN_SIDE = 256

_PATH_ELEMENTS = 2**20
"""Neurons times neurons and inputs, up to which maps over all of them are formed for one input."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A piece as seen from x: the slopes at x (lowest, highest), anchored slopes, and anchored constants of phi'."""

    at: tuple[Array, Array]
    steep: Array
    low: Array
    high: Array
    c: Array


def seen(piece: Piece, z: Vector) -> Seen:
    """Look at a piece from the values of its neurons at one input."""
    assert piece.act is not None
    low, high = steepest_quotients(piece.act, z.value, z.error)
    c = curvature_quotients(piece.act, z.value, z.error)
    return Seen(slopes_at(piece, z), np.maximum(np.abs(low), np.abs(high)), low, high, c)


def views_of(facts: Facts, passed: Passed) -> list[Seen | None]:
    """Return every piece as seen from one input; None for an affine one."""
    pairs = zip(facts.blocks.pieces, facts.neurons(passed), strict=True)
    return [None if z is None else seen(piece, z) for piece, z in pairs]


def anchored_curvatures(facts: Facts, passed: Passed, backed: Backed, views: list[Seen | None], label: int) -> Array:
    """Return curvature constants of f_i - f_label anchored at one input, for all i; 0 for the label."""
    blocks = facts.blocks
    slopes = [None if view is None else (view.low, view.high) for view in views]
    L, jacobians = _constants_seen(facts, slopes), jacobians_at(facts, passed)
    K, total = {0: 0.0}, np.zeros(blocks.classes)
    for k, (piece, view) in enumerate(zip(blocks.pieces, views, strict=True)):
        before = stacked_size([L[source] for source in piece.sources], 2)
        if view is not None and piece.W is not None:
            u = backed.gradients[piece.a]
            sizes = up(np.abs(u) + backed.drift[piece.a][:, None])
            here = _bilinear(facts, k, up(view.c * sizes)) * facts.growth.before(k) * before
            total = total + np.minimum(up(here, 8), facts.table(facts.least_terms[k])[label])
        known = [K[source] for source in piece.sources]
        there = min(before, _norm(jacobians.read[k]))
        if piece is not blocks.last:
            K[piece.output] = min(_step(facts, k, view, known, before, there), facts.curvatures[piece.output])
    found = _last_step(facts, views[-1], known, before, there, label)
    found = np.minimum(found, up(total, 8 * len(blocks.pieces) + 8))
    found[label] = 0.0
    return found


def _norm(jacobian: Jacobian) -> float:
    """Bound the norm of a Jacobian; infinite where that would take long."""
    return jacobian.norm if min(jacobian.X.shape) <= _JACOBIAN_SIDE else float(np.inf)


def weighted_norm(facts: Facts, k: int, weights: Array) -> float:
    """Bound ||diag(s) W|| of a piece."""
    W = facts.blocks.pieces[k].W
    assert W is not None
    coarse = raised(float(weights.max()) * facts.parts[k].W)
    size = up(weights[:, None] * W.size, 4)
    rows, columns = float(size.sum(axis=1).max()), float(size.sum(axis=0).max())
    coarse = min(coarse, raised(float(np.sqrt(rows * columns)), sum(size.shape)))
    if min(W.value.shape) > EIGENVALUE_SIDE:
        return coarse
    value = weights[:, None] * W.value
    error = U * np.abs(value) if W.error is None else U * np.abs(value) + weights[:, None] * W.error
    return min(coarse, spectral_norm(Enclosed(value, up(error))))


def block_growth(facts: Facts, k: int, low: Array, high: Array) -> float:
    """Bound ||H + G D W|| for every diagonal D between low and high."""
    piece, size, part = facts.blocks.pieces[k], facts.parts[k], facts.parts[k]
    found = size.H + size.G * weighted_norm(facts, k, np.maximum(np.abs(low), np.abs(high)))
    if piece.H is not None and piece.act is not None:
        mu = 0.5 * sum(piece.act.slope)
        about = up(np.maximum(np.maximum(high - mu, mu - low), 0.0))
        found = min(found, spectral_norm(part.linear) + size.G * weighted_norm(facts, k, about))
    return raised(found, 8)


def growth_seen(facts: Facts, slopes: list[tuple[Array, Array] | None], p: float) -> Growth | None:
    """Return Lipschitz constants in p -> p as seen from one input, by LipLT with slopes of every neuron's own.

    With the middles mu of the slopes and rho half their widths, a block is H + G diag(mu) W, and G diag(rho) times what
    is 1-Lipschitz.  None where that would take long.
    """
    pieces, parts = facts.blocks.pieces, facts.parts_in(p)
    neurons = sum(part.hidden for part in parts)
    if neurons * (neurons + facts.model.nodes[0].size) > _PATH_ELEMENTS:
        return None
    own = [
        part if slope is None else _about_middles(piece, part, *slope)
        for piece, part, slope in zip(pieces, parts, slopes, strict=True)
    ]
    return Growth(facts.blocks, own, p)


def _about_middles(piece: Piece, part: Linear, low: Array, high: Array) -> Linear:
    assert piece.W is not None
    mu = 0.5 * (low + high)
    rho = up(np.maximum(high - mu, mu - low))
    linear = times(piece.G, _weighed(mu, piece.W))
    assert linear is not None
    linear = linear if piece.H is None else plus(piece.H, linear)
    outer = Enclosed(np.diag(rho)) if piece.G is None else _weighed(rho, piece.G.transposed).transposed
    steepest = float(np.maximum(np.abs(low), np.abs(high)).max())
    return replace(part, linear=linear, radius=1.0, outer=outer, steepest=steepest, contraction=None)


def _weighed(d: Array, A: Enclosed) -> Enclosed:
    """Return diag(d) A."""
    value = d[:, None] * A.value
    error = U * np.abs(value) if A.error is None else U * np.abs(value) + np.abs(d[:, None]) * A.error
    return Enclosed(value, up(error) + TINY)


def slopes_seen(facts: Facts, passed: Passed) -> list[tuple[Array, Array] | None]:
    """Enclose the slopes of every block's neurons as seen from one input; None for an affine block."""
    found: list[tuple[Array, Array] | None] = []
    for piece, z in zip(facts.blocks.pieces, facts.neurons(passed), strict=True):
        if z is None or piece.act is None:
            found.append(None)
        elif piece.act.smooth:
            found.append(steepest_quotients(piece.act, z.value, z.error))
        else:
            alpha, beta = piece.act.slope
            found.append((np.full_like(z.value, alpha), np.full_like(z.value, beta)))
    return found


def pairs_seen_block_by_block(facts: Facts, slopes: list[tuple[Array, Array] | None], label: int) -> Array:
    """Return l2 Lipschitz constants of f_i - f_label as seen from one input, for all i, block after block.

    No more than those by paths is known: neither way is always the smaller one.
    """
    L = _constants_seen(facts, slopes)
    piece, (_, outer, skip) = facts.blocks.last, read_outs(facts.blocks, label)
    read, straight = [L[source] for source in piece.sources], np.zeros(facts.blocks.classes)
    if skip is not None:
        straight = row_lengths(skip, 2) * stacked_size(read, 2)
        parts = zip(piece.split(skip), read, strict=True)
        straight = np.minimum(straight, sum((row_lengths(A, 2) * one for A, one in parts), np.zeros(len(straight))))
    if slopes[-1] is None:
        return up(straight, 8 + 2 * len(read))
    through = _rows_behind(facts, outer, slopes[-1]) * stacked_size(read, 2)
    return up(straight + through, 8 + 2 * len(read))


def _rows_behind(facts: Facts, outer: Enclosed, slopes: tuple[Array, Array]) -> Array:
    """Bound the length of every row u' D W, W of the last block and D of any slopes in between."""
    k, steep = len(facts.parts) - 1, np.maximum(np.abs(slopes[0]), np.abs(slopes[1]))
    together = row_lengths(outer, 2) * weighted_norm(facts, k, steep)
    return np.minimum(together, up(lengths(steep * outer.size, 2, 1)) * facts.parts[k].W)


def _constants_seen(facts: Facts, slopes: list[tuple[Array, Array] | None]) -> dict[int, float]:
    """Return l2 Lipschitz constants of x -> v as seen from one input, for every value that a block reads."""
    found = {0: 1.0}
    by_paths = growth_seen(facts, slopes, 2.0)
    for k, (piece, slope) in enumerate(zip(facts.blocks.pieces[:-1], slopes, strict=False)):
        part, read = facts.parts[k], [found[source] for source in piece.sources]
        grown = part.product if slope is None else block_growth(facts, k, *slope)
        L = stacked_size(read, 2) * grown
        if slope is None:
            L = min(L, sum(norm * one for norm, one in zip(part.H_parts, read, strict=True)))
        found[piece.output] = min(raised(L, 8 + 2 * len(read)), facts.growth.values[piece.output])
        if by_paths is not None:
            found[piece.output] = min(found[piece.output], by_paths.values[piece.output])
    return found


def _step(facts: Facts, k: int, view: Seen | None, known: list[float], L: float, jacobian: float) -> float:
    part, K = facts.parts[k], stacked_size(known, 2)
    if view is None:
        by_parts = sum(norm * one for norm, one in zip(part.H_parts, known, strict=True))
        return raised(min(part.product * K, by_parts), 8 + 2 * len(known))
    omega = _omega(facts, k, view.c)
    first = part.transformed * K + jacobian * omega * L
    second = (block_growth(facts, k, *view.at) * K if K > 0 else 0.0) + facts.growth.before(k) * omega * L
    return raised(min(first, second), 16)


def _omega(facts: Facts, k: int, c: Array) -> float:
    """Bound the anchored curvature of one piece: least of the product, the row-weighted and the Hadamard form."""
    W = facts.blocks.pieces[k].W
    assert W is not None
    weights = up(c * row_lengths(W, 2))
    inner = min(facts.parts[k].W * float(weights.max()), weighted_norm(facts, k, weights))
    inner = min(inner, raised(float(c.max()) * facts.hadamards[k]), _weighted_hadamard(W, c))
    return raised(facts.parts[k].G * inner)


def _weighted_hadamard(W: Enclosed, c: Array) -> float:
    r"""Bound :math:`\sqrt{\lambda_{max}(C (WW^T)^{\circ 2} C)}`: at most max (Mv)_i / v_i for any v > 0."""
    B, error = gram(W)
    M = up((np.abs(B) + error) ** 2)
    M = up(c[:, None] * M * c[None, :])
    v = np.ones(len(c))
    for _ in range(40):
        v = M @ v + 1e-9 * float(v.max()) * float(M.max())
        v = v / max(float(v.max()), 1e-300)
    v = np.maximum(v, 1e-12)
    return raised(float(np.sqrt(raised(float((M @ v / v).max()), len(c) + 8))))


def _bilinear(facts: Facts, k: int, weights: Array) -> Array:
    """Bound the largest eigenvalue of W' diag(d) W for each row d >= 0."""
    W = facts.blocks.pieces[k].W
    assert W is not None
    rows = row_lengths(W, 2)
    found = up((weights * rows * rows).sum(axis=1), weights.shape[1] + 8)
    found = np.minimum(found, up(weights.max(axis=1) * facts.parts[k].W ** 2, 8))
    found = np.minimum(found, up(lengths(weights, 2, 1) * facts.hadamards[k], 8))
    found = np.minimum(found, up(lengths(weights, 2, 1) * facts.parts[k].W * float(rows.max()), 8))
    if min(W.value.shape) > _JACOBIAN_SIDE:
        return found
    return np.minimum(found, [weighted_eigenvalue(W, d) if d.any() else 0.0 for d in weights])


def _last_step(facts: Facts, view: Seen | None, known: list[float], L: float, jacobian: float, label: int) -> Array:
    part, piece, k = facts.parts[-1], facts.blocks.last, len(facts.parts) - 1
    K, (rows, outer, skip) = stacked_size(known, 2), read_outs(facts.blocks, label)
    straight = np.zeros(facts.blocks.classes) if skip is None else row_lengths(skip, 2)
    if view is None or piece.W is None or piece.act is None:
        assert skip is not None
        by_parts = [row_lengths(A, 2) * one for A, one in zip(piece.split(skip), known, strict=True)]
        return up(np.minimum(straight * K, np.sum(by_parts, axis=0)), 8 + 2 * len(known))
    size = facts.parts[k].W
    omega = _bilinear(facts, k, up(view.c * outer.size))
    whole = functional_steps(piece, part, outer, skip, 2.0)
    read = product(rows, part.linear)
    whole = np.minimum(whole, row_lengths(read, 2) + part.radius * row_lengths(outer, 2) * size)
    there = straight + _rows_behind(facts, outer, view.at)
    if piece.H is not None:
        mu = 0.5 * sum(piece.act.slope)
        about = up(np.maximum(np.maximum(view.at[1] - mu, mu - view.at[0]), 0.0))
        there = np.minimum(there, row_lengths(read, 2) + row_lengths(outer, 2) * weighted_norm(facts, k, about))
    first = whole * K + jacobian * omega * L
    second = there * K + facts.growth.before(k) * omega * L
    return up(np.minimum(first, second), 16)
