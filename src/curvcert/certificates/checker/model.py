r"""The checker's own way from a network file to a function: explicit matrices, block by block.

Every linear map becomes its matrix with a bound on the rounding of each entry.  A block is
:math:`h(x) = Hx + G\Phi(Wx + b) + c`; `None` stands for H = 0 and for G = I.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from curvcert.certificates.checker.activations import Activation, activation
from curvcert.certificates.checker.files import Content, read
from curvcert.certificates.checker.outward import Array, Enclosed, Factor, plus, product, scaled, times, up
from curvcert.errors import UnsupportedModule

KIND, VERSION = "curvcert-network", 1

LARGEST_SIDE = 4096
"""Rows or columns that an explicit matrix may have."""

_DEEPEST = 64
_MOST_MAPS = 1024
_MOST_WORK = 2**22
"""Bounds on nesting, on the maps of a network and on the taps of a convolution: a file cannot keep us busy for long."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One block on flat vectors: H x + G phi(W x + b) + c, or H x + c where `act` is None."""

    inputs: int
    outputs: int
    H: Enclosed | None
    c: Array
    c_error: Array
    G: Factor = None
    W: Enclosed | None = None
    b: Array | None = None
    b_error: Array | None = None
    act: Activation | None = None
    deviation: float = 0.0


@dataclass(frozen=True, eq=False)
class Model:
    """A network as the checker sees it: its digest, its shapes and its pieces."""

    digest: str
    in_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.pieces[-1].outputs


def read_model(path: Path | str) -> Model:
    """Read a network file.

    Raises:
        InvalidFile: if the file is cut short, altered, or does not describe a network.
        UnsupportedModule: if it describes one with parts that the checker does not cover.
    """
    content = read(path, KIND, VERSION)
    digest = network_digest(content)
    in_shape = _shape(content, content.header.get("in_shape"))
    blocks = content.header.get("blocks")
    if (
        not isinstance(blocks, list)
        or not blocks
        or len(blocks) > _DEEPEST
        or set(content.header) != {"in_shape", "blocks"}
    ):
        content.refuse("the header is not that of a network")
    if json.dumps(blocks).count('"map"') > _MOST_MAPS:
        raise UnsupportedModule(f"more than {_MOST_MAPS} linear maps")
    pieces, size = [], math.prod(in_shape)
    for block in blocks:
        piece = _piece(content, block)
        if piece.inputs != size:
            content.refuse(f"a block takes {piece.inputs} numbers and is given {size}")
        pieces.append(piece)
        size = piece.outputs
    return Model(digest, in_shape, tuple(pieces))


def network_digest(content: Content) -> str:
    """Return the SHA-256 over the description and the arrays in the order in which it names them."""
    digest = hashlib.sha256(json.dumps(content.header, sort_keys=True, separators=(",", ":")).encode())
    for k in range(len(content.arrays)):
        value = content.array(f"t{k}", "<f8")
        digest.update(f"{list(value.shape)}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _piece(content: Content, block: Any) -> Piece:
    kind = block.get("kind") if isinstance(block, dict) else None
    if kind == "affine":
        H = _matrix(content, block.get("H"))
        if H is None:
            content.refuse("an affine block without a map")
        c, c_error = _offset(content, block, "c", len(H.value))
        return Piece(H.value.shape[1], len(H.value), H, c, c_error)
    if kind == "max_pool":
        raise UnsupportedModule("max-pooling is not covered")
    if kind != "block":
        content.refuse("a block of an unknown kind")
    W = _matrix(content, block.get("W"))
    G, H = _matrix(content, block.get("G"), ("identity", "reshape")), _matrix(content, block.get("H"), ("zero",))
    if W is None:
        content.refuse("a block without a map W")
    middle, inputs = W.value.shape
    rows, columns = _declared(content, block["G"]) if G is None else G.value.shape
    across = _declared(content, block["H"]) if H is None else H.value.shape
    if columns != middle or across != (rows, inputs):
        content.refuse("the maps of a block do not fit together")
    outputs = rows
    b, b_error = _offset(content, block, "b", middle)
    c, c_error = _offset(content, block, "c", outputs)
    act, deviation = _activation(content, block.get("activation"))
    return Piece(inputs, outputs, H, c, c_error, G, W, b, b_error, act, deviation)


def _activation(content: Content, entry: Any) -> tuple[Activation, float]:
    if not isinstance(entry, dict) or set(entry) != {"name", "deviation", "declared"}:
        content.refuse("an activation without a name")
    name, deviation = entry["name"], entry["deviation"]
    if not isinstance(name, str) or not isinstance(deviation, int | float) or not 0 <= deviation < 1:
        content.refuse("an activation with an improper name or deviation")
    act = None if entry["declared"] else activation(name)
    if act is None:
        raise UnsupportedModule(f"the activation {name[:40]!r} is not in the checker's table")
    return act, float(deviation)


def _offset(content: Content, block: dict[str, Any], name: str, size: int) -> tuple[Array, Array]:
    value = _stored(content, block.get(name)).reshape(-1)
    error = block.get(f"{name}_error")
    spread = np.zeros(size) if error is None else _stored(content, error).reshape(-1)
    if value.shape != (size,) or spread.shape != (size,) or bool((spread < 0).any()):
        content.refuse(f"the offset {name} of a block has the wrong size")
    return value, spread


def _stored(content: Content, name: Any) -> Array:
    value: Array = content.array(name if isinstance(name, str) else "", "<f8")
    if not np.isfinite(value).all():
        content.refuse("a weight is NaN or infinite")
    if value.size and float(np.abs(value).max()) > 1e100:
        content.refuse("a weight is beyond 1e100")
    return value


def _shape(content: Content, value: Any) -> tuple[int, ...]:
    proper = isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 < n < 2**31 for n in value)
    if not proper:
        content.refuse("a shape that is not a list of positive whole numbers")
    return tuple(value)


