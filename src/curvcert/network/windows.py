"""Layers whose windows slide over signals or images, as linear maps of values: convolutions, poolings, interpolation.

For both front ends.  A signal of shape (channels, length) goes through the maps of images as one of height 1.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network import movement
from curvcert.network.block import MaxPool
from curvcert.network.builder import Value
from curvcert.operators import AveragePool2d, Conv2d, Dense, batch_norm_in_eval, scale
from curvcert.operators.base import Shape

Numbers = int | Sequence[int]
Sides = tuple[tuple[int, int], ...]
T = TypeVar("T")


def along(value: Value, axis: int, W: Tensor, path: str) -> Value:
    """Return W x for every vector x along one axis of a sample: a convolution by one pixel.

    >>> from curvcert.network.builder import start
    >>> along(start((2, 3), torch.device("cpu")), 1, torch.ones(5, 3, dtype=torch.float64), "last").shape
    (2, 5)
    """
    outputs, inputs = W.shape
    # A file holds weights in this order, and the same order of sums gives the same values.
    W = W.contiguous()
    if value.shape[axis] != inputs:
        raise InvalidInput(f"{path}: expected {inputs} features along axis {axis} of a sample of shape {value.shape}.")
    order = (axis, *(k for k in range(len(value.shape)) if k != axis))
    first = value.permuted(order, path)
    rest = first.shape[1:]
    if math.prod(rest) == 1:
        mixed = first.reshaped((inputs,), path).linear(Dense(W), name=path)
    else:
        image = first.reshaped((inputs, math.prod(rest), 1), path)
        mixed = image.linear(Conv2d(W[:, :, None, None], image.shape), name=path)
    back = tuple(order.index(k) for k in range(len(order)))
    return mixed.reshaped((outputs, *rest), path).permuted(back, path)


def grouped_along(value: Value, group: int, axis: int, W: Tensor, path: str) -> Value:
    """Return W_g x along one axis of a sample, with a matrix for each place g along another."""
    groups, outputs, inputs = W.shape
    order = (group, axis, *(k for k in range(len(value.shape)) if k not in (group, axis)))
    first = value.permuted(order, path)
    rest = first.shape[2:]
    image = first.reshaped((groups * inputs, math.prod(rest), 1), path)
    conv = Conv2d(W.reshape(groups * outputs, inputs, 1, 1), image.shape, groups=groups)
    mixed = image.linear(conv, name=path).reshaped((groups, outputs, *rest), path)
    return mixed.permuted(tuple(order.index(k) for k in range(len(order))), path)


def linear(value: Value, weight: Tensor, bias: Tensor | None, path: str) -> Value:
    """Return x W' + b along the last axis of a sample: the same layer for every token."""
    if value.shape[-1:] != tuple(weight.shape[1:]):
        raise InvalidInput(f"{path}: Linear expects {weight.shape[1]} features, got shape {value.shape}.")
    mixed = along(value, len(value.shape) - 1, value.weight(weight), path)
    return mixed if bias is None else mixed.shift(bias, name=path)


def convolution(
    value: Value,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers | str,
    dilation: Numbers,
    groups: int,
    mode: str,
    path: str,
) -> Value:
    """Return a convolution with torch's arguments, of signals or images as its kernel has it."""
    axes = weight.dim() - 2
    _require_grid(value, axes, path)
    steps, gaps = _each(stride, axes, path), _each(dilation, axes, path)
    sides = _sides(padding, gaps, tuple(weight.shape[2:]), path)
    if axes == 3:
        return _of_volumes(value, weight, bias, steps, sides, gaps, groups, path)
    if mode not in ("zeros", "circular"):
        value = movement.bordered(value, {k + 2: side for k, side in enumerate(sides)}, mode, path)
        sides = ((0, 0),) * axes
    image, kernel = _as_image(value, path), value.weight(weight)
    conv = Conv2d(
        # In training a kernel of images has to stay the parameter that it is.
        kernel if axes == 2 else kernel.reshape(*weight.shape[:2], *_two(tuple(weight.shape[2:]), 1)),
        image.shape,
        _two(steps, 1),
        _two(sides, (0, 0)),
        _two(gaps, 1),
        groups,
        "circular" if mode == "circular" else "zeros",
    )
    offset = None if bias is None else bias[:, None, None]
    return _as_grid(image.linear(conv, offset, path), axes, path)


