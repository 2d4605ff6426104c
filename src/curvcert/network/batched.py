"""Tensors of a module, with the batch among their axes, as values of one sample.

The batch need not come first: code for sequences puts it second, attention joins it with the heads, windows multiply
it.  So a tensor's layout says which of its axes holds the batch: that axis has pre x batch x post entries, in this
order.  A rule that reads a tensor has to say where the batch is in what it returns: that is the proof that samples do
not meet.

What moves the entries of tensors (views, slices, joins, borders, ...) needs no rule of its own: the operation is tried
on tensors whose entries are numbered, and the numbers in the result say where each entry comes from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvcert.errors import InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network.builder import Value
from curvcert.network.nodes import AffineNode, Term
from curvcert.operators import AbstractLinearMap, Diagonal, Identity
from curvcert.operators.base import Shape
from curvcert.operators.slices import Slice

BATCH = 5
"""How many samples a module is recorded with: a prime that sizes inside a network seldom are."""


@dataclass(frozen=True)
class Layout:
    """Where the batch is: the entries of one axis are pre x batch x post.

    A tensor that has no axis beside the batch is `bare`: the one number of a sample has shape (1,).
    """

    axis: int = 0
    pre: int = 1
    post: int = 1
    bare: bool = False

    @property
    def alone(self) -> bool:
        """Whether the axis is the batch and nothing else; a sample then has no such axis."""
        return self.pre == self.post == 1 and not self.bare

    def sample(self, shape: Shape) -> Shape:
        """Return the shape of one sample of a tensor."""
        kept = () if self.alone else (self.pre * self.post,)
        return (*shape[: self.axis], *kept, *shape[self.axis + 1 :])

    def tensor(self, sample: Shape) -> Shape:
        """Return the shape of the tensor of such samples."""
        behind = sample[self.axis + (not self.alone) :]
        return (*sample[: self.axis], self.pre * BATCH * self.post, *behind)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor as (batch, *sample)."""
        shape = tuple(tensor.shape)
        if self.alone:
            return tensor.movedim(self.axis, 0)
        parts = tensor.reshape(*shape[: self.axis], self.pre, BATCH, self.post, *shape[self.axis + 1 :])
        return parts.movedim(self.axis + 1, 0).reshape(BATCH, *self.sample(shape))

    def joined(self, rows: Tensor) -> Tensor:
        """Return the tensor of such rows."""
        if self.alone:
            return rows.movedim(0, self.axis)
        sample = tuple(rows.shape[1:])
        parts = rows.reshape(BATCH, *sample[: self.axis], self.pre, self.post, *sample[self.axis + 1 :])
        return parts.movedim(0, self.axis + 1).reshape(self.tensor(sample))

    def place(self, dim: int, rank: int, path: str) -> int:
        """Return which axis of a sample a dimension of a tensor is."""
        dim = dim % rank if rank else 0
        if dim == self.axis:
            raise UnsupportedModule(
                f"{path}: works along dimension {dim}, which holds the batch, so that samples would meet. Keep the "
                "batch apart."
            )
        return dim - (self.alone and dim > self.axis)


FIRST = Layout()
"""The batch as the first dimension, by itself."""


