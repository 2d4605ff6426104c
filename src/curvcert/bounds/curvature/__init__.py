"""Curvature bounds: Lipschitz constants of the Jacobians of networks."""

from curvcert.bounds.curvature.blocks import BLOCK_BOUNDS, block_curvature, scalar_block_curvatures
from curvcert.bounds.curvature.portfolio import (
    CRC,
    CURVATURE_METHODS,
    AnchoredCurvature,
    Compositional,
    LocalCurvature,
    Unrolled,
    curvature,
)
from curvcert.bounds.lipschitz.method import AbstractCurvatureMethod

__all__ = [
    "BLOCK_BOUNDS",
    "CRC",
    "CURVATURE_METHODS",
    "AbstractCurvatureMethod",
    "AnchoredCurvature",
    "Compositional",
    "LocalCurvature",
    "Unrolled",
    "block_curvature",
    "curvature",
    "scalar_block_curvatures",
]
