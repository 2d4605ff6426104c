"""`--require SHARE@RADIUS`: what a certification must prove, for a pipeline that passes or fails by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from curvcert.certificates import Certificate
from curvcert.cli.options import number
from curvcert.errors import InvalidInput
from curvcert.reporting.decimals import percent_ceil, percent_floor


@final
@dataclass(frozen=True)
class Requirement:
    """At least this share of all samples is correct and certified at this radius.

    >>> Requirement.read("0.9@36/255")
    Requirement(share=0.9, radius=0.1411764705882353, text='0.9@36/255')
    """

    share: float
    radius: float
    text: str

    @classmethod
    def read(cls, text: str) -> "Requirement":
        """Read it as it stands on the command line."""
        share, at, radius = text.partition("@")
        if not at:
            raise InvalidInput(f"--require expects SHARE@RADIUS, such as 0.9@36/255, got {text!r}.")
        found = cls(number(share, "--require"), number(radius, "--require"), text)
        if not 0 <= found.share <= 1:
            raise InvalidInput(
                f"--require expects a share between 0 and 1 in front of the @, such as 0.9, got {text!r}."
            )
        if not found.radius > 0:
            raise InvalidInput(f"--require expects a positive radius behind the @, got {text!r}.")
        return found

    def is_met(self, certificate: Certificate) -> bool:
        """Whether the certificate proves it."""
        return certificate.certified_accuracy(self.radius) >= self.share

    def verdict(self, certificate: Certificate) -> str:
        """Say whether it is met, and if not, whether any certificate could meet it."""
        total, correct = len(certificate), certificate.correct
        proven = int((correct & (certificate.radius >= self.radius)).sum())
        if self.is_met(certificate):
            return f"Required {self.text}: met, {percent_floor(proven, total)} proven."
        known = int((correct & (certificate.falsified_radius > self.radius)).sum())
        most = percent_ceil(known, total)
        rest = (
            f"At most {most} can be: attacks broke the others."
            if known / total < self.share
            else f"Up to {most} is open."
        )
        return f"Required {self.text}: MISSED, {percent_floor(proven, total)} proven. {rest}"


def radii_to_decide(epsilons: tuple[float, ...] | None, required: Sequence[Requirement]) -> tuple[float, ...] | None:
    """Return the radii of --eps with those that are required: nothing beyond the largest is proven.

    >>> radii_to_decide((0.1,), [Requirement.read("0.5@0.2")]), radii_to_decide(None, [Requirement.read("0.5@0.2")])
    ((0.1, 0.2), None)
    """
    if epsilons is None:
        return None
    return (*epsilons, *(one.radius for one in required if one.radius not in epsilons))
