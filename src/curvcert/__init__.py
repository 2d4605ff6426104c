"""Provable bounds on how fast a neural network, and its Jacobian, can change.

A number called a `Bound` is a bound: an upper bound with its rounding accounted for.  What is only
near the truth is an `Estimate`, another type, which nothing that certifies accepts.
"""

from curvcert import attacks, data, losses, nn, training
from curvcert._version import __version__
from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.outputs import output_bounds
from curvcert.bounds.types import Anchor, Ball, Bound, Estimate, Global, Interval
from curvcert.certificates import Certificate, certify, load_certificate
from curvcert.checker import check_certificate
from curvcert.falsifier import falsify
from curvcert.network import Network, load_onnx, trace
from curvcert.network.network_file import save_network
from curvcert.reporting import report

__all__ = [
    "Anchor",
    "Ball",
    "Bound",
    "Certificate",
    "Estimate",
    "Global",
    "Interval",
    "Network",
    "__version__",
    "attacks",
    "certify",
    "check_certificate",
    "curvature",
    "data",
    "falsify",
    "lipschitz",
    "load_certificate",
    "load_onnx",
    "losses",
    "nn",
    "output_bounds",
    "report",
    "save_network",
    "trace",
    "training",
]
