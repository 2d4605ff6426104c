r"""How much of a margin a ball can use up, derived afresh: bounds over balls, integrated over thin shells, in l2.

For :math:`\|x' - x\| \le t`, piece by piece: :math:`\rho` bounds the distance of :math:`x_k`, d that of each neuron,
R and r the remainder of :math:`x_k` beside its linear part at x (as a whole, and entry by entry), E the change of its
Jacobian.  Over the interval that d allows, phi' and phi'' have ranges, so that the slopes change by at most
:math:`\Delta`: by :math:`c \circ d`, which is at least linear in t, or by the width of the range.  Backwards, with
:math:`u = |G^T g|` at x, the gradient of a pair changes by at most

.. math::
    \eta_{k-1} = \Lambda_k \eta_k + \|W_k\| v_k \quad\text{and}\quad
    \sum_k \min(\|J_k^T \mathrm{diag}(u \circ c) J_k\| t + \|J_k\| \max(u \circ c) R, \|J_k\| v_k) + E_k v_k,

:math:`v_k` bounding :math:`\|\Delta \circ u\|`.  Between two radii the gradient's norm is at most
:math:`\min(g + D_{sat}, g + D_{lin} \tau / t, g + K\tau, L)`, and what the margin loses is the integral.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.anchored import block_growth, weighted_norm
from curvcert.checker.evaluation import Backed, Passed
from curvcert.checker.facts import Facts
from curvcert.checker.growth import stacked_size
from curvcert.checker.jacobians import jacobians_at, slopes_at
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    lengths,
    plus,
    raised,
    spectral_norm,
    times,
    up,
)
from curvcert.checker.pieces import Piece

_JACOBIAN_ENTRIES = 2**22


@dataclass(frozen=True, eq=False)
class Centre:
    """One piece at x; the Jacobian's norms are infinite where it is not formed."""

    z: Array
    error: Array
    low: Array
    high: Array
    u: Array
    sloped: float
    whole: float
    J: float = np.inf
    rows: Array | None = None
    pushed: Array | None = None
    off: float = 0.0
    output: float = np.inf

    def weighted(self, weights: Array, exact: bool) -> float:
        """Bound ||diag(w) J||: by the largest weight, by the rows, or by the matrix itself."""
        if self.rows is None or self.pushed is None:
            return float(np.inf)
        peak = float(weights.max())
        found = min(peak * self.J, float(lengths(weights * self.rows, 2, 0)))
        if exact and peak > 0:
            value = weights[:, None] * self.pushed
            found = min(found, spectral_norm(Enclosed(value, U * np.abs(value))) + peak * self.off)
        return raised(found)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The classes in question: their numbers, gradient norms, curvature and Lipschitz constants."""

    index: NDArray[np.intp]
    g: Array
    K: Array
    L: Array


@dataclass(frozen=True, eq=False)
class _Over:
    """One piece over a ball."""

    growth: float
    c: Array | None = None
    changes: tuple[Array, Array] | None = None
    zeta: float = 0.0
    R: float = 0.0
    E: tuple[float, float] = (0.0, 0.0)


def centres(facts: Facts, passed: Passed, backed: Backed) -> list[Centre | None]:
    """Collect what is known at x; None for an affine block."""
    pieces = facts.blocks.pieces
    widest = max([max(piece.outputs, piece.inputs) for piece in pieces] + [part.hidden for part in facts.parts])
    formed = widest * facts.model.nodes[0].size <= _JACOBIAN_ENTRIES
    jacobians = jacobians_at(facts, passed) if formed else None
    found: list[Centre | None] = []
    for k, (piece, z) in enumerate(zip(pieces, facts.neurons(passed), strict=True)):
        if z is None or piece.W is None or piece.act is None:
            found.append(None)
            continue
        low, high = slopes_at(piece, z)
        sloped = weighted_norm(facts, k, np.maximum(np.abs(low), np.abs(high)))
        u, drift = backed.gradients[piece.a], backed.drift[piece.a]
        whole = min(block_growth(facts, k, low, high), _jacobian_norm(piece, low, high))
        here = Centre(z.value, z.error, low, high, up(np.abs(u) + drift[:, None]), sloped, whole)
        at_z = None if jacobians is None else jacobians.z[k]
        if jacobians is not None and at_z is not None:
            J = min(at_z.norm, facts.parts[k].W) if piece.sources == (0,) else at_z.norm
            rows, output = (
                up(lengths(at_z.X, 2, 1) + at_z.off),
                np.inf if piece is facts.blocks.last else jacobians.given[k].norm,
            )
            here = replace(here, J=J, rows=rows, pushed=at_z.X, off=at_z.off, output=output)
        found.append(here)
    return found


def _jacobian_norm(piece: Piece, low: Array, high: Array) -> float:
    """Bound ||H + G D W|| of a piece with a skip by the matrix itself, D between low and high."""
    if piece.H is None or piece.W is None:
        return float(np.inf)
    slopes = 0.5 * (low + high)
    value = slopes[:, None] * piece.W.value
    gap = up(0.5 * (high - low) + 4 * U * np.abs(slopes))
    error = gap[:, None] * piece.W.size
    if piece.W.error is not None:
        error = error + np.abs(slopes)[:, None] * piece.W.error
    through = times(piece.G, Enclosed(value, up(error + U * np.abs(value))))
    assert through is not None
    return spectral_norm(plus(piece.H, through))


def spent(facts: Facts, at: list[Centre | None], r: Array, pairs: Pairs, shells: int, exact: bool) -> Array:
    """Bound what the margin of every pair loses over the ball of its own radius r > 0.

    `exact` takes norms of weighted matrices by eigenvalues, in every shell: tighter, and slower.
    """
    end = float(r.max())
    total, low = np.zeros_like(r), 0.0
    for j in range(1, shells + 1):
        high = end * j / shells
        saturated, linear = gradient_change(facts, at, high, pairs.index, exact)
        slope = np.minimum(up(linear / high), pairs.K)
        top = up(np.minimum(np.minimum(pairs.g + saturated, pairs.g + slope * high), pairs.L))
        top = np.maximum(top, pairs.g)
        start, stop = np.minimum(low, r), np.minimum(high, r)
        # Any bend between the two ends is allowed: each part of the path is bounded by one of the two.
        bend = np.where(slope > 0, (top - pairs.g) / np.where(slope > 0, slope, 1.0), stop)
        bend = np.minimum(np.maximum(bend, start), stop)
        rise = (pairs.g + 0.5 * slope * (bend + start)) * (bend - start) + 8 * U * (pairs.g + slope * stop) * stop
        total = up(total + rise + top * (stop - bend) + 8 * U * top * stop, 16)
        low = high
    return total


def gradient_change(
    facts: Facts, at: list[Centre | None], t: float, index: NDArray[np.intp], exact: bool
) -> tuple[Array, Array]:
    """Bound the change of every pair's gradient over the ball: as a constant, and one at least linear in t.

    The latter, divided by t, bounds the change by distance of all points within t.
    """
    over, zero = _over_ball(facts, at, t, exact), np.zeros(len(index))
    etas, total = {facts.blocks.last.output: (zero, zero)}, [zero, zero]
    for k in range(len(at) - 1, -1, -1):
        piece, size, part, centre = facts.blocks.pieces[k], facts.parts[k], over[k], at[k]
        eta = etas.pop(piece.output)
        # A part of a gradient is no longer than the whole.
        sent = [_each(part.growth * one for one in eta)] * len(piece.sources)
        if centre is None or part.c is None or part.changes is None:
            if len(piece.sources) > 1:
                sent = [_each(norm * one for one in eta) for norm in size.H_parts]
        else:
            u = centre.u[index]
            h = up(u * part.c)
            peak = h.max(axis=1)
            lifted = np.array([centre.weighted(row, exact) for row in h]) * t + peak * part.R
            shared = np.minimum(peak * part.zeta, lifted)
            squares = np.array([centre.weighted(up(np.sqrt(row)), exact) ** 2 for row in h])
            core = squares * t + centre.J * peak * part.R
            v = [up(np.minimum(lengths(change * u, 2, 1), shared), 8) for change in part.changes]
            terms = zip(total, v, part.E, strict=True)
            total = [up(one + np.minimum(core, centre.J * w) + E * w, 16) for one, w, E in terms]
            sent = [_each(part.growth * one + size.W * w for one, w in zip(eta, v, strict=True))] * len(piece.sources)
        for source, each in zip(piece.sources, sent, strict=True):
            known = etas.get(source)
            etas[source] = each if known is None else _each(one + more for one, more in zip(known, each, strict=True))
    return np.minimum(etas[0][0], total[0]), np.minimum(etas[0][1], total[1])


def _each(both: Iterable[Array]) -> tuple[Array, Array]:
    saturated, linear = (up(one, 8) for one in both)
    return saturated, linear


@dataclass(frozen=True, eq=False)
class _Front:
    """What is carried of a value: how far it moves, its remainder as a whole and by entries, its Jacobian's change."""

    rho: float
    R: float
    r: Array
    E: tuple[float, float]


