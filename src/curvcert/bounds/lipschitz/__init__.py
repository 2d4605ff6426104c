"""Lipschitz bounds of networks."""

from curvcert.bounds.lipschitz.method import AbstractLipschitzMethod
from curvcert.bounds.lipschitz.portfolio import (
    LIPSCHITZ_METHODS,
    Anchored,
    LipLT,
    LipSDP,
    LipSDPRecursion,
    Local,
    Product,
    lipschitz,
)

__all__ = [
    "LIPSCHITZ_METHODS",
    "AbstractLipschitzMethod",
    "Anchored",
    "LipLT",
    "LipSDP",
    "LipSDPRecursion",
    "Local",
    "Product",
    "lipschitz",
]
