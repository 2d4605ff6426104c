"""Findings about claims: what stops a claim from being proven, and which methods there are rules for."""

from collections.abc import Callable

from curvcert.checker.verdict import CANNOT, CONTRADICTED, NOT_REACHED, Finding
from curvcert.errors import UnsupportedModule

LIPSCHITZ = {"product", "liplt", "lipsdp-recursion", "through l2"}
CURVATURE = {"compositional", "unrolled", "crc", "anchored"}
SEEN = {"anchored-lipschitz"}
BALLS = {"shell", "line"}
"""The methods that the checker has rules for that are as good."""
LINES = {"linear"}
"""Those that it has rules for which may fall short of the file's by a little."""


class Unproven(Exception):
    """A claim that is not proven: its status and the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.finding = Finding(status, reason)


def require(holds: bool, reason: str) -> None:
    """Stop with "contradicted" unless a claim holds: what is computed here shows that it is false."""
    if not holds:
        raise Unproven(CONTRADICTED, reason)


def require_proof(proven: bool, reason: str, engine: bool = True) -> None:
    """Stop unless a claim is proven: with "not reached" where there is an engine for it, or with "cannot check"."""
    if not proven:
        raise Unproven(NOT_REACHED if engine else CANNOT, reason)


def findings_of(*checks: Callable[[], object]) -> list[Finding]:
    """Run checks one by one and return what they find; none keeps the others from being run."""
    found = []
    for check in checks:
        try:
            check()
        except Unproven as why:
            found.append(why.finding)
        except UnsupportedModule as why:
            found.append(Finding(CANNOT, f"the model has a part that is not covered: {why}"))
    return found
