"""What the checker answers: a status and a reason for every sample, what it rechecked and what it took as given."""

from collections import Counter
from dataclasses import dataclass, replace

PROVEN, CANNOT, NOT_REACHED, CONTRADICTED = "proven", "cannot check", "not reached", "contradicted"
STATUSES = (PROVEN, CANNOT, NOT_REACHED, CONTRADICTED)
"""From the best to the worst: of several findings about a sample the worst is its status."""

RECHECKED = (
    "the seals of both files and that neither contradicts itself",
    "that the certificate is about this network: the digest of its nodes",
    "that it is about these inputs, sample by sample",
    "labels, margins, and which samples are classified correctly",
    "the tables of Lipschitz and curvature constants, and the curvature constants used for every sample",
    "every radius: that no class reaches the label's within it",
    "every witness: that it is misclassified, and its distance",
    "the paper's condition, where the curvature radius is said to win by it",
)
_THE_FILE = "that the network file holds the model you mean (compare its outputs with your model's)"
_THE_MODEL = "that curvcert reads the model you gave as its framework runs it (it compares the two when it reads one)"
GIVEN = (
    _THE_FILE,
    "IEEE 754 arithmetic, and numpy's elementary functions to 32 units in the last place",
    "that LAPACK's Cholesky factorisation and matrix products use conventional inner products",
    "distances of points found by a search (search_radius): the points are not in the file",
    "the version of curvcert, the notes and the methods' names inside a family of methods",
)
_REMEDY = (
    "The checker proves radii by Lipschitz and curvature constants, shells, lines along the gradient and linear "
    "relaxation. For a certificate that it proves to the end, certify with --method checkable."
)


@dataclass(frozen=True)
class Finding:
    """One claim about a sample that is not proven: its status, and the reason."""

    status: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking a certificate.

    Attributes:
        status: for every sample "proven"; "contradicted" (a claim is false, and something shows it); "not reached" (it
            is more than the checker proves by rules that are as good as those of the method that the file names); or
            "cannot check" (the checker has no engine for what was claimed).
        reasons: why, for every sample that is not proven; empty for the others.
        radii: for every sample with a radius whether that is proven again, whatever else is claimed; None without one.
        rechecked: what the checker computed or verified itself.
        given: what it took as given.
    """

    status: tuple[str, ...]
    reasons: tuple[str, ...]
    radii: tuple[bool | None, ...]
    rechecked: tuple[str, ...] = RECHECKED
    given: tuple[str, ...] = GIVEN

    @property
    def holds(self) -> bool:
        """Whether every claim was proven."""
        return all(one == PROVEN for one in self.status)

    @property
    def refused(self) -> bool:
        """Whether a sample's claim is contradicted, or more than its own method proves."""
        return any(one in (NOT_REACHED, CONTRADICTED) for one in self.status)

    @property
    def radii_proven(self) -> tuple[int, int]:
        """How many radii are proven again, and how many samples have one."""
        claimed = [one for one in self.radii if one is not None]
        return sum(claimed), len(claimed)

    def assuming(self, stated: tuple[str, ...]) -> "Verdict":
        """Return the same where users' statements about activations are taken as given."""
        return replace(self, given=(*self.given, *(f"what a user stated: {line}" for line in stated)))

    def of_the_model(self) -> "Verdict":
        """Return the same where the network file was made from the model that is meant: that is not taken as given."""
        return replace(self, given=tuple(_THE_MODEL if line == _THE_FILE else line for line in self.given))

    def __str__(self) -> str:
        counts = Counter(self.status)
        parts = [f"{counts[name]} {name}" for name in STATUSES if counts[name]]
        lines = [f"{'The certificate holds' if self.holds else 'NOT PROVEN'}: {', '.join(parts)}."]
        proven, claimed = self.radii_proven
        lines += [f"Radii proven again: {proven} of {claimed} ({proven / claimed:.0%})."] if claimed else []
        lines += [_REMEDY] if counts[CANNOT] else []
        shown = [(k, text) for k, text in enumerate(self.reasons) if text]
        lines += [f"  sample {k}, {self.status[k]}: {text}" for k, text in shown[:10]]
        lines += [f"  and {len(shown) - 10} more"] if len(shown) > 10 else []
        lines += ["Rechecked:", *(f"  - {line}" for line in self.rechecked)]
        lines += ["Taken as given:", *(f"  - {line}" for line in self.given)]
        return "\n".join(lines)
