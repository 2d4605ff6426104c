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

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.anchored import growth, slopes_at, weighted_norm
from curvcert.checker.chain import Piece
from curvcert.checker.evaluation import Backed, Passed
from curvcert.checker.facts import Facts
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    frobenius,
    gamma,
    lengths,
    plus,
    raised,
    spectral_norm,
    times,
    up,
)

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
    """Collect what is known at x; None for an affine piece."""
    pieces = facts.chain.pieces
    widest = max([piece.outputs for piece in pieces] + [len(p.W.value) for p in pieces if p.W is not None])
    formed = widest * pieces[0].inputs <= _JACOBIAN_ENTRIES
    X, off = np.eye(pieces[0].inputs) if formed else np.zeros((0, 0)), 0.0
    found: list[Centre | None] = []
    for k, (piece, z) in enumerate(zip(pieces, facts.neurons(passed), strict=True)):
        size, width = facts.sizes[k], frobenius(X)
        result, lost = np.zeros((piece.outputs, X.shape[1])), 0.0
        if z is None or piece.W is None or piece.act is None:
            found.append(None)
        else:
            low, high = slopes_at(piece, z)
            sloped = weighted_norm(facts, k, np.maximum(np.abs(low), np.abs(high)))
            u, drift = backed.gradients[piece.a], backed.drift[piece.a]
            whole = min(growth(facts, k, low, high), _jacobian_norm(piece, low, high))
            here = Centre(z.value, z.error, low, high, up(np.abs(u) + drift[:, None]), sloped, whole)
            if formed:
                pushed = piece.W.value @ X
                J_off = raised(size.W * off + (gamma(piece.W.terms + 2) * piece.W.absolute + piece.W.off) * width, 8)
                J = spectral_norm(Enclosed(pushed)) + J_off
                J, rows = min(J, size.W) if k == 0 else J, up(lengths(pushed, 2, 1) + J_off)
                here = replace(here, J=J, rows=rows, pushed=pushed, off=J_off)
                slopes = 0.5 * (low + high)
                inner = slopes[:, None] * pushed
                gap = float(up(0.5 * (high - low) + U).max())
                lost = piece.act.steepest * J_off + gap * frobenius(pushed) + U * frobenius(inner)
                result = inner
                if piece.G is not None:
                    result = piece.G.value @ inner
                    rounding = gamma(piece.G.terms + 2) * piece.G.absolute + piece.G.off
                    lost = size.G * lost + rounding * frobenius(inner)
            found.append(here)
        if formed and piece.H is not None:
            result = result + piece.H.value @ X
            lost += size.H * off + (gamma(piece.H.terms + 2) * piece.H.absolute + piece.H.off) * width
            lost += U * frobenius(result)
        if formed:
            X, off = result, raised(lost, 16)
            last = found[-1]
            if last is not None:
                output = raised(spectral_norm(Enclosed(X)) + off) if k + 1 < len(pieces) else np.inf
                found[-1] = replace(last, output=output)
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
    over, count = _over_ball(facts, at, t, exact), len(index)
    eta, total = [np.zeros(count), np.zeros(count)], [np.zeros(count), np.zeros(count)]
    for k in range(len(at) - 1, -1, -1):
        part, centre, W = over[k], at[k], facts.sizes[k].W
        if centre is None or part.c is None or part.changes is None:
            eta = [up(part.growth * value) for value in eta]
            continue
        u = centre.u[index]
        h = up(u * part.c)
        peak = h.max(axis=1)
        lifted = np.array([centre.weighted(row, exact) for row in h]) * t + peak * part.R
        shared = np.minimum(peak * part.zeta, lifted)
        squares = np.array([centre.weighted(up(np.sqrt(row)), exact) ** 2 for row in h])
        core = squares * t + centre.J * peak * part.R
        for kind in (0, 1):
            v = up(np.minimum(lengths(part.changes[kind] * u, 2, 1), shared), 8)
            eta[kind] = up(part.growth * eta[kind] + W * v, 8)
            total[kind] = up(total[kind] + np.minimum(core, centre.J * v) + part.E[kind] * v, 16)
    return np.minimum(eta[0], total[0]), np.minimum(eta[1], total[1])


