"""Provable bounds on how fast a neural network, and its Jacobian, can change.

A number called a `Bound` is a bound: an upper bound with its rounding accounted for.  What is only
near the truth is an `Estimate`, another type, which nothing that certifies accepts.
"""

from curvcert import attacks, nn
from curvcert._version import __version__
from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.types import Anchor, Ball, Bound, Estimate, Global
from curvcert.certificates import Certificate, certify
from curvcert.network import Network, trace

__all__ = [
    "Anchor",
    "Ball",
    "Bound",
    "Certificate",
    "Estimate",
    "Global",
    "Network",
    "__version__",
    "attacks",
    "certify",
    "curvature",
    "lipschitz",
    "nn",
    "trace",
]
