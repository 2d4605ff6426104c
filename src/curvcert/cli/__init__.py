"""The command line: `curvcert`, or `python -m curvcert`.  One file per subcommand, no mathematics.

Exit statuses: 0 done; 1 a claim failed; 2 bad usage or bad input; 3 a fault of curvcert's own; 4 undecided; 5 the
surroundings failed, such as a full disk; 130 stopped by Ctrl-C.
"""

import errno
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from curvcert._version import __version__
from curvcert.cli.subcommands import Subcommands
from curvcert.cli.terminal import outlets, visible
from curvcert.errors import CannotWrite, CurvcertError, SoundnessError

CLAIM_FAILED, BAD_INPUT, FAULT, SURROUNDINGS = 1, 2, 3, 5

_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that no other input would mend."""

app = typer.Typer(name="curvcert", cls=Subcommands, no_args_is_help=True, pretty_exceptions_enable=False)


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
    1 a claim failed; 2 bad usage or bad input; 3 a fault of curvcert's own;
    4 undecided; 5 the surroundings failed, such as a full disk or a folder in
    use.
    """


def main(arguments: Sequence[str] | None = None, commands: typer.Typer | None = None) -> None:
    """Run a command line, our own; an error ends it with a line or two, and with its traceback only after --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            with outlets():
                (commands or app)(words)
        except Exception as error:
            status, message = told(error, debug)
            with outlets():
                if debug:
                    print(visible(traceback.format_exc()), end="", file=sys.stderr)
                print(visible(message), file=sys.stderr)
            sys.exit(status)


def told(error: Exception, debug: bool = False) -> tuple[int, str]:
    """Return the exit status for an error, and what a person is told."""
    if isinstance(error, CurvcertError):
        status = {SoundnessError: CLAIM_FAILED, CannotWrite: SURROUNDINGS}.get(type(error), BAD_INPUT)
        return status, f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        where = "" if error.filename is None else f"{error.filename}: "
        return SURROUNDINGS, f"{type(error).__name__}: {where}{error.strerror}. Make room, and run it again."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own, for a GPU
        return SURROUNDINGS, "MemoryError: the memory is exhausted. Take fewer samples, or a machine with more."
    if isinstance(error, OSError) and error.filename is not None:
        return BAD_INPUT, f"{type(error).__name__}: {error.filename}: {error.strerror}. Check the path and its rights."
    reason = (str(error).strip().split("\n")[0] or "no reason given").rstrip(".")
    remedy = "Please report it." if debug else "Run with --debug to see where."
    return FAULT, f"{type(error).__name__}: {reason}. This is unexpected. {remedy}"


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    print(visible(f"Warning: {message}"), file=sys.stderr)
