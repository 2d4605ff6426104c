"""A network read from the file that `save_network` wrote: the same nodes, with the same digest."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvcert.activations import (
    ACTIVATIONS,
    Activation,
    celu,
    elu,
    gelu,
    gelu_tanh,
    hardtanh,
    leaky_relu,
    selu,
    softplus,
)
from curvcert.errors import CurvcertError, InvalidFile, UnsupportedActivation
from curvcert.network.block import MaxPool
from curvcert.network.network import Network
from curvcert.network.network_file import KIND, VERSION
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
from curvcert.operators.permutation import Flip, Permutation
from curvcert.operators.segments import Segment
from curvcert.operators.slices import Slice
from curvcert.tensor_files import Arrays, read_tensor_file

Weights = Mapping[str, Tensor]

_DEEPEST = 32
"""How deeply the maps of a file may be nested."""

_LARGEST_SIZE = 2**28


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
    except (CurvcertError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise InvalidFile(f"{path} holds no network that makes sense: {error}.") from None


def weights_of(arrays: Arrays) -> dict[str, Tensor]:
    """Return the arrays of a file as float64 tensors, all finite."""
    weights = {name: torch.from_numpy(value).double() for name, value in arrays.items()}
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise InvalidFile("The file holds numbers that are not finite.")
    return weights


def network_of(description: dict[str, Any], weights: Weights) -> Network:
    """Return the network that a description says."""
    nodes: list[AbstractNode] = [InputNode(_shape(description["in_shape"]))]
    for entry in description["nodes"]:
        nodes.append(_node(entry, nodes, weights))
    return Network(tuple(nodes))


def _node(entry: dict[str, Any], before: list[AbstractNode], weights: Weights) -> AbstractNode:
    match entry["kind"]:
        case "affine":
            terms = tuple(Term(_source(term, before), _map(term["map"], weights)) for term in entry["terms"])
            error = None if entry["offset_error"] is None else weights[entry["offset_error"]]
            return AffineNode(terms, weights[entry["offset"]], offset_error=error)
        case "elementwise":
            source = _source(entry, before)
            if entry["activation"]["declared"]:
                raise UnsupportedActivation("A declared activation cannot be read: its formula is not in the file.")
            row = activation_of(entry["activation"]["name"])
            activation = replace(row, deviation=float(entry["activation"]["deviation"]))
            return ElementwiseNode(source, activation, before[source].shape)
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


def _map(op: dict[str, Any], weights: Weights, depth: int = 0) -> AbstractLinearMap:
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
        case "flip":
            return Flip(_shape(op["shape"]), _shape(op["axes"]))
        case "slice":
            source, starts, steps, target = (_shape(op[name]) for name in ("in_shape", "starts", "steps", "out_shape"))
            return Slice(source, starts, steps, target)
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


def _conv(op: dict[str, Any], weights: Weights) -> Conv2d:
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
    if not all(isinstance(size, int) and 0 <= size < _LARGEST_SIZE for size in sizes):
        raise InvalidFile(f"Sizes are whole numbers below 2**28, got {str(sizes)[:80]}.")
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
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "selu": selu,
}
_PARAMETRISED = re.compile(r"([a-z_]{1,20})\(([-+.,0-9e]{1,80})\)")


def activation_of(name: str) -> Activation:
    """Return the row of the table with that name."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    match = _PARAMETRISED.fullmatch(name)
    if match is not None and match[1] in _FACTORIES:
        made = _FACTORIES[match[1]](*(float(number) for number in match[2].split(",")))
        if made.name == name:
            return made
    raise UnsupportedActivation(f"The table has no activation {name[:40]!r}: a file holds only those of the table.")