def _of_volumes(
    value: Value, weight: Tensor, bias: Tensor | None, steps: Shape, sides: Sides, gaps: Shape, groups: int, path: str
) -> Value:
    """Return a convolution of volumes: one of images whose channels are those of all layers."""
    conv = _volume_map(value.weight(weight), value.shape, steps, sides, gaps, groups)
    layers = value.shape[1]
    image = value.reshaped((value.shape[0] * layers, *value.shape[2:]), path)
    found = image.linear(conv, name=path)
    outputs = weight.shape[0]
    volume = found.reshaped((outputs, found.shape[0] // outputs, *found.shape[1:]), path)
    return volume if bias is None else volume.shift(bias[:, None, None, None].expand(volume.shape), name=path)


def _volume_map(kernel: Tensor, shape: Shape, steps: Shape, sides: Sides, gaps: Shape, groups: int) -> Conv2d:
    """Return the convolution of images, (channels x layers, height, width), that a convolution of volumes is.

    Its kernel from layer i to layer j is the slice that lies on i when the window begins at j.
    """
    channels, layers = shape[:2]
    outputs, inputs, depth = kernel.shape[:3]
    after = (layers + sum(sides[0]) - gaps[0] * (depth - 1) - 1) // steps[0] + 1
    if after < 1:
        raise InvalidInput(f"A window of {depth} layers does not fit into {layers}.")
    whole = kernel.new_zeros(outputs, after, inputs, layers, *kernel.shape[3:])
    for j in range(after):
        for k in range(depth):
            i = j * steps[0] - sides[0][0] + k * gaps[0]
            if 0 <= i < layers:
                whole[:, j, :, i] = kernel[:, :, k]
    flat = whole.reshape(outputs * after, inputs * layers, *kernel.shape[3:])
    image = (channels * layers, *shape[2:])
    return Conv2d(flat, image, _two(steps[1:], 1), _two(sides[1:], (0, 0)), _two(gaps[1:], 1), groups)


def transposed_convolution(
    value: Value,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    groups: int,
    dilation: Numbers,
    path: str,
) -> Value:
    """Return the adjoint of the convolution with the same kernel, from images of the size that torch gives."""
    axes = weight.dim() - 2
    _require_grid(value, axes, path)
    steps, gaps, border, extra = (_each(given, axes, path) for given in (stride, dilation, padding, output_padding))
    if value.shape[0] != weight.shape[0]:
        raise InvalidInput(f"{path}: expected {weight.shape[0]} channels, got shape {value.shape}.")
    if any(e >= s for e, s in zip(extra, steps, strict=True)):
        raise UnsupportedModule(f"{path}: output_padding {extra} is not below the stride {steps}. Pad behind it.")
    sizes = zip(value.shape[1:], steps, border, gaps, weight.shape[2:], extra, strict=True)
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in sizes)
    if min(size) < 1:
        raise InvalidInput(f"{path}: nothing is left of an image of shape {value.shape}.")
    if axes == 3:
        borders = tuple((p, p) for p in border)
        whole = (weight.shape[1] * groups, *size)
        conv = _volume_map(value.weight(weight), whole, steps, borders, gaps, groups)
        image = value.reshaped((value.shape[0] * value.shape[1], *value.shape[2:]), path)
        volume = image.linear(conv.T, name=path).reshaped(whole, path)
        return volume if bias is None else volume.shift(bias[:, None, None, None].expand(volume.shape), name=path)
    conv = Conv2d(
        value.weight(weight).reshape(*weight.shape[:2], *_two(tuple(weight.shape[2:]), 1)),
        (weight.shape[1] * groups, *_two(size, 1)),
        _two(steps, 1),
        _two(tuple((p, p) for p in border), (0, 0)),
        _two(gaps, 1),
        groups,
    )
    offset = None if bias is None else bias[:, None, None]
    return _as_grid(_as_image(value, path).linear(conv.T, offset, path), axes, path)


def average_pool(
    value: Value,
    kernel: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    axes: int,
    path: str,
) -> Value:
    """Return means over windows with torch's options; a count that differs from window to window is divided out."""
    _require_grid(value, axes, path)
    sizes, border = _each(kernel, axes, path), _each(padding, axes, path)
    steps = _each(kernel if stride is None or stride == () else stride, axes, path)
    if min(steps) < 1 or min(sizes) < 1 or any(2 * p > k for p, k in zip(border, sizes, strict=True)):
        raise InvalidInput(f"{path}: windows of {sizes} in steps of {steps} cannot have a border of {border}.")
    windows = [_windows(*axis, ceil_mode) for axis in zip(value.shape[1:], sizes, steps, border, strict=True)]
    beyond = tuple(
        max(0, (len(w) - 1) * s + k - n - 2 * p)
        for w, n, k, s, p in zip(windows, value.shape[1:], sizes, steps, border, strict=True)
    )
    if axes == 3:
        return _mean_of_volumes(value, windows, border, count_include_pad, divisor_override, path)
    image, window = _as_image(value, path), _two(sizes, 1)
    counted = count_include_pad or not any(border)
    if divisor_override is None and counted and not any(beyond):
        pool = AveragePool2d(image.shape, window, _two(steps, 1), _two(border, 0))
        return _as_grid(image.linear(pool, name=path), axes, path)
    channels = image.shape[0]
    around = tuple((p, p + e) for p, e in zip(border, beyond, strict=True))
    ones = torch.ones(channels, 1, *window, dtype=torch.float64)
    sums = Conv2d(ones, image.shape, _two(steps, 1), _two(around, (0, 0)), groups=channels)
    summed = image.linear(sums, name=path)
    if divisor_override is not None:
        if divisor_override == 0:
            raise InvalidInput(f"{path}: divisor_override is 0.")
        return _as_grid(summed.times(torch.tensor(1.0 / divisor_override, dtype=torch.float64)), axes, path)
    counts = _counts(windows, value.shape[1:], border, count_include_pad)
    means = summed.times((1.0 / counts).reshape(1, *summed.shape[1:]).expand(summed.shape))
    return _as_grid(means, axes, path)


def _counts(windows: list[list[tuple[int, int]]], sizes: Shape, border: Shape, count_include_pad: bool) -> Tensor:
    """Return by what the sum over each window is divided."""
    counts = torch.ones((), dtype=torch.float64)
    for places, n, p in zip(windows, sizes, border, strict=True):
        low, high = (-p, n + p) if count_include_pad else (0, n)
        along_axis = [min(last, high) - max(first, low) for first, last in places]
        counts = counts[..., None] * torch.tensor(along_axis, dtype=torch.float64)
    return counts


def _mean_of_volumes(
    value: Value,
    windows: list[list[tuple[int, int]]],
    border: Shape,
    count_include_pad: bool,
    divisor_override: int | None,
    path: str,
) -> Value:
    """Return means over windows of volumes: sums along one axis after the other, divided by the counts."""
    counts = _counts(windows, value.shape[1:], border, count_include_pad)
    if divisor_override is not None:
        counts = torch.full_like(counts, divisor_override)
    for axis, places in enumerate(windows, start=1):
        n = value.shape[axis]
        sums = torch.tensor([[float(a <= k < b) for k in range(n)] for a, b in places], dtype=torch.float64)
        value = along(value, axis, sums, path)
    return value.times((1.0 / counts).expand(value.shape), path)


def _windows(n: int, k: int, s: int, p: int, ceil_mode: bool) -> list[tuple[int, int]]:
    """Return where each window along an axis begins and ends; with ceil_mode the last one may reach beyond the end."""
    count = (n + 2 * p - k) // s + 1
    if ceil_mode:
        count = -(-(n + 2 * p - k) // s) + 1
        count -= (count - 1) * s >= n + p  # it would begin behind the image
    if count < 1:
        raise InvalidInput(f"A window of {k} does not fit into an axis of {n}.")
    return [(j * s - p, j * s - p + k) for j in range(count)]


def adaptive_average_pool(value: Value, size: int | Sequence[int | None] | None, axes: int, path: str) -> Value:
    """Return means over as many windows as the output has places."""
    _require_grid(value, axes, path)
    given: list[Any] = list(size) if isinstance(size, tuple | list) else [size] * axes
    targets = tuple(n if m is None else m for n, m in zip(value.shape[1:], given, strict=True))
    if not all(type(m) is int and m >= 1 for m in targets):
        raise InvalidInput(f"{path}: expected an output size of positive whole numbers, got {size}.")
    if targets == value.shape[1:]:
        return value
    if all(n % m == 0 for n, m in zip(value.shape[1:], targets, strict=True)):
        kernel = tuple(n // m for n, m in zip(value.shape[1:], targets, strict=True))
        return average_pool(value, kernel, kernel, 0, False, True, None, axes, path)
    for axis, m in enumerate(targets, start=1):
        n = value.shape[axis]
        means = torch.zeros(m, n, dtype=torch.float64)
        for j in range(m):
            first, last = j * n // m, -(-(j + 1) * n // m)
            means[j, first:last] = 1.0 / (last - first)
        value = along(value, axis, means, path)
    return value


def max_pool(
    value: Value,
    kernel: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    axes: int,
    path: str,
    ceil_mode: bool = False,
) -> Value:
    """Return the largest entry of each window; of volumes, the largest along the layers of those in each layer."""
    _require_grid(value, axes, path)
    sizes, border = _each(kernel, axes, path), _each(padding, axes, path)
    steps = sizes if stride is None or stride == () else _each(stride, axes, path)
    if ceil_mode:
        # A window that reaches beyond an end holds the entry there, so that repeating this changes no maximum.
        last = [_windows(*axis, True)[-1][1] for axis in zip(value.shape[1:], sizes, steps, border, strict=True)]
        around = {
            k + 2: (p, max(0, end - value.shape[k + 1])) for k, (p, end) in enumerate(zip(border, last, strict=True))
        }
        value, border = movement.bordered(value, around, "replicate", path), (0,) * axes
    if axes == 3:
        channels, layers = value.shape[:2]
        flat = value.reshaped((channels * layers, *value.shape[2:]), path)
        inside = max_pool(flat, sizes[1:], steps[1:], border[1:], 2, path)
        columns = inside.reshaped((channels, layers, math.prod(inside.shape[1:])), path)
        across = MaxPool(columns.shape, (sizes[0], 1), (steps[0], 1), (border[0], 0), path)
        return columns.max_pool(across).reshaped((channels, across.out_shape[1], *inside.shape[1:]), path)
    image = _as_image(value, path)
    pool = MaxPool(image.shape, _two(sizes, 1), _two(steps, 1), _two(border, 0), path)
    return _as_grid(image.max_pool(pool), axes, path)


def reduced(value: Value, axes: Sequence[int], keepdim: bool, mean: bool, path: str) -> Value:
    """Return the means, or the sums, over some axes of a sample."""
    kept = tuple(axis for axis in range(len(value.shape)) if axis not in axes)
    count = math.prod(value.shape[axis] for axis in axes)
    lead = math.prod(value.shape[axis] for axis in kept)
    image = value.permuted((*kept, *axes), path).reshaped((lead, count, 1), path)
    pool = AveragePool2d(image.shape, (count, 1), (count, 1))
    found = image.linear(pool if mean else scale(float(count), pool), name=path)
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(value.shape) if keepdim or axis in kept)
    return movement.kept(found, shape, path)


def cumulative_sum(value: Value, axis: int, path: str) -> Value:
    """Return the sums of all entries up to each, along an axis."""
    n = value.shape[axis]
    return along(value, axis, torch.ones(n, n, dtype=torch.float64).tril(), path)


def interpolated(
    value: Value,
    size: Numbers | None,
    factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool | None,
    recompute: bool | None,
    path: str,
) -> Value:
    """Return signals or images in another size, axis by axis as torch itself does it in float64."""
    axes = len(value.shape) - 1
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "area") or axes not in (1, 2):
        raise UnsupportedModule(
            f"{path}: interpolation with mode {mode!r} of samples of shape {value.shape} is not supported. Use "
            "'nearest' or '(bi)linear' on signals or images."
        )
    factors: list[Any] = list(factor) if isinstance(factor, tuple | list) else [factor] * axes
    if len(factors) != axes or (size is None and None in factors):
        raise InvalidInput(f"{path}: expected a size, or a scale factor for each of {axes} axes.")
    sizes = (None,) * axes if size is None else _each(size, axes, path)
    if mode == "area":
        wanted = zip(value.shape[1:], sizes, factors, strict=True)
        return adaptive_average_pool(value, [m or math.floor(n * (f or 1)) for n, m, f in wanted], axes, path)
    for axis, (m, f) in enumerate(zip(sizes, factors, strict=True), start=1):
        n = value.shape[axis]
        if mode.startswith("nearest"):
            places = F.interpolate(torch.arange(float(n), dtype=torch.float64)[None, None], m, f, mode, None, recompute)
            value = value.gathered({axis: [int(k) for k in places[0, 0]]}, path)
        else:
            basis = torch.eye(n, dtype=torch.float64)[:, None]
            images = F.interpolate(basis, m, f, "linear", align_corners, recompute)
            value = along(value, axis, images[:, 0].T.contiguous(), path)
    return value


def batch_normalised(
    value: Value,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    path: str,
) -> Value:
    """Return batch normalisation by fixed statistics."""
    if value.shape[:1] != tuple(mean.shape):
        raise InvalidInput(f"{path}: batch normalisation expects {len(mean)} channels, got shape {value.shape}.")
    if value.live:
        raise UnsupportedModule(
            f"{path}: BatchNorm divides by statistics that move while it is trained, so the network has "
            "no constants yet. Leave it out, or train with its statistics frozen as a curvcert.nn.Normalise."
        )
    factor, shift = (None if part is None else value.weight(part) for part in (weight, bias))
    D, offset = batch_norm_in_eval(value.shape, value.weight(mean), value.weight(variance), eps, factor, shift)
    return value.linear(D, offset, path)


def _require_grid(value: Value, axes: int, path: str) -> None:
    if len(value.shape) != 1 + axes:
        what = (
            "signals of shape (channels, length)",
            "images of shape (channels, height, width)",
            "volumes of shape (channels, depth, height, width)",
        )[axes - 1]
        raise InvalidInput(
            f"{path}: expects {what}, got {value.shape}. The example input needs its batch dimension, and no Flatten "
            "before this layer."
        )


def _each(given: Numbers, axes: int, path: str) -> Shape:
    """Return one whole number for each axis."""
    numbers = tuple(given) if isinstance(given, tuple | list) else (given,)
    numbers = numbers * axes if len(numbers) == 1 else numbers
    if len(numbers) != axes or not all(type(n) is int for n in numbers):
        raise InvalidInput(f"{path}: expected {axes} whole numbers, got {given}.")
    return numbers


def _sides(padding: Numbers | str, dilation: Shape, kernel: Shape, path: str) -> Sides:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    if isinstance(padding, str):
        raise InvalidInput(f"{path}: expected padding 'same', 'valid' or numbers, got {padding!r}.")
    return tuple((p, p) for p in _each(padding, len(kernel), path))


def _two(numbers: tuple[T, ...], first: T) -> tuple[T, T]:
    """Return what is given for each of two axes; a signal is an image of height 1."""
    return (first, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _as_image(value: Value, path: str) -> Value:
    return value if len(value.shape) == 3 else value.reshaped((value.shape[0], 1, value.shape[1]), path)


def _as_grid(image: Value, axes: int, path: str) -> Value:
    channels, height, width = image.shape
    return image if axes == 2 else image.reshaped((channels, height * width), path)
