"""Linear maps as the checker reads them: every description becomes its matrix, with a bound on each entry's error."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.activations import Declared
from curvcert.checker.files import Content
from curvcert.checker.limits import MOST_ENTRIES, require_entries
from curvcert.checker.outward import Array, Enclosed, Factor, plus, product, scaled, up
from curvcert.errors import UnsupportedModule

MOST_MAPS = 1024
_DEEPEST = 64
_MOST_TAPS = 2**16
"""Bounds on the maps of a network, on nesting, and on the taps of a convolution's groups."""


class Reading:
    """A network file while it is read, and how much it may still ask for."""

    def __init__(
        self, content: Content, most: int = MOST_ENTRIES, declared: Mapping[str, Declared] = MappingProxyType({})
    ) -> None:
        """Begin with a file's content; so many entries may be made beside twice those that it holds.

        `declared` has the formulas of a user's own activations, by their names.
        """
        self.declared = declared
        self._content = content
        self._maps = MOST_MAPS
        self._entries = 0
        self.most = most + 2 * sum(value.size for value in content.arrays.values())

    @property
    def header(self) -> dict[str, Any]:
        """The description of the network."""
        return self._content.header

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that names the file."""
        self._content.refuse(why)

    def array(self, name: str) -> NDArray[Any]:
        """Return an array of float64 numbers, or refuse the file."""
        return self._content.array(name, "<f8")

    def one_more(self) -> None:
        """Count a map."""
        self._maps -= 1
        if self._maps < 0:
            raise UnsupportedModule(f"more than {MOST_MAPS} linear maps")

    def room(self, rows: int, columns: int, copies: int = 1) -> None:
        """Count a matrix that is to be made, or several of its shape."""
        self.count(copies * rows * columns)

    def count(self, entries: int) -> None:
        """Count entries of arrays that are to be made."""
        self._entries += entries
        require_entries(self._entries, self.most)


def linear_map(content: Reading, entry: Any) -> tuple[Factor, int, int]:
    """Return the matrix of a map, None for an identity, and its numbers of rows and columns."""
    if isinstance(entry, dict) and entry.get("map") in ("identity", "reshape"):
        content.one_more()
        rows, columns = _declared(content, entry)
        if rows != columns:
            content.refuse("an identity between different sizes")
        return None, rows, columns
    found = explicit_map(content, entry)
    return found, *found.value.shape


def stored(content: Reading, name: Any) -> Array:
    """Return an array of weights: finite, and not beyond what is bounded here."""
    value: Array = content.array(name if isinstance(name, str) else "")
    if not np.isfinite(value).all():
        content.refuse("a weight is NaN or infinite")
    if value.size and float(np.abs(value).max()) > 1e100:
        content.refuse("a weight is beyond 1e100")
    return value


def shape_of(content: Reading, value: Any) -> tuple[int, ...]:
    """Return a shape: positive whole numbers."""
    proper = isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 < n < 2**31 for n in value)
    if not proper:
        content.refuse("a shape that is not a list of positive whole numbers")
    return tuple(value)


def pair_of(content: Reading, value: Any, least: int) -> tuple[int, int]:
    """Return two whole numbers, none below the least."""
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and least <= n < 2**16 for n in value)):
        content.refuse("a stride, padding, dilation or window that is not two whole numbers")
    return value[0], value[1]


def explicit_map(content: Reading, entry: Any, depth: int = 0) -> Enclosed:
    """Return the matrix of a map."""
    if not isinstance(entry, dict) or depth > _DEEPEST:
        content.refuse("a linear map that is not described, or too deeply nested")
    content.one_more()
    match entry.get("map"):
        case "identity" | "zero" | "reshape":
            return _trivial(content, entry)
        case "dense":
            weight = stored(content, entry.get("weight"))
            if weight.ndim != 2 or not weight.size:
                content.refuse("a dense weight that is not a matrix")
            content.room(*weight.shape)
            return Enclosed(weight)
        case "diagonal":
            return _diagonal(content, entry)
        case "conv":
            return Enclosed(_explicit(content, convolution_of(content, entry)))
        case "average_pool":
            return _average(content, entry)
        case "permutation":
            return _permutation(content, entry)
        case "segment":
            return _segment(content, entry)
        case "flip" | "slice" | "gather":
            return _selection(content, entry)
        case "circuit":
            return _circuit(content, entry, depth)
        case "transposed":
            return explicit_map(content, entry.get("of"), depth + 1).transposed
        case "scaled":
            factor = entry.get("factor")
            if not isinstance(factor, float | int) or isinstance(factor, bool) or not abs(factor) < 1e100:
                content.refuse("a map is scaled by something that is not a number")
            return scaled(float(factor), explicit_map(content, entry.get("of"), depth + 1))
        case "sum":
            return _folded(content, entry.get("terms"), depth, False)
        case "product":
            return _folded(content, entry.get("factors"), depth, True)
        case _:
            raise UnsupportedModule(f"the linear map {str(entry.get('map'))[:40]!r} is not covered")


def _declared(content: Reading, entry: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and columns of an identity, a reshape or a zero."""
    source, target = shape_of(content, entry.get("in_shape")), shape_of(content, entry.get("out_shape"))
    return math.prod(target), math.prod(source)


