"""ONNX operators whose windows slide over signals, images and volumes: convolutions, poolings, borders, Resize."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.batched import BATCH
from curvcert.network.onnx_arguments import Given
from curvcert.network.onnx_file import Batch

_LONGEST_STEP = 2**12
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MEANS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_LARGEST: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

_Sides = list[tuple[int, int]]


def conv(given: Given) -> Tensor:
    """Return a convolution."""
    x, kernel = _image(given), given.constant(1, "a kernel")
    sizes = _kernel_sizes(given, kernel, x)
    strides, dilations, sides = _window(given, x, sizes)
    if given.node.flag("ceil_mode"):
        raise given.node.unsupported("ceil_mode of a convolution")
    padded, border = _bordered(x, sides)
    groups = given.node.attribute("group", 1)
    if kernel.shape[1] * groups != x.shape[1]:
        raise InvalidInput(
            f"{given.node.label}: a kernel for {kernel.shape[1] * groups} channels got {x.shape[1]} of them."
        )
    return _CONVOLUTIONS[x.dim() - 2](padded, kernel, _bias(given), strides, border, dilations, groups)


def conv_transpose(given: Given) -> Tensor:
    """Return the adjoint of a convolution."""
    node, x, kernel = given.node, _image(given), given.constant(1, "a kernel")
    sizes = _kernel_sizes(given, kernel, x)
    axes = len(sizes)
    strides, dilations = (_numbers(given, name, axes, (1,) * axes) for name in ("strides", "dilations"))
    extra, pads = (tuple(node.attribute(name, (0,) * n)) for name, n in (("output_padding", axes), ("pads", 2 * axes)))
    plain = node.attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID") and "output_shape" not in node.attributes
    if not plain or len(pads) != 2 * axes or len(extra) != axes or min((*pads, *extra)) < 0:
        raise node.unsupported("auto_pad, output_shape, or padding by other numbers than one for each side,")
    groups = node.attribute("group", 1)
    if groups < 1 or kernel.shape[0] != x.shape[1]:
        raise InvalidInput(f"{node.label}: a kernel for {kernel.shape[0]} channels got {x.shape[1]}.")
    sides = [(pads[k], pads[k + axes]) for k in range(axes)]
    whole = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], strides, dilations, sizes, extra, strict=True)
    ]
    given.require_room(kernel.shape[1] * groups * math.prod(whole))
    even = all(a == b for a, b in sides)
    border = tuple(a for a, _ in sides) if even else (0,) * axes
    options = (_bias(given), strides, border, extra, groups, dilations)
    found = _TRANSPOSED[axes](x, kernel, *options)
    return found if even else F.pad(found, [-n for a, b in reversed(sides) for n in (a, b)])


def average_pool(given: Given) -> Tensor:
    """Return means over windows; a border that does not count is divided out position by position."""
    x, node = _image(given), given.node
    axes = x.dim() - 2
    kernel = _numbers(given, "kernel_shape", axes)
    strides, dilations, sides = _window(given, x, kernel)
    ceil, counted = node.flag("ceil_mode"), node.flag("count_include_pad")
    border = tuple(a for a, _ in sides)
    narrow = all(a == b and 2 * a <= k for (a, b), k in zip(sides, kernel, strict=True))
    if narrow and set(dilations) == {1} and not (ceil and any(border)):
        return _MEANS[axes](x, kernel, strides, border, ceil, counted)
    if ceil:
        raise node.unsupported("ceil_mode with uneven or dilated windows", "Export with ceil_mode=False.")
    channels = x.shape[1]
    ones = torch.ones(channels, 1, *kernel, dtype=torch.float64, device=given.device)
    options = (None, strides, (0,) * axes, dilations, channels)
    flat = [n for a, b in reversed(sides) for n in (a, b)]
    sums = _CONVOLUTIONS[axes](F.pad(x, flat), ones, *options)
    if counted:
        return sums / float(math.prod(kernel))
    inside = torch.ones(1, *x.shape[1:], dtype=torch.float64, device=given.device)
    counts = _CONVOLUTIONS[axes](F.pad(inside, flat), ones, *options)
    if given.device == "cpu" and bool((counts == 0).any()):
        raise InvalidInput(f"{node.label}: a window of this pooling lies wholly in the padding.")
    return sums / counts


def max_pool(given: Given) -> Tensor:
    """Return the largest entry of each window."""
    x, node = _image(given), given.node
    axes = x.dim() - 2
    kernel = _numbers(given, "kernel_shape", axes)
    strides, dilations, sides = _window(given, x, kernel)
    if any(a != b or 2 * a > k for (a, b), k in zip(sides, kernel, strict=True)) or set(dilations) != {1}:
        raise node.unsupported("max-pooling with dilation, uneven padding, or padding over half a window")
    return _LARGEST[axes](x, kernel, strides, tuple(a for a, _ in sides), dilations, node.flag("ceil_mode"))


_BORDERS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def pad(given: Given) -> Tensor:
    """Return a tensor with a border of a constant, or of its own entries."""
    x, node = given.tensor(), given.node
    mode = node.attribute("mode", "constant")
    pads = given.integers(1, "pads")
    axes = given.axes(x.dim(), position=3) or tuple(range(x.dim()))
    if len(pads) != 2 * len(axes):
        raise InvalidInput(f"{node.label}: {len(pads)} numbers of padding for {len(axes)} dimensions.")
    sides = {axis: (pads[k], pads[k + len(axes)]) for k, axis in enumerate(axes)}
    grown = [n + sum(sides.get(axis, (0, 0))) for axis, n in enumerate(x.shape)]
    if min(grown) < 1:
        raise InvalidInput(f"{node.label}: nothing is left of a value of shape {tuple(x.shape[1:])} per sample.")
    given.require_room(math.prod(grown) // BATCH)
    if mode == "constant":
        number = node.attribute("value", 0.0)
        if given.has(2):
            number = given.number(2, "a number to pad with")
        flat = [n for axis in reversed(range(x.dim())) for n in sides.get(axis, (0, 0))]
        return F.pad(x, flat, value=float(number))
    if mode not in _BORDERS:
        raise node.unsupported(f"padding with mode {mode!r}")
    for axis, side in sides.items():
        if any(side):
            x = x.index_select(axis, torch.tensor(_border(given, mode, x.shape[axis], side), device=given.device))
    return x


def _border(given: Given, mode: str, n: int, side: tuple[int, int]) -> list[int]:
    before, after = side
    if min(side) < 0:
        raise given.node.unsupported(f"padding by a negative number with mode {mode!r}", "Slice.")
    if max(side) > {"reflect": n - 1, "wrap": n}.get(mode, max(side)):
        raise InvalidInput(f"{given.node.label}: a border of {max(side)} is wider than mode {mode!r} has for {n}.")
    places = range(-before, n + after)
    match mode:
        case "reflect":
            return [n - 1 - abs(n - 1 - abs(k)) for k in places]
        case "edge":
            return [min(max(k, 0), n - 1) for k in places]
    return [k % n for k in places]


def _image(given: Given) -> Tensor:
    x = given.tensor()
    if not 3 <= x.dim() <= 5:
        raise given.node.unsupported(
            f"{given.node.op} on samples of shape {tuple(x.shape[1:])}", "Signals, images and volumes are."
        )
    return x


def _bias(given: Given) -> Tensor | None:
    return given.constant(2, "a bias") if given.has(2) else None


def _kernel_sizes(given: Given, kernel: Tensor, x: Tensor) -> tuple[int, ...]:
    own = tuple(kernel.shape[2:])
    if kernel.dim() != x.dim() or tuple(given.node.attribute("kernel_shape", own)) != own:
        raise InvalidInput(
            f"{given.node.label}: a kernel of shape {tuple(kernel.shape)} does not fit its kernel_shape."
        )
    return own


def _numbers(given: Given, name: str, axes: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    sizes = given.node.attributes.get(name, default)
    if not isinstance(sizes, tuple) or len(sizes) != axes or not all(1 <= n <= _LONGEST_STEP for n in sizes):
        raise InvalidInput(
            f"{given.node.label}: {name} should be {axes} integers from 1 to {_LONGEST_STEP}, got {sizes}."
        )
    return sizes


def _window(given: Given, x: Tensor, kernel: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], _Sides]:
    """Return strides, dilations, and the padding on both sides of each axis."""
    axes = len(kernel)
    strides, dilations = (_numbers(given, name, axes, (1,) * axes) for name in ("strides", "dilations"))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    sides = _sides(given, x.shape[2:], reach, strides)
    grown = [n + sum(side) for n, side in zip(x.shape[2:], sides, strict=True)]
    given.require_room(x.shape[1] * math.prod(grown))
    if any(n < r for n, r in zip(grown, reach, strict=True)):
        raise InvalidInput(
            f"{given.node.label}: a window of {reach} does not fit into samples of shape {tuple(x.shape[1:])}."
        )
    return strides, dilations, sides


def _sides(given: Given, size: Sequence[int], reach: Sequence[int], strides: Sequence[int]) -> _Sides:
    node, axes = given.node, len(size)
    mode = node.attribute("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        # ceil(n / s) outputs, whatever the window; one pixel too many is left over at the end.
        totals = [(-(-n // s) - 1) * s + r - n for n, r, s in zip(size, reach, strides, strict=True)]
        if min(totals) < -1:
            raise node.unsupported(f"{mode} with a stride that leaves out pixels", "Write the padding out as pads.")
        halves = [(total // 2, total - total // 2) for total in (max(0, total) for total in totals)]
        return halves if mode == "SAME_UPPER" else [(b, a) for a, b in halves]
    none = (0,) * 2 * axes
    pads = tuple(node.attribute("pads", none)) if mode == "NOTSET" else none
    if mode not in ("NOTSET", "VALID") or len(pads) != 2 * axes or min(pads) < 0:
        raise node.unsupported(f"auto_pad {mode!r} with pads {pads}", f"Pad by {2 * axes} numbers of at least 0.")
    return [(pads[k], pads[k + axes]) for k in range(axes)]


def _bordered(x: Tensor, sides: _Sides) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor and the padding that a convolution has for it: an uneven one stands in front."""
    if all(a == b for a, b in sides):
        return x, tuple(a for a, _ in sides)
    return F.pad(x, [n for a, b in reversed(sides) for n in (a, b)]), (0,) * len(sides)


