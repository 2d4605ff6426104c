r"""How far every value can move for a unit of the input, and the output for a unit of every activation.

With :math:`\phi = \mu z + \psi`, :math:`\mu` the middle slope, :math:`\psi` is
:math:`\rho = (\beta - \alpha)/2`-Lipschitz.  With P the maps between values when all activations are their middle
slopes, from the input (0), from the activation i to the pre-activation k and to the output (f),

.. math:: Z_k = \|P_{k0}\| + \sum_{i < k} \rho_i \|P_{ki}\| Z_i, \qquad
          U_k = \|P_{fk}\| + \sum_{j > k} \rho_j \|P_{jk}\| U_j

bound :math:`\|dz_k\| / \|dx\|` and :math:`\|df / da_k\|` (`gradients.py`).  The activations of one depth, a level, are
also taken together, as one vector: its share of a sum is the least of :math:`\|[\rho_i P_{ki}]_i\|` times the constant
of the vector and the sum over its members.  Every constant is the least of this and of what the values that a block
reads give it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from curvcert.checker.lipschitz import DUAL, Linear, functional_steps
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    Factor,
    U,
    below,
    beside,
    lengths,
    operator_norm,
    plus,
    product,
    raised,
    row_lengths,
    scaled,
    times,
    up,
)
from curvcert.checker.pieces import Blocks, Piece, identity, read_outs

Norm = Callable[[Factor], Array]
Target = int | tuple[int, ...]
"""A block, or a level of them."""


@dataclass(frozen=True, eq=False)
class Paths:
    """The maps to one target from what is before it: from the input, and from the activations, by their blocks."""

    start: Enclosed | None
    reach: dict[int, Factor]


class Growth:
    """Lipschitz constants in p -> p: `values[v]` of x -> v, `inner[k]` of the pre-activation of block k.

    `links` holds the norms of the maps to a block or a level from the activations of a block or of a level, in l2; the
    rows of those to a level are weighed by rho.
    """

    def __init__(self, blocks: Blocks, parts: list[Linear], p: float) -> None:
        """Compute them all, level by level."""
        self.blocks, self.parts, self.p = blocks, parts, p
        self.values: dict[int, float] = {0: 1.0}
        self.inner: dict[int, float] = {}
        self.links: dict[Target, dict[Target, float]] = {}
        self._together: dict[tuple[int, ...], float] = {}
        self._slack = 8 * (len(parts) + 2)
        for members in blocks.order:
            level = tuple(k for k in members if blocks.pieces[k].act is not None)
            for k in level:
                self.inner[k] = self._pre_activation(k)
            if len(level) > 1:
                self._bound_together(level)
            for k in members:
                if k < len(parts) - 1:
                    self.values[blocks.pieces[k].output] = self._value(k)

    def before(self, k: int) -> float:
        """Return the constant of what a block reads, stacked."""
        return stacked_size([self.values[source] for source in self.blocks.pieces[k].sources], self.p)

    def paths(self, tails: dict[int, Factor]) -> Paths:
        """Return the maps to a target that is a sum of images of values; None stands for the value itself."""
        tails, reach = dict(tails), dict[int, Factor]()
        for k in range(len(self.parts) - 1, -1, -1):
            piece, part = self.blocks.pieces[k], self.parts[k]
            if piece.output not in tails:
                continue
            tail = tails.pop(piece.output)
            if part.hidden:
                reach[k] = times(tail, part.outer)
            before = part.linear if tail is None else product(tail, part.linear)
            for source, image in zip(piece.sources, piece.split(before), strict=True):
                _add(tails, source, image)
        return Paths(tails.get(0), reach)

    def _norm(self, A: Factor) -> Array:
        return np.asarray(operator_norm(A, self.p))

    def _total(self, paths: Paths, norm: Norm) -> Array:
        """Return the sum over paths, level by level."""
        total = np.asarray(0.0) if paths.start is None else norm(paths.start)
        for level in self.blocks.levels:
            members = [k for k in level if k in paths.reach]
            if not members:
                continue
            share = sum((self.parts[k].radius * norm(paths.reach[k]) * self.inner[k] for k in members), np.asarray(0.0))
            if len(members) > 1 and level in self._together:
                joint = beside([self._weighed(k, paths.reach[k]) for k in members])
                share = np.minimum(share, norm(joint) * self._together[level])
            total = total + share
        return up(total, self._slack)

    def _weighed(self, k: int, A: Factor) -> Enclosed:
        """Return a map from the activation of block k, times rho."""
        return scaled(self.parts[k].radius, self._as_matrix(k, A))

    def _pre_activation(self, k: int) -> float:
        piece, part = self.blocks.pieces[k], self.parts[k]
        paths = self.paths(self._tails(piece))
        self._link(k, paths)
        total = float(self._total(paths, self._norm))
        return min(total, raised(part.W * self.before(k)), self._by_parts(k, part.W_parts))

    def _link(self, target: Target, paths: Paths) -> None:
        """Note the norms of the maps to a target, for gradients on their way back."""
        if self.p != 2:
            return
        self.links[target] = {i: float(operator_norm(A, 2)) for i, A in paths.reach.items()}
        for level in self.blocks.levels:
            members = [k for k in level if k in paths.reach]
            if len(level) > 1 and members:
                joint = beside([self._as_matrix(k, paths.reach[k]) for k in members])
                self.links[target][level] = float(operator_norm(joint, 2))

    def _as_matrix(self, k: int, A: Factor) -> Enclosed:
        return identity(self.parts[k].hidden) if A is None else A

    def _tails(self, piece: Piece) -> dict[int, Factor]:
        assert piece.W is not None
        return dict(zip(piece.sources, piece.split(piece.W), strict=True))

    def _by_parts(self, k: int, norms: Sequence[float]) -> float:
        """Bound a sum of images of what a block reads by the norms of its maps."""
        sources = self.blocks.pieces[k].sources
        return raised(sum(norm * self.values[source] for norm, source in zip(norms, sources, strict=True)), self._slack)

    def _bound_together(self, level: tuple[int, ...]) -> None:
        """Bound the pre-activations of a level as one vector; none of them moves further than that."""
        targets = [self.blocks.pieces[k] for k in level]
        tails: dict[int, Factor] = {}
        heights = [len(piece.W.value) for piece in targets if piece.W is not None]
        for place, piece in enumerate(targets):
            assert piece.W is not None
            for source, image in zip(piece.sources, piece.split(piece.W), strict=True):
                _add(tails, source, _placed(image, heights, place))
        paths = self.paths(tails)
        rho = np.concatenate([np.full(n, self.parts[k].radius) for k, n in zip(level, heights, strict=True)])
        self._link(level, Paths(None, {i: _rows_weighed(rho, A) for i, A in paths.reach.items()}))
        total = float(self._total(paths, self._norm))
        self._together[level] = min(total, stacked_size([self.inner[k] for k in level], self.p))
        for k in level:
            self.inner[k] = min(self.inner[k], self._together[level])

    def _value(self, k: int) -> float:
        piece, part = self.blocks.pieces[k], self.parts[k]
        found = raised(self.before(k) * part.product)
        found = min(found, self._by_parts(k, part.H_parts) if piece.act is None else self._through(k))
        if piece.act is None or piece.H is not None or piece.G is not None:
            found = min(found, float(self._total(self.paths({piece.output: None}), self._norm)))
        return found

    def _through(self, k: int) -> float:
        piece, part = self.blocks.pieces[k], self.parts[k]
        skip = self._by_parts(k, part.H_parts) if piece.H is not None else 0.0
        return raised(skip + part.steepest * part.G * self.inner[k], 8)

    def pairs(self, label: int | None = None) -> Array:
        """Return Lipschitz constants of all f_i - f_j, i < j; or of f_i - f_label for all i."""
        dual, k = DUAL[self.p], len(self.parts) - 1
        piece, part = self.blocks.last, self.parts[k]
        rows, outer, skip = read_outs(self.blocks, label)

        def norm(A: Factor) -> Array:
            assert A is not None
            return row_lengths(A, dual)

        found = self._total(self.paths({piece.output: rows}), norm)
        found = np.minimum(found, up(functional_steps(piece, part, outer, skip, dual) * self.before(k), 8))
        through = np.zeros(len(found)) if skip is None else self._row_by_row(piece, skip, dual)
        if piece.act is not None:
            through = through + part.steepest * row_lengths(outer, dual) * self.inner[k]
        return np.minimum(found, up(through, self._slack))

    def _row_by_row(self, piece: Piece, rows: Enclosed, dual: float) -> Array:
        """Bound rows of a map of what a block reads, part by part; a sum of values also by its own terms."""
        total = np.zeros(len(rows.value))
        sums = {one.output: (k, one) for k, one in enumerate(self.blocks.pieces) if one.act is None}
        for source, image in zip(piece.sources, piece.split(rows), strict=True):
            term = row_lengths(image, dual) * self.values[source]
            if source in sums:
                _, inner = sums[source]
                assert inner.H is not None
                images = zip(inner.sources, inner.split(product(image, inner.H)), strict=True)
                term = np.minimum(term, sum(row_lengths(A, dual) * self.values[j] for j, A in images))
            total = total + term
        return total


def stacked_size(sizes: Sequence[float], p: float) -> float:
    """Bound the p-norm of values that are stacked, given bounds on the p-norm of each."""
    return sizes[0] if len(sizes) == 1 else float(lengths(np.array(sizes), p, 0))


def _add(tails: dict[int, Factor], source: int, image: Enclosed) -> None:
    known = tails.get(source)
    tails[source] = image if known is None else plus(known, image)


def _rows_weighed(weights: Array, A: Factor) -> Enclosed:
    assert A is not None
    value = weights[:, None] * A.value
    error = U * np.abs(value) if A.error is None else U * np.abs(value) + weights[:, None] * A.error
    return Enclosed(value, up(error) + TINY)


def _placed(A: Enclosed, heights: Sequence[int], place: int) -> Enclosed:
    """Return a matrix among rows of zeros, one of several on top of each other."""
    columns = A.value.shape[1]
    return below([A if k == place else Enclosed(np.zeros((n, columns))) for k, n in enumerate(heights)])
