"""How ONNX's Resize becomes one selection or one matrix along each axis, with the coordinates that a node names."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.network import windows
from curvcert.network.builder import Value
from curvcert.network.onnx_arguments import Batch, Context, argument, require_size, value_of, weight
from curvcert.network.onnx_file import Node

_ROUND: dict[str, Callable[[float], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
}


def resize(node: Node, args: Sequence[Any], context: Context) -> Value:
    """Lower an interpolation, nearest or linear, along axes of a sample."""
    value, mode = value_of(node, args), node.attribute("mode", "nearest")
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    unusual = node.flag("antialias") or node.flag("exclude_outside") or "axes" in node.attributes
    if mode not in ("nearest", "linear") or unusual or policy != "stretch":
        raise node.unsupported(f"Resize with mode {mode!r}, antialias, axes, or an aspect ratio", "Use its defaults.")
    sizes, scales = _sizes(node, args, value, context)
    require_size(node, context, tuple(sizes))
    for axis, (m, scale) in enumerate(zip(sizes, scales, strict=True)):
        n = value.shape[axis]
        if m == n and scale == 1.0:
            continue
        places = [_place(node, j, n, m, scale) for j in range(m)]
        if mode == "nearest":
            value = value.gathered({axis: _nearest(node, places, n)}, node.label)
        else:
            require_size(node, context, (m * n,))
            value = windows.along(value, axis, _weights(places, n), node.label)
    return value


def _sizes(node: Node, args: Sequence[Any], value: Value, context: Context) -> tuple[list[int], list[float]]:
    """Return the size of each axis behind, and what it was multiplied by."""
    rank, given = 1 + len(value.shape), argument(args, 3)
    if given is not None:
        listed: list[Any] = given.tolist() if isinstance(given, np.ndarray) and given.shape == (rank,) else [None]
        batch, sizes = listed[0], listed[1:]
        if batch not in (Batch.SIZE, context.graph.batch or Batch.SIZE) or not all(type(m) is int for m in sizes):
            raise node.unsupported("a size that is not constant, or changes the batch", "Give scales instead.")
        if min(sizes) < 1:
            raise InvalidInput(f"{node.label}: sizes {sizes} are not positive.")
        return sizes, [m / n for m, n in zip(sizes, value.shape, strict=True)]
    factors = weight(node, args, 2, 1).tolist()
    if len(factors) != rank or factors[0] != 1.0 or not all(0.0 < f <= 2.0**12 for f in factors):
        raise node.unsupported(f"scales {factors}", "One for each dimension, and 1 for the batch.")
    return [math.floor(n * f) for n, f in zip(value.shape, factors[1:], strict=True)], factors[1:]


def _place(node: Node, j: int, n: int, m: int, scale: float) -> float:
    """Return where along an axis an entry of the output is read."""
    match node.attribute("coordinate_transformation_mode", "half_pixel"):
        case "asymmetric":
            return j / scale
        case "align_corners":
            return j * (n - 1) / (m - 1) if m > 1 else 0.0
        case "half_pixel":
            return (j + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (j + 0.5) / scale - 0.5 if m > 1 else 0.0
        case other:
            raise node.unsupported(f"coordinates by {other!r}", "Use 'asymmetric', 'half_pixel' or 'align_corners'.")


def _nearest(node: Node, places: Sequence[float], n: int) -> list[int]:
    rounding = _ROUND.get(node.attribute("nearest_mode", "round_prefer_floor"))
    if rounding is None:
        raise node.unsupported(f"nearest_mode {node.attributes['nearest_mode']!r}")
    return [min(max(rounding(place), 0), n - 1) for place in places]


def _weights(places: Sequence[float], n: int) -> Tensor:
    """Return the matrix that takes the weighted mean of the two entries beside each place."""
    W = torch.zeros(len(places), n, dtype=torch.float64)
    for j, place in enumerate(places):
        low = math.floor(place)
        for k, share in ((low, 1 - (place - low)), (low + 1, place - low)):
            W[j, min(max(k, 0), n - 1)] += share
    return W
