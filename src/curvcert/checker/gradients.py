"""Bounds on the gradients of all differences of classes that hold at every input, in l2: they weigh curvatures.

With respect to a value: by the constants of the blocks behind it, summed over its readers.  With respect to the
activations of a block: by those, and by the sum over paths that `growth.py` has carried back from the output.
"""

import numpy as np

from curvcert.checker.activations import Activation
from curvcert.checker.growth import Growth, Target
from curvcert.checker.lipschitz import Linear, functional_steps
from curvcert.checker.outward import Array, Enclosed, U, beside, gamma, lengths, product, row_lengths, times, up
from curvcert.checker.pieces import Blocks, read_outs


def last_slopes(blocks: Blocks, part: Linear) -> Array:
    """Return Lipschitz constants of every f_i - f_j over the last block: as it is, or about its middle slope."""
    last = blocks.last
    rows, outer, skip = read_outs(blocks, None)
    found = functional_steps(last, part, outer, skip, 2.0)
    if last.act is None:
        return found
    about = row_lengths(product(rows, part.linear), 2) + part.radius * row_lengths(outer, 2) * part.W
    return np.minimum(found, up(about, 8))


def value_gradients(blocks: Blocks, parts: list[Linear], sizes: list[Array] | None = None) -> dict[int, Array]:
    """Bound the gradients of every f_i - f_j with respect to every value that a block reads.

    `sizes` are those with respect to activations, once they are known.
    """
    _, outer, skip = read_outs(blocks, None)
    found: dict[int, Array] = {}
    for k in range(len(parts) - 1, -1, -1):
        piece, part, last = blocks.pieces[k], parts[k], k == len(parts) - 1
        behind = np.ones(len(outer.value)) if last else found[piece.output]
        whole = last_slopes(blocks, part) if last else behind * part.transformed
        steep = 0.0 if piece.act is None else piece.act.steepest
        G = row_lengths(outer, 2) if last else behind * part.G
        G = G if sizes is None or piece.act is None else np.minimum(G, sizes[k])
        skips = None if skip is None or not last else piece.split(skip)
        for place, source in enumerate(piece.sources):
            sent = behind * part.H_parts[place] if not last else np.zeros(len(whole))
            sent = sent if skips is None else row_lengths(skips[place], 2)
            if part.W_parts and piece.act is not None:
                sent = sent + steep * G * part.W_parts[place]
            # A part of a gradient is no longer than the whole.
            sent = np.minimum(up(sent, 16), up(whole, 16))
            found[source] = up(found[source] + sent) if source in found else sent
    return found


def gradient_sizes(blocks: Blocks, growth: Growth, values: dict[int, Array]) -> list[Array]:
    """Bound the 2-norms of the gradients of every f_i - f_j with respect to each block's activations."""
    rows, _, _ = read_outs(blocks, None)
    parts, reach = growth.parts, growth.paths({blocks.last.output: rows}).reach
    found: dict[Target, Array] = {}
    slack = 8 * len(parts) + 8
    for place in range(len(blocks.levels) - 1, -1, -1):
        level = blocks.levels[place]
        above = blocks.levels[place + 1 :]
        for k in level:
            candidates = [_backward(growth, found, above, k, _row_norms(reach, k, len(rows.value)))]
            candidates += _onwards(blocks, growth, found, values, k)
            found[k] = up(np.min(candidates, axis=0), slack)
        if len(level) > 1:
            ends = [reach[k] if k in reach else Enclosed(np.zeros((len(rows.value), parts[k].hidden))) for k in level]
            joint = _backward(growth, found, above, level, row_lengths(beside([_known(A) for A in ends]), 2))
            found[level] = np.minimum(up(joint, slack), lengths(np.array([found[k] for k in level]), 2, 0))
            for k in level:
                found[k] = np.minimum(found[k], found[level])
    return [found.get(k, np.zeros(len(rows.value))) for k in range(len(parts))]


def _known(A: Enclosed | None) -> Enclosed:
    assert A is not None
    return A


def _row_norms(reach: dict[int, Enclosed | None], k: int, count: int) -> Array:
    return row_lengths(_known(reach[k]), 2) if k in reach else np.zeros(count)


def _backward(
    growth: Growth, found: dict[Target, Array], above: list[tuple[int, ...]], to: Target, end: Array
) -> Array:
    """Return the sum over paths to the output from a block, or a level; `end` is the one past all others."""
    total = end
    for level in above:
        share = np.zeros(len(end))
        for j in level:
            share = share + growth.parts[j].radius * growth.links[j].get(to, 0.0) * found[j]
        if len(level) > 1:
            share = np.minimum(share, growth.links[level].get(to, 0.0) * found[level])
        total = total + share
    return total


