r"""Norms of networks of stencils on a torus, frequency by frequency.

On a torus every stencil is, at each frequency f, a small matrix :math:`\hat K(f) = \sum_u K[u] e^{2 \pi i f t_u / N}`,
and a path from one value to a later one is the product of such matrices.  A stride s joins the s frequencies that
become one.  So the path maps of LipLT are exact products, and with crops and activations the growth of every value is

.. math:: Z_k = \|P_{k0}\| + \sum_i \rho_i \|P_{ki}\| Z_i,

as `bounds/lipschitz/growth.py` has it.  What the torus network does on the image, the true one does: a bound for the
first is one for the second.

Large images do not take more frequencies than small ones: with R = (taps - 1)/2 the reach of a path map and
M > 2R points, :math:`\sup_f \|\hat P(f)\| \le \max_{grid} \|\hat P\| / \cos(\pi R / M)` along each axis.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.conv import Pair
from curvcert.operators.frequencies import Exit, Frequencies, Span, Through
from curvcert.operators.planes import (
    Circles,
    Slopes,
    Use,
    Value,
    planes_of,
    shortest_circles,
    total_strides,
    with_crops,
    with_scales_folded,
)
from curvcert.operators.verified import spectral_norm_of_matrix_upper_bound
from curvcert.rounding import Upper, inflate, norm_upper_bound_of_vectors, total

_CHUNK_BYTES = 2**29
"""Frequencies are taken in pieces whose matrices fill about this much."""

_CANDIDATES = ((20, 3), (40, 2))
"""Up to a length of circles, how many tori are tried: the shortest, and those longer by one period and by two."""

_COARSE = 31
"""Points of a coarse grid for each half tap of the longest path: the bounds are then within 1% of the finest grid's."""

_WORTHWHILE = 0.75
"""A coarse grid is used where it is at most this share of the circle along either axis."""


def torus_norm_upper_bound(op: AbstractLinearMap) -> tuple[Tensor, int]:
    """Bound the 2 -> 2 norm of a map between images, and count the crops that it took.

    With none, the bound is nearly exact.

    Raises:
        Unplanar: the map has a part that is no stencil.
    """
    values = planes_of(op)
    last = len(values) - 1
    tori = tori_of(values, (last,))
    return torch.stack([torus.growth((last,))[last] for torus in tori]).amin(), tori[0].crops


def crops_of(op: AbstractLinearMap) -> int:
    """Count the crops that a map between images takes on its shortest torus.

    Raises:
        Unplanar: the map has a part that is no stencil.
    """
    values = planes_of(op)
    return tori_of(values, (len(values) - 1,))[0].crops


def tori_of(values: Sequence[Value], kept: Collection[int]) -> "list[Torus]":
    """Return the tori worth trying for a network of stencils, the shortest first; bounds on any of them hold.

    With slopes only the shortest is: others gain less than 1% there, and take as long.  `kept` are the values that will
    be asked about.

    Raises:
        Unplanar: the strides of two terms of a sum differ.
    """
    folded, place = with_scales_folded(values, kept)
    strides = total_strides(folded)
    shortest = shortest_circles(folded, strides)
    grid = _coarse_grid(folded, strides, shortest)
    bent = any(value.slopes is not None for value in values)
    single = bent or grid is not None
    count = 1 if single else next((count for length, count in _CANDIDATES if max(shortest.length) <= length), 1)
    found = []
    for extra in range(count):
        circles = shortest.longer(extra)
        cropped, number = with_crops(folded, strides, circles)
        places = {k: number[place[k]] for k in kept}
        found.append(Torus(cropped, places, grid or circles, circles, len(cropped) - len(folded)))
    return found


@final
@dataclass(frozen=True, eq=False)
class Link:
    """How much of what an activation sends back arrives at a value: rho times the norm of the path map.

    `reader` is the number, on the torus, of an activation or a crop.
    """

    reader: int
    share: Tensor


