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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.conv import Pair
from curvcert.operators.frequencies import Frequencies, Span
from curvcert.operators.planes import (
    Circles,
    Use,
    Value,
    planes_of,
    shortest_circles,
    total_strides,
    with_crops,
    with_scales_folded,
)
from curvcert.rounding import gamma, inflate

_CHUNK_BYTES = 2**29
"""Frequencies are taken in pieces whose matrices fill about this much."""

_CANDIDATES = ((20, 3), (40, 2))
"""Up to a length of circles, how many tori are tried: the shortest, and those longer by one period and by two."""

_COARSE = 31
"""Points of a coarse grid for each half tap of the longest path: the bounds are then within 1% of the finest grid's."""

_WORTHWHILE = 0.75
"""A coarse grid is used where it is at most this share of the circle along either axis."""


@dataclass(frozen=True, eq=False)
class Growth:
    """How far values of a network of stencils move, in the 2-norm, for a unit of its input.

    `crops` counts the crops that it took; with none, what has no slopes before it is bounded by a norm that is nearly
    exact.
    """

    of: Mapping[int, Tensor]
    crops: int


def torus_norm_upper_bound(op: AbstractLinearMap) -> tuple[Tensor, int]:
    """Bound the 2 -> 2 norm of a map between images, and count the crops that it took.

    Raises:
        Unplanar: the map has a part that is no stencil.
    """
    values = planes_of(op)
    last = len(values) - 1
    found = growth_on_torus(values, (last,))
    return found.of[last], found.crops


def crops_of(op: AbstractLinearMap) -> int:
    """Count the crops that a map between images takes on its shortest torus.

    Raises:
        Unplanar: the map has a part that is no stencil.
    """
    values = planes_of(op)
    folded, _ = with_scales_folded(values, (len(values) - 1,))
    strides = total_strides(folded)
    cropped, _ = with_crops(folded, strides, shortest_circles(folded, strides))
    return len(cropped) - len(folded)


def growth_on_torus(values: Sequence[Value], targets: Collection[int]) -> Growth:
    """Bound how far each target moves; every candidate torus bounds all of them, and each takes its least.

    With slopes only the shortest torus is tried: others gain less than 1% there, and take as long.

    Raises:
        Unplanar: the strides of two terms of a sum differ.
    """
    folded, place = with_scales_folded(values, targets)
    strides = total_strides(folded)
    shortest = shortest_circles(folded, strides)
    found: list[dict[int, Tensor]] = []
    grid = _coarse_grid(folded, strides, shortest)
    bent = any(value.slopes is not None for value in values)
    count = 1 if bent else next((count for length, count in _CANDIDATES if max(shortest.length) <= length), 1)
    for extra in range(count):
        circles = shortest.longer(extra)
        cropped, number = with_crops(folded, strides, circles)
        wanted = {target: number[place[target]] for target in targets}
        whole = _growth(cropped, grid or circles, set(wanted.values()), circles)
        found.append({target: whole[k] for target, k in wanted.items()})
        if grid is not None:
            break
    least = {target: torch.stack([each[target] for each in found]).amin() for target in targets}
    return Growth(least, len(cropped) - len(folded))


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


def _growth(values: Sequence[Value], grid: Circles, targets: Collection[int], circles: Circles) -> dict[int, Tensor]:
    """Return the growth of the targets on one torus, or at all frequencies by a grid among them, by LipLT."""
    coarse = grid.length[0] < circles.length[0], grid.length[1] < circles.length[1]
    bent = {k: value.slopes for k, value in enumerate(values) if value.slopes is not None}
    wanted = sorted({*targets, *(values[k].uses[0].source for k in bent)})
    norms: dict[tuple[int, int], Tensor] = {}
    for rows in _row_pieces(values, grid):
        frequencies = Frequencies(values, grid, rows, coarse)
        for start in (0, *bent):
            for end, norm in frequencies.path_norms(start, wanted).items():
                norms[end, start] = norms[end, start].maximum(norm) if (end, start) in norms else norm
    growth = {0: torch.ones((), dtype=torch.float64, device=rows.device)}
    for end in wanted:
        if end in bent:  # activations of activations
            slopes, source = bent[end], values[end].uses[0].source
            growth[end] = inflate((abs(slopes.mu) + slopes.rho) * growth[source], gamma(4))
            continue
        terms = [norms[end, 0]] if (end, 0) in norms else []
        terms += [
            slopes.rho * norms[end, start] * growth[values[start].uses[0].source]
            for start, slopes in bent.items()
            if (end, start) in norms
        ]
        if terms:
            growth[end] = inflate(torch.stack(terms).sum(), gamma(4 * len(bent) + 8))
    return growth


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
    kernels = [use.stencil.kernel for value in values for use in value.uses if use.stencil is not None]
    rows = torch.arange(circles.length[0] // circles.period[0] // 2 + 1, device=kernels[0].device if kernels else None)
    at_once = max(1, _CHUNK_BYTES // (16 * (sum(numbers) + max(paths))))
    pieces: tuple[Tensor, ...] = rows.split(at_once)
    return pieces


def _frequencies_per_row(circles: Circles, stride: Pair) -> int:
    return circles.period[0] * circles.length[1] // (stride[0] * stride[1])