def _stacked(fronts: list[_Front]) -> _Front:
    if len(fronts) == 1:
        return fronts[0]
    rho, R, E0, E1 = (
        stacked_size(sizes, 2) for sizes in zip(*((one.rho, one.R, *one.E) for one in fronts), strict=True)
    )
    return _Front(rho, R, np.concatenate([one.r for one in fronts]), (E0, E1))


def _over_ball(facts: Facts, at: list[Centre | None], t: float, exact: bool) -> list[_Over]:
    """Carry the ball of radius t forward."""
    fronts = {0: _Front(t, 0.0, np.zeros(facts.model.nodes[0].size), (0.0, 0.0))}
    found = []
    for k, (piece, centre) in enumerate(zip(facts.blocks.pieces, at, strict=True)):
        read = [fronts[source] for source in piece.sources]
        if centre is None:
            over, front = _affine_step(facts, k, read, t)
        else:
            over, front = _step(facts, k, centre, read, t, exact)
        found.append(over)
        fronts[piece.output] = front
    return found


def _affine_step(facts: Facts, k: int, read: list[_Front], t: float) -> tuple[_Over, _Front]:
    piece, part, whole = facts.blocks.pieces[k], facts.parts[k], _stacked(read)
    assert piece.H is not None

    def moved(stacked: float, parts: Iterable[float]) -> float:
        by_parts = sum(norm * one for norm, one in zip(part.H_parts, parts, strict=True))
        return raised(min(part.H * stacked, by_parts), 8 + 2 * len(read))

    reach = np.inf if piece is facts.blocks.last else facts.growth.values[piece.output]
    r = up(piece.H.size @ whole.r, len(whole.r) + 4) + TINY
    R = min(moved(whole.R, (one.R for one in read)), float(lengths(r, 2, 0)))
    E = moved(whole.E[0], (one.E[0] for one in read)), moved(whole.E[1], (one.E[1] for one in read))
    rho = min(moved(whole.rho, (one.rho for one in read)), raised(reach * t))
    return _Over(part.H), _Front(rho, R, r, E)


