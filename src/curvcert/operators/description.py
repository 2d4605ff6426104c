"""Linear maps as entries of files: what an entry says of a map, and the map that an entry says.

Each kind of map registers both ways in its own file, beside everything else that is known about it; those of the
algebra of maps (sums, products, transposes, ...) do here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatch
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from curvcert.errors import InvalidFile, UnsupportedOperator
from curvcert.operators.base import (
    AbstractLinearMap,
    Composition,
    Identity,
    Reshape,
    Scaled,
    Shape,
    Sum,
    Transposed,
    Zero,
    add,
    compose,
    scale,
)

Weights = list[NDArray[np.float64]]
Description = dict[str, Any]

_DEEPEST = 32
"""How deeply the maps of a file may be nested."""

_LARGEST_SIZE = 2**28
_MOST_PARTS = 2**16
_MOST_NUMBERS, _PER_WEIGHT = 2**25, 32
_MOST_WORK = 2**36
"""Nodes and maps; numbers in all their values, more where a file holds many weights; multiplications on the way."""


def stored(value: Tensor | None, weights: Weights) -> str | None:
    """Append an array to those of a file and return its name."""
    if value is None:
        return None
    weights.append(np.ascontiguousarray(value.detach().cpu().double().numpy(), "<f8"))
    return f"t{len(weights) - 1}"


@singledispatch
def description(op: AbstractLinearMap, weights: Weights) -> Description:
    """Return the entry of a map; its arrays are appended to the weights.

    >>> description(Identity((2,)), [])
    {'map': 'identity', 'in_shape': [2], 'out_shape': [2]}

    Raises:
        UnsupportedOperator: if a map is of a type that files have no word for.
    """
    raise UnsupportedOperator(f"A network file has no word for the linear map {type(op).__name__}.")


@final
class Reading:
    """The weights of a file, and how much its entries may still ask for: small files may not ask for much."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with what any file may ask for, and more for one that holds many weights."""
        self._weights, self._depth = weights, 0
        self._parts, self._work = _MOST_PARTS, _MOST_WORK
        self._numbers = _MOST_NUMBERS + _PER_WEIGHT * sum(value.numel() for value in weights.values())

    def take(self, numbers: int, work: int = 0, parts: int = 0) -> None:
        """Count what is about to be formed, or computed by whoever evaluates the network once."""
        self._numbers -= numbers
        self._work -= max(work, numbers)
        self._parts -= parts
        for left, what in ((self._parts, "parts"), (self._numbers, "numbers"), (self._work, "multiplications")):
            if left < 0:
                raise InvalidFile(f"The network asks for more {what} than a file of its size may.")

    def weight(self, name: str) -> Tensor:
        """Return an array of the file."""
        return self._weights[name]

    def map(self, entry: Description) -> AbstractLinearMap:
        """Return the map that an entry says.

        Raises:
            InvalidFile: there is no such map, or it asks for too much.
        """
        reader = _READERS.get(entry["map"])
        if reader is None:
            raise InvalidFile(f"There is no map of the kind {str(entry['map'])[:40]!r}.")
        self.take(0, parts=1)
        with self._deeper():
            made = reader(entry, self)
        self.take(max(made.in_size, made.out_size))
        return made

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        if self._depth > _DEEPEST:
            raise InvalidFile(f"The maps are nested more than {_DEEPEST} deep.")
        self._depth += 1
        yield
        self._depth -= 1


Reader = Callable[[Description, Reading], AbstractLinearMap]

_READERS: dict[str, Reader] = {}


def reads(kind: str) -> Callable[[Reader], Reader]:
    """Register what reads the entries of a kind of map."""

    def register(reader: Reader) -> Reader:
        _READERS[kind] = reader
        return reader

    return register


def shape(sizes: list[int]) -> Shape:
    """Return the sizes in an entry, which are whole numbers within bounds."""
    if not all(isinstance(size, int) and 0 <= size < _LARGEST_SIZE for size in sizes):
        raise InvalidFile(f"Sizes are whole numbers below 2**28, got {str(sizes)[:80]}.")
    return tuple(sizes)


def pair(sizes: list[int]) -> tuple[int, int]:
    """Return the two sizes in an entry."""
    first, second = shape(sizes)
    return first, second


@description.register(Identity | Zero | Reshape)
def _(op: AbstractLinearMap, weights: Weights) -> Description:
    return {"map": type(op).__name__.lower(), "in_shape": list(op.in_shape), "out_shape": list(op.out_shape)}


@reads("identity")
def _identity(entry: Description, reading: Reading) -> AbstractLinearMap:
    return Identity(shape(entry["in_shape"]))


@reads("zero")
def _zero(entry: Description, reading: Reading) -> AbstractLinearMap:
    return Zero(shape(entry["in_shape"]), shape(entry["out_shape"]))


@reads("reshape")
def _reshape(entry: Description, reading: Reading) -> AbstractLinearMap:
    return Reshape(shape(entry["in_shape"]), shape(entry["out_shape"]))


@description.register
def _(op: Transposed, weights: Weights) -> Description:
    return {"map": "transposed", "of": description(op.map, weights)}


@reads("transposed")
def _transposed(entry: Description, reading: Reading) -> AbstractLinearMap:
    return Transposed(reading.map(entry["of"]))


@description.register
def _(op: Scaled, weights: Weights) -> Description:
    return {"map": "scaled", "factor": op.factor, "of": description(op.map, weights)}


@reads("scaled")
def _scaled(entry: Description, reading: Reading) -> AbstractLinearMap:
    return scale(float(entry["factor"]), reading.map(entry["of"]))


@description.register
def _(op: Sum, weights: Weights) -> Description:
    return {"map": "sum", "terms": [description(term, weights) for term in op.terms]}


@reads("sum")
def _sum(entry: Description, reading: Reading) -> AbstractLinearMap:
    return add(*(reading.map(term) for term in entry["terms"]))


@description.register
def _(op: Composition, weights: Weights) -> Description:
    return {"map": "product", "factors": [description(factor, weights) for factor in op.factors]}


@reads("product")
def _product(entry: Description, reading: Reading) -> AbstractLinearMap:
    return compose(*(reading.map(factor) for factor in entry["factors"]))
