"""Counterexamples as files: one sealed safetensors file with the network, the points and the claim, no code in it."""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from curvcert.boxes import Box
from curvcert.errors import CurvcertError, InvalidFile, UnsupportedActivation
from curvcert.falsifier.counterexample import Counterexample
from curvcert.network.network_file import KIND as NETWORK_KIND
from curvcert.network.network_file import VERSION as NETWORK_VERSION
from curvcert.network.network_file import save_network
from curvcert.network.network_reading import activation_of, network_of, weights_of
from curvcert.network.nodes import ElementwiseNode
from curvcert.tensor_files import Arrays, read_tensor_file, write_tensor_file

KIND, VERSION = "curvcert-counterexample", 2

_POINTS = ("x", "y", "covector", "centre")
_NUMBERS = ("radius", "claimed", "offset")
_WORDS = ("kind", "scope", "source")
_INTEGERS = ("label", "rival")


def save_counterexample(example: Counterexample, path: Path | str) -> Path:
    """Write a counterexample to a file that `load_counterexample` and `curvcert audit --replay` read.

    Raises:
        UnsupportedActivation: if the network has an activation that was declared: no file can hold it.
    """
    for node in example.network.nodes:
        if isinstance(node, ElementwiseNode):
            if node.activation.assumes:
                raise UnsupportedActivation(
                    f"{node.activation.name!r} was declared or registered: no file can hold it."
                )
            activation_of(node.activation.name)
    with tempfile.TemporaryDirectory() as folder:
        written = save_network(example.network, Path(folder) / "network.safetensors")
        description, weights = read_tensor_file(written, NETWORK_KIND, NETWORK_VERSION)
    header: dict[str, Any] = {name: getattr(example, name) for name in (*_NUMBERS, *_WORDS, *_INTEGERS)}
    header |= {"p": "inf" if math.isinf(example.p) else example.p, "network": description}
    points = {name: getattr(example, name).detach().cpu().double().numpy() for name in _POINTS}
    if example.box is not None:
        points["box"] = example.box.to_array().numpy()
    return write_tensor_file(path, KIND, VERSION, header, {**weights, **points})


def load_counterexample(path: Path | str) -> Counterexample:
    """Return the counterexample in a file; whether it refutes its claim is what `replay` tells.

    >>> import torch
    >>> from curvcert.activations import TANH
    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> x = torch.zeros(1, dtype=torch.float64)
    >>> network = single_neuron(TANH, 2.0)
    >>> example = Counterexample("lipschitz", "a guess", network, x, x + 1, x + 1, 2.0, "global", x, 0.0, claimed=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_counterexample(save_counterexample(example, f"{folder}/example.safetensors"))
    Counterexample(lipschitz in l2, claimed 1, by a guess)

    Raises:
        InvalidFile: if the file is cut short, altered, of another kind, or makes no sense.
    """
    header, arrays = read_tensor_file(path, KIND, VERSION)
    try:
        return _example(header, arrays)
    except InvalidFile:
        raise
    except (CurvcertError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise InvalidFile(f"{path} holds no counterexample that makes sense: {error}.") from None


def _example(header: dict[str, Any], arrays: Arrays) -> Counterexample:
    for names, kind in ((_WORDS, str), (_INTEGERS, int), (_NUMBERS, float)):
        for name in names:
            if not isinstance(header[name], kind) or isinstance(header[name], bool):
                raise InvalidFile(f"The header's {name} is of type {kind.__name__}, got {header[name]!r}.")
    box = arrays.pop("box", None)
    weights = weights_of(arrays)
    p = math.inf if header["p"] == "inf" else float(header["p"])
    if not p >= 1:
        raise InvalidFile(f"The norm's exponent is at least 1, got {p}.")
    network = network_of(header["network"], weights)
    fields: dict[str, Any] = {name: header[name] for name in (*_WORDS, *_INTEGERS, *_NUMBERS)}
    fields |= {name: weights[name] for name in _POINTS}
    if box is not None:
        fields["box"] = Box.of((torch.tensor(box[0]), torch.tensor(box[1])), network.in_shape)
    return Counterexample(network=network, p=p, **fields)