def _over_ball(facts: Facts, at: list[Centre | None], t: float, exact: bool) -> list[_Over]:
    """Carry the ball of radius t forward."""
    rho, R, r = t, 0.0, np.zeros(facts.chain.pieces[0].inputs)
    E = [0.0, 0.0]
    found = []
    for k, (piece, centre) in enumerate(zip(facts.chain.pieces, at, strict=True)):
        size, last = facts.sizes[k], k == len(at) - 1
        reach = float(np.inf) if last else facts.prefixes[k + 1]
        if centre is None or piece.W is None or piece.act is None:
            assert piece.H is not None
            rho, R = raised(min(size.H * rho, reach * t)), raised(size.H * R)
            r, E = up(piece.H.size @ r, len(r) + 4) + TINY, [raised(size.H * value) for value in E]
            found.append(_Over(size.H))
            continue
        rows = facts.rows[k]
        zeta, d = size.W * rho, rows * rho
        rz = np.minimum(rows * R, up(piece.W.size @ r, len(r) + 4)) + TINY
        Rz = min(size.W * R, float(lengths(rz, 2, 0)))
        if centre.rows is not None:
            zeta = min(zeta, centre.J * t + Rz)
            d = np.minimum(d, centre.rows * t + rz)
        zeta = raised(zeta, 8)
        d = up(np.minimum(d, zeta), 8)
        width = up(d + centre.error)
        low, high = piece.act.first.over(centre.z - width, centre.z + width)
        bottom, top = piece.act.second.over(centre.z - width, centre.z + width)
        s, c = np.maximum(np.abs(low), np.abs(high)), np.maximum(np.abs(bottom), np.abs(top))
        linear = up(c * d)
        saturated = np.minimum(up(np.maximum(high - centre.low, centre.high - low)), linear)
        Lambda = 0.0 if last else _growth_over(facts, k, centre, low, high, exact)
        found.append(_Over(Lambda, c, (saturated, linear), zeta, Rz, (raised(size.W * E[0]), raised(size.W * E[1]))))
        if last:
            break
        inner = min(float(lengths(s * d, 2, 0)), float(s.max()) * zeta)
        rho = min(Lambda * rho, size.H * rho + size.G * inner, reach * t)
        if centre.rows is not None:
            S = np.maximum(np.abs(centre.low), np.abs(centre.high))
            e = up(0.5 * linear * d)
            nu = min(float(lengths(e, 2, 0)), 0.5 * float(linear.max()) * zeta)
            bent = up(S * rz)
            passed = min(float(lengths(bent, 2, 0)), float(S.max()) * Rz) + nu
            R_next = min(centre.whole * R + size.G * nu, size.H * R + size.G * passed)
            r_next = bent + e if piece.G is None else up(piece.G.size @ (bent + e), len(e) + 8)
            if piece.H is not None:
                r_next = r_next + up(piece.H.size @ r, len(r) + 8)
            r = up(r_next, 8) + TINY
            R = raised(min(R_next, float(lengths(r, 2, 0))), 16)
            E = [
                raised(Lambda * E[kind] + size.G * centre.weighted(change, exact), 8)
                for kind, change in enumerate((saturated, linear))
            ]
            output = min(centre.output, size.G * float(S.max()) * centre.J if piece.H is None else np.inf)
            rho = min(rho, output * t + R)
        rho = raised(rho, 8)
    return found


def _growth_over(facts: Facts, k: int, centre: Centre, low: Array, high: Array, exact: bool) -> float:
    """Bound ||H + G D W|| for all slopes over the ball: from that at x, and by the least of the others."""
    size, part = facts.sizes[k], facts.parts[k]
    s = np.maximum(np.abs(low), np.abs(high))
    flat = np.where(centre.low * centre.high > 0, np.minimum(np.abs(centre.low), np.abs(centre.high)), 0.0)
    weighted = min(centre.sloped + max(0.0, float((s - flat).max())) * size.W, float(s.max()) * size.W)
    change = up(np.maximum(np.maximum(high - centre.low, centre.high - low), 0.0))
    moved = float(change.max()) * size.W
    found = min(size.H + size.G * weighted, part.transformed)
    if exact:
        moved = min(moved, weighted_norm(facts, k, change))
        found = min(found, growth(facts, k, low, high))
    return raised(min(found, centre.whole + size.G * moved), 8)
