"""The map of a two-dimensional convolution (cross-correlation, as in PyTorch)."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, Shape, require_weight
from curvcert.operators.description import Description, Reading, Weights, description, pair, reads, shape, stored

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]

_COLUMN_ELEMENTS = 2**26
"""Numbers in the columns of an adjoint that is folded: they take as many times the image as the kernel has taps."""


@final
@dataclass(frozen=True, eq=False)
class Conv2d(AbstractLinearMap):
    """y[o, i] = sum over c, u of K[o, c, u] x[c, s i + d u - P], on images of a fixed size.

    `padding` is ((top, bottom), (left, right)), asymmetric if need be; outside the image stand
    zeros, or its periodic continuation with `padding_mode="circular"`.

    >>> mean = Conv2d(torch.full((1, 1, 2, 2), 0.25), image_shape=(1, 2, 2))
    >>> mean.apply(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]))
    tensor([[[3.]]])
    """

    weight: Tensor
    image_shape: Shape
    stride: Pair = (1, 1)
    padding: Padding = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: Literal["zeros", "circular"] = "zeros"

    def __post_init__(self) -> None:
        require_weight(self.weight, 4, "Conv2d")
        outputs, per_group = self.weight.shape[:2]
        if len(self.in_shape) != 3 or per_group * self.groups != self.in_shape[0] or outputs % self.groups:
            raise InvalidInput(
                f"Conv2d with weight {tuple(self.weight.shape)} and {self.groups} groups expects an image of "
                f"shape ({per_group * self.groups}, height, width), got {self.in_shape}."
            )
        if min(self.stride) < 1 or min(self.dilation) < 1 or self.groups < 1:
            raise InvalidInput("Conv2d expects stride, dilation and groups of at least 1.")
        if min(min(side) for side in self.padding) < 0:
            raise InvalidInput(f"Conv2d expects padding of at least 0, got {self.padding}. Crop the input instead.")
        if self.padding_mode not in ("zeros", "circular"):
            raise InvalidInput(
                f"Conv2d covers padding modes 'zeros' and 'circular', got {self.padding_mode!r}. "
                "Retrain with zero padding."
            )
        if min(self.out_shape) < 1:
            raise InvalidInput(f"Conv2d's kernel does not fit into an image of shape {self.in_shape}.")
        if self.padding_mode == "circular" and any(
            max(side) > n for side, n in zip(self.padding, self.in_shape[1:], strict=True)
        ):
            raise InvalidInput(f"Circular padding {self.padding} wraps more than once around {self.in_shape}.")

    @property
    def in_shape(self) -> Shape:
        return self.image_shape

    @cached_property
    def extent(self) -> Pair:
        """e = d (k - 1): how far the dilated kernel reaches, along each axis."""
        kh, kw = self.weight.shape[2:]
        return self.dilation[0] * (kh - 1), self.dilation[1] * (kw - 1)

    @cached_property
    def out_shape(self) -> Shape:
        spatial = (
            (n + sum(side) - e - 1) // s + 1
            for n, side, e, s in zip(self.in_shape[1:], self.padding, self.extent, self.stride, strict=True)
        )
        return (self.weight.shape[0], *spatial)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def _pixelwise(self) -> Tensor | None:
        """The matrix that every pixel goes through by itself, if that is all: a product says so in far less time.

        Not kept: one made without gradients would cut a parameter in training off from its own.
        """
        single = self.weight.shape[2:] == (1, 1) and self.stride == (1, 1) and self.groups == 1
        return self.weight[:, :, 0, 0] if single and not any(map(any, self.padding)) else None

    def _apply(self, x: Tensor) -> Tensor:
        if self._pixelwise is not None:
            return torch.matmul(self._pixelwise, x.flatten(2)).reshape(len(x), *self.out_shape)
        (top, bottom), (left, right) = self.padding
        if self.padding_mode == "zeros" and (top, left) == (bottom, right):
            return F.conv2d(x, self.weight, None, self.stride, (top, left), self.dilation, self.groups)
        mode = "constant" if self.padding_mode == "zeros" else "circular"
        padded = F.pad(x, (left, right, top, bottom), mode=mode)
        return F.conv2d(padded, self.weight, None, self.stride, 0, self.dilation, self.groups)

    def _adjoint(self, y: Tensor) -> Tensor:
        if self._pixelwise is not None:
            return torch.matmul(self._pixelwise.T, y.flatten(2)).reshape(len(y), *self.in_shape)
        return (folded_adjoint if folds(self) else scattered_adjoint)(self, y)

    def _matrix(self) -> Tensor:
        kernel = ungrouped_kernel(self)
        matrix = kernel.new_zeros(*self.out_shape, *self.in_shape)
        for a in range(kernel.shape[2]):
            for b in range(kernel.shape[3]):
                (oh, ih), (ow, iw) = _taps(self, 0, a), _taps(self, 1, b)
                # Index arrays apart from each other put their axes first: (oh, ow, outputs, inputs).
                matrix[:, oh[:, None], ow[None, :], :, ih[:, None], iw[None, :]] += kernel[:, :, a, b]
        return matrix.reshape(self.out_size, self.in_size)


def overlaps(conv: Conv2d) -> bool:
    """Whether two outputs may read the same pixel, or an output a pixel outside the image.

    Where not, rows of different windows are orthogonal, and the norms are those of the kernel's matrix.

    >>> [overlaps(Conv2d(torch.ones(1, 1, k, k), (1, 4, 4), (2, 2))) for k in (1, 2, 3)]
    [False, False, True]
    """
    padded = any(any(side) for side in conv.padding)
    return padded or any(e >= s for e, s in zip(conv.extent, conv.stride, strict=True))


def folds(conv: Conv2d) -> bool:
    """Tell which way the adjoint goes: cuDNN's transposed convolutions are several times slower in float64."""
    return conv.device.type == "cuda" and conv.dtype == torch.float64 and conv.groups == 1


