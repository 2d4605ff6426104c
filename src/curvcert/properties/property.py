"""What a property says: where the inputs are, and which outputs there would violate it; in exact numbers.

Glossary:

- *row*: a linear inequality of the outputs, :math:`\\sum_k c_k Y_k \\le b`, or with <.
- *case*: a box of inputs with rows; a point of the box at which all rows hold violates the property.
- *property*: several cases; it holds where no case has such a point.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import final


@final
@dataclass(frozen=True)
class Row:
    """A linear inequality; `strict` where equality is not part of it."""

    coefficients: Mapping[int, Fraction]
    most: Fraction
    strict: bool = False


@final
@dataclass(frozen=True)
class Case:
    """Inputs from `lower` to `upper`, one number per input, and rows of the outputs; no rows hold everywhere."""

    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    rows: tuple[Row, ...]

    @property
    def empty(self) -> bool:
        """Whether no input is in the box."""
        return any(low > high for low, high in zip(self.lower, self.upper, strict=True))


@final
@dataclass(frozen=True)
class Property:
    """Cases of a network with so many inputs and outputs."""

    inputs: int
    outputs: int
    cases: tuple[Case, ...]
