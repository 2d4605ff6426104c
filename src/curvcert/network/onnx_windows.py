"""How operators whose windows slide over images become linear maps: convolutions, poolings and their padding."""

from collections.abc import Sequence
from typing import Any

import torch

from curvcert.errors import InvalidInput
from curvcert.network import movement
from curvcert.network.block import MaxPool
from curvcert.network.builder import Value
from curvcert.network.onnx_arguments import Context, argument, linear, require_size, value_of, weight
from curvcert.network.onnx_constants import axes_of, integers
from curvcert.network.onnx_file import Node
from curvcert.operators import AveragePool2d, Conv2d, Diagonal
from curvcert.operators.conv import Padding

_LONGEST_STEP = 2**12
_NO_PADDING: Padding = ((0, 0), (0, 0))


def conv(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a two-dimensional convolution."""
    value = value_of(node, args)
    kernel = weight(node, args, 1, 4)
    strides, dilations, padding = _window(node, context, value, tuple(kernel.shape[2:]))
    if node.attribute("kernel_shape", tuple(kernel.shape[2:])) != tuple(kernel.shape[2:]):
        raise InvalidInput(f"{node.label}: kernel_shape contradicts a kernel of shape {tuple(kernel.shape)}.")
    op = Conv2d(kernel, value.shape, strides, padding, dilations, node.attribute("group", 1))
    offset = None if len(args) < 3 or args[2] is None else weight(node, args, 2, 1)[:, None, None]
    if offset is not None and len(offset) != op.out_shape[0]:
        raise InvalidInput(f"{node.label}: a bias of {len(offset)} numbers got {op.out_shape[0]} channels.")
    return linear(node, context, value, op, offset)


def average_pool(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower means over windows; a border that does not count is divided out position by position."""
    value, kernel = value_of(node, args), _pair(node, "kernel_shape", None)
    strides, dilations, padding = _window(node, context, value, kernel)
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
    value, kernel = value_of(node, args), _pair(node, "kernel_shape", None)
    strides, dilations, padding = _window(node, context, value, kernel)
    (top, bottom), (left, right) = padding
    if dilations != (1, 1) or (top, left) != (bottom, right) or 2 * top > kernel[0] or 2 * left > kernel[1]:
        raise node.unsupported("max-pooling with dilation, uneven padding, or padding over half a window")
    return value.max_pool(MaxPool(value.shape, kernel, strides, (top, left), node.name or node.outputs[0]))


def pad(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a border of zeros."""
    value = value_of(node, args)
    if node.attribute("mode", "constant") != "constant" or node.attribute("value", 0.0) != 0.0:
        raise node.unsupported("padding with anything but zeros")
    if len(args) > 2 and args[2] is not None and bool(weight(node, args, 2).any()):
        raise node.unsupported("padding with anything but zeros")
    rank = 1 + len(value.shape)
    pads = node.attribute("pads", ()) if "pads" in node.attributes else integers(node, argument(args, 1), "pads")
    axes = axes_of(node, args, rank, position=3) or tuple(range(rank))
    if len(pads) != 2 * len(axes):
        raise InvalidInput(f"{node.label}: {len(pads)} numbers of padding for {len(axes)} dimensions.")
    sides = {axis: (pads[k], pads[k + len(axes)]) for k, axis in enumerate(axes)}
    sides = {axis: side for axis, side in sides.items() if any(side)}
    grown = [max(1, n + sum(sides.get(axis, (0, 0)))) for axis, n in enumerate(value.shape, start=1)]
    require_size(node, context, tuple(grown))
    return movement.pad(value, sides, node.label)


def _pair(node: Node, name: str, default: tuple[int, int] | None) -> tuple[int, int]:
    sizes = node.attributes.get(name, default)
    if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(1 <= n <= _LONGEST_STEP for n in sizes):
        raise InvalidInput(f"{node.label}: {name} should be two integers from 1 to {_LONGEST_STEP}, got {sizes}.")
    return int(sizes[0]), int(sizes[1])


def _window(
    node: Node, context: Context, value: Value, kernel: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int], Padding]:
    """Return strides, dilations and padding of a window that slides over images."""
    if len(value.shape) != 3:
        raise node.unsupported(
            f"{node.op} on samples of shape {value.shape}", "Images of shape (channels, height, width) are."
        )
    strides, dilations = _pair(node, "strides", (1, 1)), _pair(node, "dilations", (1, 1))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    size = value.shape[1:]
    own = _own_padding(node, size, reach, strides)
    require_size(node, context, (value.shape[0], *(n + sum(side) for n, side in zip(size, own, strict=True))))
    spare = [n + sum(side) - r for n, side, r in zip(size, own, reach, strict=True)]
    if min(spare) < 0:
        raise InvalidInput(f"{node.label}: a window of {reach} does not fit into images of shape {value.shape}.")
    if node.flag("ceil_mode") and any(room % s for room, s in zip(spare, strides, strict=True)):
        raise node.unsupported("ceil_mode, where it makes windows that are cut short,", "Export with ceil_mode=False.")
    return strides, dilations, (own[0], own[1])


def _own_padding(
    node: Node, size: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    mode = node.attribute("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        # ceil(n / s) outputs, whatever the window; one pixel too many is left over at the end.
        axes = zip(size, reach, strides, strict=True)
        totals = [(-(-n // s) - 1) * s + r - n for n, r, s in axes]
        if min(totals) < -1:
            raise node.unsupported(f"{mode} with a stride that leaves out pixels", "Write the padding out as pads.")
        halves = [(total // 2, total - total // 2) for total in (max(0, total) for total in totals)]
        return halves if mode == "SAME_UPPER" else [(b, a) for a, b in halves]
    pads = node.attribute("pads", (0, 0, 0, 0)) if mode == "NOTSET" else (0, 0, 0, 0)
    if mode not in ("NOTSET", "VALID") or len(pads) != 4 or min(pads) < 0:
        raise node.unsupported(f"auto_pad {mode!r} with pads {pads}", "Pad by four numbers of at least 0.")
    return [(pads[0], pads[2]), (pads[1], pads[3])]
