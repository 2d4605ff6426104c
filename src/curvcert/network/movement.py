"""What moves the numbers of a sample: shapes, orders, parts and joins, for both front ends.

Dimensions are counted as frameworks do, with the batch as dimension 0.  It stays first and whole: a rule that touches
it would let samples meet.
"""

import math
from collections.abc import Mapping, Sequence

import torch

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
    return kept(value, tuple(n for axis, n in enumerate(value.shape) if axis not in axes or n != 1), path)


def kept(value: Value, shape: Shape, path: str) -> Value:
    """Return the value in a shape that has lost dimensions of size 1."""
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
    return kept(found, (*value.shape[:axis], *value.shape[axis + 1 :]), path)


def pad(value: Value, sides: Mapping[int, tuple[int, int]], path: str, number: float = 0.0) -> Value:
    """Return the value with a number before and behind it along some dimensions; negative sizes cut off."""
    for dim, (before, after) in sides.items():
        size = value.shape[axis_of(value, dim, path)] if before or after else 0
        if before < 0 or after < 0:
            value = cut(value, dim, slice(max(0, -before), size - max(0, -after)), path)
    grown = {dim: (max(0, before), max(0, after)) for dim, (before, after) in sides.items()}
    around = {axis_of(value, dim, path): side for dim, side in grown.items() if any(side)}
    padded = value.padded(around, path)
    if not number or not around:
        return padded
    inside = torch.zeros(padded.shape, dtype=torch.float64)
    starts = [around.get(axis, (0, 0))[0] for axis in range(len(value.shape))]
    inside[tuple(slice(first, first + n) for first, n in zip(starts, value.shape, strict=True))] = 1.0
    return padded.shift(number * (1 - inside), name=path)


def bordered(value: Value, sides: Mapping[int, tuple[int, int]], mode: str, path: str) -> Value:
    """Return the value with a border made of its own entries: mode 'reflect', 'replicate' or 'circular'."""
    chosen = {}
    for dim, (before, after) in sides.items():
        axis = axis_of(value, dim, path)
        n = value.shape[axis]
        if before < 0 or after < 0:
            raise UnsupportedModule(f"{path}: padding by a negative number with mode {mode!r} is not supported. Slice.")
        if max(before, after) > {"reflect": n - 1, "circular": n}.get(mode, max(before, after)):
            raise InvalidInput(
                f"{path}: a border of {max(before, after)} is wider than mode {mode!r} has for {n} entries."
            )
        places = range(-before, n + after)
        match mode:
            case "reflect":
                chosen[axis] = [n - 1 - abs(n - 1 - abs(k)) for k in places]
            case "replicate":
                chosen[axis] = [min(max(k, 0), n - 1) for k in places]
            case "circular":
                chosen[axis] = [k % n for k in places]
            case _:
                raise UnsupportedModule(
                    f"{path}: padding mode {mode!r} is not supported. Use 'constant', 'reflect', 'replicate' or "
                    "'circular'."
                )
    return value.gathered(chosen, path)


def choose(value: Value, dim: int, places: Sequence[int], path: str) -> Value:
    """Return value[..., places, ...] along a dimension: entries in any order, repeated ones too."""
    axis = axis_of(value, dim, path)
    n = value.shape[axis]
    if not places or not all(type(k) is int and -n <= k < n for k in places):
        raise InvalidInput(f"{path}: expected entries of dimension {dim} of size {n}, got {list(places)[:8]}.")
    return value.gathered({axis: [k % n for k in places]}, path)


def roll(value: Value, shifts: Sequence[int], dims: Sequence[int], path: str) -> Value:
    """Return the value shifted around along some dimensions."""
    if len(shifts) != len(dims) or not all(type(k) is int for k in shifts):
        raise InvalidInput(f"{path}: expected a whole number for each dimension, got shifts {shifts} along {dims}.")
    for shift, dim in zip(shifts, dims, strict=True):
        n = value.shape[axis_of(value, dim, path)]
        value = choose(value, dim, [(k - shift) % n for k in range(n)], path)
    return value


def unflatten(value: Value, dim: int, sizes: Sequence[int], path: str) -> Value:
    """Return the value with one dimension as several."""
    axis = axis_of(value, dim, path)
    given, n = tuple(sizes), value.shape[axis]
    known = math.prod(k for k in given if k != -1)
    full = tuple(n // max(known, 1) if k == -1 else k for k in given)
    if not full or not all(type(k) is int and k > 0 for k in full) or math.prod(full) != n:
        raise InvalidInput(f"{path}: cannot unflatten dimension {dim} of size {n} into {given}.")
    return value.reshaped((*value.shape[:axis], *full, *value.shape[axis + 1 :]), path)


def repeat(value: Value, times: Sequence[int], path: str) -> Value:
    """Return the value repeated as a whole, so often along each axis of a sample."""
    if len(times) != len(value.shape) or not all(type(k) is int and k >= 1 for k in times):
        raise InvalidInput(f"{path}: expected a whole number for each dimension of {value.shape}, got {tuple(times)}.")
    return value.gathered({k: [*range(n)] * times[k] for k, n in enumerate(value.shape)}, path)


def blocks_to_space(value: Value, factor: int, path: str) -> Value:
    """Return images (c r^2, h, w) as (c, h r, w r): torch's pixel shuffle."""
    channels, height, width = _image(value, path)
    r = factor
    if type(r) is not int or r < 1 or channels % r**2:
        raise InvalidInput(f"{path}: {channels} channels cannot be shuffled by a factor of {factor}.")
    parts = value.reshaped((channels // r**2, r, r, height, width), path).permuted((0, 3, 1, 4, 2), path)
    return parts.reshaped((channels // r**2, height * r, width * r), path)


def _image(value: Value, path: str) -> Shape:
    if len(value.shape) != 3:
        raise InvalidInput(f"{path}: expects images of shape (channels, height, width), got {value.shape}.")
    return value.shape


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
