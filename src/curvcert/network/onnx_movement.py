"""How ONNX operators that move the numbers of samples are lowered: by the same rules as those of torch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from curvcert.errors import InvalidInput
from curvcert.network import movement
from curvcert.network.builder import Value
from curvcert.network.onnx_arguments import Batch, Context, argument, require_size, value_of
from curvcert.network.onnx_constants import axes_of, cuts_of, integers
from curvcert.network.onnx_file import Node

_BATCH = "Keep the batch as the first dimension throughout."
_ENDLESS = 2**31 - 1


def flatten(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a flattening of all that follows the batch."""
    value = value_of(node, args)
    rank, axis = 1 + len(value.shape), node.attribute("axis", 1)
    first = axis + rank if axis < 0 else axis
    if not 1 <= first <= rank or math.prod(value.shape[: first - 1]) != 1:
        raise node.unsupported(f"Flatten at axis {axis} of samples of shape {value.shape}", _BATCH)
    return movement.reshape(value, (-1,), node.label)


def reshape_node(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a change of shape; 0 copies a size, -1 is what remains, and the batch stays first."""
    value, target = value_of(node, args), argument(args, 1)
    if not isinstance(target, np.ndarray) or target.ndim != 1 or not 1 <= target.size <= 32:
        raise node.unsupported("a shape that is not a constant list")
    sizes = list(target.tolist())
    old = (Batch.SIZE, *value.shape)
    if not node.flag("allowzero"):
        sizes = [(old[k] if k < len(old) else None) if n == 0 else n for k, n in enumerate(sizes)]
    first, rest = sizes[0], sizes[1:]
    if not all(type(n) is int and (n > 0 or n == -1) for n in rest) or not rest:
        raise node.unsupported(f"a change of shape into {_written(sizes)}", _BATCH)
    if first == -1:
        # The batch is what remains, as long as the rest is one whole sample.
        keeps = -1 not in rest and math.prod(rest) == math.prod(value.shape)
    else:
        keeps = first is Batch.SIZE or (type(first) is int and first == context.graph.batch)
    if not keeps:
        raise node.unsupported(f"a change of shape from {_written(old)} into {_written(sizes)}", _BATCH)
    return movement.reshape(value, tuple(rest), node.label)


def _written(sizes: Sequence[Any]) -> str:
    return "(" + ", ".join(size.value if isinstance(size, Batch) else str(size) for size in sizes) + ")"


def transpose(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower a permutation of dimensions that leaves the batch first."""
    value = value_of(node, args)
    return movement.permute(value, node.attribute("perm", tuple(reversed(range(1 + len(value.shape))))), node.label)


def squeeze(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower the loss of dimensions of size 1."""
    value = value_of(node, args)
    axes = axes_of(node, args, 1 + len(value.shape))
    if axes is None:
        raise node.unsupported("Squeeze without axes", "Name the axes: the batch might be of size 1, too.")
    if 0 in axes or any(value.shape[axis - 1] != 1 for axis in axes):
        raise node.unsupported(f"Squeeze of axes {axes} of samples of shape {value.shape}", _BATCH)
    kept = tuple(n for axis, n in enumerate(value.shape, start=1) if axis not in axes)
    if not kept:
        raise node.unsupported("an output of one number per sample without a dimension", "Keep a dimension of size 1.")
    return movement.reshape(value, kept, node.label)


def unsqueeze(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower new dimensions of size 1."""
    value = value_of(node, args)
    named = node.attribute("axes", ()) if "axes" in node.attributes else integers(node, argument(args, 1), "axes")
    rank = 1 + len(value.shape) + len(named)
    axes = axes_of(node, args, rank) or ()
    if 0 in axes or rank > 32:
        raise node.unsupported(f"Unsqueeze at axes {axes}", _BATCH)
    sizes = iter(value.shape)
    return movement.reshape(value, tuple(1 if axis in axes else next(sizes) for axis in range(1, rank)), node.label)


def concat(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower values joined along a dimension."""
    values = [value_of(node, args, k) for k in range(len(args))]
    found = movement.join(values, node.attribute("axis", 0), node.label)
    require_size(node, context, found.shape)
    return found


def slice_node(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower parts along dimensions, backwards too."""
    value = value_of(node, args)
    size = context.graph.batch or _ENDLESS
    for axis, part in cuts_of(node, args, (size, *value.shape)):
        whole_batch = axis == 0 and (part.start, part.step) == (0, 1) and part.stop is not None and part.stop >= size
        value = value if whole_batch else movement.cut(value, axis, part, node.label)
    return value


def split_node(node: Node, args: Sequence[Any], context: Context) -> tuple[Value, ...]:
    """Lower the parts of a value along a dimension: of given sizes, or as equal as they can be."""
    value, axis = value_of(node, args), node.attribute("axis", 0)
    given = node.attributes.get("split", argument(args, 1))
    if given is not None:
        return movement.split(value, integers(node, np.asarray(given), "split"), axis, node.label)
    size = value.shape[movement.axis_of(value, axis, node.label)]
    parts = movement.equal_parts(value, -(-size // len(node.outputs)), axis, node.label)
    if len(parts) != len(node.outputs):
        raise InvalidInput(f"{node.label}: {size} entries cannot be split into {len(node.outputs)} parts.")
    return parts


def gather(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower one entry along a dimension, or several in any order."""
    value, index, axis = value_of(node, args), argument(args, 1), node.attribute("axis", 0)
    if not isinstance(index, np.ndarray) or index.dtype.kind not in "iu" or index.ndim > 1 or index.size == 0:
        raise node.unsupported("a choice of entries that is not a constant list of whole numbers")
    if index.ndim == 0:
        return movement.item(value, axis, int(index), node.label)
    size = value.shape[movement.axis_of(value, axis, node.label)]
    places = [int(k) + size if k < 0 else int(k) for k in index]
    require_size(node, context, (math.prod(value.shape) // size * len(places),))
    if not all(0 <= k < size for k in places):
        raise InvalidInput(f"{node.label}: the choice of entries {places[:8]} of {size} is not in there.")
    step = places[1] - places[0] if len(places) > 1 else 1
    stop = places[-1] + (1 if step > 0 else -1)
    if step == 0 or places != list(range(places[0], stop, step)):
        return movement.choose(value, axis, places, node.label)
    return movement.cut(value, axis, slice(places[0], None if stop < 0 else stop, step), node.label)


def depth_to_space(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower channels spread over blocks of pixels."""
    value, r = value_of(node, args), node.attribute("blocksize", 0)
    if node.attribute("mode", "DCR") == "CRD":
        return movement.blocks_to_space(value, r, node.label)
    if len(value.shape) != 3 or r < 1 or value.shape[0] % r**2:
        raise InvalidInput(f"{node.label}: blocks of {r} do not fit samples of shape {value.shape}.")
    channels, height, width = value.shape
    parts = value.reshaped((r, r, channels // r**2, height, width), node.label).permuted((2, 3, 0, 4, 1), node.label)
    return parts.reshaped((channels // r**2, height * r, width * r), node.label)


def space_to_depth(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower blocks of pixels gathered into channels."""
    value, r = value_of(node, args), node.attribute("blocksize", 0)
    if len(value.shape) != 3 or r < 1 or value.shape[1] % r or value.shape[2] % r:
        raise InvalidInput(f"{node.label}: blocks of {r} do not fit samples of shape {value.shape}.")
    channels, height, width = value.shape
    parts = value.reshaped((channels, height // r, r, width // r, r), node.label).permuted((2, 4, 0, 1, 3), node.label)
    return parts.reshaped((channels * r**2, height // r, width // r), node.label)
