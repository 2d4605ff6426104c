r"""Networks of stencils between images, and the circles on which they are replaced by circular ones.

A *value* is an image: the input, a sum of images of earlier values under stencils, or what *slopes* make of one value,
:math:`\phi = \mu + \psi` with :math:`\psi` rho-Lipschitz.  On a torus with circles that are long enough, circular
stencils give the same on the image as the true ones do, as long as every stencil that reads beyond an image reads
zeros there.  So:

- *gap*: the positions of a circle that are not of the image;
- *clean*: a value that is zero in the gap.  The input is, and whatever has slopes, its gap set to zero;
- *crop*: where a stencil reads the gap of a value that is not clean, the gap is set to zero before, which is one more
  nonlinearity, with slopes in [0, 1].
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import final

from curvcert.operators.base import (
    AbstractLinearMap,
    Composition,
    Identity,
    Reshape,
    Scaled,
    Shape,
    Sum,
)
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Pair
from curvcert.operators.stencils import Stencil, folded, stencil_of


@final
@dataclass(frozen=True, eq=False)
class Use:
    """The image of an earlier value under a stencil (or the value itself), times a factor."""

    source: int
    stencil: Stencil | None = None
    factor: float = 1.0


@final
@dataclass(frozen=True)
class Slopes:
    """A middle slope mu, and a Lipschitz constant rho of what is left."""

    mu: float
    rho: float


CROP = Slopes(0.5, 0.5)
"""A coordinate is kept or set to zero: slopes in [0, 1]."""


@final
@dataclass(frozen=True, eq=False)
class Value:
    """An image: the input (no uses), a sum of uses, or what slopes make of a single one."""

    shape: Shape
    uses: tuple[Use, ...] = ()
    slopes: Slopes | None = None


class Unplanar(Exception):
    """A map is no network of stencils between images."""


class Planes:
    """Values under construction, each after what it reads."""

    def __init__(self, shape: Shape) -> None:
        """Start with an input."""
        if len(shape) != 3:
            raise Unplanar
        self.values = [Value(shape)]

    def add(self, value: Value) -> int:
        """Append a value and return its number."""
        self.values.append(value)
        return len(self.values) - 1

    def image(self, op: AbstractLinearMap, source: int) -> int:
        """Append what a map makes of a value, step by step, and return its number."""
        match op:
            case Identity():
                return source
            case Reshape() if op.in_shape == op.out_shape:
                return source
            case Composition():
                for factor in reversed(op.factors):
                    source = self.image(factor, source)
                return source
            case Scaled():
                return self._sum([Use(self.image(op.map, source), factor=op.factor)])
            case Sum():
                return self.total([self.image(term, source) for term in op.terms])
            case Circuit():
                return op.carried(source, self.image, self.total)
            case _:
                stencil = stencil_of(op)
                if stencil is None:
                    raise Unplanar
                return self.add(Value(op.out_shape, (Use(source, stencil),)))

    def total(self, images: Sequence[int]) -> int:
        """Append the sum of some values and return its number."""
        return images[0] if len(images) == 1 else self._sum([Use(image) for image in images])

    def _sum(self, uses: list[Use]) -> int:
        return self.add(Value(self.values[uses[0].source].shape, tuple(uses)))


def planes_of(op: AbstractLinearMap) -> list[Value]:
    """Return the values of a map, the last of which is its image.

    Raises:
        Unplanar: the map has a part that is no stencil.
    """
    planes = Planes(op.in_shape)
    planes.image(op, 0)
    return planes.values


def with_scales_folded(values: Sequence[Value], kept: Collection[int]) -> tuple[list[Value], dict[int, int]]:
    """Return the values with scales per channel folded into the stencils beside them, and where each stands now.

    What only a folded stencil read is gone, unless it is kept.
    """
    readers = Counter(use.source for value in values for use in value.uses)
    made: list[Value] = []
    number: dict[int, int] = {}
    for k, value in enumerate(values):
        uses = tuple(replace(use, source=number[use.source]) for use in value.uses)
        if len(uses) == 1 and value.slopes is None and uses[0].source == len(made) - 1 > 0:
            source = value.uses[0].source
            merged = None if source in kept or readers[source] > 1 else _merged(made[-1], uses[0])
            if merged is not None:
                made[-1] = replace(value, uses=(merged,))
                number[k] = len(made) - 1
                continue
        number[k] = len(made)
        made.append(replace(value, uses=uses))
    return made, number


def _merged(value: Value, use: Use) -> Use | None:
    """Return the use of a value as a use of what the value itself is made of, or None."""
    if len(value.uses) != 1 or value.slopes is not None:
        return None
    inner = value.uses[0]
    if use.stencil is None or inner.stencil is None:
        # A factor alone moves no position.
        if use.factor * inner.factor == 0.0 or not _is_exact(use.factor, inner.factor):
            return None
        stencil = use.stencil or inner.stencil
    else:
        stencil = folded(use.stencil, inner.stencil) if use.factor == inner.factor == 1.0 else None
        if stencil is None:
            return None
    return Use(inner.source, stencil, use.factor * inner.factor)


def _is_exact(a: float, b: float) -> bool:
    return Fraction(a) * Fraction(b) == Fraction(a * b)


def total_strides(values: Sequence[Value]) -> list[Pair]:
    """Return how many positions of the input one step of each value is.

    Raises:
        Unplanar: two terms of a sum have different ones.
    """
    found: list[Pair] = [(1, 1)]
    for value in values[1:]:
        strides = {_times(found[use.source], use.stencil.stride if use.stencil else (1, 1)) for use in value.uses}
        if len(strides) != 1:
            raise Unplanar
        found.append(strides.pop())
    return found


def _times(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0], a[1] * b[1]


@final
@dataclass(frozen=True)
class Circles:
    """The circle of the input along each axis, and the common multiple of all total strides, which divides it."""

    length: Pair
    period: Pair

    def longer(self, periods: int) -> "Circles":
        """Return circles that are longer by some periods."""
        h, w = (n + periods * t for n, t in zip(self.length, self.period, strict=True))
        return replace(self, length=(h, w))


def shortest_circles(values: Sequence[Value], strides: Sequence[Pair]) -> Circles:
    """Return the shortest circles on which every stencil reads what it should."""
    length, period = [0, 0], [1, 1]
    for axis in (0, 1):
        period[axis] = math.lcm(*(stride[axis] for stride in strides))
        needs = [value.shape[1 + axis] * stride[axis] for value, stride in zip(values, strides, strict=True)]
        needs += [
            use.stencil.reach[axis].need * strides[use.source][axis]
            for value in values
            for use in value.uses
            if use.stencil is not None
        ]
        length[axis] = period[axis] * math.ceil(max(needs) / period[axis])
    return Circles((length[0], length[1]), (period[0], period[1]))


def with_crops(values: Sequence[Value], strides: Sequence[Pair], circles: Circles) -> tuple[list[Value], list[int]]:
    """Return the values with crops where a stencil would read a gap that is not clean, and where each stands now."""
    made: list[Value] = []
    number: list[int] = []
    clean: list[bool] = []
    crops: dict[int, int] = {}
    for value in values:
        uses = list[Use]()
        tidy = True
        for use in value.uses:
            source = number[use.source]
            lengths = [n // s for n, s in zip(circles.length, strides[use.source], strict=True)]
            if use.stencil is not None:
                inside = all(axis.stays_inside for axis in use.stencil.reach)
                if not (clean[source] or inside):
                    if source not in crops:
                        crops[source] = len(made)
                        made.append(Value(made[source].shape, (Use(source),), CROP))
                        clean.append(True)
                    source = crops[source]
                axes = zip(use.stencil.reach, lengths, strict=True)
                tidy &= all(axis.leaves_gap_clean(length) for axis, length in axes)
            tidy &= clean[source]
            uses.append(replace(use, source=source))
        number.append(len(made))
        made.append(replace(value, uses=tuple(uses)))
        clean.append(tidy or value.slopes is not None)
    return made, number