def _pair(content: Content, value: Any, least: int) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and least <= n < 2**16 for n in value)):
        content.refuse("a stride, padding, dilation or window that is not two whole numbers")
    return value[0], value[1]


def _fits(rows: int, columns: int) -> None:
    if max(rows, columns) > LARGEST_SIDE:
        raise UnsupportedModule(f"an explicit matrix of {rows} x {columns} is beyond the limit of {LARGEST_SIDE}")


def _matrix(content: Content, entry: Any, absent: tuple[str, ...] = (), depth: int = 0) -> Enclosed | None:
    """Return the matrix of a map, or None for one of those that a block may leave out: G = I, H = 0."""
    if not isinstance(entry, dict) or depth > _DEEPEST:
        content.refuse("a linear map that is not described, or too deeply nested")
    match entry.get("map"):
        case "identity" | "zero" | "reshape":
            return _trivial(content, entry, absent)
        case "dense":
            weight = _stored(content, entry.get("weight"))
            if weight.ndim != 2:
                content.refuse("a dense weight that is not a matrix")
            _fits(*weight.shape)
            return Enclosed(weight)
        case "diagonal":
            return _diagonal(content, entry)
        case "conv":
            return _convolution(content, entry)
        case "average_pool":
            return _average(content, entry)
        case "permutation":
            return _permutation(content, entry)
        case "transposed":
            inner = _inner(content, entry.get("of"), depth)
            return inner.transposed
        case "scaled":
            factor = entry.get("factor")
            if not isinstance(factor, float | int) or isinstance(factor, bool) or not abs(factor) < 1e100:
                content.refuse("a map is scaled by something that is not a number")
            return scaled(float(factor), _inner(content, entry.get("of"), depth))
        case "sum":
            return _folded(content, entry.get("terms"), depth, False)
        case "product":
            return _folded(content, entry.get("factors"), depth, True)
        case _:
            raise UnsupportedModule(f"the linear map {str(entry.get('map'))[:40]!r} is not covered")


def _inner(content: Content, entry: Any, depth: int) -> Enclosed:
    found = _matrix(content, entry, (), depth + 1)
    if found is None:
        content.refuse("a map without a matrix")
    return found


