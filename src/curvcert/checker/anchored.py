r"""Curvature constants with one point fixed, derived afresh: one input, all classes beside its label, in l2.

With the quotients :math:`c_l` of phi' as seen from the neurons' values at x, two recursions hold step by step:

.. math::
    K_{k+1}(x) &\le L_{h_k} K_k(x) + \|Dx_k(x)\| \, \omega_k(x) L_k(x), \\
    K_{k+1}(x) &\le \|Dh_k(x_k)\| K_k(x) + L_k \, \omega_k(x) L_k(x),

:math:`L_{h_k}` and :math:`L_k` global and :math:`L_k(x)` anchored: write
:math:`Dh(x_k') Dx_k' - Dh(x_k) Dx_k` as :math:`Dh(x_k') (Dx_k' - Dx_k) + (Dh(x_k') - Dh(x_k)) Dx_k`, or the other way
round.  Unrolled with the gradient u at x,
:math:`K(x) \le \sum_k L_k L_k(x) \lambda_{max}(W^T \mathrm{diag}(c \circ |u|) W)`.
"""

from dataclasses import dataclass

import numpy as np

from curvcert.checker.chain import Piece, read_outs
from curvcert.checker.curvature import EIGENVALUE_SIDE
from curvcert.checker.evaluation import Backed, Passed, Vector
from curvcert.checker.facts import Facts
from curvcert.checker.lipschitz import Linear, functional_steps
from curvcert.checker.outward import (
    Array,
    Enclosed,
    U,
    frobenius,
    gamma,
    gram,
    lengths,
    product,
    raised,
    row_lengths,
    spectral_norm,
    up,
    weighted_eigenvalue,
)
from curvcert.checker.quotients import curvature_quotients, steepest_quotients

_JACOBIAN_SIDE = 256


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


def slopes_at(piece: Piece, z: Vector) -> tuple[Array, Array]:
    """Enclose the slopes of a piece's neurons at one input."""
    assert piece.act is not None
    return piece.act.first.over(z.value - z.error * (1 + 4 * U), z.value + z.error * (1 + 4 * U))


def views_of(facts: Facts, passed: Passed) -> list[Seen | None]:
    """Return every piece as seen from one input; None for an affine one."""
    pairs = zip(facts.chain.pieces, facts.neurons(passed), strict=True)
    return [None if z is None else seen(piece, z) for piece, z in pairs]


def anchored_curvatures(facts: Facts, passed: Passed, backed: Backed, views: list[Seen | None], label: int) -> Array:
    """Return curvature constants of f_i - f_label anchored at one input, for all i; 0 for the label."""
    model = facts.chain
    L = _anchored_prefixes(facts, views)
    jacobians = _jacobian_norms(facts, passed, views)
    K, total = 0.0, np.zeros(model.classes)
    last = len(model.pieces) - 1
    for k, (piece, view) in enumerate(zip(model.pieces, views, strict=True)):
        if view is not None and piece.W is not None:
            u = backed.gradients[piece.a]
            sizes = up(np.abs(u) + backed.drift[piece.a][:, None])
            weights = up(view.c * sizes)
            total = total + _bilinear(facts, k, weights) * facts.prefixes[k] * L[k]
        if k < last:
            K = _step(facts, k, view, K, L[k], min(L[k], jacobians[k]))
    found = _last_step(facts, views[last], K, L[last], min(L[last], jacobians[last]), label)
    found = np.minimum(found, up(total, 8 * last + 16))
    found[label] = 0.0
    return found


def weighted_norm(facts: Facts, k: int, weights: Array) -> float:
    """Bound ||diag(s) W|| of a piece."""
    W = facts.chain.pieces[k].W
    assert W is not None
    coarse = raised(float(weights.max()) * facts.sizes[k].W)
    size = up(weights[:, None] * W.size, 4)
    rows, columns = float(size.sum(axis=1).max()), float(size.sum(axis=0).max())
    coarse = min(coarse, raised(float(np.sqrt(rows * columns)), sum(size.shape)))
    if min(W.value.shape) > EIGENVALUE_SIDE:
        return coarse
    value = weights[:, None] * W.value
    error = U * np.abs(value) if W.error is None else U * np.abs(value) + weights[:, None] * W.error
    return min(coarse, spectral_norm(Enclosed(value, up(error))))


def growth(facts: Facts, k: int, low: Array, high: Array) -> float:
    """Bound ||H + G D W|| for every diagonal D between low and high."""
    piece, size, part = facts.chain.pieces[k], facts.sizes[k], facts.parts[k]
    found = size.H + size.G * weighted_norm(facts, k, np.maximum(np.abs(low), np.abs(high)))
    if piece.H is not None and piece.act is not None:
        mu = 0.5 * sum(piece.act.slope)
        about = up(np.maximum(np.maximum(high - mu, mu - low), 0.0))
        assert part.linear is not None
        found = min(found, spectral_norm(part.linear) + size.G * weighted_norm(facts, k, about))
    return raised(found, 8)


def _anchored_prefixes(facts: Facts, views: list[Seen | None]) -> list[float]:
    found = [1.0]
    for k, view in enumerate(views[:-1]):
        grown = facts.parts[k].product if view is None else growth(facts, k, view.low, view.high)
        found.append(min(raised(found[-1] * grown), facts.prefixes[k + 1]))
    return found