# Resize.

_ROUND: dict[str, Callable[[float], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
}


def upsample(given: Given) -> Tensor:
    """Return an Upsample of an old opset: Resize with asymmetric coordinates."""
    scales = given.node.attributes.get("scales")
    factors = list(scales) if scales is not None else given.array(1, "scales").tolist()
    return _resized(given, factors, None, "asymmetric", "floor")


def resize(given: Given) -> Tensor:
    """Return an interpolation, nearest or linear, along the axes of a sample."""
    node, x = given.node, given.tensor()
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if node.flag("antialias") or node.flag("exclude_outside") or "axes" in node.attributes or policy != "stretch":
        raise node.unsupported("Resize with antialias, axes, or an aspect ratio", "Use its defaults.")
    if len(given.args) == 2:  # opset 10
        return _resized(given, given.array(1, "scales").tolist(), None, "asymmetric", "floor")
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = node.attribute("nearest_mode", "round_prefer_floor")
    if not given.has(3):
        return _resized(given, given.array(2, "scales").tolist(), None, coordinates, rounding)
    listed: list[Any] = given.array(3, "sizes").tolist()
    fixed, old = given.graph.batch, given.sizes(x)
    sizes = [
        own if n == own or (isinstance(own, Batch) and n == fixed) else n for n, own in zip(listed, old, strict=True)
    ]
    if any(type(m) is not int and not isinstance(own, Batch) for m, own in zip(sizes, old, strict=True)):
        raise node.unsupported("a size that is not constant", "Give scales instead.")
    factors = [1.0 if m == own else m / own if isinstance(own, int) else 0.0 for m, own in zip(sizes, old, strict=True)]
    return _resized(
        given,
        factors,
        [n if m == own else m for m, own, n in zip(sizes, old, x.shape, strict=True)],
        coordinates,
        rounding,
    )


def _resized(given: Given, factors: list[float], sizes: list[int] | None, coordinates: str, rounding: str) -> Tensor:
    x, node = given.tensor(), given.node
    mode = node.attribute("mode", "nearest")
    batch = next((k for k, n in enumerate(given.sizes(x)) if isinstance(n, Batch)), None)
    if (
        len(factors) != x.dim()
        or (batch is not None and factors[batch] != 1.0)
        or not all(0 < f <= 2**12 for f in factors)
    ):
        raise node.unsupported(f"scales {factors}", "One for each dimension, and 1 for the batch.")
    if mode not in ("nearest", "linear", "cubic") or rounding not in _ROUND:
        raise node.unsupported(
            f"Resize with mode {mode!r}, or nearest_mode {rounding!r}", "Use 'nearest', 'linear' or 'cubic'."
        )
    target = sizes or [math.floor(n * f) for n, f in zip(x.shape, factors, strict=True)]
    if min(target) < 1:
        raise InvalidInput(f"{node.label}: sizes {target} are not positive.")
    given.require_room(math.prod(target) // BATCH)
    for axis, (m, scale) in enumerate(zip(target, factors, strict=True)):
        n = x.shape[axis]
        if m == n and scale == 1.0:
            continue
        places = [_place(given, coordinates, j, n, m, scale) for j in range(m)]
        if mode == "nearest":
            chosen = [min(max(_ROUND[rounding](place), 0), n - 1) for place in places]
            x = x.index_select(axis, torch.tensor(chosen, device=given.device))
        else:
            given.require_room(m * n)
            a = node.attribute("cubic_coeff_a", -0.75) if mode == "cubic" else None
            W = _weights(places, n, a).to(given.device)
            x = (x.movedim(axis, -1) @ W.t()).movedim(-1, axis)
    return x


def _place(given: Given, coordinates: str, j: int, n: int, m: int, scale: float) -> float:
    """Return where along an axis an entry of the output is read."""
    match coordinates:
        case "asymmetric":
            return j / scale
        case "align_corners":
            return j * (n - 1) / (m - 1) if m > 1 else 0.0
        case "half_pixel":
            return (j + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (j + 0.5) / scale - 0.5 if m > 1 else 0.0
        case other:
            raise given.node.unsupported(
                f"coordinates by {other!r}", "Use 'asymmetric', 'half_pixel' or 'align_corners'."
            )


def _weights(places: Sequence[float], n: int, a: float | None) -> Tensor:
    """Return the matrix of a weighted mean of the entries beside each place: two, or four by Keys' cubic with `a`."""
    W = torch.zeros(len(places), n, dtype=torch.float64)
    for j, place in enumerate(places):
        low = math.floor(place)
        for k in (low, low + 1) if a is None else range(low - 1, low + 3):
            away = abs(place - k)
            W[j, min(max(k, 0), n - 1)] += 1 - away if a is None else _cubic(away, a)
    return W


def _cubic(away: float, a: float) -> float:
    if away <= 1:
        return ((a + 2) * away - (a + 3)) * away**2 + 1
    return ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