def scattered_adjoint(conv: Conv2d, y: Tensor) -> Tensor:
    """Return the images of a batch under the adjoint, by a transposed convolution."""
    axes = zip(conv.in_shape[1:], conv.padding, conv.extent, conv.stride, conv.out_shape[1:], strict=True)
    # What the stride never reached at the far end of the padded image.
    rest_h, rest_w = (n + sum(side) - (m - 1) * s - e - 1 for n, side, e, s, m in axes)
    padded = F.conv_transpose2d(y, conv.weight, None, conv.stride, 0, (0, 0), conv.groups, conv.dilation)
    return _unpadded(conv, F.pad(padded, (0, rest_w, 0, rest_h)), (0, 0))


def folded_adjoint(conv: Conv2d, y: Tensor, elements: int = _COLUMN_ELEMENTS) -> Tensor:
    r"""Return the same by one product with the kernel's matrix, whose columns are then added where they overlap.

    For a kernel without groups.  At each tap the product sums over the outputs, and at most :math:`k_h k_w` taps
    are added after that: outputs + :math:`k_h k_w` - 1 roundings, no more than outputs x :math:`k_h k_w`, the
    number of terms, so that `rounding_length` holds for this order too.  No more than about `elements` numbers
    stand in the columns at once.
    """
    common = (0, 0) if conv.padding_mode == "circular" else (min(conv.padding[0]), min(conv.padding[1]))
    axes = zip(conv.in_shape[1:], conv.padding, common, strict=True)
    size = tuple(n + sum(side) - 2 * both for n, side, both in axes)
    kernel, taps = conv.weight.flatten(1).mT, conv.weight.shape[2:]
    at_once = max(1, elements // (len(kernel) * math.prod(conv.out_shape[1:])))
    pieces = [
        F.fold(kernel @ part.flatten(2), size, taps, conv.dilation, common, conv.stride) for part in y.split(at_once)
    ]
    return _unpadded(conv, pieces[0] if len(pieces) == 1 else torch.cat(pieces), common)


def _unpadded(conv: Conv2d, padded: Tensor, cut: Pair) -> Tensor:
    """Return the adjoint of padding; `cut` of it, the same at both ends of an axis, is taken off already."""
    sides = zip(conv.in_shape[1:], conv.padding, cut, strict=True)
    for axis, (n, (before, after), gone) in enumerate(sides, start=2):
        if conv.padding_mode == "zeros":
            padded = padded.narrow(axis, before - gone, n)
        else:
            source = torch.arange(-before, n + after, device=padded.device) % n
            shape = [*padded.shape[:axis], n, *padded.shape[axis + 1 :]]
            padded = padded.new_zeros(shape).index_add(axis, source, padded)
    return padded


def _taps(conv: Conv2d, axis: int, tap: int) -> tuple[Tensor, Tensor]:
    """Return the output positions that tap reads the image from, and the image positions it reads."""
    n, before = conv.in_shape[1 + axis], conv.padding[axis][0]
    out = torch.arange(conv.out_shape[1 + axis], device=conv.device)
    position = out * conv.stride[axis] + tap * conv.dilation[axis] - before
    if conv.padding_mode == "circular":
        return out, position % n
    inside = (position >= 0) & (position < n)
    return out[inside], position[inside]


def ungrouped_kernel(conv: Conv2d) -> Tensor:
    """Return the (outputs, inputs, kh, kw) kernel, with zeros between the groups."""
    if conv.groups == 1:
        return conv.weight
    outputs, per_group, kh, kw = conv.weight.shape
    kernel = conv.weight.new_zeros(outputs, conv.in_shape[0], kh, kw)
    size = outputs // conv.groups
    for g in range(conv.groups):
        rows = slice(g * size, (g + 1) * size)
        kernel[rows, g * per_group : (g + 1) * per_group] = conv.weight[rows]
    return kernel


@description.register
def _(op: Conv2d, weights: Weights) -> Description:
    return {
        "map": "conv",
        "weight": stored(op.weight, weights),
        "image_shape": list(op.image_shape),
        "stride": list(op.stride),
        "padding": [list(side) for side in op.padding],
        "dilation": list(op.dilation),
        "groups": op.groups,
        "padding_mode": op.padding_mode,
    }


@reads("conv")
def _read(entry: Description, reading: Reading) -> Conv2d:
    above, beside = map(pair, entry["padding"])
    conv = Conv2d(
        reading.weight(entry["weight"]),
        shape(entry["image_shape"]),
        pair(entry["stride"]),
        (above, beside),
        pair(entry["dilation"]),
        int(entry["groups"]),
        entry["padding_mode"],
    )
    # Padding is written out, and every output takes one multiplication for each of the kernel's taps.
    padded = (n + sum(side) for n, side in zip(conv.in_shape[1:], conv.padding, strict=True))
    reading.take(conv.in_shape[0] * math.prod(padded), conv.out_size * math.prod(conv.weight.shape[1:]))
    return conv
