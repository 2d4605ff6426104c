"""Modules that torch lacks; importing this package is enough for `curvcert.trace` to know them."""

from curvcert.nn.activations import ISRU, Arctan, CentredSoftplus, Erf, Normalise, Sin

__all__ = ["ISRU", "Arctan", "CentredSoftplus", "Erf", "Normalise", "Sin"]
