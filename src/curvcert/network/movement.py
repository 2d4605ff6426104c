"""What moves the numbers of a sample: shapes, orders, parts and joins, for both front ends.

Dimensions are counted as frameworks do, with the batch as dimension 0.  It stays first and whole: a rule that touches
it would let samples meet.
"""

import math
from collections.abc import Mapping, Sequence

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.builder import Value, concat
from curvcert.operators.base import Shape

_BATCH = "Keep the batch as the first dimension throughout."


def axis_of(value: Value, dim: int, path: str, extra: int = 0) -> int:
    """Return which axis of a sample a dimension is, where `extra` dimensions are about to be added."""
    rank = len(value.shape) + 1 + extra
    if type(dim) is not int or not -rank <= dim < rank:
        raise InvalidInput(f"{path}: there is no dimension {dim} among {rank}.")
    if dim % rank == 0:
        raise UnsupportedModule(f"{path}: dimension {dim} is the batch, which samples share. {_BATCH}")
    return dim % rank - 1


def reshape(value: Value, sizes: Shape, path: str) -> Value:
    """Return the value in another shape; one size may be -1."""
    known, size = math.prod(n for n in sizes if n != -1), math.prod(value.shape)
    if sizes.count(-1) == 1 and known > 0:
        sizes = tuple(size // known if n == -1 else n for n in sizes)
    if any(n < 1 for n in sizes) or math.prod(sizes) != size:
        raise InvalidInput(f"{path}: cannot reshape samples of shape {value.shape} into {sizes}.")
    return value.reshaped(sizes, path)


def flatten(value: Value, start_dim: int, end_dim: int, path: str) -> Value:
    """Return the value with the dimensions from start_dim to end_dim as one."""
    rank = len(value.shape) + 1
    first, last = (d + rank if d < 0 else d for d in (start_dim, end_dim))
    if not 1 <= first <= last < rank:
        raise UnsupportedModule(
            f"{path}: Flatten from dimension {start_dim} to {end_dim} is not supported. Keep the batch: flatten(x, 1)."
        )
    middle = math.prod(value.shape[first - 1 : last])
    return value.reshaped((*value.shape[: first - 1], middle, *value.shape[last:]), path)


def permute(value: Value, order: Sequence[int], path: str) -> Value:
    """Return the value with its dimensions in another order."""
    rank = len(value.shape) + 1
    if not all(type(dim) is int and -rank <= dim < rank for dim in order):
        raise InvalidInput(f"{path}: {tuple(order)} is no order of {rank} dimensions.")
    places = [dim % rank for dim in order]
    if sorted(places) != list(range(rank)):
        raise InvalidInput(f"{path}: {tuple(order)} is no order of {rank} dimensions.")
    if places[0] != 0:
        raise UnsupportedModule(f"{path}: the order {tuple(order)} moves the batch. {_BATCH}")
    return value.permuted(tuple(place - 1 for place in places[1:]), path)


def transpose(value: Value, first: int, second: int, path: str) -> Value:
    """Return the value with two dimensions swapped."""
    a, b = axis_of(value, first, path), axis_of(value, second, path)
    axes = list(range(len(value.shape)))
    axes[a], axes[b] = b, a
    return value.permuted(tuple(axes), path)


def squeeze(value: Value, dims: Sequence[int], path: str) -> Value:
    """Return the value without some dimensions of size 1."""
    axes = {axis_of(value, dim, path) for dim in dims}
    return _kept(value, tuple(n for axis, n in enumerate(value.shape) if axis not in axes or n != 1), path)


def _kept(value: Value, shape: Shape, path: str) -> Value:
    if not shape:
        raise UnsupportedModule(f"{path}: one number per sample without a dimension. Keep a dimension of size 1.")
    return value.reshaped(shape, path)


def unsqueeze(value: Value, dim: int, path: str) -> Value:
    """Return the value with a new dimension of size 1."""
    axis = axis_of(value, dim, path, extra=1)
    return value.reshaped((*value.shape[:axis], 1, *value.shape[axis:]), path)


def flip(value: Value, dims: Sequence[int], path: str) -> Value:
    """Return the value counted from the other end along some dimensions."""
    return value.flipped(tuple(axis_of(value, dim, path) for dim in dims), path)


def cut(value: Value, dim: int, part: slice, path: str) -> Value:
    """Return value[..., part, ...] along a dimension, backwards too."""
    axis = axis_of(value, dim, path)
    chosen = range(value.shape[axis])[part]
    if not chosen:
        raise InvalidInput(f"{path}: nothing is left of dimension {dim} of size {value.shape[axis]}.")
    lowest, step = min(chosen), abs(chosen.step)
    found = value.cut(axis, lowest, len(chosen), step, path)
    return found if chosen.step > 0 else found.flipped((axis,), path)


def item(value: Value, dim: int, index: int, path: str) -> Value:
    """Return value[..., index, ...], without that dimension."""
    axis = axis_of(value, dim, path)
    size = value.shape[axis]
    if not -size <= index < size:
        raise InvalidInput(f"{path}: there is no entry {index} along dimension {dim} of size {size}.")
    found = value.cut(axis, index % size, 1, name=path)
    return _kept(found, (*value.shape[:axis], *value.shape[axis + 1 :]), path)


def pad(value: Value, sides: Mapping[int, tuple[int, int]], path: str) -> Value:
    """Return the value with zeros before and behind it along some dimensions; negative numbers cut off."""
    for dim, (before, after) in sides.items():
        size = value.shape[axis_of(value, dim, path)] if before or after else 0
        if before < 0 or after < 0:
            value = cut(value, dim, slice(max(0, -before), size - max(0, -after)), path)
    grown = {dim: (max(0, before), max(0, after)) for dim, (before, after) in sides.items()}
    return value.padded({axis_of(value, dim, path): side for dim, side in grown.items() if any(side)}, path)


def pad_last(value: Value, sides: Sequence[int], path: str) -> Value:
    """Return the value padded as torch writes it: two numbers for the last dimension, two for the one before, ..."""
    if len(sides) % 2 or len(sides) > 2 * len(value.shape) or not all(type(n) is int for n in sides):
        raise InvalidInput(
            f"{path}: expected padding by two whole numbers for each of the last dimensions, got {tuple(sides)}."
        )
    pairs = zip(sides[::2], sides[1::2], strict=True)
    return pad(value, {-1 - k: side for k, side in enumerate(pairs)}, path)


def split(value: Value, sizes: Sequence[int], dim: int, path: str) -> tuple[Value, ...]:
    """Return the parts of a value of the given sizes along a dimension."""
    axis = axis_of(value, dim, path)
    if any(type(n) is not int or n < 1 for n in sizes) or sum(sizes) != value.shape[axis]:
        raise InvalidInput(f"{path}: parts of {tuple(sizes)} do not make up dimension {dim} of {value.shape[axis]}.")
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(value.cut(axis, first, n, name=path) for first, n in zip(starts, sizes, strict=True))


def equal_parts(value: Value, size: int, dim: int, path: str) -> tuple[Value, ...]:
    """Return the parts of a value of one size along a dimension, the last perhaps smaller."""
    whole = value.shape[axis_of(value, dim, path)]
    if type(size) is not int or size < 1:
        raise InvalidInput(f"{path}: parts of {size} entries do not exist.")
    return split(value, [min(size, whole - first) for first in range(0, whole, size)], dim, path)


def join(values: Sequence[Value], dim: int, path: str) -> Value:
    """Return values joined along a dimension."""
    return concat(values, axis_of(values[0], dim, path), path)


def stack(values: Sequence[Value], dim: int, path: str) -> Value:
    """Return values joined along a new dimension."""
    return join([unsqueeze(value, dim, path) for value in values], dim, path)
