"""Certificates: radii that are proven, and witnesses that are shown."""

from curvcert.certificates.certificate import Certificate, load_certificate
from curvcert.certificates.certification import Certifier, certifier, certify
from curvcert.certificates.search import with_search
from curvcert.checker import Verdict, check_certificate, evaluate_network

__all__ = [
    "Certificate",
    "Certifier",
    "Verdict",
    "certifier",
    "certify",
    "check_certificate",
    "evaluate_network",
    "load_certificate",
    "with_search",
]
