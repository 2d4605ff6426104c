r"""How far differences of outputs rise over a ball or its cut with a box, by lines in place of the activations.

For *any* covectors u, one on every value, and any slopes s, with w = s o u on what an activation is applied to,

.. math:: F(x + d) - F(x) = u_0 \cdot d + \sum_l [u_l (\phi(z'_l) - \phi(z_l)) - w_l (z'_l - z_l)] + \sum_v e_v
          \cdot (v' - v),

e_v what rounding leaves between u_v and what the readers of v send back.  So a rise is bounded by the largest value of
:math:`u_0 \cdot d`, by what every line costs over its neuron's range, and by the rounding.  The same with unit rows
gives the ranges, value by value, each cut with what intervals and norms know.

No slope needs a proof, so none is read from the file: they are those of the lines that rest on the activation and are
nearest to it in the middle of the range.  What a line costs is the largest value of :math:`R(z) = \phi(z) - s z`:
between two points where the derivative turns, or the function bends, R is convex or concave, whichever, so that no
value in [a, b] is above the larger of R(a), R(b) and, for any z in it,
:math:`R(z) + \max\{R'(z) (b - z), R'(z) (a - z)\}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.activations import Activation, Graph
from curvcert.checker.evaluation import Passed
from curvcert.checker.lipschitz import DUAL
from curvcert.checker.model import Activated, Affine, Input, Model
from curvcert.checker.outward import (
    TINY,
    Array,
    U,
    gamma,
    lengths,
    operator_norm,
    row_lengths,
    up,
)
from curvcert.errors import UnsupportedModule

_HALF = 16
"""Nodes on either side of the middle of a range that a line may rest on."""

_HALVINGS, _ROUNDS = 60, 12
_GOLDEN = (np.sqrt(5.0) - 1) / 2
_MOST_WORK = 2**36
"""Multiplications that one ball may take."""


@dataclass(frozen=True, eq=False)
class Ball:
    """The displacements of length r at most in the p-norm, no coordinate further than its room on either side."""

    p: float
    r: float
    below: Array
    above: Array

    @staticmethod
    def about(x: Array, p: float, r: float, sides: tuple[Array, Array] | None) -> "Ball":
        """Return the ball about x, cut with a box that holds x if one is given."""
        if sides is None:
            room = np.full(x.size, r)
            return Ball(p, r, room, room)
        below, above = (up(side, 1).reshape(-1) for side in (x - sides[0], sides[1] - x))
        return Ball(p, r, np.minimum(below, r), np.minimum(above, r))

    @property
    def length(self) -> float:
        """A bound on the p-norm."""
        return min(self.r, float(lengths(np.maximum(self.below, self.above)[None], self.p, 1)[0]))

    def largest(self, u: Array) -> Array:
        r"""Bound u.d for every row: for any v between 0 and |u|, it is at most r ||v|| + sum c (|u| - v).

        c is the room to the side that u points to.  In l2 :math:`v = \min(|u|, \lambda c)` and in l1
        :math:`v = \min(|u|, \lambda)` are the best for some :math:`\lambda`, which is searched for.
        """
        a, dual = np.abs(u), DUAL[self.p]
        whole = up(self.r * lengths(u, dual, 1), 2)
        c = np.where(u > 0, self.above, self.below)
        if not bool((c < self.r).any()):
            return whole
        best: Array = np.minimum(whole, self._split(np.zeros_like(a), a, c))
        for v in self._candidates(a, c):
            best = np.minimum(best, self._split(v, a, c))
        return best

    def _candidates(self, a: Array, c: Array) -> Iterator[Array]:
        """Yield v to try: in l2 up to where what the box leaves of r is used up, in l1 by golden sections."""
        if self.p == 2:
            factor = lengths(a, 2, 1) / max(self.r, 1e-300)
            for _ in range(_ROUNDS):
                beyond = a >= factor[:, None] * c
                yield np.where(beyond, factor[:, None] * c, a)
                room = self.r**2 - np.where(beyond, c * c, 0.0).sum(axis=1)
                rest = np.where(beyond, 0.0, a * a).sum(axis=1)
                factor = np.where(room > 0, np.sqrt(rest / np.where(room > 0, room, 1.0)), factor)
        elif self.p == 1:
            low, high = np.zeros((len(a), 1)), a.max(axis=1, keepdims=True)
            for _ in range(_HALVINGS):
                inner = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
                v = [np.minimum(a, each) for each in inner]
                yield from v
                left = (self._split(v[0], a, c) < self._split(v[1], a, c))[:, None]
                low, high = np.where(left, low, inner[0]), np.where(left, inner[1], high)

    def _split(self, v: Array, a: Array, c: Array) -> Array:
        return up(self.r * lengths(v, DUAL[self.p], 1) + (c * (a - v)).sum(axis=1), a.shape[1] + 8) + TINY


@dataclass(frozen=True, eq=False)
class _Moved:
    """How far every entry of a value falls and rises, and how long the whole displacement is."""

    fall: Array
    rise: Array
    length: float

    @property
    def farthest(self) -> Array:
        return np.maximum(self.fall, self.rise)


@dataclass(frozen=True, eq=False)
class _Lines:
    """The slopes of an activation's lines, and what a unit covector, or its negative, costs beside them."""

    above: Array
    below: Array
    up: Array
    down: Array


