"""Stencils: the maps between images that do the same thing at every position, and which positions they read.

A convolution, a pooling by means and a scale per channel are all

    y[o, i] = sum over c, u of K[o, c, u] x[c, s i + t_u],     x = 0 outside the image,

with the offsets t along each axis.  So is the adjoint of one without stride, the offsets negated.
"""

from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import final

from torch import Tensor

from curvcert.operators.base import AbstractLinearMap, Transposed
from curvcert.operators.conv import Conv2d, Pair
from curvcert.operators.structured import AveragePool2d, Diagonal
from curvcert.rounding import UNIT_ROUNDOFF, Upper, lengths


@final
@dataclass(frozen=True)
class Reach:
    """What a stencil reads along one axis: n positions give m, output i reads s i + t for each offset t."""

    n: int
    m: int
    stride: int
    offsets: tuple[int, ...]

    @property
    def need(self) -> int:
        """The shortest circle on which what is read outside the image never falls on the image again."""
        first, last = min(self.offsets), self.stride * (self.m - 1) + max(self.offsets)
        return max(self.n + max(-first, last - self.n + 1, 0), self.stride * self.m)

    @property
    def stays_inside(self) -> bool:
        """Whether only the image itself is read."""
        return min(self.offsets) >= 0 and self.stride * (self.m - 1) + max(self.offsets) < self.n

    @property
    def is_roomy(self) -> bool:
        """Whether a torus costs little: windows that do not overlap, or taps that are few beside a large image."""
        extent = max(self.offsets) - min(self.offsets)
        apart = extent < self.stride and self.stays_inside
        return apart or (self.n >= 8 and 5 * extent <= self.n)

    def leaves_gap_clean(self, circle: int) -> bool:
        """Whether, on a circle, every output beyond the m that are meant reads nothing of the image."""
        beyond = range(self.m, circle // self.stride)
        return all((self.stride * i + t) % circle >= self.n for i in beyond for t in self.offsets)


@final
@dataclass(frozen=True, eq=False)
class Stencil:
    """A kernel of shape (groups, outputs, inputs, taps, taps), within a relative `error` of the one that is meant."""

    kernel: Tensor
    reach: tuple[Reach, Reach]
    error: float = 0.0

    @cached_property
    def size(self) -> Tensor:
        """A bound on the norm of the sum of the absolute values of the taps, and so of what any frequency sees."""
        size = lengths(Upper(self.kernel.abs()).sum(-2, -1), -2, -1).amax()
        return (size + size * self.error).bound

    @property
    def is_scale(self) -> bool:
        """Whether it is a scale of each channel."""
        return self.kernel.shape[1:] == (1, 1, 1, 1) and all(
            axis.stride == 1 and axis.offsets == (0,) and axis.n == axis.m for axis in self.reach
        )

    @property
    def stride(self) -> Pair:
        """The stride along each axis."""
        return self.reach[0].stride, self.reach[1].stride


@singledispatch
def stencil_of(op: AbstractLinearMap) -> Stencil | None:
    """Return a map as a stencil, or None if it is none."""
    return None


@stencil_of.register
def _(op: Conv2d) -> Stencil | None:
    if op.padding_mode != "zeros":
        return None
    (h, w), (a, b) = (_reach(op, axis) for axis in (0, 1)), op.weight.shape[:2]
    return Stencil(op.weight.reshape(op.groups, a // op.groups, b, *op.weight.shape[2:]), (h, w))


def _reach(op: Conv2d, axis: int) -> Reach:
    dilation, before = op.dilation[axis], op.padding[axis][0]
    offsets = tuple(dilation * tap - before for tap in range(op.weight.shape[2 + axis]))
    return Reach(op.in_shape[1 + axis], op.out_shape[1 + axis], op.stride[axis], offsets)


@stencil_of.register
def _(op: AveragePool2d) -> Stencil | None:
    pooled = stencil_of(op.as_conv)
    assert pooled is not None  # a convolution with zero padding
    return Stencil(pooled.kernel, pooled.reach, 4 * UNIT_ROUNDOFF)


@stencil_of.register
def _(op: Diagonal) -> Stencil | None:
    weight = op.weight.expand(op.shape)
    if len(op.shape) != 3 or not bool((weight == weight[:, :1, :1]).all()):
        return None
    h, w = (Reach(n, n, 1, (0,)) for n in op.shape[1:])
    return Stencil(weight[:, :1, :1].reshape(-1, 1, 1, 1, 1), (h, w))


@stencil_of.register
def _(op: Transposed) -> Stencil | None:
    inner = stencil_of(op.map)
    if inner is None or inner.stride != (1, 1):
        return None
    h, w = (Reach(axis.m, axis.n, 1, tuple(-t for t in axis.offsets)) for axis in inner.reach)
    return Stencil(inner.kernel.transpose(1, 2), (h, w), inner.error)


def folded(outer: Stencil, inner: Stencil) -> Stencil | None:
    """Return two stencils in a row as one where either is a scale per channel, else None; an entry rounds once."""
    if outer.is_scale:
        scale = outer.kernel.reshape(inner.kernel.shape[0], -1, 1, 1, 1)
        return Stencil(inner.kernel * scale, inner.reach, inner.error + outer.error + 4 * UNIT_ROUNDOFF)
    if inner.is_scale:
        scale = inner.kernel.reshape(outer.kernel.shape[0], 1, -1, 1, 1)
        return Stencil(outer.kernel * scale, outer.reach, inner.error + outer.error + 4 * UNIT_ROUNDOFF)
    return None
