"""Ways to certified radii, one file each, and the plan that runs them."""

from curvcert.certificates.methods.anchored import AnchoredLipschitzRadius, AnchoredRadius
from curvcert.certificates.methods.constants import WAYS, ByConstants, CurvatureRadius, LipschitzRadius
from curvcert.certificates.methods.line import LineRadius
from curvcert.certificates.methods.linear import LinearRadius
from curvcert.certificates.methods.method import (
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
    Wanted,
)
from curvcert.certificates.methods.norms import CarriedRadius
from curvcert.certificates.methods.quadratic import QuadraticRadius
from curvcert.certificates.methods.shell import ShellRadius

CERTIFICATE_METHODS: dict[str, AbstractCertificateMethod] = {
    method.name: method
    for method in (
        LipschitzRadius("lipschitz", "auto"),
        AnchoredLipschitzRadius(),
        AnchoredRadius(),
        ShellRadius(),
        LineRadius(),
        LinearRadius(),
        QuadraticRadius(),
        CarriedRadius(),
        *(LipschitzRadius(bound, bound) for bound in ("product", "liplt", "lipsdp-recursion")),
        *(CurvatureRadius(bound, bound) for bound in ("compositional", "unrolled", "crc")),
    )
}
"""The rows of `certify`; "auto" runs all that say so."""

RADII = tuple(dict.fromkeys((*WAYS, *(method.way for method in CERTIFICATE_METHODS.values()))))
"""The names that radii may have in a certificate."""

__all__ = [
    "CERTIFICATE_METHODS",
    "RADII",
    "AbstractCertificateMethod",
    "AbstractStep",
    "ByConstants",
    "Question",
    "Samples",
    "Wanted",
]
