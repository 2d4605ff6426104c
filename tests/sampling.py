"""Tables too long for every run: a fixed sample of the rows runs each time, all of them in `make test-full`."""

from collections.abc import Collection, Iterable
from itertools import product

import pytest
from _pytest.mark.structures import ParameterSet


def crossed(*axes: Iterable[object], every: int = 2, always: Collection[object] = ()) -> list[ParameterSet]:
    """Return every combination of the axes, and mark as full what the sample leaves out.

    The sample is a chequerboard (for `every` = 2), so that each value of an axis meets values of all the others;
    and each combination with a value of `always`.
    """
    return [
        pytest.param(
            *values,
            marks=() if sum(places) % every == 0 or any(value in always for value in values) else pytest.mark.full,
            id="-".join(map(_name, values)),
        )
        for places, values in (zip(*row, strict=True) for row in product(*(enumerate(axis) for axis in axes)))
    ]


def _name(value: object) -> str:
    if isinstance(value, tuple):
        return "to".join(f"{number:g}" for number in value)
    return str(getattr(value, "name", getattr(value, "__name__", value)))
