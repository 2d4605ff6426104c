"""A network read from the file that `save_network` wrote: the same nodes, with the same digest."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert.activations import (
    ACTIVATIONS,
    EXP,
    LOG,
    Activation,
    celu,
    elu,
    gelu,
    gelu_tanh,
    hardtanh,
    leaky_relu,
    power,
    selu,
    softplus,
    softshrink,
)
from curvcert.errors import CurvcertError, InvalidFile, UnsupportedActivation
from curvcert.network.block import MaxPool
from curvcert.network.network import Network
from curvcert.network.network_file import KIND, VERSION
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, ProductNode, Term
from curvcert.operators.description import Reading, pair, shape
from curvcert.tensor_files import Arrays, read_tensor_file


def load_network(path: Path | str) -> Network:
    """Return the network in a file that `save_network` wrote; nodes have no names there.

    >>> import tempfile
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> from curvcert.network.network_file import network_digest, save_network
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load_network(save_network(net, f"{folder}/net.safetensors"))
    >>> network_digest(again) == network_digest(net)
    True

    Raises:
        InvalidFile: if the file is cut short, altered, of another kind, or makes no sense.
        UnsupportedActivation: if it has an activation that was declared: its formula is not in the file.
    """
    header, arrays = read_tensor_file(path, KIND, VERSION)
    try:
        return network_of(header, weights_of(arrays))
    except (InvalidFile, UnsupportedActivation):
        raise
    except (CurvcertError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise InvalidFile(f"{path} holds no network that makes sense: {error}.") from None


def weights_of(arrays: Arrays) -> dict[str, Tensor]:
    """Return the arrays of a file as float64 tensors, all finite."""
    if any(value.dtype != np.float64 for value in arrays.values()):
        raise InvalidFile("The file holds numbers that are not float64.")
    weights = {name: torch.from_numpy(value) for name, value in arrays.items()}
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise InvalidFile("The file holds numbers that are not finite.")
    return weights


def network_of(description: dict[str, Any], weights: Mapping[str, Tensor]) -> Network:
    """Return the network that a description says, unless it would take far more memory or work than the file."""
    reading = Reading(weights)
    nodes: list[AbstractNode] = [InputNode(shape(description["in_shape"]))]
    for entry in description["nodes"]:
        nodes.append(_node(entry, nodes, reading))
        reading.take(math.prod(nodes[-1].shape), parts=1)
    return Network(tuple(nodes))


def _node(entry: dict[str, Any], before: list[AbstractNode], reading: Reading) -> AbstractNode:
    match entry["kind"]:
        case "affine":
            terms = tuple(Term(_source(term, before), reading.map(term["map"])) for term in entry["terms"])
            error = None if entry["offset_error"] is None else reading.weight(entry["offset_error"])
            return AffineNode(terms, reading.weight(entry["offset"]), offset_error=error)
        case "elementwise":
            source = _source(entry, before)
            if entry["activation"]["declared"]:
                raise UnsupportedActivation("A declared activation cannot be read: its formula is not in the file.")
            row = activation_of(entry["activation"]["name"])
            activation = replace(row, deviation=float(entry["activation"]["deviation"]))
            return ElementwiseNode(source, activation, before[source].shape)
        case "max_pool":
            kernel = pair(entry["kernel_size"])
            pool = MaxPool(shape(entry["image_shape"]), kernel, pair(entry["stride"]), pair(entry["padding"]))
            reading.take(0, math.prod((*pool.out_shape, *kernel)))
            return MaxPoolNode(_source(entry, before), pool)
        case "product":
            left, right = (_source(entry, before, side) for side in ("left", "right"))
            return ProductNode(left, right, before[left].shape)
    raise InvalidFile(f"There is no node of the kind {str(entry['kind'])[:40]!r}.")


def _source(entry: dict[str, Any], before: list[AbstractNode], name: str = "source") -> int:
    source = entry[name]
    if type(source) is not int or not 0 <= source < len(before):
        raise InvalidFile(f"A node reads one of the {len(before)} before it, got {str(source)[:40]}.")
    return source


_FACTORIES: dict[str, Callable[..., Activation]] = {
    "softplus": softplus,
    "centred_softplus": lambda beta: softplus(beta, centred=True),
    "celu": celu,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "hardtanh": hardtanh,
    "softshrink": softshrink,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "selu": selu,
    "power": power,
}
_PARAMETRISED = re.compile(r"([a-z_]{1,20})\(([-+.,0-9e]{1,80})\)")


def activation_of(name: str) -> Activation:
    """Return the row of the table with that name."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    if name in (EXP.name, LOG.name):
        return EXP if name == EXP.name else LOG
    match = _PARAMETRISED.fullmatch(name)
    if match is not None and match[1] in _FACTORIES:
        made = _FACTORIES[match[1]](*(float(number) for number in match[2].split(",")))
        if made.name == name:
            return made
    raise UnsupportedActivation(f"The table has no activation {name[:40]!r}: a file holds only those of the table.")
