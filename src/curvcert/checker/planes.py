r"""Values between images on a torus: the maps along all paths as composed kernels, and LipLT on them.

Continue every image by zeros without an end, or on a torus of N positions where nothing is read across its far side.
If what an activation gives is set to zero beside the image, all windows give on the image what they should, and so
the network is one of windows on the whole torus.  Beside the image an activation's slopes are 0: with slopes in the
hull of [alpha, beta] and 0, middle :math:`\mu` and radius :math:`\rho`, every path map P is one composed kernel, and

.. math:: Z_k = \|P_{k0}\| + \sum_i \rho_i \|P_{ki}\| Z_i

bounds how far the pre-activation k moves for a unit of the input, and more than it: beside the image too.  A constant
of the image alone may therefore not stand for :math:`Z_i`.

A value is *clean* if it is zero beside its image: the input is, what an activation gives is, and sums of pointwise maps
of those are.  Where a window reads beyond the image of a value that is not, the value is first set to zero there: a
*crop*, an activation with slopes in [0, 1].
"""

import math
from dataclasses import dataclass

import numpy as np

from curvcert.checker.model import Activated, Affine, Input, Model
from curvcert.checker.outward import Array, raised
from curvcert.checker.windows import Pair, Stencil, Window, unit

_MOST_TAPS = 2**24
_MOST_WORK = 2**41
"""Entries of a composed kernel, and multiplications for all of them, beyond which a value has no sum over paths."""


@dataclass(frozen=True, eq=False)
class _Use:
    """An earlier value under a window, or the value itself."""

    source: int
    window: Window | None


@dataclass(frozen=True, eq=False)
class _Plane:
    """An image: the input, a sum, or what slopes (their middle and radius) make of one value.

    `node` is its number in the model; a crop has none.
    """

    uses: tuple[_Use, ...]
    shape: tuple[int, int, int]
    stride: Pair
    clean: bool
    slopes: tuple[float, float] | None
    node: int | None