def _onwards(
    blocks: Blocks, growth: Growth, found: dict[Target, Array], values: dict[int, Array], k: int
) -> list[Array]:
    """Return what the constants behind a block's output give, and the one block that reads it, if it has no skip."""
    piece, parts = blocks.pieces[k], growth.parts
    if k == len(parts) - 1:
        return []
    candidates = [parts[k].G * values[piece.output]]
    readers = [j for j, one in enumerate(blocks.pieces) if piece.output in one.sources]
    one = blocks.pieces[readers[0]]
    if len(readers) == 1 and one.act is not None and one.W is not None and one.H is None:
        W = one.split(one.W)[one.sources.index(piece.output)]
        link = times(W, piece.G)
        assert link is not None
        candidates.append(one.act.steepest * link.norm * found[readers[0]])
    return candidates


Interval = tuple[Array, Array]
"""The lowest and the highest that entries can be."""


def weights(act: Activation, entries: Interval, side: str) -> Array:
    r"""Bound :math:`\max(u \phi'', 0)` for all u between and all :math:`\phi''`; from below of -u, or of both."""
    low, high = act.second.range
    corners = np.array([end * q for end in entries for q in (low, high)])
    slack = 8 * U * np.abs(corners).max(axis=0)
    above, below = corners.max(axis=0) + slack, slack - corners.min(axis=0)
    both = np.maximum(np.abs(entries[0]), np.abs(entries[1])) * act.c
    one = above if side == "above" else below if side == "below" else both
    found: Array = np.maximum(up(np.minimum(one, both)), 0.0)
    return found


def gradient_entries(blocks: Blocks, sizes: list[Array], values: dict[int, Array]) -> list[Interval]:
    """Enclose every entry of the gradients with respect to activations, by intervals through the transposed maps.

    No entry exceeds the whole: `sizes` with respect to activations, `values` to what blocks read.
    """
    rows, _, _ = read_outs(blocks, None)
    ends = {blocks.last.output: (rows.value, rows.value)}
    found: list[Interval] = []
    for piece, size in zip(reversed(blocks.pieces), reversed(sizes), strict=True):
        end, last = ends[piece.output], piece is blocks.last
        behind = None if last else values[piece.output]
        end = end if behind is None else _within(*end, behind[:, None])
        if piece.act is None or piece.W is None:
            assert piece.H is not None
            below = _sent(piece.H, end, behind)
            found.append((np.zeros((len(size), 0)), np.zeros((len(size), 0))))
        else:
            inner = _within(*(end if piece.G is None else _sent(piece.G, end, behind)), size[:, None])
            found.append(inner)
            corners = np.array([slope * bound for slope in piece.act.slope for bound in inner])
            slack = 4 * U * np.abs(corners).max(axis=0)
            slopes = corners.min(axis=0) - slack, corners.max(axis=0) + slack
            below = _sent(piece.W, slopes, piece.act.steepest * size)
            if piece.H is not None:
                below = _sum(below, _pulled(piece.H, *end))
        start = 0
        for source, count in zip(piece.sources, piece.sizes, strict=True):
            part = below[0][:, start : start + count], below[1][:, start : start + count]
            ends[source] = _sum(ends[source], part) if source in ends else part
            start += count
    return found[::-1]


def _within(low: Array, high: Array, cap: Array) -> tuple[Array, Array]:
    return np.maximum(low, -cap), np.minimum(high, cap)


def _sent(A: Enclosed, end: tuple[Array, Array], size: Array | None) -> tuple[Array, Array]:
    """Enclose g A for every row vector g in an interval, no longer than `size` where that is given."""
    below = _pulled(A, *end)
    return below if size is None else _within(*below, up(size[:, None] * row_lengths(A.transposed, 2)[None], 8))


def _sum(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return _down(left[0] + right[0]), _up(left[1] + right[1])


def _up(x: Array) -> Array:
    return x + 4 * U * np.abs(x)


def _down(x: Array) -> Array:
    return x - 4 * U * np.abs(x)


def _pulled(A: Enclosed, low: Array, high: Array) -> tuple[Array, Array]:
    """Enclose g A for every row vector g between low and high."""
    n = len(A.value)
    centre = 0.5 * (low + high)
    radius = up(np.maximum(high - centre, centre - low))
    size = A.size
    width = radius @ size + gamma(n + 2) * (np.abs(centre) @ size)
    if A.error is not None:
        width = width + np.abs(centre) @ A.error
    middle, width = centre @ A.value, up(width, n + 8)
    return _down(middle - width), _up(middle + width)
