"""`curvcert verify`: whether a network has a property that a VNN-LIB file states."""

from pathlib import Path
from typing import Annotated

import typer

from curvcert._version import __version__
from curvcert.cli import options
from curvcert.cli.models import ModelChoice, load_network
from curvcert.cli.output import Output, assumed
from curvcert.properties import Decision, decide, load_vnnlib

VIOLATED, UNDECIDED = 1, 4
"""The exit statuses of a property that does not hold, and of one that is neither proven nor violated."""

_STATUS = {"holds": 0, "violated": VIOLATED, "unknown": UNDECIDED}
_MOST_INPUTS = 12
"""Inputs of a witness that a person is shown."""


def verify_command(
    model: options.ModelName,
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", help="A property in VNN-LIB 1.0 (.vnnlib).", show_default=False),
    ],
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Begin nothing new after so long; the answer is unknown then.")
    ] = 60.0,
    normalise: options.Normalise = None,
    weights: options.Weights = None,
    evaluate: options.Evaluate = False,
    input_shape: options.InputShape = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Decide a property of a network: it holds, is violated, or that is unknown.

    A file in VNN-LIB says which inputs to look at, a box, and which outputs
    would violate the property there:

        curvcert verify net.onnx spec.vnnlib

    For longer than a minute, and for a machine to read:

        curvcert verify net.onnx spec.vnnlib --timeout 600 --json

    Both answers are proven, rounding included; where the property is violated
    --json has the witness. Kinks, such as ReLU and max-pooling, are welcome.

    The exit status is 0 if it holds, 1 if it is violated, 4 if that is unknown,
    2 if a file cannot be used.
    """
    output = Output(json, quiet)
    wanted = load_vnnlib(spec)
    network = load_network(ModelChoice(model, weights, normalise, input_shape, evaluate), None)
    with output.working(f"bounding {wanted.outputs} outputs over {len(wanted.cases)} cases"):
        found = decide(network, wanted, timeout)
    output.show(f"{found.verdict}: {found.reason}", *_witness(found), *assumed(network.assumes))
    output.answer(found.verdict, _facts(model, spec, found) | {"assumes": network.assumes})
    raise typer.Exit(_STATUS[found.verdict])


def _witness(found: Decision) -> list[str]:
    """Return the witness as a person reads it."""
    if found.witness is None or found.outputs is None:
        return []
    inputs, (low, high) = found.witness.flatten().tolist(), (found.outputs.lower[0], found.outputs.upper[0])
    lines = [f"X_{k} = {value!r}" for k, value in enumerate(inputs[:_MOST_INPUTS])]
    if len(inputs) > _MOST_INPUTS:
        lines.append(f"... {len(inputs) - _MOST_INPUTS} more inputs: --json has them all")
    middle = ((low + high) / 2).tolist()
    lines += [f"Y_{k} = {value:.9g}" for k, value in enumerate(middle[:_MOST_INPUTS])]
    if not found.in_own_arithmetic:
        lines.append("In the arithmetic of the model's own dtype this point does not show it: rounding decides there.")
    return lines


def _facts(model: str, spec: Path, found: Decision) -> dict[str, object]:
    return {
        "command": "verify",
        "curvcert": __version__,
        "model": model,
        "property": str(spec),
        "verdict": found.verdict,
        "reason": found.reason,
        "boxes": found.boxes,
        "witness": None if found.witness is None else found.witness.flatten(),
        "outputs": None if found.outputs is None else [found.outputs.lower[0], found.outputs.upper[0]],
        "in_own_arithmetic": found.in_own_arithmetic,
    }
