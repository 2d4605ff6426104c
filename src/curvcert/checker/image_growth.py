r"""Lipschitz constants of networks of large images: value by value, along paths of windows, and row by row.

The last, for layers behind images: rows of a map of a value are carried back to all activations and to the input with
the middle slopes in between, and

.. math:: \|df\| \le \|P_{f0}\| + \sum_i \rho_i \|P_{fi}\| Z_i.

Their rounding travels as one number for each row.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property

import numpy as np

from curvcert.checker.contraction import contractions
from curvcert.checker.lipschitz import DUAL
from curvcert.checker.model import Activated, Affine, Map, Model, Term, pair_rows
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    frobenius,
    gamma,
    gram,
    largest_eigenvalue,
    lengths,
    raised,
    up,
)
from curvcert.checker.planes import Planes, TooDear
from curvcert.checker.wide import MOST_ROWS
from curvcert.checker.windows import Window

_MOST_ENTRIES = 2**26
"""Numbers that rows may have at a value that they are carried back to."""

Measure = Callable[[Array, Array], Array]


class ImageGrowth:
    r"""Lipschitz constants in p -> p of x -> v for every value v, `values`.

    In l2 `above` holds a matrix M for small values, and what it is off by: :math:`JJ^T \preceq M` for all Jacobians J.
    With :math:`J = \sum_i P_i X_i`, :math:`\|X_i\| \le s_i`, that is
    :math:`M = \sum_j \theta_j \sum_i s_i^2 P_i P_i^T / \theta_i` for any :math:`\theta > 0`; with
    :math:`\theta_i = s_i \|P_i\|` its norm is at most the square of LipLT's sum.
    """

    def __init__(self, model: Model, p: float) -> None:
        """Compute them all, in the order of the nodes."""
        self._model, self._p = model, p
        self.planes = Planes(model, p)
        self.values: list[float] = []
        self.above: dict[int, tuple[Array, float]] = {}
        inner = {node.source for node in model.activated.values()}
        for k, node in enumerate(model.nodes):
            match node:
                case Affine():
                    self.values.append(self._sum(k, node, k in inner))
                case Activated():
                    self.values.append(raised(node.act.steepest * self.values[node.source]))
                case _:
                    self.values.append(1.0)

    def pairs(self) -> Array:
        """Return Lipschitz constants of all f_i - f_j, i < j."""
        model = self._model
        rows, last = pair_rows(model.classes, None), len(model.nodes) - 1
        dual = DUAL[self._p]

        def measure(R: Array, off: Array) -> Array:
            spread = math.sqrt(R.shape[1]) * (1 + 1e-12) if dual == 1 else 1.0
            return up(lengths(R, dual, 1) + spread * off, 8)

        found = measure(rows, np.zeros(len(rows))) * self.values[last]
        node = model.nodes[last]
        if isinstance(node, Affine):
            straight = np.zeros(len(rows))
            for term in node.terms:
                straight = (
                    straight + measure(*pulled_back(term.map, rows, np.zeros(len(rows)))) * self.values[term.source]
                )
            found = np.minimum(found, up(straight, 2 * len(node.terms) + 8))
        return np.minimum(up(found), self._by_paths(last, rows, measure))

    @cached_property
    def _slack(self) -> int:
        return 8 * len(self._model.nodes) + 16

    def _sum(self, k: int, node: Affine, inner: bool) -> float:
        total = raised(sum(norm_of(term.map, self._p) * self.values[term.source] for term in node.terms), self._slack)
        if self._p == 2:
            total = min(total, self._contracted(k))
        if inner and k in self.planes:
            with suppress(TooDear):
                total = min(total, self.planes.growth(k))
        if inner and node.size <= MOST_ROWS:
            total = min(total, self._together(k, node.size) if self._p == 2 else self._by_rows(k, node.size))
        return total

    def _together(self, k: int, count: int) -> float:
        """Bound a value in l2 by the matrix M above all that its Jacobian can be times its transpose; keep that."""
        try:
            parts = [
                (self._share(i), *gram(Enclosed(R)), frobenius(off)) for i, R, off in self._carried(k, np.eye(count))
            ]
        except TooDear:
            return float(np.inf)
        norms = [math.sqrt(max(0.0, largest_eigenvalue(G, error))) + off for _, G, error, off in parts]
        weights = [max(share * norm, TINY) for (share, *_), norm in zip(parts, norms, strict=True)]
        total, wrong = np.zeros((count, count)), 0.0
        for (share, G, error, off), norm, weight in zip(parts, norms, weights, strict=True):
            # A row matrix that is off by E has a Gram matrix that is off by 2 |R| |E| + |E|^2.
            factor = raised(sum(weights) * share * share / weight, 2 * len(parts) + 8)
            total = total + factor * G
            wrong += factor * (error + off * (2 * norm + off)) + 4 * len(parts) * U * factor * frobenius(G)
        self.above[k] = total, raised(wrong, 4 * len(parts) + 16)
        return raised(math.sqrt(max(0.0, largest_eigenvalue(*self.above[k]))))

    def _share(self, k: int) -> float:
        """Return what the rest of an activation moves by at most, or the input: what is in front of its rows."""
        node = self._model.nodes[k]
        return raised(middle(node)[1] * self.values[node.source]) if isinstance(node, Activated) else 1.0

    def _by_rows(self, k: int, count: int) -> float:
        """Bound a value in l1 or linf by the sum over paths, row by row."""

        def measure(R: Array, off: Array) -> Array:
            if self._p == np.inf:
                rows = lengths(R, 1, 1) + math.sqrt(R.shape[1]) * (1 + 1e-12) * off
                return np.asarray(float(up(rows, 8).max()))
            return np.asarray(raised(float(lengths(R, 1, 0).max()) + float(off.sum()), len(off) + 8))

        return float(self._by_paths(k, np.eye(count), measure))

    def carried_back(self, at: int, rows: Array) -> Iterator[tuple[int, Array, Array]]:
        """Give the rows of a value behind every activation before it, on the torus where they are images."""
        return self._carried(at, rows, torus=True)

    def _by_paths(self, at: int, rows: Array, measure: Measure) -> Array:
        """Return the sum over all paths to rows of maps of a value; infinite where they take too much memory."""
        total = np.zeros(())
        try:
            for k, R, off in self._carried(at, rows):
                total = total + self._share(k) * measure(R, off)
        except TooDear:
            return np.full(len(rows), np.inf) if measure(rows[:1], np.zeros(1)).ndim else np.asarray(np.inf)
        return up(total, self._slack)

    def _carried(self, at: int, rows: Array, torus: bool = False) -> Iterator[tuple[int, Array, Array]]:
        """Give the rows behind every activation, and behind the input, and how far each is off in the 2-norm."""
        waiting: dict[int, tuple[Array, Array]] = {at: (rows, np.zeros(len(rows)))}

        def send(source: int, R: Array, off: Array) -> None:
            if source in waiting:
                known, before = waiting[source]
                R = known + R
                off = off + before + 2 * U * lengths(R, 2, 1)
            waiting[source] = R, up(off, 8)

        for k in range(at, -1, -1):
            if k not in waiting:
                continue
            R, off = waiting.pop(k)
            if R.size > _MOST_ENTRIES:
                raise TooDear
            node = self._model.nodes[k]
            plane = torus and k in self.planes
            if isinstance(node, Affine):
                for term in node.terms:
                    if plane:
                        send(term.source, *self._pulled_on_torus(term, R, off))
                        continue
                    image, far = pulled_back(term.map, R, off)
                    inside = torus and term.source in self.planes
                    send(term.source, self.planes.embedded(term.source, image) if inside else image, far)
                continue
            yield k, R, off
            if isinstance(node, Activated):
                mu = self.planes.slopes(k)[0] if plane else middle(node)[0]
                if mu:
                    send(node.source, mu * R, up(abs(mu) * (off + U * lengths(R, 2, 1)), 8))

    def _pulled_on_torus(self, term: Term, R: Array, off: Array) -> tuple[Array, Array]:
        if term.map is None:
            return R, off
        assert isinstance(term.map, Window)
        rounding = (gamma(term.map.terms + 2) * term.map.absolute + term.map.off) * lengths(R, 2, 1)
        return self.planes.pulled(term.map, term.source, R), up(term.map.absolute * off + rounding, 8)

    def _contracted(self, k: int) -> float:
        """Bound the end of a contracting block by the block's own constant; infinite where none ends."""
        block = contractions(self._model).get(k)
        return float(np.inf) if block is None else raised(block.constant * self.values[block.x])