class Batched:
    """A tensor that depends on the input: the value of one sample, and where the batch is.

    What a row of operations has moved is kept as the places that its entries come from, until the value is asked for:
    a border that is written side by side is one selection then.
    """

    def __init__(self, value: Value, layout: Layout = FIRST) -> None:
        """Wrap a value."""
        self.layout, self._path = layout, ""
        self._value: Value | None = value
        self._sample: Shape = value.shape
        self._moved: tuple[Places, Places] | None = None

    @staticmethod
    def of_places(step: "Places", layout: Layout, path: str) -> "Batched":
        """Return the tensor whose entries come from places of others."""
        found = Batched.__new__(Batched)
        found.layout, found._value, found._sample, found._path = layout, None, tuple(step.places.shape), path
        found._moved = step, step.followed()
        return found

    @property
    def value(self) -> Value:
        """The value of one sample."""
        if self._value is None:
            assert self._moved is not None
            step, origin = self._moved
            self._value = origin.value(self._path, whole=False) or step.value(self._path, whole=True)
        assert self._value is not None
        return self._value

    @property
    def origin(self) -> "Places":
        """Where its entries come from, all moves back: if none moved, itself."""
        if self._moved is not None:
            return self._moved[1]
        return Places((self,), torch.arange(math.prod(self._sample)).reshape(self._sample), None)

    @property
    def sample(self) -> Shape:
        """Shape of one sample."""
        return self._sample

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self.layout.tensor(self._sample)

    def place(self, dim: int, path: str) -> int:
        """Return which axis of a sample a dimension is."""
        return self.layout.place(dim, len(self.shape), path)

    def leading(self, path: str) -> Value:
        """Return the value of one sample where the batch is the first dimension, alone."""
        if self.layout != FIRST:
            raise UnsupportedModule(
                f"{path}: expects the batch as the first dimension, by itself; it is in dimension {self.layout.axis} "
                f"of a tensor of shape {self.shape}. Bring it there."
            )
        return self.value


@dataclass(frozen=True, eq=False)
class Places:
    """Where the entries of a tensor come from: counted through all of its sources, -1 for a constant."""

    sources: tuple[Batched, ...]
    places: Tensor
    constant: Tensor | None

    def followed(self) -> "Places":
        """Return the same with the sources' own sources."""
        bases: list[Batched] = list(dict.fromkeys(base for source in self.sources for base in source.origin.sources))
        firsts, count = {}, 0
        for base in bases:
            firsts[base], count = count, count + math.prod(base.sample)
        table, constants = [], []
        for source in self.sources:
            origin = source.origin
            moved, first = torch.full_like(origin.places, -1), 0
            for base in origin.sources:
                size = math.prod(base.sample)
                mine = (origin.places >= first) & (origin.places < first + size)
                moved, first = torch.where(mine, origin.places - first + firsts[base], moved), first + size
            table.append(moved.flatten())
            zeros = torch.zeros(origin.places.shape, dtype=torch.float64)
            constants.append((zeros if origin.constant is None else origin.constant).flatten())
        mine, where = self.places >= 0, self.places.clamp(min=0)
        constant = torch.cat(constants)[where].where(mine, 0.0 if self.constant is None else self.constant)
        return Places(tuple(bases), torch.cat(table)[where].where(mine, -1), constant if bool(constant.any()) else None)

    def value(self, path: str, whole: bool) -> Value | None:
        """Return the value; unless `whole`, only if every source goes there axis by axis."""
        if self.constant is not None and not bool(torch.isfinite(self.constant).all()):
            raise InvalidInput(f"{path}: a constant is NaN or infinite, or was never given a value.")
        terms, first = [], 0
        for source in self.sources:
            size = math.prod(source.sample)
            mine = (self.places >= first) & (self.places < first + size)
            if bool(mine.any()):
                term = _embedded(source.value, (self.places - first).where(mine, -1), path, whole)
                if term is None:
                    return None
                terms.append(term)
            first += size
        value = _summed(terms, path)
        return value if self.constant is None else value.shift(self.constant, name=path)


def constant_of_a_sample(constant: Tensor, shape: Shape, layout: Layout, path: str) -> Tensor:
    """Return a constant that is broadcast to a tensor as one sample has it: the same for every sample."""
    if not bool(torch.isfinite(constant).all()):
        raise InvalidInput(f"{path}: a constant is NaN or infinite, or was never given a value.")
    rows = layout.rows(constant.expand(shape))
    if constant.dim() > len(shape) - layout.axis - 1 and not bool((rows == rows[:1]).all()):
        raise _differs(constant, path)
    return rows[0]


def _differs(constant: Tensor, path: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"{path}: a constant of shape {tuple(constant.shape)} has other numbers for every sample of a batch. Give all "
        "samples the same."
    )


