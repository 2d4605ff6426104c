"""`python -m benchmarks`: the experiments of the paper, what is made from their records, and a list of all there is.

A benchmark is a module of its own, `python -m benchmarks.NAME`.  All of it needs a checkout: its records, its kept
weights and its pages.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import audit_page, gallery, peers_page, performance_page
from benchmarks.harness import RESULTS, ROOT
from benchmarks.reproduce import EXPERIMENTS, results_page
from benchmarks.reproduce.command import reproduce_command
from benchmarks.reproduce.figures import draw_figures
from benchmarks.reproduce.keeping import keep_all
from curvcert import cli
from curvcert.training.kept import kept_content
from curvcert.whole_files import write_whole

FIGURES = ROOT / "docs" / "images" / "results"
PAGES = {
    ROOT / "docs" / "results.md": results_page.results_page,
    audit_page.PAGE: audit_page.audit_page,
    performance_page.PAGE: performance_page.performance_page,
    gallery.PAGE: gallery.gallery_page,
    peers_page.COMPARE: peers_page.compare_page,
    peers_page.RELAXATIONS: peers_page.relaxations_page,
}
"""Every page with parts that are written from the records."""

_RUN = '\nif __name__ == "__main__":'
"""The line of a module that can be run."""


def benchmarks() -> dict[str, str]:
    """Return the command of every benchmark, and the first line of what it says of itself.

    >>> benchmarks()["python -m benchmarks.audit"]
    'A large audit: every bound and certificate attacked on aimed networks, and on fresh random ones.'
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
    told = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in texts.items() if _RUN in text}
    return {f"python -m benchmarks.{name}": text.partition("\n")[0] for name, text in told.items()}


def _help() -> str:
    experiments = {f"python -m benchmarks reproduce {name}": each.claim for name, each in EXPERIMENTS.items()}
    return "\n\n".join(
        [
            "Measurements: tables and figures of the paper, and benchmarks.  Run it at the root of a checkout.",
            _listed("Tables and figures of the paper, each with the claim that it tests:", experiments),
            _listed("Benchmarks, each with options of its own (--help):", benchmarks()),
        ]
    )


def _listed(title: str, lines: Mapping[str, str]) -> str:
    """Return a paragraph that a terminal shows line by line."""
    return "\n".join(["\b", title, *(f"  {command}\n      {told}" for command, told in lines.items())])


app = typer.Typer(
    name="python -m benchmarks",
    help=_help(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("reproduce")(reproduce_command)


@app.command()
def figures(
    results: Annotated[Path, typer.Option(help="The folder of the records.")] = RESULTS,
    folder: Annotated[Path, typer.Option(help="The folder of the pictures.")] = FIGURES,
) -> None:
    """Draw the pictures of the page "Results" again, each from its record.

    Example:

        python -m benchmarks figures
    """
    for path in draw_figures(results, folder):
        typer.echo(path)


@app.command()
def keep(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder that `reproduce` wrote.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The experiments to keep.")],
    results: Annotated[Path, typer.Option(help="The folder to keep them in.")] = RESULTS,
) -> None:
    """Keep what was measured already among the results: records, arrays, rows and small weights.

    Example:

        python -m benchmarks keep runs/reproduce anchored-depth crc-vs-ccrc
    """
    keep_all(out, results, names)


@app.command()
def weights(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A network of results/weights.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)],
) -> None:
    """Write the file of a kept network: of one beside its mirror image, from the network's own.

    Example:

        python -m benchmarks weights 6C2F-ours-mirror-seed0 runs/6C2F-ours-mirror-seed0.safetensors
    """
    write_whole(file, kept_content(RESULTS, name))


@app.command()
def pages() -> None:
    """Write the pages anew that show records: "Results", "Performance and scale" and those of certified radii.

    Example:

        python -m benchmarks pages
    """
    for page, written in PAGES.items():
        write_whole(page, written())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors end it as they end `curvcert`."""
    cli.main(arguments, app)