class Relaxation:
    """A network about one input, over one ball."""

    def __init__(self, model: Model, passed: Passed, ball: Ball) -> None:
        _require_modest(model)
        self._model, self._passed, self._ball = model, passed, ball
        self._lines: dict[int, _Lines] = {}
        self._ranges: dict[int, _Moved] = {}
        self._moved: list[_Moved] = []
        for k in range(len(model.nodes)):
            self._moved.append(self._reached(k))

    def rises(self, rows: Array) -> Array:
        """Bound how far linear functions of the outputs, one for each row, rise."""
        last = self._moved[-1]
        plus, minus = np.maximum(rows, 0.0), np.maximum(-rows, 0.0)
        apart = up(plus @ last.rise + minus @ last.fall, 2 * rows.shape[1] + 4)
        together = up(last.length * lengths(rows, DUAL[self._ball.p], 1), 2)
        found: Array = np.minimum(np.minimum(apart, together), self._back(len(self._moved) - 1, rows))
        return np.where(np.isnan(found), np.inf, found)

    def _reached(self, k: int) -> _Moved:
        node, ball = self._model.nodes[k], self._ball
        match node:
            case Input():
                return _Moved(ball.below, ball.above, ball.length)
            case Affine():
                return self._sum(node)
            case Activated():
                z = self._range(node.source)
                low, high = self._ends(node.source, z)
                self._lines[k] = self._drawn(k, node, low, high)
                return self._activated(k, node, z, low, high)

    def _sum(self, node: Affine) -> _Moved:
        p = self._ball.p
        fall = rise = np.zeros(node.size)
        length = 0.0
        for term in node.terms:
            v, A = self._moved[term.source], term.matrix
            if A is None:
                parts = v.fall, v.rise
            else:
                n = A.value.shape[1]
                plus, minus = np.maximum(A.value, 0.0), np.maximum(-A.value, 0.0)
                off = 0.0 if A.error is None else A.error @ v.farthest
                by_norm = up(row_lengths(A, DUAL[p]) * v.length, 2)
                sides = plus @ v.fall + minus @ v.rise, plus @ v.rise + minus @ v.fall
                parts = tuple(np.minimum(up(side + off, 2 * n + 8) + TINY, by_norm) for side in sides)  # type: ignore[assignment]
            fall, rise = fall + parts[0], rise + parts[1]
            length += operator_norm(A, p) * v.length
        count = len(node.terms) + 2
        return _cut(up(fall, count), up(rise, count), float(length * (1 + 4 * count * U)), p)

    def _activated(self, k: int, node: Activated, z: _Moved, low: Array, high: Array) -> _Moved:
        a = self._passed.values[k]
        least, most = remainders(node.act, np.zeros_like(low), np.zeros_like(low), low, high)
        flat, steep = node.act.first.over(low, high) if node.act.smooth else node.act.slope
        rising, falling = np.maximum(steep, 0.0), np.maximum(-np.asarray(flat), 0.0)
        fall = np.minimum(up(np.maximum(rising * z.fall, falling * z.rise)), up(a.value - least + a.error, 4))
        rise = np.minimum(up(np.maximum(rising * z.rise, falling * z.fall)), up(most - a.value + a.error, 4))
        length = float(np.maximum(rising, falling).max()) * z.length * (1 + 8 * U)
        rounding = 4 * U * np.abs(a.value)
        return _cut(np.maximum(fall, 0.0) + rounding, np.maximum(rise, 0.0) + rounding, length, self._ball.p)

    def _range(self, value: int) -> _Moved:
        """Return how far the entries of a value move, by a row for each where that could tell more."""
        if value not in self._ranges:
            self._ranges[value] = self._by_rows(value)
        return self._ranges[value]

    def _by_rows(self, value: int) -> _Moved:
        moved, node = self._moved[value], self._model.nodes[value]
        if value == 0:
            return moved
        eye = np.eye(node.size)
        fall, rise = np.minimum(moved.fall, self._back(value, -eye)), np.minimum(moved.rise, self._back(value, eye))
        return _cut(fall, rise, moved.length, self._ball.p)

    def _ends(self, value: int, moved: _Moved) -> tuple[Array, Array]:
        z = self._passed.values[value]
        slack = z.error + 4 * U * (np.abs(z.value) + z.error + moved.farthest)
        return z.value - moved.fall - slack, z.value + moved.rise + slack

    def _drawn(self, k: int, node: Activated, low: Array, high: Array) -> _Lines:
        """Return lines, and the largest values of a unit covector's bracket, and of its negative's."""
        z, a = self._passed.values[node.source], self._passed.values[k]
        above, below = resting(node.act, low, high)
        least, most = remainders(node.act, below, above, low, high)

        def centre(s: Array) -> tuple[Array, Array]:
            line = s * z.value
            return a.value - line, a.error + np.abs(s) * z.error + 8 * U * (np.abs(a.value) + np.abs(line))

        (at_above, doubt_above), (at_below, doubt_below) = centre(above), centre(below)
        rises = np.maximum(most - at_above + doubt_above + 4 * U * (np.abs(most) + np.abs(at_above)), 0.0)
        falls = np.maximum(at_below - least + doubt_below + 4 * U * (np.abs(least) + np.abs(at_below)), 0.0)
        return _Lines(above, below, up(rises), up(falls))

    def _back(self, value: int, rows: Array) -> Array:
        """Bound how far rows of a value rise: carry them back, and add what it costs on the way."""
        nodes, total = self._model.nodes, np.zeros(len(rows))
        here: dict[int, Array] = {value: rows}
        reads = 1
        for k in range(value, 0, -1):
            u = here.pop(k, None)
            if u is None:
                continue
            node, size = nodes[k], np.abs(u)
            if isinstance(node, Affine):
                for term in node.terms:
                    v, A = self._moved[term.source], term.matrix
                    if A is not None:
                        cost = gamma(A.value.shape[0] + 2) * (np.abs(A.value) @ v.farthest)
                        cost = cost if A.error is None else cost + A.error @ v.farthest
                        total = total + up(size @ up(cost, 2 * A.value.shape[1] + 8), len(cost) + 4)
                    total = total + self._sent(here, term.source, u if A is None else u @ A.value)
            elif isinstance(node, Activated):
                lines, plus, minus = self._lines[k], np.maximum(u, 0.0), np.maximum(-u, 0.0)
                total = total + up(plus @ lines.up + minus @ lines.down, 2 * u.shape[1] + 8)
                w = np.where(u > 0, lines.above, lines.below) * u
                total = total + up(2 * U * (np.abs(w) @ self._range(node.source).farthest), u.shape[1] + 8)
                total = total + self._sent(here, node.source, w)
            total, reads = total + TINY * (1 + size.sum(axis=1)), reads + 4
        first = here.get(0)
        ways = np.zeros(len(rows)) if first is None else self._ball.largest(first)
        return up(ways + total, 4 * reads + 8)

    def _sent(self, here: dict[int, Array], source: int, arriving: Array) -> Array:
        """Add a covector to what else reads a value; return what the rounding of that sum costs."""
        if source not in here:
            here[source] = arriving
            return np.zeros(len(arriving))
        here[source] = here[source] + arriving
        far = self._moved[source].farthest
        return up(2 * U * (np.abs(here[source]) @ far), len(far) + 8)