def aligned(items: Sequence[Batched | Tensor], path: str) -> tuple[Layout, list[Value | Tensor]]:
    """Return tensors of one operation on every entry in the shape of one sample, broadcast."""
    whole = tuple(torch.broadcast_shapes(*(item.shape for item in items)))
    dependent = [item for item in items if isinstance(item, Batched)]
    moved = {_moved(item, len(whole)) for item in dependent}
    if len(moved) != 1 or any(item.shape[item.layout.axis] != whole[next(iter(moved)).axis] for item in dependent):
        raise UnsupportedModule(
            f"{path}: combines tensors of shapes {', '.join(str(item.shape) for item in dependent)} whose batches are "
            "in different places, so that samples would meet. Keep the batch in one dimension."
        )
    (layout,) = moved
    found: list[Value | Tensor] = []
    for item in items:
        if isinstance(item, Batched):
            full = layout.sample((*(1,) * (len(whole) - len(item.shape)), *item.shape))
            found.append(item.value.reshaped(full, path).expanded(layout.sample(whole), path))
        else:
            found.append(constant_of_a_sample(item, whole, layout, path))
    return layout, found


def _moved(item: Batched, rank: int) -> Layout:
    layout = item.layout
    return Layout(layout.axis + rank - len(item.shape), layout.pre, layout.post, rank == 1)


def moved(function: Callable[..., Any], sources: Sequence[Batched | Tensor], path: str) -> list[Batched | Tensor]:
    """Return the tensors that `function` makes by moving the entries of its sources, of which some are constants.

    The function is tried twice: on zeros, which shows the constants in its result, and on numbered entries.
    """
    dependent = [source for source in sources if isinstance(source, Batched)]
    sizes = [math.prod(source.sample) for source in dependent]
    total = sum(sizes)
    rows = 1.0 + torch.arange(float(total)) + total * torch.arange(float(BATCH))[:, None]
    numbered = iter(
        source.layout.joined(part.reshape(BATCH, *source.sample))
        for source, part in zip(dependent, rows.double().split(sizes, dim=1), strict=True)
    )
    nothing = [torch.zeros(s.shape, dtype=torch.float64) if isinstance(s, Batched) else s.cpu() for s in sources]
    entries = [
        next(numbered).contiguous() if isinstance(s, Batched) else c for s, c in zip(sources, nothing, strict=True)
    ]
    offsets, found = (_listed(function(*given)) for given in (nothing, entries))
    return [
        _traced(offset, torch.where(offset.isfinite(), result - offset, 0.0), dependent, sizes, path)
        for offset, result in zip(offsets, found, strict=True)
    ]


