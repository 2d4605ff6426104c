"""`curvcert check`: an independent verdict on a certificate file."""

from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from curvcert._version import __version__
from curvcert.activations.base import Activation
from curvcert.certificates import load_certificate
from curvcert.checker import Declared, Verdict, check_certificate
from curvcert.cli import options
from curvcert.cli.inputs import load_inputs
from curvcert.cli.models import ModelChoice, is_network_file, load_network
from curvcert.cli.output import Output
from curvcert.errors import InvalidInput
from curvcert.network.network_file import save_network
from curvcert.network.nodes import ElementwiseNode

CLAIM_FAILED, UNDECIDED = 1, 4
"""The exit statuses of a certificate that does not hold; the first, if both apply."""


def check_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A certificate.safetensors by `curvcert certify`.", show_default=False),
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The network.safetensors beside it; or the model itself, as `curvcert certify` takes it: a "
            "package.module:factory is code that is run with your rights.",
            show_default=False,
        ),
    ],
    data: options.DataName,
    normalise: options.Normalise = None,
    weights: options.Weights = None,
    evaluate: options.Evaluate = False,
    input_shape: options.InputShape = None,
    split: options.Split = "test",
    data_folder: options.DataFolder = None,
    labels: options.Labels = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Verify a certificate file with code that shares nothing with the code that made it.

    With the network file beside the certificate:

        curvcert check out/certificate.safetensors out/network.safetensors digits

    With your own model, which also shows that the certificate is about that one:

        curvcert check out/certificate.safetensors net.onnx data.npz --normalise 0.1307 0.3081

    Sample by sample of the same data, from its first:

        curvcert check out/certificate.safetensors net.onnx mnist --json

    The exit status is 0 if every claim is proven, 1 if one is contradicted or
    not reached, 4 if some cannot be checked and no other fails, 2 if a file
    cannot be used.
    """
    output = Output(json, quiet)
    certificate = load_certificate(file)
    samples = len(certificate)
    inputs = load_inputs(data, split, data_folder, samples, labels)
    if len(inputs) < samples:
        raise InvalidInput(f"{file} is about {samples} samples, {inputs.name} has {len(inputs)}. Give the same data.")
    choice = ModelChoice(model, weights, normalise, input_shape, evaluate)
    with TemporaryDirectory() as folder, output.working(f"checking {samples} samples"):
        network, declared = _network_file(choice, inputs.shape, folder, certificate.threshold)
        verdict = check_certificate(file, network, inputs.x.numpy(), inputs.y.numpy(), declared)
    verdict = verdict if is_network_file(model) else verdict.of_the_model()
    first = str(verdict).split("\n")[0]
    output.show(str(verdict))
    output.answer(first, _facts(file, verdict))
    if not verdict.holds:
        raise typer.Exit(CLAIM_FAILED if verdict.refused else UNDECIDED)


def _network_file(
    choice: ModelChoice, shape: tuple[int, ...], folder: str, threshold: float | None
) -> tuple[Path, dict[str, Declared]]:
    """Return the network as the checker reads it, and the formulas of activations that were declared.

    It is the file that was given, which has no formulas, or one made from the model.
    """
    if not is_network_file(choice.name):
        network = load_network(choice, shape).decided(threshold).classified
        acts = [node.activation for node in network.nodes if isinstance(node, ElementwiseNode)]
        declared = {act.name: Declared(partial(_values, act), act.slope) for act in acts if act.profiles is None}
        return save_network(network, Path(folder) / "network.safetensors"), declared
    if choice.normalise or choice.weights or choice.evaluate or choice.input_shape:
        raise InvalidInput(
            f"{choice.name} is a network file, complete as it is: leave out --normalise, --weights, --eval and "
            "--input-shape."
        )
    return Path(choice.name), {}


def _values(act: Activation, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of a declared activation."""
    with torch.no_grad():
        found: NDArray[np.float64] = act.value(torch.from_numpy(np.ascontiguousarray(z))).numpy()
    return found


def _facts(file: Path, verdict: Verdict) -> dict[str, object]:
    return {
        "command": "check",
        "curvcert": __version__,
        "certificate": str(file),
        "holds": verdict.holds,
        "radii": dict(zip(("proven", "claimed"), verdict.radii_proven, strict=True)),
        "counts": dict(Counter(verdict.status)),
        "status": verdict.status,
        "reasons": verdict.reasons,
        "rechecked": verdict.rechecked,
        "given": verdict.given,
    }