def _declared(content: Content, entry: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and columns of an identity, a reshape or a zero."""
    source, target = _shape(content, entry.get("in_shape")), _shape(content, entry.get("out_shape"))
    return math.prod(target), math.prod(source)


def _trivial(content: Content, entry: dict[str, Any], absent: tuple[str, ...]) -> Enclosed | None:
    rows, columns = _declared(content, entry)
    if entry["map"] != "zero" and rows != columns:
        content.refuse("an identity between different sizes")
    if entry["map"] in absent:
        return None
    _fits(rows, columns)
    return Enclosed(np.zeros((rows, columns)) if entry["map"] == "zero" else np.eye(rows))


def _folded(content: Content, entries: Any, depth: int, multiply: bool) -> Enclosed:
    if not isinstance(entries, list) or not 0 < len(entries) <= 256:
        content.refuse("a sum or product without parts")
    total: Factor = None
    for entry in entries:
        trivial = multiply and isinstance(entry, dict) and entry.get("map") in ("identity", "reshape")
        if trivial and total is not None and _trivial(content, entry, ()) is not None:
            if math.prod(entry["out_shape"]) != total.value.shape[1]:
                content.refuse("the factors of a product do not fit together")
            continue
        part = _inner(content, entry, depth)
        if total is None:
            total = part
            continue
        expected = part.value.shape[0] == total.value.shape[1] if multiply else part.value.shape == total.value.shape
        if not expected:
            content.refuse("the parts of a sum or product do not fit together")
        total = product(total, part) if multiply else plus(total, part)
    if total is None:
        content.refuse("a sum or product without parts")
    return total


def _diagonal(content: Content, entry: dict[str, Any]) -> Enclosed:
    weight, shape = _stored(content, entry.get("weight")), _shape(content, entry.get("shape"))
    _fits(math.prod(shape), 1)
    try:
        full = np.broadcast_to(weight, shape)
    except ValueError:
        content.refuse("a diagonal weight that does not fit its shape")
    return Enclosed(np.diag(full.reshape(-1)))


def _permutation(content: Content, entry: dict[str, Any]) -> Enclosed:
    source, axes = _shape(content, entry.get("in_shape")), entry.get("axes")
    if not isinstance(axes, list) or not all(type(a) is int for a in axes) or sorted(axes) != list(range(len(source))):
        content.refuse("a permutation that is no order of the axes")
    size = math.prod(source)
    _fits(size, size)
    return Enclosed(np.eye(size)[np.arange(size).reshape(source).transpose(axes).reshape(-1)])


def _convolution(content: Content, entry: dict[str, Any]) -> Enclosed:
    weight, image = _stored(content, entry.get("weight")), _shape(content, entry.get("image_shape"))
    stride, dilation = _pair(content, entry.get("stride"), 1), _pair(content, entry.get("dilation"), 1)
    padding, groups = entry.get("padding"), entry.get("groups")
    if weight.ndim != 4 or len(image) != 3 or not isinstance(padding, list) or len(padding) != 2:
        content.refuse("a convolution whose kernel or image has the wrong number of dimensions")
    sides = _pair(content, padding[0], 0), _pair(content, padding[1], 0)
    if type(groups) is not int or groups < 1 or weight.shape[1] * groups != image[0] or weight.shape[0] % groups:
        content.refuse("a convolution whose groups do not fit its channels")
    circular = entry.get("padding_mode") == "circular"
    if not circular and entry.get("padding_mode") != "zeros":
        raise UnsupportedModule("a padding mode beyond zeros and circular")
    return Enclosed(_explicit(content, weight, image, stride, sides, dilation, groups, circular))


def _explicit(
    content: Content,
    weight: Array,
    image: tuple[int, ...],
    stride: tuple[int, int],
    sides: tuple[tuple[int, int], tuple[int, int]],
    dilation: tuple[int, int],
    groups: int,
    circular: bool,
) -> Array:
    """Return the matrix of y[o, i] = sum over c, u of K[o, c, u] x[c, s i + d u - P], position by position."""
    outputs, per_group, *kernel = weight.shape
    if min(kernel) < 1 or outputs < 1:
        content.refuse("an empty kernel")
    axes = zip(image[1:], sides, kernel, stride, dilation, strict=True)
    height, width = ((n + sum(side) - d * (k - 1) - 1) // s + 1 for n, side, k, s, d in axes)
    if min(height, width) < 1:
        content.refuse("a kernel that does not fit into its image")
    _fits(outputs * height * width, math.prod(image))
    wraps = circular and any(d * (k - 1) >= n for n, k, d in zip(image[1:], kernel, dilation, strict=True))
    if wraps or outputs * height * width * math.prod(kernel) > _MOST_WORK:
        raise UnsupportedModule("a kernel that wraps around its image, or has too many taps")
    matrix = np.zeros((outputs, height, width, *image))
    for o in range(outputs):
        first = o // (outputs // groups) * per_group
        channels = slice(first, first + per_group)
        for i, j in np.ndindex(height, width):
            for a, b in np.ndindex(*kernel):
                y = i * stride[0] + a * dilation[0] - sides[0][0]
                x = j * stride[1] + b * dilation[1] - sides[1][0]
                if circular:
                    y, x = y % image[1], x % image[2]
                if 0 <= y < image[1] and 0 <= x < image[2]:
                    matrix[o, i, j, channels, y, x] += weight[o, :, a, b]
    return matrix.reshape(outputs * height * width, -1)


def _average(content: Content, entry: dict[str, Any]) -> Enclosed:
    image = _shape(content, entry.get("image_shape"))
    window, stride = _pair(content, entry.get("kernel_size"), 1), _pair(content, entry.get("stride"), 1)
    padding = _pair(content, entry.get("padding"), 0)
    if len(image) != 3:
        content.refuse("a pooling of something that is not an image")
    _fits(math.prod(image), 1)
    sides = (padding[0], padding[0]), (padding[1], padding[1])
    ones = np.ones((image[0], 1, *window))
    counts = _explicit(content, ones, image, stride, sides, (1, 1), image[0], False)
    value = counts / math.prod(window)
    return Enclosed(value, up(2.0**-53 * value))


def pair_rows(piece: Piece, label: int | None, classes: int) -> tuple[Array, Enclosed, Enclosed | None]:
    """Return the rows of f_i - f_label for all i (or f_i - f_j, i < j), as maps of the last piece's G and H."""
    eye = np.eye(classes)
    if label is None:
        rows = np.array([eye[i] - eye[j] for i in range(classes) for j in range(i + 1, classes)])
    else:
        rows = eye - eye[label]
    read_out = Enclosed(rows)
    inner = read_out if piece.act is None else times(read_out, piece.G)
    assert inner is not None
    return rows, inner, None if piece.H is None else product(read_out, piece.H)
