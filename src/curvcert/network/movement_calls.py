"""The calls of torch that move the numbers of samples, each with torch's own parameters: `MOVES`.

A rule is given the path for messages, then what the call is given, with `Value`s for the tensors that depend on the
input.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network import movement
from curvcert.network.builder import Value


class Batch(Enum):
    """Stands for the number of samples, which no computation may depend on."""

    SIZE = "batch"


def _same(path: str, value: Value, memory_format: Any = None) -> Value:
    return value


def _flatten(path: str, value: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    return movement.flatten(value, start_dim, end_dim, path)


def _reshape(path: str, value: Value, *numbers: Any, shape: Sequence[Any] = ()) -> Value:
    sizes = tuple(_listed(numbers) or shape)
    keeps_batch = sizes[:1] in ((-1,), (Batch.SIZE,))
    if not keeps_batch or not all(type(n) is int for n in sizes[1:]):
        raise UnsupportedModule(f"{path}: reshape must keep the batch dimension first: x.view(x.size(0), ...).")
    return movement.reshape(value, sizes[1:], path)


def _listed(given: tuple[Any, ...]) -> Sequence[Any]:
    """Return the numbers of a call such as flip(1, 2) or flip((1, 2))."""
    return given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given


def _permute(path: str, value: Value, *numbers: Any, dims: Sequence[int] = ()) -> Value:
    return movement.permute(value, _listed(numbers) or dims, path)


def _transpose(path: str, value: Value, dim0: int, dim1: int) -> Value:
    return movement.transpose(value, dim0, dim1, path)


def _squeeze(path: str, value: Value, dim: int | Sequence[int] | None = None) -> Value:
    if dim is None:
        raise UnsupportedModule(f"{path}: squeeze without a dimension would drop a batch of one sample. Name it.")
    return movement.squeeze(value, _listed((dim,)), path)


def _unsqueeze(path: str, value: Value, dim: int) -> Value:
    return movement.unsqueeze(value, dim, path)


def _flip(path: str, value: Value, *numbers: Any, dims: Sequence[int] = ()) -> Value:
    return movement.flip(value, _listed(numbers) or dims, path)


def _fliplr(path: str, value: Value) -> Value:
    return movement.flip(value, (1,), path)


def _pad(path: str, tensor: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    return movement.pad_last(tensor, pad, path, mode, float(value or 0.0))


def _index_select(path: str, value: Value, dim: int, index: Any) -> Value:
    return movement.choose(value, dim, _places(path, value, dim, index), path)


def _places(path: str, value: Value, dim: int, index: Any) -> list[int]:
    """Return the entries that a constant index names: a list of whole numbers, or a mask."""
    size = value.shape[movement.axis_of(value, dim, path)]
    found = torch.as_tensor(index) if isinstance(index, tuple | list) else index
    if not isinstance(found, torch.Tensor) or found.dim() != 1 or found.dtype.is_floating_point or found.is_complex():
        raise UnsupportedModule(
            f"{path}: an index is made of whole numbers, slices, None and one constant list of entries or mask; got "
            f"{type(index).__name__}."
        )
    if found.dtype == torch.bool:
        if len(found) != size:
            raise InvalidInput(f"{path}: a mask of {len(found)} entries for dimension {dim} of size {size}.")
        found = found.nonzero()[:, 0]
    return [int(k) for k in found]


def _roll(path: str, value: Value, shifts: Any, dims: Any = ()) -> Value:
    if dims == ():
        raise UnsupportedModule(f"{path}: roll without dimensions moves entries to other samples. Name them.")
    return movement.roll(value, _listed((shifts,)), _listed((dims,)), path)


def _unflatten(path: str, value: Value, dim: int, sizes: Any) -> Value:
    return movement.unflatten(value, dim, _listed((sizes,)), path)


def _repeat(path: str, value: Value, *numbers: Any) -> Value:
    times = tuple(_listed(numbers))
    if times[:1] != (1,) or len(times) != 1 + len(value.shape):
        raise UnsupportedModule(f"{path}: repeat must leave the batch, its first dimension, as it is.")
    return movement.repeat(value, times[1:], path)


def _expand(path: str, value: Value, *numbers: Any) -> Value:
    sizes = tuple(_listed(numbers))
    if sizes[:1] not in ((-1,), (Batch.SIZE,)) or len(sizes) != 1 + len(value.shape):
        raise UnsupportedModule(f"{path}: expand must keep the batch dimension first: x.expand(-1, ...).")
    wanted = [n if m == -1 else m for n, m in zip(value.shape, sizes[1:], strict=True)]
    if any(n not in (1, m) for n, m in zip(value.shape, wanted, strict=True)):
        raise InvalidInput(f"{path}: cannot expand samples of shape {value.shape} to {tuple(wanted)}.")
    times = [1 if n == m else m for n, m in zip(value.shape, wanted, strict=True)]
    return movement.repeat(value, times, path)


def _repeat_interleave(path: str, value: Value, repeats: int, dim: int | None = None) -> Value:
    if dim is None or type(repeats) is not int:
        raise UnsupportedModule(f"{path}: repeat_interleave needs a dimension, and one whole number.")
    size = value.shape[movement.axis_of(value, dim, path)]
    return movement.choose(value, dim, [k for k in range(size) for _ in range(repeats)], path)


def _pixel_shuffle(path: str, value: Value, upscale_factor: int) -> Value:
    return movement.blocks_to_space(value, upscale_factor, path)


def _pixel_unshuffle(path: str, value: Value, downscale_factor: int) -> Value:
    return movement.space_to_blocks(value, downscale_factor, path)


def _narrow(path: str, value: Value, dim: int, start: int, length: int) -> Value:
    size = value.shape[movement.axis_of(value, dim, path)]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise InvalidInput(f"{path}: {length} entries from {start} on do not fit into dimension {dim} of size {size}.")
    return movement.cut(value, dim, slice(first, first + length), path)


def _select(path: str, value: Value, dim: int, index: int) -> Value:
    return movement.item(value, dim, index, path)


def _unbind(path: str, value: Value, dim: int = 0) -> tuple[Value, ...]:
    size = value.shape[movement.axis_of(value, dim, path)]
    return tuple(movement.item(value, dim, k, path) for k in range(size))


def _split(path: str, value: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    if isinstance(sizes, tuple | list):
        return movement.split(value, sizes, dim, path)
    return movement.equal_parts(value, sizes, dim, path)


def _chunk(path: str, value: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    size = value.shape[movement.axis_of(value, dim, path)]
    if type(chunks) is not int or chunks < 1:
        raise InvalidInput(f"{path}: expected a number of chunks, at least 1, got {chunks}.")
    return movement.equal_parts(value, -(-size // chunks), dim, path)


def _cat(path: str, tensors: Sequence[Any], dim: int = 0) -> Value:
    return movement.join(_values(path, tensors), dim, path)


def _stack(path: str, tensors: Sequence[Any], dim: int = 0) -> Value:
    return movement.stack(_values(path, tensors), dim, path)


def _values(path: str, tensors: Sequence[Any]) -> Sequence[Value]:
    if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Value) for tensor in tensors):
        raise UnsupportedModule(
            f"{path}: joining values with constants is not supported. Let every part depend on the input, and add "
            "constants in the layer behind."
        )
    return tensors


def _item(path: str, value: Any, index: Any) -> Any:
    """Return value[index]: of several values, or numbers, slices, None and ... along the dimensions of one."""
    if isinstance(value, tuple | list):
        return value[index]
    wanted = list(index) if isinstance(index, tuple) else [index]
    if sum(part is ... for part in wanted) > 1:
        raise InvalidInput(f"{path}: an index has one ellipsis at most.")
    named = sum(part is not None and part is not ... for part in wanted)
    if any(part is ... for part in wanted):
        place = next(k for k, part in enumerate(wanted) if part is ...)
        wanted[place : place + 1] = [slice(None)] * (1 + len(value.shape) - named)
    if sum(isinstance(part, tuple | list | torch.Tensor) for part in wanted) > 1:
        raise UnsupportedModule(f"{path}: several lists of entries in one index are not supported. Index step by step.")
    dim = 0
    for part in wanted:
        value, dim = _indexed(path, value, dim, part)
    return value


def _indexed(path: str, value: Value, dim: int, part: Any) -> tuple[Value, int]:
    """Return a value indexed along one dimension, and the next dimension."""
    if part is None:
        return movement.unsqueeze(value, dim, path), dim + 1
    if type(part) is int:
        return movement.item(value, dim, part, path), dim
    if not isinstance(part, slice):
        return movement.choose(value, dim, _places(path, value, dim, part), path), dim + 1
    if not all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step)):
        raise UnsupportedModule(f"{path}: a slice whose ends are not whole numbers is not supported.")
    return value if part == slice(None) else movement.cut(value, dim, part, path), dim + 1


MOVES: dict[Any, Callable[..., Any]] = {
    "contiguous": _same,
    "clone": _same,
    torch.clone: _same,
    torch.flatten: _flatten,
    "flatten": _flatten,
    torch.reshape: _reshape,
    "reshape": _reshape,
    "view": _reshape,
    torch.permute: _permute,
    "permute": _permute,
    torch.transpose: _transpose,
    "transpose": _transpose,
    torch.swapaxes: _transpose,
    "swapaxes": _transpose,
    torch.squeeze: _squeeze,
    "squeeze": _squeeze,
    torch.unsqueeze: _unsqueeze,
    "unsqueeze": _unsqueeze,
    torch.flip: _flip,
    "flip": _flip,
    torch.fliplr: _fliplr,
    "fliplr": _fliplr,
    F.pad: _pad,
    torch.index_select: _index_select,
    "index_select": _index_select,
    torch.roll: _roll,
    "roll": _roll,
    torch.unflatten: _unflatten,
    "unflatten": _unflatten,
    "repeat": _repeat,
    torch.tile: _repeat,
    "tile": _repeat,
    "expand": _expand,
    torch.repeat_interleave: _repeat_interleave,
    "repeat_interleave": _repeat_interleave,
    F.pixel_shuffle: _pixel_shuffle,
    F.pixel_unshuffle: _pixel_unshuffle,
    torch.narrow: _narrow,
    "narrow": _narrow,
    torch.select: _select,
    "select": _select,
    torch.unbind: _unbind,
    "unbind": _unbind,
    torch.split: _split,
    "split": _split,
    torch.chunk: _chunk,
    "chunk": _chunk,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.stack: _stack,
    getitem: _item,
}
"""Every function and method, with its rule."""
