"""ONNX operators that move the entries of tensors: shapes, orders, parts and joins."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network.batched import BATCH
from curvcert.network.onnx_arguments import Given
from curvcert.network.onnx_constants import cuts_of
from curvcert.network.onnx_file import Batch
from curvcert.network.recording import Recorded


def reshape(given: Given) -> Tensor:
    """Return a change of shape; 0 copies a size, -1 is what remains."""
    x, target = given.tensor(), given.array(1, "a shape")
    if target.ndim != 1 or not 0 <= target.size <= 32:
        raise given.node.unsupported("a shape that is not a constant list")
    sizes = list(target.tolist())
    if not given.node.flag("allowzero"):
        old = given.sizes(x)
        sizes = [(old[k] if k < len(old) else -2) if type(n) is int and n == 0 else n for k, n in enumerate(sizes)]
    return x.reshape(given.shape(x, sizes))


def flatten(given: Given) -> Tensor:
    """Return a matrix: the axes before one, and those from it on."""
    x = given.tensor()
    axis = given.node.attribute("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def squeeze(given: Given) -> Tensor:
    """Return the loss of dimensions of size 1."""
    x = given.tensor()
    axes = given.axes(x.dim())
    if axes is None:
        raise given.node.unsupported("Squeeze without axes", "Name the axes: the batch might be of size 1, too.")
    if any(x.shape[axis] != 1 for axis in axes):
        raise given.node.unsupported(
            f"Squeeze of axes {axes} of samples of shape {tuple(x.shape[1:])}", "The batch cannot be squeezed."
        )
    return x.squeeze(axes)


def unsqueeze(given: Given) -> Tensor:
    """Return new dimensions of size 1."""
    x = given.tensor()
    named = given.integers(1, "axes")
    for axis in sorted(given.axes(x.dim() + len(named)) or ()):
        x = x.unsqueeze(axis)
    return x


def transpose(given: Given) -> Tensor:
    """Return another order of dimensions."""
    x = given.tensor()
    order = given.node.attribute("perm", tuple(reversed(range(x.dim()))))
    if sorted(order) != list(range(x.dim())):
        raise InvalidInput(f"{given.node.label}: {order} is no order of {x.dim()} dimensions.")
    return x.permute(order)


def expand(given: Given) -> Tensor:
    """Return a tensor repeated along dimensions of size 1."""
    x = given.tensor()
    sizes, old, fixed = given.array(1, "a shape").tolist(), given.sizes(x), given.graph.batch
    target: list[int] = []
    for back in range(1, len(sizes) + 1):
        n, own = sizes[-back], old[-back] if back <= len(old) else 1
        if isinstance(own, Batch) and n in (own, 1, own.times * (fixed or 0)):
            n = x.shape[-back]
        if type(n) is not int:
            raise given.node.unsupported("an Expand of a value by the size of the batch")
        target.insert(0, n)
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(target))
    given.require_room(math.prod(shape) // BATCH)
    return x.expand(shape)


def concat(given: Given) -> Tensor:
    """Return tensors joined along a dimension."""
    parts = [part for part in (given.tensor(k) for k in range(len(given.args))) if part.numel()]
    if not parts:
        raise InvalidInput(f"{given.node.label}: it joins nothing.")
    rank = parts[0].dim()
    if any(part.dim() != rank for part in parts):
        raise given.node.unsupported(
            f"values of shapes {', '.join(str(tuple(part.shape)) for part in parts)} joined", "Give them one rank."
        )
    axis = given.axis(0, rank)
    largest = [max(part.shape[k] for part in parts) for k in range(rank)]
    # A constant is the same for every sample.
    grown = [
        part
        if isinstance(part, Recorded)
        else part.expand([part.shape[k] if k == axis else largest[k] for k in range(rank)])
        for part in parts
    ]
    return torch.cat(grown, axis)


def cut(given: Given) -> Tensor:
    """Return parts along dimensions, backwards too."""
    x = given.tensor()
    whole = _whole_batch(given, x)
    for axis, part in cuts_of(given.node, given.args, tuple(x.shape)):
        if axis == whole and range(given.graph.batch or 0)[part] == range(given.graph.batch or 0):
            continue
        chosen = range(x.shape[axis])[part]
        if not chosen:
            return torch.zeros([0 if k == axis else n for k, n in enumerate(x.shape)], device=given.device)
        step = abs(chosen.step)
        x = torch.ops.aten.slice.Tensor(x, axis, min(chosen), max(chosen) + 1, step)
        x = x.flip(axis) if chosen.step < 0 else x
    return x


def _whole_batch(given: Given, x: Tensor) -> int | None:
    """Return the dimension of the batch if the file fixes its size."""
    if given.graph.batch is None or not isinstance(x, Recorded):
        return None
    layout = given.layout_of(x)
    return layout.axis if layout.alone else None


def split(given: Given) -> Sequence[Tensor]:
    """Return the parts along a dimension: of given sizes, or as equal as they can be."""
    x, count = given.tensor(), len(given.node.outputs)
    axis = given.axis(0, x.dim())
    size = x.shape[axis]
    if "split" in given.node.attributes or given.has(1):
        sizes = list(given.integers(1, "split"))
    else:
        part = -(-size // count)
        sizes = [min(part, size - first) for first in range(0, size, part)]
    if len(sizes) != count or sum(sizes) != size or min(sizes) < 1:
        raise InvalidInput(f"{given.node.label}: {count} parts of {tuple(sizes)} do not make up {size} entries.")
    parts: Sequence[Tensor] = torch.split(x, sizes, axis)
    return parts


def gather(given: Given) -> Tensor:
    """Return entries along a dimension, in any order."""
    x, index = given.tensor(), given.array(1, "a choice of entries")
    axis = given.axis(0, x.dim())
    if index.dtype.kind not in "iu" or index.size == 0 or index.size > 2**24:
        raise given.node.unsupported("a choice of entries that is not a constant list of whole numbers")
    size = x.shape[axis]
    if not bool(((index >= -size) & (index < size)).all()):
        raise InvalidInput(
            f"{given.node.label}: the choice of entries {index.reshape(-1)[:8].tolist()} of {size} is not in there."
        )
    given.require_room(math.prod(x.shape) // max(size, 1) * index.size // BATCH)
    places = torch.from_numpy(np.asarray(index % size))
    if index.ndim == 0:
        return x.select(axis, int(places))
    found = x.index_select(axis, places.reshape(-1).to(given.device))
    return found if index.ndim == 1 else found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def gather_elements(given: Given) -> Tensor:
    """Return entries along a dimension, chosen for each place."""
    x, index = given.tensor(), given.constant(1, "a choice of entries").long()
    axis = given.axis(0, x.dim())
    if index.dim() != x.dim():
        raise InvalidInput(f"{given.node.label}: {index.dim()} dimensions of choices for {x.dim()} of entries.")
    grown = [
        BATCH if isinstance(n, Batch) and index.shape[k] == 1 else index.shape[k] for k, n in enumerate(given.sizes(x))
    ]
    return torch.gather(x, axis, (index % x.shape[axis]).expand(grown))


def gather_nd(given: Given) -> Tensor:
    """Return entries, or parts, whose places along the first dimensions are listed."""
    x, index = given.tensor(), given.constant(1, "a choice of entries").long()
    if given.node.attribute("batch_dims", 0) or not 1 <= index.shape[-1] <= x.dim():
        raise given.node.unsupported(f"GatherND with batch_dims, or {index.shape[-1]} places for {x.dim()} dimensions")
    count = index.shape[-1]
    given.require_room(math.prod(index.shape[:-1]) * math.prod(x.shape[count:]) // BATCH)
    sizes = torch.tensor(x.shape[:count])
    if bool(((index < -sizes) | (index >= sizes)).any()):
        raise InvalidInput(f"{given.node.label}: the choice of entries is not in there.")
    found: Tensor = x[tuple(index.unbind(-1))]
    return found


def tile(given: Given) -> Tensor:
    """Return a tensor repeated as a whole."""
    x, times = given.tensor(), given.integers(1, "repeats")
    given.require_room(math.prod(x.shape) // BATCH * math.prod(times))
    return x.repeat(times)


def depth_to_space(given: Given) -> Tensor:
    """Return channels spread over blocks of pixels."""
    x, r = given.tensor(), given.node.attribute("blocksize", 0)
    if x.dim() != 4 or r < 1 or x.shape[1] % r**2:
        raise InvalidInput(f"{given.node.label}: blocks of {r} do not fit samples of shape {tuple(x.shape[1:])}.")
    if given.node.attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, r)
    n, channels, height, width = x.shape
    parts = x.reshape(n, r, r, channels // r**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, channels // r**2, height * r, width * r)


def space_to_depth(given: Given) -> Tensor:
    """Return blocks of pixels gathered into channels."""
    x, r = given.tensor(), given.node.attribute("blocksize", 0)
    if x.dim() != 4 or r < 1 or x.shape[2] % r or x.shape[3] % r:
        raise InvalidInput(f"{given.node.label}: blocks of {r} do not fit samples of shape {tuple(x.shape[1:])}.")
    n, channels, height, width = x.shape
    parts = x.reshape(n, channels, height // r, r, width // r, r).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, channels * r**2, height // r, width // r)


def triangle(given: Given) -> Tensor:
    """Return what lies above or below a diagonal."""
    offset = int(given.number(1, "a diagonal")) if given.has(1) else 0
    return torch.triu(given.tensor(), offset) if given.node.flag("upper", True) else torch.tril(given.tensor(), offset)
