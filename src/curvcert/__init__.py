"""Provable bounds on how fast a neural network, and its Jacobian, can change.

A number called a `Bound` is a bound: an upper bound with its rounding accounted for.  What is only
near the truth is an `Estimate`, another type, which nothing that certifies accepts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvcert._version import __version__

if TYPE_CHECKING:
    from curvcert import attacks, data, losses, nn, training, zoo
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
    "zoo",
]

_HOMES = {
    "curvcert.bounds.curvature": ("curvature",),
    "curvcert.bounds.lipschitz": ("lipschitz",),
    "curvcert.bounds.outputs": ("output_bounds",),
    "curvcert.bounds.types": ("Anchor", "Ball", "Bound", "Estimate", "Global", "Interval"),
    "curvcert.certificates": ("Certificate", "certify", "load_certificate"),
    "curvcert.checker": ("check_certificate",),
    "curvcert.falsifier": ("falsify",),
    "curvcert.network": ("Network", "load_onnx", "trace"),
    "curvcert.network.network_file": ("save_network",),
    "curvcert.reporting": ("report",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker is to know the names above, and no others

    def __getattr__(name: str) -> Any:
        """Load what is asked for: so `curvcert --help` need not wait for torch, nor a bound for matplotlib."""
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _HOME:
            found = getattr(import_module(_HOME[name]), name)
        else:
            try:
                found = import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return __all__
