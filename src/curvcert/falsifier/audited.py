"""What an audit did, and how much it asks of each network."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from curvcert.errors import InvalidInput
from curvcert.falsifier.findings import Findings

PARTS = ("bounds", "certificates", "outputs")
"""What an audit asks about a random network."""


@dataclass(frozen=True)
class Effort:
    """How much is asked of one network.

    Attributes:
        anchors: points for anchored bounds, and balls for local ones.
        samples: inputs for each certificate.
        ascents: ascents of every sort, at least.
        steps: of each ascent.
        restarts: starts of each attack on a radius.
        dear: how often a method of `certify` that costs more is asked, beside a cheap one.
        best: how often "auto" is asked, beside all single methods.
        boxed: how often certificates are asked within a box.
        parts: what is asked about a random network at all: "bounds", "certificates", "outputs".
    """

    anchors: int = 8
    samples: int = 128
    ascents: int = 48
    steps: int = 14
    restarts: int = 2
    dear: float = 0.5
    best: float = 0.2
    boxed: float = 0.2
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        if min(self.anchors, self.samples, self.ascents, self.steps, self.restarts) < 1:
            raise InvalidInput(f"An audit needs at least one of everything, got {self}.")
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise InvalidInput(f"The parts of an audit are among {', '.join(PARTS)}, got {self.parts}.")

    def scaled(self, share: float) -> "Effort":
        """Return that share of the counts, at least one of each.

        >>> Effort().scaled(0.01).samples
        1
        """
        names = ("anchors", "samples", "ascents", "steps", "restarts")
        return replace(self, **{name: max(1, round(share * getattr(self, name))) for name in names})


@final
@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What an audit did: findings, and how often each cell of the table was met.

    Attributes:
        seed: of the audit; network k of it is `audit_network(seed, k)`.
        networks: how many random ones there were.
        seconds: how long it took.
        findings: counts by kind, and counterexamples.
        cells: checks by kind, method, scope and norm.
        families: networks by family.
        compared: checks by family.
        activations: networks by activation.
        refused_networks: those of which something was refused.
        refusals: bounds and certificates that were refused, by reason; of aimed networks much does not apply, which is
            not counted.
        aimed: how many aimed networks there were.
    """

    seed: int
    networks: int = 0
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)
    cells: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)
    compared: Mapping[str, int] = field(default_factory=dict)
    activations: Mapping[str, int] = field(default_factory=dict)
    refused_networks: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    aimed: int = 0

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.seed,
            self.networks + other.networks,
            self.seconds + other.seconds,
            self.findings + other.findings,
            dict(Counter(self.cells) + Counter(other.cells)),
            dict(Counter(self.families) + Counter(other.families)),
            dict(Counter(self.compared) + Counter(other.compared)),
            dict(Counter(self.activations) + Counter(other.activations)),
            self.refused_networks + other.refused_networks,
            dict(Counter(self.refusals) + Counter(other.refusals)),
            self.aimed + other.aimed,
        )

    def __repr__(self) -> str:
        return f"Audit(seed {self.seed}, {self.networks} random networks, {self.aimed} aimed: {self.findings})"

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as what JSON can hold."""
        searches = self.findings.searches
        return {
            "seed": self.seed,
            "networks": self.networks,
            "aimed_networks": self.aimed,
            "checks": self.findings.total,
            "checks_by_kind": dict(sorted(self.findings.checks.items())),
            "violations": len(self.findings.counterexamples),
            "unconfirmed": self.findings.unconfirmed,
            "refused_networks": self.refused_networks,
            "refusals": dict(sorted(self.refusals.items())),
            "closest": {kind: round(share, 12) for kind, share in sorted(self.findings.closest.items())},
            "ascended_hessians": searches.get("hessian", 0),
            "attacked_radii": searches.get("attacked radius", 0),
            "searches": dict(sorted(searches.items())),
            "families": dict(sorted(self.families.items())),
            "checks_by_family": dict(sorted(self.compared.items())),
            "activations": dict(sorted(self.activations.items())),
            "checks_by_cell": dict(sorted(self.cells.items())),
            "seconds": round(self.seconds, 1),
        }
