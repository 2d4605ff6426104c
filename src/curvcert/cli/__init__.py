"""The command line: `curvcert`, or `python -m curvcert`.  One file a subcommand, no mathematics."""

import sys
from typing import Annotated

import typer

from curvcert._version import __version__
from curvcert.cli.demo import demo
from curvcert.errors import CurvcertError

app = typer.Typer(name="curvcert", no_args_is_help=True, add_completion=False)
app.command()(demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvcert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Provable bounds on how fast a neural network, and its Jacobian, can change."""


def main() -> None:
    """Run the command line; an error that curvcert raises on purpose ends it with one line, not a trace."""
    try:
        app()
    except CurvcertError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