def _jacobian_norms(facts: Facts, passed: Passed, views: list[Seen | None]) -> list[float]:
    """Bound the norms of the Jacobians of x -> x_k at x, for the input of every piece; inf where they are wide."""
    pieces = facts.chain.pieces
    found, X, off = [1.0], np.eye(pieces[0].inputs), 0.0
    for k, (piece, view, z) in enumerate(zip(pieces[:-1], views, facts.neurons(passed), strict=False)):
        result, lost = np.zeros((piece.outputs, X.shape[1])), 0.0
        constant = facts.parts[k].product
        width = frobenius(X)
        if view is not None and piece.W is not None and piece.act is not None and z is not None:
            slopes = piece.act.first.function(z.value)
            gap = up(np.maximum(np.maximum(view.at[1] - slopes, slopes - view.at[0]), 0.0))
            pushed = piece.W.value @ X
            inner = slopes[:, None] * pushed
            result = inner if piece.G is None else piece.G.value @ inner
            rounding = gamma(len(X) + 4) * frobenius(piece.W.value) + piece.W.off
            lost = frobenius(gap[:, None] * pushed) + piece.act.steepest * rounding * width + U * frobenius(inner)
            lost = facts.sizes[k].G * lost
            if piece.G is not None:
                lost += (gamma(len(inner) + 4) * frobenius(piece.G.value) + piece.G.off) * frobenius(inner)
            constant = min(constant, growth(facts, k, *view.at)) if off > 0 else constant
        if piece.H is not None:
            result = result + piece.H.value @ X
            lost += (gamma(len(X) + 4) * frobenius(piece.H.value) + piece.H.off) * width + U * frobenius(result)
        X, off = result, raised(constant * off + lost, 16)
        narrow = min(X.shape) <= _JACOBIAN_SIDE
        found.append(raised(spectral_norm(Enclosed(X)) + off) if narrow else float(np.inf))
    return found


def _step(facts: Facts, k: int, view: Seen | None, K: float, L: float, jacobian: float) -> float:
    part: Linear = facts.parts[k]
    if view is None:
        return raised(part.product * K)
    omega = _omega(facts, k, view.c)
    first = part.transformed * K + jacobian * omega * L
    second = (growth(facts, k, *view.at) * K if K > 0 else 0.0) + facts.prefixes[k] * omega * L
    return raised(min(first, second), 16)


def _omega(facts: Facts, k: int, c: Array) -> float:
    """Bound the anchored curvature of one piece: least of the product, the row-weighted and the Hadamard form."""
    W = facts.chain.pieces[k].W
    assert W is not None
    weights = up(c * row_lengths(W, 2))
    inner = min(facts.sizes[k].W * float(weights.max()), weighted_norm(facts, k, weights))
    inner = min(inner, raised(float(c.max()) * facts.hadamards[k]), _weighted_hadamard(W, c))
    return raised(facts.sizes[k].G * inner)


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
    W = facts.chain.pieces[k].W
    assert W is not None
    rows = row_lengths(W, 2)
    found = up((weights * rows * rows).sum(axis=1), weights.shape[1] + 8)
    found = np.minimum(found, up(weights.max(axis=1) * facts.sizes[k].W ** 2, 8))
    found = np.minimum(found, up(lengths(weights, 2, 1) * facts.hadamards[k], 8))
    found = np.minimum(found, up(lengths(weights, 2, 1) * facts.sizes[k].W * float(rows.max()), 8))
    if min(W.value.shape) > _JACOBIAN_SIDE:
        return found
    return np.minimum(found, [weighted_eigenvalue(W, d) if d.any() else 0.0 for d in weights])


def _last_step(facts: Facts, view: Seen | None, K: float, L: float, jacobian: float, label: int) -> Array:
    model, part = facts.chain, facts.parts[-1]
    piece, k = model.pieces[-1], len(model.pieces) - 1
    rows, outer, skip = read_outs(model, label)
    straight = np.zeros(model.classes) if skip is None else row_lengths(skip, 2)
    if view is None or piece.W is None or piece.act is None:
        return up(straight * K)
    size = facts.sizes[k].W
    omega = _bilinear(facts, k, up(view.c * outer.size))
    whole = functional_steps(piece, part, outer, skip, 2.0)
    assert part.linear is not None
    read = product(Enclosed(rows), part.linear)
    whole = np.minimum(whole, row_lengths(read, 2) + part.radius * row_lengths(outer, 2) * size)
    steep = np.maximum(np.abs(view.at[0]), np.abs(view.at[1]))
    there = straight + row_lengths(outer, 2) * weighted_norm(facts, k, steep)
    there = np.minimum(there, straight + up(lengths(steep * outer.size, 2, 1)) * size)
    if piece.H is not None:
        mu = 0.5 * sum(piece.act.slope)
        about = up(np.maximum(np.maximum(view.at[1] - mu, mu - view.at[0]), 0.0))
        there = np.minimum(there, row_lengths(read, 2) + row_lengths(outer, 2) * weighted_norm(facts, k, about))
    first = whole * K + jacobian * omega * L
    second = there * K + facts.prefixes[k] * omega * L
    return up(np.minimum(first, second), 16)
