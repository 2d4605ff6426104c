"""`curvcert compare`: two certificates side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from curvcert._version import __version__
from curvcert.certificates import Certificate, load_certificate
from curvcert.cli import options
from curvcert.cli.output import Output
from curvcert.reporting.comparison import compare
from curvcert.whole_files import write_whole

_NAMED = "A folder by `curvcert certify`, or a certificate file."


def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A", help=_NAMED, show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help=_NAMED, show_default=False)],
    eps: Annotated[
        str | None, typer.Option(metavar="EPS,EPS", help="Radii to compare at, such as 36/255,72/255; four by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as an HTML page.", show_default=False)
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Put two certificates side by side: what each proves, at the same radii.

    Two methods, or two models, on the same data:

        curvcert compare out/lipschitz out/auto --out compare.html

    At radii of your own:

        curvcert compare out/old out/new --eps 36/255,72/255
    """
    output = Output(json, quiet)
    epsilons = None if eps is None else options.numbers(eps, "--eps")
    found = compare(_loaded(first), _loaded(second), (str(first), str(second)), epsilons)
    table = Table(title=f"in l{found.both[0].p:g}")
    for heading in ("", *found.names):
        table.add_column(heading, justify="left" if not heading else "right")
    for title, values in found.rows():
        table.add_row(title, *values)
    conclusions = found.conclusions()
    output.show(table, *conclusions)
    if out is not None:
        output.show(f"page: {write_whole(out, found.page())}")
    content = {
        "command": "compare",
        "curvcert": __version__,
        "names": found.names,
        "same_samples": found.same_samples,
        "at": [
            {"eps": eps, "certified": [one.certified_accuracy(eps) for one in found.both]} for eps in found.epsilons
        ],
        "page": None if out is None else str(out),
    }
    output.answer("\n".join(conclusions), content)


def _loaded(path: Path) -> Certificate:
    return load_certificate(path / "certificate.safetensors" if path.is_dir() else path)