def _step(facts: Facts, k: int, centre: Centre, read: list[_Front], t: float, exact: bool) -> tuple[_Over, _Front]:
    piece, size, whole = facts.blocks.pieces[k], facts.parts[k], _stacked(read)
    assert piece.W is not None
    assert piece.act is not None
    rows, by_parts = facts.rows[k], facts.rows_of_parts[k]

    def moved(stacked: float, parts: list[float]) -> tuple[float, Array]:
        both = zip(size.W_parts, by_parts, parts, strict=True)
        terms = [(norm * one, each * one) for norm, each, one in both]
        zeta = min(size.W * stacked, sum(term for term, _ in terms))
        return zeta, np.minimum(rows * stacked, sum((term for _, term in terms), np.zeros(len(rows))))

    roundings = 8 + 2 * len(read)
    zeta, d = moved(whole.rho, [one.rho for one in read])
    Rz, rz = moved(whole.R, [one.R for one in read])
    rz = up(np.minimum(rz, up(piece.W.size @ whole.r, len(whole.r) + 4)), roundings) + TINY
    Rz = raised(min(Rz, float(lengths(rz, 2, 0))), roundings)
    if centre.rows is not None:
        zeta = min(zeta, centre.J * t + Rz)
        d = np.minimum(d, centre.rows * t + rz)
    zeta = raised(zeta, roundings)
    d = up(np.minimum(d, zeta), roundings)
    width = up(d + centre.error)
    low, high = piece.act.first.over(centre.z - width, centre.z + width)
    bottom, top = piece.act.second.over(centre.z - width, centre.z + width)
    s, c = np.maximum(np.abs(low), np.abs(high)), np.maximum(np.abs(bottom), np.abs(top))
    linear = up(c * d)
    changes = np.minimum(up(np.maximum(high - centre.low, centre.high - low)), linear), linear
    last = piece is facts.blocks.last
    Lambda = 0.0 if last else _growth_over(facts, k, centre, low, high, exact)
    over = _Over(Lambda, c, changes, zeta, Rz, (raised(size.W * whole.E[0]), raised(size.W * whole.E[1])))
    if last:
        return over, whole
    inner = min(float(lengths(s * d, 2, 0)), float(s.max()) * zeta)
    rho = min(Lambda * whole.rho, size.H * whole.rho + size.G * inner, facts.growth.values[piece.output] * t)
    front = replace(whole, rho=raised(rho, 8))
    return over, front if centre.rows is None else _carried(facts, k, centre, over, front, d, rz, t, exact)