def _trivial(content: Reading, entry: dict[str, Any]) -> Enclosed:
    rows, columns = _declared(content, entry)
    if entry["map"] != "zero" and rows != columns:
        content.refuse("an identity between different sizes")
    content.room(rows, columns)
    return Enclosed(np.zeros((rows, columns)) if entry["map"] == "zero" else np.eye(rows))


def _folded(content: Reading, entries: Any, depth: int, multiply: bool) -> Enclosed:
    if not isinstance(entries, list) or not 0 < len(entries) <= 256:
        content.refuse("a sum or product without parts")
    total: Factor = None
    for entry in entries:
        reshaped = isinstance(entry, dict) and entry.get("map") in ("identity", "reshape")
        if multiply and reshaped and total is not None:
            if linear_map(content, entry)[1] != total.value.shape[1]:
                content.refuse("the factors of a product do not fit together")
            continue
        part = explicit_map(content, entry, depth + 1)
        if total is None:
            total = part
            continue
        expected = part.value.shape[0] == total.value.shape[1] if multiply else part.value.shape == total.value.shape
        if not expected:
            content.refuse("the parts of a sum or product do not fit together")
        content.room(len(total.value), part.value.shape[1], copies=2)  # itself and its error
        total = product(total, part) if multiply else plus(total, part)
    if total is None:
        content.refuse("a sum or product without parts")
    return total


def _circuit(content: Reading, entry: dict[str, Any], depth: int) -> Enclosed:
    """Return the last of several matrices, each a sum of products of maps with earlier ones; the first is I."""
    steps = entry.get("steps")
    if not isinstance(steps, list) or not 0 < len(steps) <= 256:
        content.refuse("a circuit without steps")
    values: list[Factor] = [None]
    size: int | None = None
    for step in steps:
        if not isinstance(step, list) or not 0 < len(step) <= 256:
            content.refuse("a step of a circuit without parts")
        total: Factor = None
        for part in step:
            source = part.get("source") if isinstance(part, dict) else None
            if type(source) is not int or not 0 <= source < len(values):
                content.refuse("a step of a circuit that reads a later value")
            A, before = explicit_map(content, part.get("map"), depth + 1), values[source]
            rows, columns = A.value.shape
            size = columns if source == 0 and size is None else size
            fits = columns == (size if before is None else len(before.value))
            if not fits or (total is not None and len(total.value) != rows):
                content.refuse("the steps of a circuit do not fit together")
            content.room(rows, size or columns, copies=2)
            image = A if before is None else product(A, before)
            total = image if total is None else plus(total, image)
        values.append(total)
    found = values[-1]
    assert found is not None
    return found


def _segment(content: Reading, entry: dict[str, Any]) -> Enclosed:
    (total,), start, part = shape_of(content, [entry.get("total")]), entry.get("start"), entry.get("shape")
    size = math.prod(shape_of(content, part))
    if type(start) is not int or not 0 <= start <= total - size:
        content.refuse("a segment that does not fit into its vector")
    content.room(size, total)
    return Enclosed(np.eye(size, total, start))


