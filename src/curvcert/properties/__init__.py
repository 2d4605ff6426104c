"""Properties of networks, as VNN-LIB states them: read, and decided."""

from curvcert.properties.decision import Decision, decide
from curvcert.properties.property import Case, Property, Row
from curvcert.properties.vnnlib import load_vnnlib

__all__ = ["Case", "Decision", "Property", "Row", "decide", "load_vnnlib"]
