"""The tables of the page on the audit, from the record of injected faults: who finds which."""

from benchmarks.faults import GROUPS
from benchmarks.harness import ROOT, figures_of
from benchmarks.pages import table, with_parts

PAGE = ROOT / "docs" / "audit.md"
FINDERS = {"tests": "tests", "audit": "`curvcert audit`", "check": "`curvcert check`"}
"""Who finds faults, by the name in the record."""


def outcomes() -> dict[str, dict[str, bool]]:
    """Return for each finder what became of every fault that it was given, when it was last given it."""
    found: dict[str, dict[str, bool]] = {by: {} for by in FINDERS}
    for run in figures_of("teeth")["runs"]:
        found[run.get("by", "tests")] |= {name: outcome["found"] for name, outcome in run["faults"].items()}
    return found


def counts_table() -> str:
    """Return how many faults each part has, and how many of them each finder finds."""
    found, lines = outcomes(), []
    for group, faults in GROUPS.items():
        counts = [sum(found[by].get(fault.name, False) for fault in faults) for by in FINDERS]
        lines.append([group, f"{len(faults)}", *(f"{count}" for count in counts)])
    return table(("a fault in", "faults", *FINDERS.values()), lines)


def faults_table() -> str:
    """Return every fault, what it makes false, and who finds it; a cell is empty where a finder was not given it."""
    found, words = outcomes(), {True: "finds it", False: "does not", None: ""}
    lines = [
        [f"`{fault.name}`", fault.claim.replace("|", "\\|"), *(words[found[by].get(fault.name)] for by in FINDERS)]
        for faults in GROUPS.values()
        for fault in faults
    ]
    return table(("fault", "what becomes false", *FINDERS.values()), lines)


def audit_page() -> str:
    """Return the page with every part written anew."""
    return with_parts(PAGE, {"counts of faults": counts_table, "faults": faults_table})