class Planes:
    """The images of a network, and LipLT in one norm on them."""

    def __init__(self, model: Model, p: float) -> None:
        """Find the images that windows join; norms are computed when they are first asked for."""
        self._p = p
        self._values: list[_Plane] = []
        self._number: dict[int, int] = {}
        self._crops: dict[int, int] = {}
        self._work = 0
        for k, node in enumerate(model.nodes):
            match node:
                case Input() if len(model.in_shape) == 3:
                    c, h, w = model.in_shape
                    self._add(_Plane((), (c, h, w), (1, 1), True, None, 0))
                case Activated() if node.source in self._number:
                    low, high = min(node.act.slope[0], 0.0), max(node.act.slope[1], 0.0)
                    mu = 0.5 * (low + high)
                    slopes = mu, raised(max(high - mu, mu - low))
                    before = self._values[self._number[node.source]]
                    self._add(
                        _Plane((_Use(self._number[node.source], None),), before.shape, before.stride, True, slopes, k)
                    )
                case Affine():
                    self._add_sum(k, node)
                case _:
                    pass
        self._length = self._shortest()
        self._norms: dict[int, dict[int, float]] = {}
        self._moved: dict[int, float] = {0: 1.0}

    def __contains__(self, node: int) -> bool:
        """Whether a value of the model is an image that only windows lead to."""
        return node in self._number

    @property
    def has_crops(self) -> bool:
        """Whether a window reads beyond the image of a value that is not clean."""
        return bool(self._crops)

    def growth(self, node: int) -> float:
        """Bound how far a value moves on the torus for a unit of the input.

        Raises:
            TooDear: if the composed kernels are too large.
        """
        return self._growth(self._number[node])

    def link(self, node: int, activation: int) -> float:
        """Bound the norm of all paths on the torus from an activation to a sum; 0 where there is none.

        Raises:
            TooDear: if the composed kernels are too large.
        """
        return self._path_norms(self._number[activation]).get(self._number[node], 0.0)

    def slopes(self, activation: int) -> tuple[float, float]:
        """Return the middle and the radius of the slopes of an activation on the torus."""
        found = self._values[self._number[activation]].slopes
        assert found is not None
        return found

    def embedded(self, node: int, rows: Array) -> Array:
        """Return covectors of a value on its image as such of the value on the torus."""
        plane = self._values[self._number[node]]
        result = np.zeros((len(rows), plane.shape[0], *self._circle(plane)))
        result[:, :, : plane.shape[1], : plane.shape[2]] = rows.reshape(len(rows), *plane.shape)
        return result.reshape(len(rows), -1)

    def pulled(self, window: Window, source: int, rows: Array) -> Array:
        """Return g A on the torus for every covector g of the image of a value under a window."""
        plane, stencil = self._values[self._number[source]], window.stencil
        circle = self._circle(plane)
        given = [n // s for n, s in zip(circle, stencil.stride, strict=True)]
        rows = rows.reshape(len(rows), -1, *given)
        result = np.zeros((len(rows), plane.shape[0], *circle))
        for a, b in np.ndindex(*stencil.kernel.shape[2:]):
            sent = np.ascontiguousarray(stencil.kernel[:, :, a, b].T) @ rows.reshape(*rows.shape[:2], -1)
            i, j = (
                (np.arange(m) * s + first + tap) % n
                for m, s, first, tap, n in zip(given, stencil.stride, stencil.first, (a, b), circle, strict=True)
            )
            result[:, :, i[:, None], j] += sent.reshape(len(rows), -1, *given)
        return result.reshape(len(rows), -1)

    def _growth(self, target: int) -> float:
        if target not in self._moved:
            total = self._path_norms(0).get(target, 0.0)
            for start in range(1, target + 1):
                slopes = self._values[start].slopes
                norm = None if slopes is None else self._path_norms(start).get(target)
                if slopes is not None and norm is not None:
                    total += slopes[1] * norm * self._growth(self._values[start].uses[0].source)
            self._moved[target] = raised(total, 4 * target + 8)
        return self._moved[target]

    def _add(self, plane: _Plane) -> int:
        self._values.append(plane)
        if plane.node is not None:
            self._number[plane.node] = len(self._values) - 1
        return len(self._values) - 1

    def _add_sum(self, k: int, node: Affine) -> None:
        """Add a sum of images; nothing where it has other terms, or terms of different strides."""
        uses, clean, strides, shapes = [], True, set(), set()
        for term in node.terms:
            number = self._number.get(term.source)
            if number is None or not (term.map is None or isinstance(term.map, Window)):
                return
            plane, window = self._values[number], term.map
            if window is not None and window.source != plane.shape:
                return
            step = (1, 1) if window is None else window.stencil.stride
            strides.add((plane.stride[0] * step[0], plane.stride[1] * step[1]))
            shapes.add(plane.shape if window is None else window.target)
            clean = clean and plane.clean and (window is None or window.is_pointwise)
            uses.append(_Use(number, window))
        if len(strides) > 1 or len(shapes) > 1:
            return
        tidy = [
            _Use(self._crop(use.source), use.window)
            if use.window is not None and use.window.reads_beyond and not self._values[use.source].clean
            else use
            for use in uses
        ]
        self._add(_Plane(tuple(tidy), shapes.pop(), strides.pop(), clean, None, k))

    def _crop(self, source: int) -> int:
        if source not in self._crops:
            plane = self._values[source]
            self._crops[source] = self._add(
                _Plane((_Use(source, None),), plane.shape, plane.stride, True, (0.5, 0.5), None)
            )
        return self._crops[source]

    def _shortest(self) -> Pair:
        """Return how long the circles of the input are on the shortest torus that has room for all windows."""
        found = [1, 1]
        for axis in (0, 1):
            period = math.lcm(*(plane.stride[axis] for plane in self._values), 1)
            for plane in self._values:
                needs = [plane.shape[1 + axis] * plane.stride[axis]]
                for use in plane.uses:
                    if use.window is not None:
                        needs.append(use.window.needed(axis) * self._values[use.source].stride[axis])
                found[axis] = max(found[axis], *(-(-need // period) * period for need in needs))
        return found[0], found[1]

    def _circle(self, plane: _Plane) -> Pair:
        return self._length[0] // plane.stride[0], self._length[1] // plane.stride[1]

    def _path_norms(self, start: int) -> dict[int, float]:
        """Bound the norms of the maps from one value to every value that an activation reads."""
        if start not in self._norms:
            self._norms[start] = self._measured(start)
        return self._norms[start]

    def _measured(self, start: int) -> dict[int, float]:
        first = self._values[start]
        length = self._circle(first)
        last = {use.source: k for k, plane in enumerate(self._values) for use in plane.uses}
        bent = {use.source for plane in self._values if plane.slopes is not None for use in plane.uses}
        states: dict[int, Stencil] = {start: unit(first.shape[0])}
        # An activation may read another, and so what it gives is also a value that paths end in: its own at length 1.
        norms: dict[int, float] = {start: 1.0} if start in bent else {}
        for k in range(start + 1, len(self._values)):
            plane = self._values[k]
            reached = [use for use in plane.uses if use.source in states]
            if not reached or (plane.slopes is not None and plane.slopes[0] == 0.0):
                continue
            total: Stencil | None = None
            for use in reached:
                state = states[use.source]
                image = state if use.window is None else self._behind(state, use.window.stencil)
                total = image if total is None else total.plus(image)
            assert total is not None
            states[k] = total if plane.slopes is None else total.times(plane.slopes[0])
            if k in bent:
                norms[k] = states[k].norm(self._p, length)
            states = {number: state for number, state in states.items() if last.get(number, -1) > k}
        return norms

    def _behind(self, state: Stencil, window: Stencil) -> Stencil:
        taps = [
            n + s * (m - 1)
            for n, s, m in zip(state.kernel.shape[2:], state.stride, window.kernel.shape[2:], strict=True)
        ]
        entries = len(window.kernel) * state.kernel.shape[1] * math.prod(taps)
        self._work += window.kernel.size * state.kernel[0].size
        if entries > _MOST_TAPS or self._work > _MOST_WORK:
            raise TooDear
        return state.behind(window)


class TooDear(Exception):
    """Composed kernels that would take too much memory or time."""
