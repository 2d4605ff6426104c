"""How the tests ask the checker, and how its answers are told apart."""

import numpy as np
from torch import Tensor

from curvcert.bounds.curvature.portfolio import curvature_of
from curvcert.bounds.lipschitz.problem import all_pairs, make_problem
from curvcert.certificates.constants import Tables, global_constants
from curvcert.checker import Verdict, check_certificate
from curvcert.network import Network
from tests.certificates.saved import Files

REFUSED = {"not reached", "contradicted"}
"""The statuses of a sample with a claim that its own method does not prove, or that is shown to be false."""


def verdict(files: Files, **changed) -> Verdict:
    """Check a certificate, perhaps with another file, other inputs or other labels."""
    given = {"certificate": files.certificate, "model": files.network, "x": files.x, "y": files.y} | changed
    return check_certificate(**given)


def refused(found: Verdict) -> bool:
    """Whether every sample is refused."""
    assert found.refused and not found.holds
    return set(found.status) <= REFUSED


def certified_lipschitz(network: Network, p: float = 2.0) -> np.ndarray:
    """Return the table of Lipschitz constants of a certificate by the best of all methods."""
    return global_constants(network, all_pairs(network, p), Tables(L="auto")).L.numpy()


def certified_curvature(network: Network, method: str = "auto", at: Tensor | None = None) -> np.ndarray:
    """Return the curvature constants of all pairs as certificates take them: without a search for multipliers."""
    problem = make_problem(network, 2, None, at, None, "all", None)
    return curvature_of(problem, method).value.numpy()