def resting(act: Activation, low: Array, high: Array) -> tuple[Array, Array]:
    """Return the slopes of the lines that rest on phi from above and from below, nearest in the middle of each range.

    The line from above is an edge of the hull of the graph's nodes, that over the middle; or it touches phi there.
    """
    width = high - low
    wide = (width > 1e-7 * (1 + np.abs(low) + np.abs(high))) & np.isfinite(width)
    low, width = np.where(wide, low, 0.5 * (low + high)), np.where(wide, width, 1.0)
    middle = low + np.where(wide, 0.5 * width, 0.0)
    step = 1e-5 * width
    difference = (act.value.function(middle + step) - act.value.function(middle - step)) / (2 * step)
    tangent = act.first.function(middle) if act.smooth else difference
    share = np.arange(1, _HALF + 1) / (2 * _HALF)
    # Chords from every node on the left of the middle to every one on the right.
    left, right = (act.value.function(low + width * part[:, None]) for part in (0.5 - share, 0.5 + share))
    weight = share[None, :, None] / (share[:, None, None] + share[None, :, None])
    at_middle = weight * left[:, None] + (1 - weight) * right[None]
    slopes = (right[None] - left[:, None]) / ((share[:, None, None] + share[None, :, None]) * width)
    value, found = act.value.function(middle), []
    for sign in (1.0, -1.0):
        best = (sign * at_middle).reshape(-1, len(low)).argmax(axis=0)
        chord = slopes.reshape(-1, len(low))[best, np.arange(len(low))]
        touches = sign * value >= (sign * at_middle).reshape(-1, len(low))[best, np.arange(len(low))]
        slope = np.where(touches | ~wide, tangent, chord)
        found.append(np.clip(np.where(np.isfinite(slope), slope, 0.0), *act.slope))
    return found[0], found[1]


