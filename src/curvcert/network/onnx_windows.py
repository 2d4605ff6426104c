"""How operators whose windows slide over images become linear maps: convolutions, poolings and their padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network import movement
from curvcert.network.block import MaxPool
from curvcert.network.builder import Value
from curvcert.network.onnx_arguments import Context, argument, linear, require_size, value_of, weight
from curvcert.network.onnx_constants import axes_of, integers
from curvcert.network.onnx_file import Node
from curvcert.operators import AbstractLinearMap, AveragePool2d, Conv2d, Diagonal
from curvcert.operators.conv import Padding, Pair

_LONGEST_STEP = 2**12
_NO_PADDING: Padding = ((0, 0), (0, 0))


def conv(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a convolution of signals or images."""
    value, axes = _as_image(node, value_of(node, args))
    kernel = _as_plane(weight(node, args, 1, 2 + axes))
    strides, dilations, padding = _window(node, context, value, (kernel.shape[2], kernel.shape[3]), axes)
    _require_kernel_shape(node, kernel, axes)
    op = Conv2d(kernel, value.shape, strides, padding, dilations, node.attribute("group", 1))
    return _as_given(node, linear(node, context, value, op, _bias(node, args, op)), axes)


def conv_transpose(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower the adjoint of a convolution, of signals or images."""
    value, axes = _as_image(node, value_of(node, args))
    kernel, groups = _as_plane(weight(node, args, 1, 2 + axes)), node.attribute("group", 1)
    _require_kernel_shape(node, kernel, axes)
    strides, dilations = _pair(node, "strides", (1, 1), axes), _pair(node, "dilations", (1, 1), axes)
    extra = tuple(node.attribute("output_padding", (0,) * axes))
    pads = tuple(node.attribute("pads", (0,) * 2 * axes))
    plain = node.attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID") and "output_shape" not in node.attributes
    if not plain or len(pads) != 2 * axes or len(extra) != axes or min((*pads, *extra)) < 0:
        raise node.unsupported("auto_pad, output_shape, or padding by other numbers than one for each side,")
    sides = [(0, 0)] * (2 - axes) + [(pads[k], pads[k + axes]) for k in range(axes)]
    extra = (0,) * (2 - axes) + extra
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        raise node.unsupported("an output_padding that is not below the stride", "Pad behind it.")
    if groups < 1 or kernel.shape[0] != value.shape[0]:
        raise InvalidInput(f"{node.label}: a kernel for {kernel.shape[0]} channels got {value.shape[0]}.")
    grids = zip(value.shape[1:], strides, dilations, kernel.shape[2:], sides, extra, strict=True)
    size = tuple((n - 1) * s + d * (k - 1) + 1 - sum(side) + e for n, s, d, k, side, e in grids)
    image = (kernel.shape[1] * groups, *size)
    require_size(node, context, image)
    op = Conv2d(kernel, image, strides, (sides[0], sides[1]), dilations, groups).T
    if op.in_shape != value.shape:
        raise InvalidInput(f"{node.label}: pads {pads} do not fit samples of shape {value.shape}.")
    return _as_given(node, linear(node, context, value, op, _bias(node, args, op)), axes)


def _bias(node: Node, args: Sequence[Any], op: AbstractLinearMap) -> Tensor | None:
    offset = None if len(args) < 3 or args[2] is None else weight(node, args, 2, 1)[:, None, None]
    if offset is not None and len(offset) != op.out_shape[0]:
        raise InvalidInput(f"{node.label}: a bias of {len(offset)} numbers got {op.out_shape[0]} channels.")
    return offset


def _require_kernel_shape(node: Node, kernel: Tensor, axes: int) -> None:
    own = tuple(kernel.shape[4 - axes :])
    if tuple(node.attribute("kernel_shape", own)) != own:
        raise InvalidInput(f"{node.label}: kernel_shape contradicts a kernel of shape {tuple(kernel.shape)}.")


def _as_image(node: Node, value: Value) -> tuple[Value, int]:
    """Return a signal as an image of height 1, and how many axes it has; an image as it is."""
    if len(value.shape) == 2:
        return value.reshaped((value.shape[0], 1, value.shape[1]), node.label), 1
    return value, 2


def _as_plane(kernel: Tensor) -> Tensor:
    return kernel[:, :, None] if kernel.dim() == 3 else kernel


def _as_given(node: Node, image: Value, axes: int) -> Value:
    channels, height, width = image.shape
    return image if axes == 2 else image.reshaped((channels, height * width), node.label)


def average_pool(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower means over windows; a border that does not count is divided out position by position."""
    value, axes = _as_image(node, value_of(node, args))
    kernel = _pair(node, "kernel_shape", None, axes)
    strides, dilations, padding = _window(node, context, value, kernel, axes)
    return _as_given(node, _means(node, context, value, kernel, strides, dilations, padding), axes)


def _means(
    node: Node, context: Context, value: Value, kernel: Pair, strides: Pair, dilations: Pair, padding: Padding
) -> Value:
    counted = node.flag("count_include_pad") or padding == _NO_PADDING
    (top, bottom), (left, right) = padding
    narrow = 2 * top <= kernel[0] and 2 * left <= kernel[1]
    if counted and narrow and dilations == (1, 1) and (top, left) == (bottom, right):
        return linear(node, context, value, AveragePool2d(value.shape, kernel, strides, (top, left)))
    channels = value.shape[0]
    ones = torch.ones(channels, 1, *kernel, dtype=torch.float64)
    if counted:
        return linear(
            node, context, value, Conv2d(ones / ones[0].numel(), value.shape, strides, padding, dilations, channels)
        )
    sums = Conv2d(ones, value.shape, strides, padding, dilations, channels)
    require_size(node, context, sums.out_shape)
    counts = sums.apply(torch.ones(value.shape, dtype=torch.float64))
    if bool((counts == 0).any()):
        raise InvalidInput(f"{node.label}: a window of this pooling lies wholly in the padding.")
    return linear(node, context, value, Diagonal(1.0 / counts, sums.out_shape) @ sums)


def max_pool(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower the largest entry of each window."""
    value, axes = _as_image(node, value_of(node, args))
    kernel = _pair(node, "kernel_shape", None, axes)
    strides, dilations, padding = _window(node, context, value, kernel, axes)
    (top, bottom), (left, right) = padding
    if dilations != (1, 1) or (top, left) != (bottom, right) or 2 * top > kernel[0] or 2 * left > kernel[1]:
        raise node.unsupported("max-pooling with dilation, uneven padding, or padding over half a window")
    pool = MaxPool(value.shape, kernel, strides, (top, left), node.name or node.outputs[0])
    return _as_given(node, value.max_pool(pool), axes)


_BORDERS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def pad(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a border of a constant, or of the value's own entries."""
    value, mode = value_of(node, args), node.attribute("mode", "constant")
    rank = 1 + len(value.shape)
    pads = node.attribute("pads", ()) if "pads" in node.attributes else integers(node, argument(args, 1), "pads")
    axes = axes_of(node, args, rank, position=3) or tuple(range(rank))
    if len(pads) != 2 * len(axes):
        raise InvalidInput(f"{node.label}: {len(pads)} numbers of padding for {len(axes)} dimensions.")
    sides = {axis: (pads[k], pads[k + len(axes)]) for k, axis in enumerate(axes)}
    sides = {axis: side for axis, side in sides.items() if any(side)}
    grown = [max(1, n + sum(sides.get(axis, (0, 0)))) for axis, n in enumerate(value.shape, start=1)]
    require_size(node, context, tuple(grown))
    if mode in _BORDERS:
        return movement.bordered(value, sides, _BORDERS[mode], node.label)
    if mode != "constant":
        raise node.unsupported(f"padding with mode {mode!r}")
    number = node.attribute("value", 0.0)
    if len(args) > 2 and args[2] is not None:
        (number,) = weight(node, args, 2).reshape(-1).tolist()
    return movement.pad(value, sides, node.label, float(number))


def _pair(node: Node, name: str, default: Pair | None, axes: int) -> Pair:
    """Return two numbers that a node has for the axes of an image; for a signal one, behind that of height 1."""
    sizes = node.attributes.get(name, default if default is None else default[2 - axes :])
    if not isinstance(sizes, tuple) or len(sizes) != axes or not all(1 <= n <= _LONGEST_STEP for n in sizes):
        raise InvalidInput(f"{node.label}: {name} should be {axes} integers from 1 to {_LONGEST_STEP}, got {sizes}.")
    whole = (1,) * (2 - axes) + sizes
    return int(whole[0]), int(whole[1])


def _window(node: Node, context: Context, value: Value, kernel: Pair, axes: int) -> tuple[Pair, Pair, Padding]:
    if len(value.shape) != 3:
        raise node.unsupported(
            f"{node.op} on samples of shape {value.shape}", "Images of shape (channels, height, width) are."
        )
    strides, dilations = _pair(node, "strides", (1, 1), axes), _pair(node, "dilations", (1, 1), axes)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    size = value.shape[1:]
    own = _own_padding(node, size, reach, strides, axes)
    require_size(node, context, (value.shape[0], *(n + sum(side) for n, side in zip(size, own, strict=True))))
    spare = [n + sum(side) - r for n, side, r in zip(size, own, reach, strict=True)]
    if min(spare) < 0:
        raise InvalidInput(f"{node.label}: a window of {reach} does not fit into images of shape {value.shape}.")
    if node.flag("ceil_mode") and any(room % s for room, s in zip(spare, strides, strict=True)):
        raise node.unsupported("ceil_mode, where it makes windows that are cut short,", "Export with ceil_mode=False.")
    return strides, dilations, (own[0], own[1])


def _own_padding(
    node: Node, size: Sequence[int], reach: Sequence[int], strides: Sequence[int], axes: int
) -> list[tuple[int, int]]:
    mode = node.attribute("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        # ceil(n / s) outputs, whatever the window; one pixel too many is left over at the end.
        grids = zip(size, reach, strides, strict=True)
        totals = [(-(-n // s) - 1) * s + r - n for n, r, s in grids]
        if min(totals) < -1:
            raise node.unsupported(f"{mode} with a stride that leaves out pixels", "Write the padding out as pads.")
        halves = [(total // 2, total - total // 2) for total in (max(0, total) for total in totals)]
        return halves if mode == "SAME_UPPER" else [(b, a) for a, b in halves]
    none = (0,) * 2 * axes
    pads = tuple(node.attribute("pads", none)) if mode == "NOTSET" else none
    if mode not in ("NOTSET", "VALID") or len(pads) != 2 * axes or min(pads) < 0:
        raise node.unsupported(f"auto_pad {mode!r} with pads {pads}", f"Pad by {2 * axes} numbers of at least 0.")
    return [(0, 0)] * (2 - axes) + [(pads[k], pads[k + axes]) for k in range(axes)]