def behind(model: Model) -> list[float]:
    """Bound how far any f_i - f_j moves in the 2-norm for a unit of every value, by products of norms."""
    found = [0.0] * len(model.nodes)
    found[-1] = raised(math.sqrt(2.0))
    for k in range(len(model.nodes) - 1, -1, -1):
        node = model.nodes[k]
        if isinstance(node, Affine):
            for term in node.terms:
                found[term.source] = raised(found[term.source] + norm_of(term.map, 2.0) * found[k])
        elif isinstance(node, Activated):
            found[node.source] = raised(found[node.source] + node.act.steepest * found[k])
    return found


def middle(node: Activated) -> tuple[float, float]:
    """Return the middle of the slopes, and their radius."""
    alpha, beta = node.act.slope
    mu = 0.5 * (alpha + beta)
    return mu, raised(max(beta - mu, mu - alpha))


def norm_of(A: Map, p: float) -> float:
    """Bound the p -> p norm of a map."""
    return 1.0 if A is None else A.norm_in(p)


def pulled_back(A: Map, rows: Array, off: Array) -> tuple[Array, Array]:
    """Return g A for every row g, and how far it is off."""
    if A is None:
        return rows, off
    rounding = (gamma(A.terms + 2) * A.absolute + A.off) * lengths(rows, 2, 1)
    return A.pulled(rows), up(A.norm * off + rounding, 8)
