"""`curvcert audit`: attack our own bounds and certificates, or replay a counterexample."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from curvcert.cli import options
from curvcert.cli.output import Output
from curvcert.errors import InvalidInput
from curvcert.falsifier import AIMS, Audit, Effort, audit, load_counterexample, replay, save_counterexample
from curvcert.falsifier.auditing import NETWORKS
from curvcert.folder_lock import locked


def audit_command(
    networks: Annotated[
        int | None, typer.Option(min=1, help="How many random networks to attack, after the aimed ones.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after this long.")] = None,
    checks: Annotated[int | None, typer.Option(min=1, help="Go on until there were this many checks.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed meets the same networks and attacks.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder for counterexamples; it is made if there are any.")] = Path(
        "counterexamples"
    ),
    first: Annotated[bool, typer.Option("--first", help="Stop at the first network with a violation.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    file: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Replay a saved counterexample instead.")
    ] = None,
) -> None:
    """Attack every bound and certificate on networks aimed at them, then on fresh random ones.

    Ascends slopes and Hessians against Lipschitz and curvature bounds, outputs against their intervals, and margins
    within 0.999 of certified radii; 20 random networks by default.  Nothing should be found; exit status 1, and a file
    for each, if something is.  What curvcert refuses to bound or certify is counted by reason: nothing is claimed
    there.

        curvcert audit --minutes 5 --seed 1

        curvcert audit --replay counterexamples/lipschitz-0.safetensors

    A replay ends with exit status 1 if the file does refute its claim.
    """
    output = Output(json, quiet)
    if file is not None:
        _replay(file, output)
        return
    if minutes is not None and not minutes > 0:
        raise InvalidInput(f"--minutes is a positive number, got {minutes}.")
    share = options.budget_share(output)
    if networks is None and minutes is None and checks is None:
        networks = NETWORKS
    result = audit(
        seed,
        None if networks is None else options.share_of(networks, share),
        None if minutes is None else share * minutes,
        None if checks is None else options.share_of(checks, share),
        Effort().scaled(share),
        progress=False if quiet else None,
        aims=AIMS if share == 1 else AIMS[: options.share_of(len(AIMS), share)],
        first=first,
    )
    saved = _save(result, out)
    output.show(counts_table(result), *(f"A counterexample: {path}" for path in saved))
    refused = sum(result.refusals.values())
    short = f"{len(saved)} violations in {result.findings.total} checks, {refused} bounds or certificates refused"
    output.answer(short, {"command": "audit", **result.to_dict(), "files": [str(path) for path in saved]})
    if saved:
        raise typer.Exit(1)


def counts_table(result: Audit) -> Table:
    """Return what was compared with what, and the verdict."""
    found = len(result.findings.counterexamples)
    table = Table(
        title=f"{result.aimed} aimed and {result.networks} random networks, seed {result.seed}: {found} violations",
        caption=f"{result.findings.total} checks in {result.seconds:.0f} s",
    )
    table.add_column("claim, or search")
    table.add_column("count", justify="right")
    for kind, count in sorted(result.findings.checks.items()):
        table.add_row(f"{kind} checks", f"{count}")
    for name, count in sorted(result.findings.searches.items()):
        table.add_row(_searched(name), f"{count}")
    if result.findings.unconfirmed:
        table.add_row("above a claim, but not confirmed by a replay", f"{result.findings.unconfirmed}")
    if result.refused_networks:
        table.add_row("networks of which something was refused, so not claimed", f"{result.refused_networks}")
    for reason, count in sorted(result.refusals.items()):
        table.add_row(f"refused by {reason}", f"{count}")
    return table


def _searched(name: str) -> str:
    if name == "witness":
        return "replayed witness"
    return name if name.startswith("attacked") else f"ascended {name}"


def _save(result: Audit, folder: Path) -> list[Path]:
    if not result.findings.counterexamples:
        return []
    with locked(folder, "curvcert audit"):
        return [
            save_counterexample(example, folder / f"{example.kind}-{k}.safetensors")
            for k, example in enumerate(result.findings.counterexamples)
        ]


def _replay(file: Path, output: Output) -> None:
    example = load_counterexample(file)
    verdict = replay(example)
    line = f"{'Refuted' if verdict.refuted else 'Not refuted'}: {verdict.reason}."
    output.show(f"{example!r}", line)
    content = {"claim": repr(example), "refuted": verdict.refuted, "shown": verdict.shown, "reason": verdict.reason}
    output.answer(line, {"command": "audit", **content})
    if verdict.refuted:
        raise typer.Exit(1)
