"""Certificates: radii that are proven, and witnesses that are shown."""

from curvcert.certificates.certificate import Certificate
from curvcert.certificates.certification import Certifier, certifier, certify
from curvcert.certificates.search import with_search

__all__ = ["Certificate", "Certifier", "certifier", "certify", "with_search"]
