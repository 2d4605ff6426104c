"""How the tests ask the checker, and how its answers are told apart."""

from curvcert.checker import Verdict, check_certificate
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
