r"""Networks of images that are too large for explicit matrices: convolutions stay kernels, and every node one map.

A product of maps becomes nodes in a row, a sum several terms of one node.  Scales of channels become part of the kernel
or the matrix beside them.  What is neither a kernel nor a matrix of moderate size is not covered.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from curvcert.checker.limits import require_passes
from curvcert.checker.maps import Reading, convolution_of, explicit_map, pooling_of, shape_of, stored
from curvcert.checker.model import Activated, Affine, Input, Map, Node, Term, activated, offset_of
from curvcert.checker.outward import TINY, Array, Enclosed, U, up
from curvcert.checker.windows import Stencil, Window
from curvcert.errors import UnsupportedModule

MOST_IN_KERNELS = 2**24
"""Entries of kernels, and of matrices that are no part of the file, beside twice those that a file holds."""

MOST_ROWS = 1600
"""Up to this size the rows of a value are carried back one by one."""

_MOST_BRANCHES = 16
"""Terms that the sums in a map may have, multiplied out."""


@dataclass(frozen=True, eq=False)
class _Scales:
    """A multiple of every channel of an image, or of every number of a vector; a single one is one of all.

    `image` is the shape of the image, where it is known to be one.
    """

    factors: Array
    image: tuple[int, int, int] | None = None


Stage = Enclosed | Window | _Scales
Stages = tuple[Stage, ...]
"""Maps one after another, the first one first; none of them is the identity."""


def wide_nodes(content: Reading, entries: list[dict[str, Any]], in_shape: tuple[int, ...]) -> tuple[Node, ...]:
    """Return the nodes of a network file; nothing reads those that a product of maps adds but the next one."""
    nodes: list[Node] = [Input(math.prod(in_shape))]
    number = [0]
    for entry in entries:
        if entry["kind"] == "affine":
            _add_affine(content, entry, nodes, number)
        elif entry["kind"] == "elementwise":
            source = number[entry["source"]]
            nodes.append(activated(content, entry, source, nodes[source].size))
        else:
            raise UnsupportedModule(f"a node of the kind {entry['kind']!r} in a network of large images")
        number.append(len(nodes) - 1)
    sizes = [node.size for node in nodes]
    passes = [sum(_work(term.map) for term in node.terms) if isinstance(node, Affine) else 0 for node in nodes]
    inner = {node.source for node in nodes if isinstance(node, Activated)}
    require_passes(sizes, passes, [k for k in inner if sizes[k] <= MOST_ROWS], sizes[-1])
    return tuple(nodes)


def _work(A: Map) -> int:
    if A is None:
        return 0
    return A.value.size if isinstance(A, Enclosed) else A.stencil.kernel.size * math.prod(A.target[1:])


def _add_affine(content: Reading, entry: dict[str, Any], nodes: list[Node], number: list[int]) -> None:
    offset, error = offset_of(content, entry)
    terms: list[Term] = []
    for term in entry["terms"]:
        source = number[term["source"]]
        for stages in _stages(content, term.get("map")):
            maps = _merged(stages)
            here = source
            for one in maps[:-1]:
                _require_fit(content, one, nodes[here].size)
                size = one.shape[0]
                nodes.append(Affine((Term(here, one),), np.zeros(size), np.zeros(size)))
                here = len(nodes) - 1
            last = maps[-1] if maps else None
            rows = nodes[here].size if last is None else last.shape[0]
            if last is not None:
                _require_fit(content, last, nodes[here].size)
            if rows != len(offset):
                content.refuse(f"a map of {rows} rows in a node of {len(offset)} numbers does not fit")
            terms.append(Term(here, last))
    nodes.append(Affine(tuple(terms), offset, error))


def _require_fit(content: Reading, one: Enclosed | Window, size: int) -> None:
    if one.shape[1] != size:
        content.refuse(f"a map of {one.shape[1]} numbers behind one of {size} does not fit")


def _stages(content: Reading, entry: Any, depth: int = 0) -> list[Stages]:
    """Return a map as a sum of products."""
    if not isinstance(entry, dict) or depth > 16:
        content.refuse("a linear map that is not described, or too deeply nested")
    match entry.get("map"):
        case "identity" | "reshape":
            content.one_more()
            source, target = shape_of(content, entry.get("in_shape")), shape_of(content, entry.get("out_shape"))
            if math.prod(source) != math.prod(target):
                content.refuse("an identity between different sizes")
            return [()]
        case "conv":
            content.one_more()
            return [(_window(content, entry),)]
        case "average_pool":
            content.one_more()
            return [(_average(content, entry),)]
        case "diagonal":
            content.one_more()
            return [(_scales(content, entry),)]
        case "scaled":
            factor = entry.get("factor")
            if not isinstance(factor, float | int) or isinstance(factor, bool) or not abs(factor) < 1e100:
                content.refuse("a map is scaled by something that is not a number")
            scale = _Scales(np.array([float(factor)]))
            return [(*stages, scale) for stages in _stages(content, entry.get("of"), depth + 1)]
        case "transposed":
            return [
                tuple(map(_stage_transposed, reversed(one))) for one in _stages(content, entry.get("of"), depth + 1)
            ]
        case "sum":
            parts = _parts(content, entry.get("terms"))
            found = [stages for part in parts for stages in _stages(content, part, depth + 1)]
        case "product":
            found = [()]
            for part in reversed(_parts(content, entry.get("factors"))):
                behind = _stages(content, part, depth + 1)
                if len(found) * len(behind) > _MOST_BRANCHES:
                    raise UnsupportedModule(f"a sum of more than {_MOST_BRANCHES} products")
                found = [(*first, *then) for first in found for then in behind]
        case _:
            found = [(explicit_map(content, entry),)]
    if len(found) > _MOST_BRANCHES:
        raise UnsupportedModule(f"a sum of more than {_MOST_BRANCHES} products")
    return found


def _parts(content: Reading, entries: Any) -> list[Any]:
    if not isinstance(entries, list) or not 0 < len(entries) <= 256:
        content.refuse("a sum or product without parts")
    return entries


def _window(content: Reading, entry: dict[str, Any]) -> Window:
    conv = convolution_of(content, entry)
    if conv.circular:
        raise UnsupportedModule("circular padding in a network of large images")
    outputs, per_group, *taps = conv.weight.shape
    spread = [d * (k - 1) + 1 for d, k in zip(conv.dilation, taps, strict=True)]
    content.count(2 * outputs * conv.image[0] * math.prod(spread))
    kernel = np.zeros((outputs, conv.image[0], *spread))
    for g in range(conv.groups):
        rows, columns = outputs // conv.groups, slice(g * per_group, (g + 1) * per_group)
        chosen = slice(g * rows, (g + 1) * rows)
        kernel[chosen, columns, :: conv.dilation[0], :: conv.dilation[1]] = conv.weight[chosen]
    first = -conv.sides[0][0], -conv.sides[1][0]
    return _of_kernel(kernel, first, conv.stride, (conv.image[0], conv.image[1], conv.image[2]), conv.result)


def _of_kernel(
    kernel: Array, first: tuple[int, int], stride: tuple[int, int], image: tuple[int, int, int], result: tuple[int, int]
) -> Window:
    stencil = Stencil(kernel, first, stride, np.zeros(kernel.shape[:2]))
    return Window(stencil, image, (len(kernel), *result))


def _average(content: Reading, entry: dict[str, Any]) -> Window:
    pool = pooling_of(content, entry)
    channels, size = pool.image[0], math.prod(pool.window)
    content.count(2 * channels**2 * size)
    kernel = np.zeros((channels, channels, *pool.window))
    kernel[np.arange(channels), np.arange(channels)] = 1 / size
    first = -pool.padding[0], -pool.padding[1]
    stencil = Stencil(kernel, first, pool.stride, up(2 * U * kernel.sum(axis=(2, 3)), 8))
    return Window(stencil, pool.image, (channels, *pool.result))


def _scales(content: Reading, entry: dict[str, Any]) -> _Scales:
    weight, shape = stored(content, entry.get("weight")), shape_of(content, entry.get("shape"))
    content.count(math.prod(shape))
    try:
        full = np.broadcast_to(weight, shape)
    except ValueError:
        content.refuse("a diagonal weight that does not fit its shape")
    if len(shape) == 3:
        if bool((full != full[:, :1, :1]).any()):
            raise UnsupportedModule("scales that differ from position to position, in a network of large images")
        return _Scales(np.ascontiguousarray(full[:, 0, 0]), (shape[0], shape[1], shape[2]))
    return _Scales(np.ascontiguousarray(full.reshape(-1)))


def _stage_transposed(stage: Stage) -> Stage:
    return stage if isinstance(stage, _Scales) else transposed(stage)


def transposed(stage: Enclosed | Window) -> Enclosed | Window:
    """Return the transposed map.

    Raises:
        UnsupportedModule: if it is a window with a stride.
    """
    if isinstance(stage, Enclosed):
        return stage.transposed
    stencil = stage.stencil
    if stencil.stride != (1, 1):
        raise UnsupportedModule("a transposed convolution with a stride, in a network of large images")
    taps = stencil.kernel.shape[2:]
    first = tuple(-(a + n - 1) for a, n in zip(stencil.first, taps, strict=True))
    kernel = np.ascontiguousarray(stencil.kernel.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
    return Window(Stencil(kernel, (first[0], first[1]), (1, 1), stencil.off.T), stage.target, stage.source)


def _merged(stages: Stages) -> list[Enclosed | Window]:
    """Return the same maps with every scale folded into one beside it."""
    found: list[Enclosed | Window] = []
    waiting: list[_Scales] = []
    for stage in stages:
        if isinstance(stage, _Scales):
            if found and not waiting:
                found[-1] = rows_scaled(found[-1], stage.factors)
            else:
                waiting.append(stage)
            continue
        one = stage
        for scales in reversed(waiting):
            one = columns_scaled(one, scales.factors)
        waiting = []
        found.append(one)
    return [*found, *(_alone(scales) for scales in waiting)]


def _alone(scales: _Scales) -> Window:
    """Return scales as a window of one position."""
    if scales.image is None:
        raise UnsupportedModule("scales of a vector beside no other map, in a network of large images")
    stencil = Stencil(np.diag(scales.factors)[:, :, None, None], (0, 0), (1, 1), np.zeros((len(scales.factors),) * 2))
    return Window(stencil, scales.image, scales.image)


def rows_scaled(one: Enclosed | Window, d: Array) -> Enclosed | Window:
    """Return diag(d) A, one number for each row or each channel."""
    return _of_rows(one, d) if isinstance(one, Enclosed) else _of_outputs(one, d)


def columns_scaled(one: Enclosed | Window, d: Array) -> Enclosed | Window:
    """Return A diag(d), one number for each column or each channel."""
    if isinstance(one, Enclosed):
        return _of_rows(one.transposed, d).transposed
    d = _fitting(d, one.source[0])
    stencil = one.stencil
    off = (stencil.off + 2 * U * stencil.sums) * np.abs(d)[None]
    kernel = stencil.kernel * d[None, :, None, None]
    return Window(Stencil(kernel, stencil.first, stencil.stride, up(off) + TINY), one.source, one.target)


def _of_rows(one: Enclosed, d: Array) -> Enclosed:
    d = _fitting(d, one.shape[0])
    value = d[:, None] * one.value
    error = U * np.abs(value) if one.error is None else U * np.abs(value) + np.abs(d)[:, None] * one.error
    return Enclosed(value, up(error) + TINY)


def _of_outputs(one: Window, d: Array) -> Window:
    d = _fitting(d, one.target[0])
    stencil = one.stencil
    off = (stencil.off + 2 * U * stencil.sums) * np.abs(d)[:, None]
    kernel = stencil.kernel * d[:, None, None, None]
    return Window(Stencil(kernel, stencil.first, stencil.stride, up(off) + TINY), one.source, one.target)


def _fitting(d: Array, count: int) -> Array:
    if len(d) not in (1, count):
        raise UnsupportedModule("scales of another number than the channels or rows beside them")
    found: Array = np.broadcast_to(d, count)
    return found
