"""Counterexamples as files: one sealed safetensors file with the network, the points and the claim, no code in it."""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvcert.activations import ACTIVATIONS, Activation, celu, elu, hardtanh, leaky_relu, softplus
from curvcert.errors import CurvcertError, InvalidFile, UnsupportedActivation
from curvcert.falsifier.counterexample import Counterexample
from curvcert.network import MaxPool, Network
from curvcert.network.network_file import KIND as NETWORK_KIND
from curvcert.network.network_file import VERSION as NETWORK_VERSION
from curvcert.network.network_file import save_network
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode, Term
from curvcert.operators import (
    AbstractLinearMap,
    AveragePool2d,
    Conv2d,
    Dense,
    Diagonal,
    Identity,
    Reshape,
    Transposed,
    Zero,
    add,
    compose,
    scale,
)
from curvcert.operators.base import Shape
from curvcert.operators.circuit import Circuit
from curvcert.operators.permutation import ChannelShift, Permutation
from curvcert.operators.segments import Segment
from curvcert.tensor_files import Arrays, read_tensor_file, write_tensor_file

KIND, VERSION = "curvcert-counterexample", 2

_POINTS = ("x", "y", "covector", "centre")
_NUMBERS = ("radius", "claimed")
_WORDS = ("kind", "scope", "source")
_INTEGERS = ("label", "rival")
_DEEPEST = 32
"""How deeply the maps of a file may be nested."""


def save_counterexample(example: Counterexample, path: Path | str) -> Path:
    """Write a counterexample to a file that `load_counterexample` and `curvcert audit --replay` read.

    Raises:
        UnsupportedActivation: if the network has an activation that was declared: no file can hold it.
    """
    for node in example.network.nodes:
        if isinstance(node, ElementwiseNode):
            _activation(node.activation.name)
    with tempfile.TemporaryDirectory() as folder:
        written = save_network(example.network, Path(folder) / "network.safetensors")
        description, weights = read_tensor_file(written, NETWORK_KIND, NETWORK_VERSION)
    header: dict[str, Any] = {name: getattr(example, name) for name in (*_NUMBERS, *_WORDS, *_INTEGERS)}
    header |= {"p": "inf" if math.isinf(example.p) else example.p, "network": description}
    points = {name: getattr(example, name).detach().cpu().double().numpy() for name in _POINTS}
    return write_tensor_file(path, KIND, VERSION, header, {**weights, **points})


