"""Hunts for violations of any `Bound` or `Certificate`: shared by the tests and `curvcert audit`.

Everything that a search finds is attained, so it is a *lower* bound on the truth; what it finds above a bound
is replayed with its rounding bounded, and counts only if the claim is then false whatever the rounding did.
"""

from curvcert.falsifier.aimed import AIMS
from curvcert.falsifier.audited import Audit, Effort
from curvcert.falsifier.auditing import audit, audit_aim, audit_network
from curvcert.falsifier.bound_search import falsify_bound
from curvcert.falsifier.counterexample import Counterexample, Replay, replay
from curvcert.falsifier.counterexample_file import load_counterexample, save_counterexample
from curvcert.falsifier.extremes import largest_hessian_lower_bound, largest_slope_lower_bound
from curvcert.falsifier.findings import Findings
from curvcert.falsifier.outputs import falsify_outputs
from curvcert.falsifier.radii import falsify

__all__ = [
    "AIMS",
    "Audit",
    "Counterexample",
    "Effort",
    "Findings",
    "Replay",
    "audit",
    "audit_aim",
    "audit_network",
    "falsify",
    "falsify_bound",
    "falsify_outputs",
    "largest_hessian_lower_bound",
    "largest_slope_lower_bound",
    "load_counterexample",
    "replay",
    "save_counterexample",
]
