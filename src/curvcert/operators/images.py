"""Which large maps between images are bounded on a torus, frequency by frequency, and not by a Gram matrix."""

from torch import Tensor

from curvcert.operators import fourier
from curvcert.operators.base import AbstractLinearMap, Composition, Sum
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Conv2d, overlaps
from curvcert.operators.planes import Unplanar, Value, planes_of
from curvcert.operators.structured import AveragePool2d
from curvcert.operators.torus import crops_of, torus_norm_upper_bound

EXPLICIT_SIZE = 1600
"""Up to this size of a Gram matrix it is taken: a second at most, and exact."""

GRAM_SIZE = 4096
"""Up to this size it is taken where a torus may be more than a tenth above the exact norm."""


_GRAM_WORK = 2**35
"""Multiplications up to which a Gram matrix is a matter of a second or two."""


def large_norm_upper_bound(op: AbstractLinearMap, gram_size: int = GRAM_SIZE) -> tuple[Tensor, str] | None:
    """Bound the 2 -> 2 norm of a large map between images and name the method; None where a Gram matrix serves better.

    A torus is within a tenth of the exact norm where no crop is needed and images have room (`Reach.is_roomy`);
    elsewhere Gram matrices up to `gram_size` are taken.
    """
    size = _gram_size(op)
    if size <= EXPLICIT_SIZE or not isinstance(op, Conv2d | AveragePool2d | Composition | Sum | Circuit):
        return None
    try:
        values = planes_of(op)
        if size <= gram_size and not _are_roomy(values):
            return None
        if isinstance(op, Conv2d):
            return (fourier.fourier_norm_upper_bound(op), "Fourier") if overlaps(op) else None
        value, crops = torus_norm_upper_bound(op)
    except Unplanar:
        return None
    if crops == 0:
        return value, "frequencies of a torus"
    if size <= gram_size:
        return None
    return value, f"frequencies of a torus with {crops} crop{'s' if crops > 1 else ''}"


def is_nearly_exact(op: AbstractLinearMap) -> bool:
    """Whether the norm of a map is bounded within about a tenth in seconds: what is large must be free of crops."""
    smallest, largest = _gram_size(op), max(op.in_size, op.out_size)
    if smallest <= EXPLICIT_SIZE:
        return smallest**2 * largest <= _GRAM_WORK
    try:
        return crops_of(op) == 0
    except Unplanar:
        return False


def _gram_size(op: AbstractLinearMap) -> int:
    """Return the least size of a space that the map leads through."""
    inner = (factor.out_size for factor in op.factors) if isinstance(op, Composition) else ()
    return min(op.in_size, op.out_size, *inner)


def _are_roomy(values: list[Value]) -> bool:
    stencils = (use.stencil for value in values for use in value.uses if use.stencil is not None)
    return all(axis.is_roomy for stencil in stencils for axis in stencil.reach)