def _selection(content: Reading, entry: dict[str, Any]) -> Enclosed:
    """Return the rows of the identity that a flip of axes, a slice, or indices along them take, in their order."""
    flips = entry["map"] == "flip"
    source = shape_of(content, entry.get("shape" if flips else "in_shape"))
    content.count(math.prod(source))
    gathers = entry["map"] == "gather"
    cut = _gathered(content, entry, source) if gathers else _cut(content, entry, source, flips)
    order = np.arange(math.prod(source)).reshape(source)[cut].reshape(-1)
    content.room(order.size, math.prod(source))
    rows = np.zeros((order.size, math.prod(source)))
    rows[np.arange(order.size), order] = 1.0
    return Enclosed(rows)


def _gathered(content: Reading, entry: dict[str, Any], source: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
    """Return which entries a gathering takes along every axis."""
    indices = entry.get("indices")
    if not isinstance(indices, list) or len(indices) != len(source):
        content.refuse("indices along other axes than there are")
    for chosen, n in zip(indices, source, strict=True):
        if not isinstance(chosen, list) or not chosen or not all(type(k) is int and 0 <= k < n for k in chosen):
            content.refuse("an index that is not in its tensor")
    content.count(math.prod(map(len, indices)))
    return np.ix_(*indices)


def _cut(content: Reading, entry: dict[str, Any], source: tuple[int, ...], flips: bool) -> tuple[slice, ...]:
    """Return what a selection takes along every axis."""
    if flips:
        axes = entry.get("axes")
        if not isinstance(axes, list) or not all(type(a) is int and 0 <= a < len(source) for a in axes):
            content.refuse("a flip of axes that do not exist")
        return tuple(slice(None, None, -1 if axis in axes else 1) for axis in range(len(source)))
    steps, target = shape_of(content, entry.get("steps")), shape_of(content, entry.get("out_shape"))
    starts = entry.get("starts")
    if not isinstance(starts, list) or not all(type(n) is int and n >= 0 for n in starts):
        content.refuse("a slice that starts nowhere")
    if not len(source) == len(starts) == len(steps) == len(target):
        content.refuse("a slice along other axes than it has")
    ends = [start + step * (count - 1) + 1 for start, step, count in zip(starts, steps, target, strict=True)]
    if any(end > size for end, size in zip(ends, source, strict=True)):
        content.refuse("a slice that does not fit into its tensor")
    return tuple(slice(start, end, step) for start, end, step in zip(starts, ends, steps, strict=True))


def _diagonal(content: Reading, entry: dict[str, Any]) -> Enclosed:
    weight, shape = stored(content, entry.get("weight")), shape_of(content, entry.get("shape"))
    content.room(math.prod(shape), math.prod(shape))
    try:
        full = np.broadcast_to(weight, shape)
    except ValueError:
        content.refuse("a diagonal weight that does not fit its shape")
    return Enclosed(np.diag(full.reshape(-1)))


def _permutation(content: Reading, entry: dict[str, Any]) -> Enclosed:
    source, axes = shape_of(content, entry.get("in_shape")), entry.get("axes")
    if not isinstance(axes, list) or not all(type(a) is int for a in axes) or sorted(axes) != list(range(len(source))):
        content.refuse("a permutation that is no order of the axes")
    size = math.prod(source)
    content.room(size, size)
    return Enclosed(np.eye(size)[np.arange(size).reshape(source).transpose(axes).reshape(-1)])


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution as a file describes it: (outputs, inputs of a group, height, width), and the size of its result."""

    weight: Array
    image: tuple[int, ...]
    stride: tuple[int, int]
    sides: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    groups: int
    circular: bool
    result: tuple[int, int]


def convolution_of(content: Reading, entry: dict[str, Any]) -> Convolution:
    """Read the description of a convolution."""
    weight, image = stored(content, entry.get("weight")), shape_of(content, entry.get("image_shape"))
    stride, dilation = pair_of(content, entry.get("stride"), 1), pair_of(content, entry.get("dilation"), 1)
    padding, groups = entry.get("padding"), entry.get("groups")
    if weight.ndim != 4 or len(image) != 3 or not isinstance(padding, list) or len(padding) != 2:
        content.refuse("a convolution whose kernel or image has the wrong number of dimensions")
    sides = pair_of(content, padding[0], 0), pair_of(content, padding[1], 0)
    if type(groups) is not int or groups < 1 or weight.shape[1] * groups != image[0] or weight.shape[0] % groups:
        content.refuse("a convolution whose groups do not fit its channels")
    circular = entry.get("padding_mode") == "circular"
    if not circular and entry.get("padding_mode") != "zeros":
        raise UnsupportedModule("a padding mode beyond zeros and circular")
    outputs, _, *kernel = weight.shape
    if min(kernel) < 1 or outputs < 1:
        content.refuse("an empty kernel")
    axes = zip(image[1:], sides, kernel, stride, dilation, strict=True)
    height, width = ((n + sum(side) - d * (k - 1) - 1) // s + 1 for n, side, k, s, d in axes)
    if min(height, width) < 1:
        content.refuse("a kernel that does not fit into its image")
    return Convolution(weight, image, stride, sides, dilation, groups, circular, (height, width))


def _explicit(content: Reading, conv: Convolution) -> Array:
    """Return the matrix of y[o, i] = sum over c, u of K[o, c, u] x[c, s i + d u - P], position by position."""
    image, groups, (height, width) = conv.image, conv.groups, conv.result
    outputs, per_group, *kernel = conv.weight.shape
    content.room(outputs * height * width, math.prod(image))
    wraps = conv.circular and any(d * (k - 1) >= n for n, k, d in zip(image[1:], kernel, conv.dilation, strict=True))
    if wraps or groups * math.prod(kernel) > _MOST_TAPS:
        raise UnsupportedModule("a kernel that wraps around its image, or has too many taps")
    matrix = np.zeros((groups, outputs // groups, height, width, groups, per_group, *image[1:]))
    taps = conv.weight.reshape(groups, outputs // groups, per_group, *kernel)
    for a, b in np.ndindex(*kernel):
        i, y = _met(height, conv.stride[0], a * conv.dilation[0] - conv.sides[0][0], image[1], conv.circular)
        j, x = _met(width, conv.stride[1], b * conv.dilation[1] - conv.sides[1][0], image[2], conv.circular)
        for g in range(groups):
            # One entry for each output position: no other tap of this pass meets it.
            block = matrix[g, :, :, :, g]
            block[:, i[:, None], j, :, y[:, None], x] += taps[g, :, :, a, b]
    return matrix.reshape(outputs * height * width, -1)


def _met(outputs: int, stride: int, shift: int, n: int, circular: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the places along an axis that a tap is met at: of the output, and of the image."""
    places = np.arange(outputs)
    read = places * stride + shift
    if circular:
        return places, read % n
    inside = (read >= 0) & (read < n)
    return places[inside], read[inside]


@dataclass(frozen=True)
class Pooling:
    """Average pooling as a file has it, and the height and width of what it gives."""

    image: tuple[int, int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    result: tuple[int, int]


def pooling_of(content: Reading, entry: dict[str, Any]) -> Pooling:
    """Return a pooling whose windows fit into its image."""
    image = shape_of(content, entry.get("image_shape"))
    window, stride = pair_of(content, entry.get("kernel_size"), 1), pair_of(content, entry.get("stride"), 1)
    padding = pair_of(content, entry.get("padding"), 0)
    if len(image) != 3:
        content.refuse("a pooling of something that is not an image")
    sizes = zip(image[1:], padding, window, stride, strict=True)
    height, width = ((n + 2 * pad - k) // s + 1 for n, pad, k, s in sizes)
    if min(height, width) < 1:
        content.refuse("a window that does not fit into its image")
    return Pooling((image[0], image[1], image[2]), window, stride, padding, (height, width))


def _average(content: Reading, entry: dict[str, Any]) -> Enclosed:
    pool = pooling_of(content, entry)
    channels, *sides = pool.image
    content.room(channels * math.prod(pool.result), math.prod(pool.image), copies=2)
    axes = zip(sides, pool.padding, pool.window, pool.stride, pool.result, strict=True)
    rows, columns = (_windows(*axis) for axis in axes)
    value = np.kron(np.eye(channels), np.kron(rows, columns)) / math.prod(pool.window)
    return Enclosed(value, up(2.0**-53 * value))


def _windows(n: int, padding: int, window: int, stride: int, outputs: int) -> Array:
    """Return which places of an axis each window reads, as 0 and 1."""
    start = np.arange(outputs)[:, None] * stride - padding
    place = np.arange(n)[None]
    read: Array = ((place >= start) & (place < start + window)).astype(np.float64)
    return read
