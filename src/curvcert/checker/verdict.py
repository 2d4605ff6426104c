"""What the checker answers: a status and a reason for every sample, what it rechecked and what it took as given."""

from collections import Counter
from dataclasses import dataclass

PROVEN, REFUSED, CANNOT = "proven", "refused", "cannot check"

RECHECKED = (
    "the seals of both files and that neither contradicts itself",
    "that the certificate is about this network: the digest of its blocks",
    "that it is about these inputs, sample by sample",
    "labels, margins, and which samples are classified correctly",
    "the tables of Lipschitz and curvature constants, and the curvature constants used for every sample",
    "every radius: that no class reaches the label's within it",
    "every witness: that it is misclassified, and its distance",
    "the paper's condition, where the curvature radius is said to win by it",
)
GIVEN = (
    "that the network file holds the model you mean (compare its outputs with your model's)",
    "IEEE 754 arithmetic, and numpy's elementary functions to 32 units in the last place",
    "that LAPACK's Cholesky factorisation and matrix products use conventional inner products",
    "distances of points found by a search (search_radius): the points are not in the file",
    "the version of curvcert, the notes and the methods' names inside a family of methods",
)


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking a certificate.

    Attributes:
        status: for every sample "proven", "refused" (claimed is more than the checker can prove, or something
            false) or "cannot check" (the checker has no method for what was claimed).
        reasons: why, for every sample that is not proven; empty for the others.
        rechecked: what the checker computed or verified itself.
        given: what it took as given.
    """

    status: tuple[str, ...]
    reasons: tuple[str, ...]
    rechecked: tuple[str, ...] = RECHECKED
    given: tuple[str, ...] = GIVEN

    @property
    def holds(self) -> bool:
        """Whether every claim was proven."""
        return all(one == PROVEN for one in self.status)

    def __str__(self) -> str:
        counts = Counter(self.status)
        parts = [f"{counts[name]} {name}" for name in (PROVEN, REFUSED, CANNOT) if counts[name]]
        lines = [f"{'The certificate holds' if self.holds else 'NOT PROVEN'}: {', '.join(parts)}."]
        shown = [(k, text) for k, text in enumerate(self.reasons) if text]
        lines += [f"  sample {k}, {self.status[k]}: {text}" for k, text in shown[:10]]
        lines += [f"  and {len(shown) - 10} more"] if len(shown) > 10 else []
        lines += ["Rechecked:", *(f"  - {line}" for line in self.rechecked)]
        lines += ["Taken as given:", *(f"  - {line}" for line in self.given)]
        return "\n".join(lines)


def uniform(samples: int, status: str, reason: str) -> Verdict:
    """Return the verdict that is the same for every sample."""
    return Verdict((status,) * samples, (reason,) * samples)
