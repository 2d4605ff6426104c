"""What a hunt found: how much was compared, with what, and what was refuted."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from curvcert.falsifier.counterexample import Counterexample


@final
@dataclass(frozen=True, eq=False, repr=False)
class Findings:
    """Counts by kind, and counterexamples.

    Attributes:
        checks: how many times a claim was compared with an ascended or attacked value, by kind of claim.
        searches: how many ascents and attacks there were, by kind; one of them may serve several checks.
        counterexamples: the claims that a replay with bounded rounding refuted; of each bound the worst one.
        unconfirmed: claims that a search exceeded by more than its own rounding, but no replay refuted.
        closest: the largest share of a bound that a search reached, by kind: 1 is a bound that is attained.  What is
            above 1 and no replay confirms is the search's own rounding, and counts as 1.

    >>> Findings({"lipschitz": 3}) + Findings({"lipschitz": 1, "radius": 2})
    Findings(6 checks: 4 lipschitz, 2 radius; 0 violations)
    """

    checks: Mapping[str, int] = field(default_factory=dict)
    searches: Mapping[str, int] = field(default_factory=dict)
    counterexamples: tuple[Counterexample, ...] = ()
    unconfirmed: int = 0
    closest: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of checks."""
        return sum(self.checks.values())

    def __bool__(self) -> bool:
        """Whether anything was found against us."""
        return bool(self.counterexamples)

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(
            dict(Counter(self.checks) + Counter(other.checks)),
            dict(Counter(self.searches) + Counter(other.searches)),
            self.counterexamples + other.counterexamples,
            self.unconfirmed + other.unconfirmed,
            {k: max(self.closest.get(k, 0.0), other.closest.get(k, 0.0)) for k in (*self.closest, *other.closest)},
        )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.checks.items()))
        count = len(self.counterexamples)
        doubtful = f", {self.unconfirmed} unconfirmed" if self.unconfirmed else ""
        shown = f": {', '.join(map(repr, self.counterexamples[:3]))}" if count else ""
        noun = "violation" if count == 1 else "violations"
        return f"Findings({self.total} checks{': ' if kinds else ''}{kinds}; {count} {noun}{doubtful}{shown})"


def together(findings: Iterable[Findings]) -> Findings:
    """Return the sum of many findings.

    >>> together([])
    Findings(0 checks; 0 violations)
    """
    return sum(findings, Findings())
