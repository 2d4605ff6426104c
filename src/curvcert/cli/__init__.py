"""The command line: `curvcert`, or `python -m curvcert`.  One file a subcommand, no mathematics.

Exit statuses: 0 done; 1 a claim failed; 2 bad usage or bad input; 3 a fault of curvcert's own; 130 stopped by Ctrl-C.
"""

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from curvcert._version import __version__
from curvcert.cli.audit import audit_command
from curvcert.cli.bound import bound_command
from curvcert.cli.certify import certify_command
from curvcert.cli.check import check_command
from curvcert.cli.demo import demo
from curvcert.cli.reproduce import reproduce_command
from curvcert.cli.train import train_command
from curvcert.errors import CurvcertError, SoundnessError

CLAIM_FAILED, BAD_INPUT, FAULT = 1, 2, 3

app = typer.Typer(name="curvcert", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command("bound")(bound_command)
app.command("certify")(certify_command)
app.command("check")(check_command)
app.command("train")(train_command)
app.command("audit")(audit_command)
app.command("reproduce")(reproduce_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvcert {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; understood anywhere on the line.")
    ] = False,
) -> None:
    """Provable bounds on how fast a neural network, and its Jacobian, can change.

    Two minutes with the network that comes along, then a model of your own:

        curvcert demo

        curvcert certify net.onnx data.npz --box 0 1 --out out

        curvcert check out/certificate.safetensors out/network.safetensors data.npz

    Every command has --help with examples. Exit statuses: 0 done;
    1 a claim failed; 2 bad usage or bad input; 3 a fault of curvcert's own.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error ends it with a line or two, and with its traceback only after --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            app(words)
        except Exception as error:
            if debug:
                traceback.print_exc()
            status, message = _told(error, debug)
            print(message, file=sys.stderr)
            sys.exit(status)


def _told(error: Exception, debug: bool) -> tuple[int, str]:
    """Return the exit status for an error, and what a person is told."""
    if isinstance(error, CurvcertError):
        status = CLAIM_FAILED if isinstance(error, SoundnessError) else BAD_INPUT
        return status, f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return BAD_INPUT, f"{type(error).__name__}: {error.filename}: {error.strerror}. Check the path and its rights."
    reason = (str(error).strip().split("\n")[0] or "no reason given").rstrip(".")
    remedy = "Please report it." if debug else "Run with --debug to see where."
    return FAULT, f"{type(error).__name__}: {reason}. This is unexpected. {remedy}"


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)