def load_counterexample(path: Path | str) -> Counterexample:
    """Return the counterexample in a file; whether it refutes its claim is what `replay` tells.

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
    except (CurvcertError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise InvalidFile(f"{path} holds no counterexample that makes sense: {error}.") from None


def _example(header: dict[str, Any], arrays: Arrays) -> Counterexample:
    for names, kind in ((_WORDS, str), (_INTEGERS, int), (_NUMBERS, float)):
        for name in names:
            if not isinstance(header[name], kind) or isinstance(header[name], bool):
                raise InvalidFile(f"The header's {name} is of type {kind.__name__}, got {header[name]!r}.")
    weights = {name: torch.from_numpy(value).double() for name, value in arrays.items()}
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise InvalidFile("The file holds numbers that are not finite.")
    p = math.inf if header["p"] == "inf" else float(header["p"])
    if not p >= 1:
        raise InvalidFile(f"The norm's exponent is at least 1, got {p}.")
    network = _network(header["network"], weights)
    fields: dict[str, Any] = {name: header[name] for name in (*_WORDS, *_INTEGERS, *_NUMBERS)}
    fields |= {name: weights[name] for name in _POINTS}
    return Counterexample(network=network, p=p, **fields)


def _network(description: dict[str, Any], weights: dict[str, Tensor]) -> Network:
    nodes: list[AbstractNode] = [InputNode(_shape(description["in_shape"]))]
    for entry in description["nodes"]:
        nodes.append(_node(entry, nodes, weights))
    return Network(tuple(nodes))


def _node(entry: dict[str, Any], before: list[AbstractNode], weights: dict[str, Tensor]) -> AbstractNode:
    match entry["kind"]:
        case "affine":
            terms = tuple(Term(_source(term, before), _map(term["map"], weights)) for term in entry["terms"])
            error = None if entry["offset_error"] is None else weights[entry["offset_error"]]
            return AffineNode(terms, weights[entry["offset"]], offset_error=error)
        case "elementwise":
            source = _source(entry, before)
            return ElementwiseNode(source, _activation(entry["activation"]["name"]), before[source].shape)
        case "max_pool":
            sizes = (_shape(entry[name]) for name in ("image_shape", "kernel_size", "stride", "padding"))
            image, kernel, stride, padding = sizes
            pool = MaxPool(image, _pair(kernel), _pair(stride), _pair(padding))
            return MaxPoolNode(_source(entry, before), pool)
    raise InvalidFile(f"There is no node of the kind {str(entry['kind'])[:40]!r}.")


def _source(entry: dict[str, Any], before: list[AbstractNode]) -> int:
    source = entry["source"]
    if type(source) is not int or not 0 <= source < len(before):
        raise InvalidFile(f"A node reads one of the {len(before)} before it, got {str(source)[:40]}.")
    return source


def _map(op: dict[str, Any], weights: dict[str, Tensor], depth: int = 0) -> AbstractLinearMap:
    if depth > _DEEPEST:
        raise InvalidFile(f"The maps are nested more than {_DEEPEST} deep.")
    match op["map"]:
        case "dense":
            return Dense(weights[op["weight"]])
        case "conv":
            return _conv(op, weights)
        case "diagonal":
            return Diagonal(weights[op["weight"]], _shape(op["shape"]))
        case "average_pool":
            image, kernel = _shape(op["image_shape"]), _pair(_shape(op["kernel_size"]))
            return AveragePool2d(image, kernel, _pair(_shape(op["stride"])), _pair(_shape(op["padding"])))
        case "identity":
            return Identity(_shape(op["in_shape"]))
        case "zero":
            return Zero(_shape(op["in_shape"]), _shape(op["out_shape"]))
        case "reshape":
            return Reshape(_shape(op["in_shape"]), _shape(op["out_shape"]))
        case "transposed":
            return Transposed(_map(op["of"], weights, depth + 1))
        case "scaled":
            return scale(float(op["factor"]), _map(op["of"], weights, depth + 1))
        case "sum":
            return add(*(_map(term, weights, depth + 1) for term in op["terms"]))
        case "product":
            return compose(*(_map(factor, weights, depth + 1) for factor in op["factors"]))
        case "permutation":
            return Permutation(_shape(op["in_shape"]), _shape(op["axes"]))
        case "channel_shift":
            groups = tuple((_shape(group[:1])[0], int(group[1]), int(group[2])) for group in op["groups"])
            return ChannelShift(_shape(op["image_shape"]), groups)
        case "segment":
            total, start = _shape([op["total"], op["start"]])
            return Segment(total, start, _shape(op["shape"]))
        case "circuit":
            return Circuit(
                tuple(
                    tuple((_shape([part["source"]])[0], _map(part["map"], weights, depth + 1)) for part in step)
                    for step in op["steps"]
                )
            )
    raise InvalidFile(f"There is no map of the kind {str(op['map'])[:40]!r}.")


def _conv(op: dict[str, Any], weights: dict[str, Tensor]) -> Conv2d:
    above, beside = (_pair(_shape(side)) for side in op["padding"])
    return Conv2d(
        weights[op["weight"]],
        _shape(op["image_shape"]),
        _pair(_shape(op["stride"])),
        (above, beside),
        _pair(_shape(op["dilation"])),
        int(op["groups"]),
        op["padding_mode"],
    )


def _shape(sizes: list[int]) -> Shape:
    if not all(isinstance(size, int) and 0 <= size < 2**20 for size in sizes):
        raise InvalidFile(f"Sizes are whole numbers below 2**20, got {str(sizes)[:80]}.")
    return tuple(sizes)


def _pair(sizes: Shape) -> tuple[int, int]:
    first, second = sizes
    return first, second


_FACTORIES: dict[str, Callable[..., Activation]] = {
    "softplus": softplus,
    "centred_softplus": lambda beta: softplus(beta, centred=True),
    "celu": celu,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "hardtanh": hardtanh,
}
_PARAMETRISED = re.compile(r"([a-z_]{1,20})\(([-+.,0-9e]{1,80})\)")


def _activation(name: str) -> Activation:
    """Return the row of the table with that name; a deviation of torch's own softplus does not change the function."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    match = _PARAMETRISED.fullmatch(name)
    if match is not None and match[1] in _FACTORIES:
        made = _FACTORIES[match[1]](*(float(number) for number in match[2].split(",")))
        if made.name == name:
            return made
    raise UnsupportedActivation(f"The table has no activation {name[:40]!r}: a file holds only those of the table.")