@final
@dataclass(frozen=True, eq=False)
class Torus:
    """A network of stencils on one torus.

    Attributes:
        values: the values, crops among them.
        place: where those stand that may be asked about, by their numbers before crops came in.
        grid: the frequencies that are looked at.
        circles: all there are.
        crops: how many crops it took.
    """

    values: Sequence[Value]
    place: Mapping[int, int]
    grid: Circles
    circles: Circles
    crops: int

    @property
    def bent(self) -> dict[int, Slopes]:
        """The slopes of activations and crops, by their numbers on the torus."""
        return {k: value.slopes for k, value in enumerate(self.values) if value.slopes is not None}

    @property
    def is_coarse(self) -> bool:
        """Whether only some of the frequencies are looked at."""
        return any(self._coarse)

    @property
    def _coarse(self) -> tuple[bool, bool]:
        (h, w), (height, width) = self.grid.length, self.circles.length
        return h < height, w < width

    def growth(self, targets: Collection[int]) -> dict[int, Tensor]:
        """Return how far each target moves, in the 2-norm, for a unit of the input, by LipLT."""
        return {target: self.constants[self.place[target]] for target in targets}

    @cached_property
    def constants(self) -> dict[int, Tensor]:
        """How far every value moves that bends, is bent, or may be asked about, by their numbers on the torus."""
        bent = self.bent
        source = {k: self.values[k].uses[0].source for k in bent}
        wanted = sorted({*self.place.values(), *source.values(), *bent})
        norms = self._path_norms((0, *bent), {*wanted} - bent.keys())
        growth = {0: Upper(torch.ones((), dtype=torch.float64, device=_device(self.values)))}
        for end in wanted:
            if end in bent:
                moved = growth[source[end]]
                growth[end] = moved * abs(bent[end].mu) + moved * bent[end].rho
                continue
            terms = [Upper(norms[end, 0])] if (end, 0) in norms else []
            terms += [
                growth[source[start]] * norms[end, start] * slopes.rho
                for start, slopes in bent.items()
                if (end, start) in norms
            ]
            if terms:
                growth[end] = total(terms)
        return {k: moved.bound for k, moved in growth.items()}

    def all_frequencies(self) -> Frequencies | None:
        """Return all frequencies together, or None where they are only looked at by a grid, or piece by piece."""
        rows = _row_pieces(self.values, self.grid)
        return (
            Frequencies(self.values, self.grid, rows[0], self._coarse)
            if not self.is_coarse and len(rows) == 1
            else None
        )

    def links(self, starts: Collection[int]) -> dict[int, list[Link]]:
        """Return the links from each of some values, by their numbers on the torus, to what bends after it."""
        source = {k: self.values[k].uses[0].source for k in self.bent}
        norms = self._path_norms(starts, {*source.values()})
        one = torch.ones((), dtype=torch.float64, device=_device(self.values))
        norms |= {(start, start): one for start in starts}
        return {
            start: [
                Link(k, inflate(slopes.rho * norms[source[k], start], 0.0))
                for k, slopes in self.bent.items()
                if (source[k], start) in norms
            ]
            for start in starts
        }

    def behind(self, starts: Collection[int], exits: Sequence[Exit]) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Bound the path maps from values on the torus to vectors behind it: the 2-norm, and that of every row.

        By the number of the exit and the start.  A row of such a map takes all frequencies: where only a grid of them
        is looked at, it is the norm of the exit times that of the path to it.
        """
        if self.is_coarse:
            return self._behind_a_grid(starts, exits)
        found: dict[tuple[int, int], Through] = {}
        for frequencies in self._pieces():
            for start in starts:
                for key, part in frequencies.exits(start, exits).items():
                    found[key, start] = found[key, start].plus(part) if (key, start) in found else part
        return {key: (through.norm, through.row_norms) for key, through in found.items()}

    def _behind_a_grid(
        self, starts: Collection[int], exits: Sequence[Exit]
    ) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        norms = self._path_norms(starts, {gate.source for gate in exits})
        norms |= {(start, start): torch.ones_like(gate.error) for start in starts for gate in exits}
        found = {}
        for key, gate in enumerate(exits):
            rows = gate.rows.flatten(1)
            norm = inflate(spectral_norm_of_matrix_upper_bound(rows) + gate.error, 0.0)
            lengths = inflate(norm_upper_bound_of_vectors(rows, 2, 1) + gate.error, 0.0)
            for start in starts:
                if (gate.source, start) in norms:
                    path = norms[gate.source, start]
                    found[key, start] = inflate(path * norm, 0.0), inflate(path * lengths, 0.0)
        return found

    def _path_norms(self, starts: Collection[int], ends: Collection[int]) -> dict[tuple[int, int], Tensor]:
        norms: dict[tuple[int, int], Tensor] = {}
        for frequencies in self._pieces():
            for start in starts:
                for end, norm in frequencies.path_norms(start, ends).items():
                    norms[end, start] = norms[end, start].maximum(norm) if (end, start) in norms else norm
        return norms

    def _pieces(self) -> Iterator[Frequencies]:
        for rows in _row_pieces(self.values, self.grid):
            yield Frequencies(self.values, self.grid, rows, self._coarse)


def _device(values: Sequence[Value]) -> torch.device | None:
    kernels = (use.stencil.kernel for value in values for use in value.uses if use.stencil is not None)
    return next((kernel.device for kernel in kernels), None)


def _coarse_grid(values: Sequence[Value], strides: Sequence[Pair], circles: Circles) -> Circles | None:
    """Return as many points along every axis as the longest path needs, or None where a torus has hardly more."""
    length = [0, 0]
    for axis in (0, 1):
        spans: list[Span] = [(0, 0)]
        for value in values[1:]:
            ends = [_span(spans[use.source], use, strides, axis) for use in value.uses]
            spans.append((min(low for low, _ in ends), max(high for _, high in ends)))
        points = math.ceil(_COARSE * max(high - low for low, high in spans) / 2)
        period = circles.period[axis]
        length[axis] = min(circles.length[axis], period * max(2, math.ceil(points / period)))
    worthwhile = any(a <= _WORTHWHILE * b for a, b in zip(length, circles.length, strict=True))
    return Circles((length[0], length[1]), circles.period) if worthwhile else None


def _span(before: Span, use: Use, strides: Sequence[Pair], axis: int) -> Span:
    """Return what a path from the input reads along an axis that ends in a use of a value."""
    if use.stencil is None:
        return before
    offsets, step = use.stencil.reach[axis].offsets, strides[use.source][axis]
    return before[0] + step * min(offsets), before[1] + step * max(offsets)


def _row_pieces(values: Sequence[Value], circles: Circles) -> tuple[Tensor, ...]:
    """Return the frequencies along the first axis, up to those that strides join and half the circle, in pieces.

    The kernels are real: what is not in this half is the complex conjugate of what is.
    """
    strides = total_strides(values)
    # The numbers of every symbol, and of the path maps from one start, at one row of joined frequencies.
    numbers = [
        _frequencies_per_row(circles, strides[use.source]) * use.stencil.kernel[..., 0, 0].numel()
        for value in values
        for use in value.uses
        if use.stencil is not None
    ]
    widest = max(value.shape[0] for value in values)
    paths = [4 * _frequencies_per_row(circles, strides[k]) * value.shape[0] * widest for k, value in enumerate(values)]
    rows = torch.arange(circles.length[0] // circles.period[0] // 2 + 1, device=_device(values))
    at_once = max(1, _CHUNK_BYTES // (16 * (sum(numbers) + max(paths))))
    pieces: tuple[Tensor, ...] = rows.split(at_once)
    return pieces


def _frequencies_per_row(circles: Circles, stride: Pair) -> int:
    return circles.period[0] * circles.length[1] // (stride[0] * stride[1])