TURNED = 1e-28
"""More than a parabola of slopes below 2 rises in the rounding of its vertex."""


def remainders(act: Activation, below: Array, above: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Bound phi(z) - s z over [low, high]: from below for the slopes of one kind, from above for those of the other."""
    points = act.bends if act.bends is not None else tuple(turn.point for turn in act.first.turns)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return np.full_like(low, -np.inf), np.full_like(low, np.inf)
    ends = [low, *(np.clip(np.full_like(low, t), low, high) for t in points), high]
    found = []
    for sign, s in ((-1.0, below), (1.0, above)):
        turned = [] if act.vertex is None else [np.clip(act.vertex(s), low, high)]
        # Beside a vertex that is rounded, a parabola is off by the square of that: far below TURNED.
        top = np.max([sign * _at(act, s, z) + _doubt(act, s, z) for z in [*ends, *turned]], axis=0) + TURNED
        if act.bends is None:
            # Pieces beyond the range are clipped to its ends, which are looked at already.
            for a, b in pairwise(ends):
                if (a < b).any():
                    top = np.maximum(top, _inside(act, sign, s, a, b))
            top = top + _slivers(act, s, low, high)
        far = np.maximum(np.abs(low), np.abs(high)) > act.first.known
        found.append(sign * np.where(far, np.inf, top))
    return found[0], found[1]


def _inside(act: Activation, sign: float, s: Array, a: Array, b: Array) -> Array:
    """Bound sign R by its tangent at a point of the piece [a, b]: where its derivative changes sign, or at an end."""
    first: Graph = act.first

    def rising(z: Array) -> NDArray[np.bool_]:
        return sign * (first.function(z) - s) > 0

    at_a, at_b = rising(a), rising(b)
    left, right = a, b
    for _ in range(_HALVINGS if (at_a != at_b).any() else 0):
        middle = 0.5 * (left + right)
        same = rising(middle) == at_a
        left, right = np.where(same, middle, left), np.where(same, right, middle)
    z = np.where(at_a & at_b, b, np.where(at_a | at_b, 0.5 * (left + right), a))
    z = np.clip(z, a, b)
    slope = first.function(z)
    doubt = first.error(slope) + 2 * U * (np.abs(slope) + np.abs(s))
    tilt = sign * (slope - s)
    beside = np.maximum((tilt + doubt) * (b - z), (tilt - doubt) * (a - z))
    found: Array = sign * _at(act, s, z) + _doubt(act, s, z) + beside + 8 * U * np.abs(beside)
    return found


def _at(act: Activation, s: Array, z: Array) -> Array:
    found: Array = act.value.function(z) - s * z
    return found


def _doubt(act: Activation, s: Array, z: Array) -> Array:
    """Bound the error of R at a point."""
    value = act.value.function(z)
    found: Array = act.value.error(value) + 4 * U * (np.abs(value) + 2 * np.abs(s * z))
    return found


def _slivers(act: Activation, s: Array, low: Array, high: Array) -> Array:
    """Bound what it matters that the turns in a range are beside the true ones by their rounding."""
    total = np.zeros_like(s)
    for turn in act.first.turns:
        if turn.point != 0.0:
            sliver = 1e-12 * (1 + abs(turn.point))
            met = (low <= turn.point + sliver) & (high >= turn.point - sliver)
            total += np.where(met, sliver * (2 * (np.abs(s) + act.steepest) + act.c * (high - low)), 0.0)
    return total


def _cut(fall: Array, rise: Array, length: float, p: float) -> _Moved:
    """Return the same, each cut by the others: no entry moves further than all, nor all than the entries."""
    across = float(lengths(np.maximum(fall, rise)[None], p, 1)[0])
    length = min(length, across) if np.isfinite(across) else length
    return _Moved(np.minimum(fall, length), np.minimum(rise, length), length)


def _require_modest(model: Model) -> None:
    """Refuse networks whose rows would take too long on their way back, and activations of unknown shape."""
    for node in model.activated.values():
        if not node.act.smooth and node.act.bends is None:
            raise UnsupportedModule(f"lines beside {node.act.name} are not covered")
    entries = [
        sum(term.matrix.value.size for term in node.terms if term.matrix is not None) if isinstance(node, Affine) else 0
        for node in model.nodes
    ]
    read = {node.source for node in model.activated.values()}
    work = sum(2 * model.nodes[k].size * sum(entries[: k + 1]) for k in read)
    if work > _MOST_WORK:
        raise UnsupportedModule(f"lines through every neuron would take {work:.1e} multiplications")
