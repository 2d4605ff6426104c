"""What does not depend on the input's values: constants, and shapes that exporters compute on the way.

The size of the batch is a symbol there, of which multiples may be taken.  A constant of that size is the same for every
sample, and has size 1 there.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from curvcert.errors import CurvcertError, InvalidInput
from curvcert.network.onnx_file import LARGEST, Array, Batch, Node

Fold = Callable[[Node, Sequence[Any]], Array]

_CASTS = {1: np.float32, 10: np.float16, 11: np.float64, 6: np.int32, 7: np.int64, 9: np.bool_}


def fold(node: Node, args: Sequence[Array | None]) -> Array:
    """Evaluate a node of constants; shapes may hold `Batch.SIZE`, with which nothing can be computed.

    Raises:
        UnsupportedModule: arithmetic with the size of the batch.
        InvalidInput: arguments that do not fit, or a result too large.
    """
    try:
        with np.errstate(all="ignore"):
            result: Array = np.asarray(FOLDS[node.op](node, args))
    except CurvcertError:
        raise
    except TypeError as error:
        raise node.unsupported(f"arithmetic with the size of the batch ({error})") from error
    except (ValueError, IndexError, OverflowError, AttributeError) as error:
        raise InvalidInput(f"{node.label}: its constants do not fit ({error}). Export the model again.") from error
    return result


def _of_one_sample(sizes: Array) -> Array:
    """Return a shape with the size of the batch as 1."""
    return np.array([n.times if isinstance(n, Batch) else n for n in sizes.reshape(-1).tolist()], dtype=object)


def integers(node: Node, array: Any, what: str) -> tuple[int, ...]:
    """Return a constant as a tuple of integers."""
    if (
        not isinstance(array, np.ndarray)
        or array.size > 64
        or not all(type(n) is int for n in array.flatten().tolist())
    ):
        raise node.unsupported(f"a value of {what} that is not a short list of constant integers")
    return tuple(array.flatten().tolist())


def axes_of(node: Node, args: Sequence[Any], rank: int, position: int = 1) -> tuple[int, ...] | None:
    """Return the axes that a node names, as an attribute or an input, counted from 0; None if it names none."""
    if "axes" in node.attributes:
        axes = node.attribute("axes", ())
    elif len(args) > position and args[position] is not None:
        axes = integers(node, args[position], "axes")
    else:
        return None
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise InvalidInput(f"{node.label}: axes {axes} do not exist, or repeat, among {rank} dimensions.")
    return tuple(axis % rank for axis in axes)


def _require_small(node: Node, size: int) -> None:
    if size > LARGEST:
        raise InvalidInput(f"{node.label}: a constant of {size} numbers is over the {LARGEST} that load_onnx covers.")


def _constant(node: Node, args: Sequence[Any]) -> Array:
    for name, kind in (("value_float", np.float64), ("value_floats", np.float64), ("value_int", np.int64)):
        if name in node.attributes:
            return np.asarray(node.attributes[name], dtype=kind)
    if "value_ints" in node.attributes:
        return np.asarray(node.attributes["value_ints"], dtype=np.int64)
    value = node.attributes.get("value")
    if not isinstance(value, np.ndarray):
        raise node.unsupported("a constant that is not a dense tensor of numbers")
    return value


def _constant_of_shape(node: Node, args: Sequence[Any]) -> Array:
    shape = integers(node, _of_one_sample(args[0]), "its shape")
    _require_small(node, math.prod(shape))
    value = node.attributes.get("value", np.zeros(1))
    return np.full(shape, value.reshape(-1)[0])


def _arithmetic(function: Callable[[Array, Array], Array]) -> Fold:
    def folded(node: Node, args: Sequence[Any]) -> Array:
        left, right = args
        _require_small(node, math.prod(np.broadcast_shapes(left.shape, right.shape)))
        return function(left, right)

    return folded


def _divide(left: Array, right: Array) -> Array:
    if object in (left.dtype, right.dtype):
        part: Array = np.floor_divide(left, right)
        return part
    if np.issubdtype(left.dtype, np.floating):
        quotient: Array = left / right
        return quotient
    if bool((np.asarray(left < 0) | np.asarray(right <= 0)).any()):
        raise ValueError("an integer division of negative numbers, or by zero")
    whole: Array = left // right
    return whole


def _gather(node: Node, args: Sequence[Any]) -> Array:
    data, index = args
    axis = node.attribute("axis", 0)
    if not -data.ndim <= axis < data.ndim:
        raise ValueError(f"axis {axis} of {data.ndim}")
    _require_small(node, index.size * (data.size // max(1, data.shape[axis])))
    return np.asarray(np.take(data, index.astype(np.int64), axis=axis))


def cuts_of(node: Node, args: Sequence[Any], shape: Sequence[int]) -> list[tuple[int, slice]]:
    """Return what a Slice takes along each axis that it names, of a tensor of some shape."""
    if "starts" in node.attributes:
        starts, ends = node.attribute("starts", ()), node.attribute("ends", ())
        steps = (1,) * len(starts)
    else:
        starts, ends = integers(node, args[1], "starts"), integers(node, args[2], "ends")
        steps = integers(node, args[4], "steps") if len(args) > 4 and args[4] is not None else (1,) * len(starts)
    axes = axes_of(node, args, len(shape), position=3) or tuple(range(len(starts)))
    # Going backwards, an end before the first entry means up to and with it.
    return [
        (axis, slice(first, None if step < 0 and last < -shape[axis] else last, step))
        for axis, first, last, step in zip(axes, starts, ends, steps, strict=True)
    ]


def _slice(node: Node, args: Sequence[Any]) -> Array:
    cut = [slice(None)] * args[0].ndim
    for axis, part in cuts_of(node, args, args[0].shape):
        cut[axis] = part
    found: Array = args[0][tuple(cut)]
    return found


def _concat(node: Node, args: Sequence[Any]) -> Array:
    _require_small(node, sum(part.size for part in args))
    return np.concatenate(args, axis=node.attribute("axis", 0))


def _unsqueeze(node: Node, args: Sequence[Any]) -> Array:
    named = node.attributes.get("axes")
    rank = args[0].ndim + (len(named) if named is not None else args[1].size)
    if rank > 32:
        raise ValueError(f"{rank} dimensions")
    return np.expand_dims(args[0], axes_of(node, args, rank) or ())


def _squeeze(node: Node, args: Sequence[Any]) -> Array:
    return np.asarray(np.squeeze(args[0], axes_of(node, args, args[0].ndim)))


def _reshape(node: Node, args: Sequence[Any]) -> Array:
    sizes = integers(node, _of_one_sample(args[1]), "its shape")
    if not node.flag("allowzero"):
        sizes = tuple(args[0].shape[k] if n == 0 else n for k, n in enumerate(sizes))
    return np.reshape(args[0], sizes)


def _transpose(node: Node, args: Sequence[Any]) -> Array:
    return np.transpose(args[0], node.attribute("perm", tuple(reversed(range(args[0].ndim)))))


def _expand(node: Node, args: Sequence[Any]) -> Array:
    shape = np.broadcast_shapes(args[0].shape, integers(node, _of_one_sample(args[1]), "its shape"))
    _require_small(node, math.prod(shape))
    return np.broadcast_to(args[0], shape)


def _cast(node: Node, args: Sequence[Any]) -> Array:
    data, to = args[0], node.attribute("to", 0)
    if to not in _CASTS:
        raise node.unsupported(f"a cast to the element type {to}")
    if data.dtype == object and to in (6, 7):
        return np.asarray(data)
    if data.dtype == object and any(isinstance(n, Batch) for n in data.reshape(-1).tolist()):
        raise TypeError("a cast of it to another type")
    cast: Array = data.astype(_CASTS[to])
    return cast.astype(np.float64) if np.issubdtype(cast.dtype, np.floating) else cast


def _where(node: Node, args: Sequence[Any]) -> Array:
    mask, above, below = args
    _require_small(node, math.prod(np.broadcast_shapes(mask.shape, above.shape, below.shape)))
    return np.asarray(np.where(mask.astype(bool), above, below))


def _all(node: Node, args: Sequence[Any], function: Callable[[Array, Array], Array]) -> Array:
    _require_small(node, math.prod(np.broadcast_shapes(*(arg.shape for arg in args))))
    found: Array = reduce(function, args)
    return found


def _range(node: Node, args: Sequence[Any]) -> Array:
    first, last, step = (arg.reshape(()).item() for arg in args)
    _require_small(node, abs(math.ceil((last - first) / step)))
    return np.arange(first, last, step)


def _product(node: Node, args: Sequence[Any]) -> Array:
    axes = axes_of(node, args, args[0].ndim)
    return np.asarray(np.prod(args[0], axis=axes or None, keepdims=node.flag("keepdims", True)))


FOLDS: dict[str, Fold] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Identity": lambda node, args: args[0],
    "Shape": lambda node, args: np.asarray(args[0].shape, dtype=np.int64),
    "Add": _arithmetic(np.add),
    "Sub": _arithmetic(np.subtract),
    "Mul": _arithmetic(np.multiply),
    "Div": _arithmetic(_divide),
    "Mod": _arithmetic(np.mod),
    "Pow": _arithmetic(np.power),
    "Equal": _arithmetic(lambda left, right: np.asarray(left == right, dtype=bool)),
    "Greater": _arithmetic(np.greater),
    "Less": _arithmetic(np.less),
    "And": _arithmetic(np.logical_and),
    "Or": _arithmetic(np.logical_or),
    "Not": lambda node, args: np.logical_not(args[0]),
    "Where": _where,
    "Range": _range,
    "Min": lambda node, args: _all(node, args, np.minimum),
    "Max": lambda node, args: _all(node, args, np.maximum),
    "Ceil": lambda node, args: np.ceil(args[0]),
    "Floor": lambda node, args: np.floor(args[0]),
    "Size": lambda node, args: np.asarray(args[0].size, dtype=np.int64),
    "ReduceProd": _product,
    "NonZero": lambda node, args: np.array(np.nonzero(args[0]), dtype=np.int64),
    "Neg": lambda node, args: np.negative(args[0]),
    "Sqrt": lambda node, args: np.sqrt(args[0]),
    "Reciprocal": lambda node, args: 1.0 / args[0],
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Cast": _cast,
}
"""How what does not depend on the input is computed; other operators are those of torch."""