def _carried(
    facts: Facts, k: int, centre: Centre, over: _Over, front: _Front, d: Array, rz: Array, t: float, exact: bool
) -> _Front:
    """Carry the remainder and the change of the Jacobian through a block, behind rho."""
    piece, size = facts.blocks.pieces[k], facts.parts[k]
    assert over.changes is not None
    linear = over.changes[1]
    S = np.maximum(np.abs(centre.low), np.abs(centre.high))
    e = up(0.5 * linear * d)
    nu = min(float(lengths(e, 2, 0)), 0.5 * float(linear.max()) * over.zeta)
    bent = up(S * rz)
    passed = min(float(lengths(bent, 2, 0)), float(S.max()) * over.R) + nu
    R = min(centre.whole * front.R + size.G * nu, size.H * front.R + size.G * passed)
    r = bent + e if piece.G is None else up(piece.G.size @ (bent + e), len(e) + 8)
    if piece.H is not None:
        r = r + up(piece.H.size @ front.r, len(front.r) + 8)
    r = up(r, 8) + TINY
    R = raised(min(R, float(lengths(r, 2, 0))), 16)
    E0, E1 = (
        raised(over.growth * before + size.G * centre.weighted(change, exact), 8)
        for before, change in zip(front.E, over.changes, strict=True)
    )
    output = min(centre.output, size.G * float(S.max()) * centre.J if piece.H is None else np.inf)
    return _Front(raised(min(front.rho, output * t + R), 8), R, r, (E0, E1))


def _growth_over(facts: Facts, k: int, centre: Centre, low: Array, high: Array, exact: bool) -> float:
    """Bound ||H + G D W|| for all slopes over the ball: from that at x, and by the least of the others."""
    size = facts.parts[k]
    s = np.maximum(np.abs(low), np.abs(high))
    flat = np.where(centre.low * centre.high > 0, np.minimum(np.abs(centre.low), np.abs(centre.high)), 0.0)
    weighted = min(centre.sloped + max(0.0, float((s - flat).max())) * size.W, float(s.max()) * size.W)
    change = up(np.maximum(np.maximum(high - centre.low, centre.high - low), 0.0))
    moved = float(change.max()) * size.W
    found = min(size.H + size.G * weighted, size.transformed)
    if exact:
        moved = min(moved, weighted_norm(facts, k, change))
        found = min(found, block_growth(facts, k, low, high))
    return raised(min(found, centre.whole + size.G * moved), 8)