def _listed(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def _traced(offset: Tensor, numbers: Tensor, dependent: list[Batched], sizes: list[int], path: str) -> Batched | Tensor:
    """Return the tensor whose entries come from the places with these numbers; 0 is none."""
    if not bool(numbers.any()):
        return offset
    layout = _layout_of(numbers, sum(sizes), path)
    places = layout.rows(numbers)[0].long() - 1
    rows = layout.rows(offset)
    if not bool(((rows == rows[:1]) | rows.isnan()).all()):
        raise _differs(offset, path)
    return Batched.of_places(Places(tuple(dependent), places, rows[0].double()), layout, path)


def _layout_of(numbers: Tensor, total: int, path: str) -> Layout:
    """Return where the batch is in a tensor of numbered entries: every sample has the same, one `total` on."""
    for axis, size in enumerate(numbers.shape):
        for pre in (k for k in range(1, size // BATCH + 1) if size % (BATCH * k) == 0):
            layout = Layout(axis, pre, size // (BATCH * pre), numbers.dim() == 1)
            rows = layout.rows(numbers).reshape(BATCH, -1)
            steps = (rows[:1] > 0) * (total * torch.arange(float(BATCH), dtype=torch.float64))[:, None]
            if bool((rows == rows[:1] + steps).all()) and not bool((rows[0] > total).any()):
                return layout
    raise UnsupportedModule(
        f"{path}: moves entries from one sample to another, or the batch out of its dimension, so that no constant "
        "holds for one sample. Keep the batch apart."
    )


def _summed(terms: list[tuple[Value, AbstractLinearMap]], path: str) -> Value:
    value, embedding = terms[0]
    if len(terms) == 1:
        return value.linear(embedding, name=path)
    builder = value.builder
    parts = tuple(Term(value.number, A.to(builder.dtype, builder.device)) for value, A in terms)
    return builder.add(AffineNode(parts, builder.zeros(embedding.out_shape), path))


def _embedded(value: Value, places: Tensor, path: str, whole: bool) -> tuple[Value, AbstractLinearMap] | None:
    """Return the entries of a value at some places of a larger one, with the map that puts them there; -1 is none."""
    mine = places >= 0
    shape = tuple(places.shape)
    if bool(mine.all()):
        found = selected(value, places, path, whole)
        return None if found is None else (found, Identity(shape))
    sides = [mine.movedim(k, 0).reshape(shape[k], -1).any(1).nonzero().flatten() for k in range(mine.dim())]
    starts, sizes = tuple(int(s[0]) for s in sides), tuple(int(s[-1] - s[0]) + 1 for s in sides)
    box = tuple(slice(first, first + n) for first, n in zip(starts, sizes, strict=True))
    if bool(mine[box].all()):
        found = selected(value, places[box], path, whole)
        return None if found is None else (found, Slice(shape, starts, (1,) * len(shape), sizes).T)
    found = selected(value, places.clamp(min=0), path, whole)
    return None if found is None else (found, Diagonal(mine.double(), shape))


def selected(value: Value, places: Tensor, path: str = "", whole: bool = True) -> Value | None:
    """Return the entries at places counted through all axes; unless `whole`, only if they go axis by axis."""
    shape, size = tuple(places.shape), math.prod(value.shape)
    flat = places.flatten()
    if len(flat) == size and bool((flat == torch.arange(size)).all()):
        return value.reshaped(shape, path)
    found = _by_axes(value, places, path)
    if found is not None or not whole:
        return found
    return value.reshaped((size,), path).gathered({0: flat.tolist()}, path).reshaped(shape, path)


def _by_axes(value: Value, places: Tensor, path: str) -> Value | None:
    """Return the entries if each axis of the result chooses along one axis of the value at most."""
    chosen: dict[int, list[int]] = {}
    axes: dict[int, int] = {}
    left = places
    for axis in reversed(range(len(value.shape))):
        n = value.shape[axis]
        along, left = left % n, left // n
        varies = [k for k in range(along.dim()) if bool((along != along.narrow(k, 0, 1)).any())]
        if len(varies) > 1 or any(k in axes.values() for k in varies):
            return None
        index = [slice(None) if k in varies else 0 for k in range(along.dim())]
        chosen[axis] = along[tuple(index)].reshape(-1).tolist()
        if varies:
            axes[axis] = varies[0]
    for axis, entries in chosen.items():
        value = _along(value, axis, entries, path)
    order = sorted(axes, key=lambda axis: axes[axis])
    value = value.permuted((*order, *(k for k in range(len(value.shape)) if k not in axes)), path)
    shape = tuple(places.shape)
    known = tuple(n if k in axes.values() else 1 for k, n in enumerate(shape))
    return value.reshaped(known, path).expanded(shape, path)


def _along(value: Value, axis: int, entries: list[int], path: str) -> Value:
    """Return the chosen entries along an axis: a slice if they are evenly spaced."""
    steps = {b - a for a, b in pairwise(entries)} or {1}
    if len(steps) == 1 and (step := next(iter(steps))) != 0:
        found = value.cut(axis, min(entries), len(entries), abs(step), path)
        return found if step > 0 else found.flipped((axis,), path)
    return value.gathered({axis: entries}, path)


def require_shape(found: Batched | Tensor, shape: Shape, path: str) -> None:
    """Raise unless a rule has returned what the operation itself returns."""
    if tuple(found.shape) != shape:
        raise SoundnessError(f"{path}: its rule returns shape {tuple(found.shape)}, the operation {shape}.")
