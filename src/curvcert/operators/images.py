"""Which large maps between images are bounded on a torus, frequency by frequency, and not by a Gram matrix."""

from torch import Tensor

from curvcert.operators import fourier
from curvcert.operators.base import AbstractLinearMap, Composition, Sum
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Conv2d, overlaps
from curvcert.operators.planes import Unplanar, Value, planes_of
from curvcert.operators.structured import AveragePool2d
from curvcert.operators.torus import torus_norm_upper_bound

EXPLICIT_SIZE = 1600
"""Up to this size of a Gram matrix it is taken: a second at most, and exact."""

_GRAM_SIZE = 4096
"""Up to this size it is taken where a torus may be more than a tenth above the exact norm."""


def large_norm_upper_bound(op: AbstractLinearMap) -> tuple[Tensor, str] | None:
    """Bound the 2 -> 2 norm of a large map between images and name the method; None where a Gram matrix serves better.

    A torus is within a tenth of the exact norm where no crop is needed and images have room (`Reach.is_roomy`).
    """
    size = _gram_size(op)
    if size <= EXPLICIT_SIZE or not isinstance(op, Conv2d | AveragePool2d | Composition | Sum | Circuit):
        return None
    try:
        values = planes_of(op)
        if size <= _GRAM_SIZE and not _are_roomy(values):
            return None
        if isinstance(op, Conv2d):
            return (fourier.fourier_norm_upper_bound(op), "Fourier") if overlaps(op) else None
        value, crops = torus_norm_upper_bound(op)
    except Unplanar:
        return None
    if crops == 0:
        return value, "frequencies of a torus"
    if size <= _GRAM_SIZE:
        return None
    return value, f"frequencies of a torus with {crops} crop{'s' if crops > 1 else ''}"


def _gram_size(op: AbstractLinearMap) -> int:
    """Return the least size of a space that the map leads through."""
    inner = (factor.out_size for factor in op.factors) if isinstance(op, Composition) else ()
    return min(op.in_size, op.out_size, *inner)


def _are_roomy(values: list[Value]) -> bool:
    stencils = (use.stencil for value in values for use in value.uses if use.stencil is not None)
    return all(axis.is_roomy for stencil in stencils for axis in stencil.reach)
