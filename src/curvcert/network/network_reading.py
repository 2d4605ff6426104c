"""A network read from the file that `save_network` wrote: the same nodes, with the same digest."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
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

_DEEPEST = 32
"""How deeply the maps of a file may be nested."""

_LARGEST_SIZE = 2**28
_MOST_PARTS = 2**16
_MOST_NUMBERS, _PER_WEIGHT = 2**25, 32
_MOST_WORK = 2**36
"""Nodes and maps; numbers in all their values, more where a file holds many weights; multiplications on the way."""


@final
class _Reading:
    """The weights of a file, and how much its description may still ask for: small files may not ask for much."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self._parts, self._work = _MOST_PARTS, _MOST_WORK
        self._numbers = _MOST_NUMBERS + _PER_WEIGHT * sum(value.numel() for value in weights.values())

    def take(self, numbers: int, work: int = 0, parts: int = 0) -> None:
        """Count what is about to be formed, or computed by whoever evaluates the network once."""
        self._numbers -= numbers
        self._work -= max(work, numbers)
        self._parts -= parts
        for left, what in ((self._parts, "parts"), (self._numbers, "numbers"), (self._work, "multiplications")):
            if left < 0:
                raise InvalidFile(f"The network asks for more {what} than a file of its size may.")


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
    reading = _Reading(weights)
    nodes: list[AbstractNode] = [InputNode(_shape(description["in_shape"]))]
    for entry in description["nodes"]:
        nodes.append(_node(entry, nodes, reading))
        reading.take(math.prod(nodes[-1].shape), parts=1)
    return Network(tuple(nodes))


def _node(entry: dict[str, Any], before: list[AbstractNode], reading: _Reading) -> AbstractNode:
    match entry["kind"]:
        case "affine":
            terms = tuple(Term(_source(term, before), _map(term["map"], reading)) for term in entry["terms"])
            error = None if entry["offset_error"] is None else reading.weights[entry["offset_error"]]
            return AffineNode(terms, reading.weights[entry["offset"]], offset_error=error)
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
            reading.take(0, math.prod((*pool.out_shape, *kernel)))
            return MaxPoolNode(_source(entry, before), pool)
    raise InvalidFile(f"There is no node of the kind {str(entry['kind'])[:40]!r}.")


def _source(entry: dict[str, Any], before: list[AbstractNode]) -> int:
    source = entry["source"]
    if type(source) is not int or not 0 <= source < len(before):
        raise InvalidFile(f"A node reads one of the {len(before)} before it, got {str(source)[:40]}.")
    return source


def _map(op: dict[str, Any], reading: _Reading, depth: int = 0) -> AbstractLinearMap:
    if depth > _DEEPEST:
        raise InvalidFile(f"The maps are nested more than {_DEEPEST} deep.")
    reading.take(0, parts=1)
    made = _made(op, reading, depth)
    reading.take(max(made.in_size, made.out_size))
    return made


def _made(op: dict[str, Any], reading: _Reading, depth: int) -> AbstractLinearMap:
    match op["map"]:
        case "dense":
            weight = reading.weights[op["weight"]]
            reading.take(0, weight.numel())
            return Dense(weight)
        case "conv":
            return _conv(op, reading)
        case "diagonal":
            return Diagonal(reading.weights[op["weight"]], _shape(op["shape"]))
        case "average_pool":
            return _average_pool(op, reading)
        case "identity":
            return Identity(_shape(op["in_shape"]))
        case "zero":
            return Zero(_shape(op["in_shape"]), _shape(op["out_shape"]))
        case "reshape":
            return Reshape(_shape(op["in_shape"]), _shape(op["out_shape"]))
        case "transposed":
            return Transposed(_map(op["of"], reading, depth + 1))
        case "scaled":
            return scale(float(op["factor"]), _map(op["of"], reading, depth + 1))
        case "sum":
            return add(*(_map(term, reading, depth + 1) for term in op["terms"]))
        case "product":
            return compose(*(_map(factor, reading, depth + 1) for factor in op["factors"]))
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
                    tuple((_shape([part["source"]])[0], _map(part["map"], reading, depth + 1)) for part in step)
                    for step in op["steps"]
                )
            )
    raise InvalidFile(f"There is no map of the kind {str(op['map'])[:40]!r}.")


def _average_pool(op: dict[str, Any], reading: _Reading) -> AveragePool2d:
    image, kernel = _shape(op["image_shape"]), _pair(_shape(op["kernel_size"]))
    # Its shape is that of a convolution by a kernel of equal weights, which is formed for it.
    reading.take(image[0] * math.prod(kernel))
    pool = AveragePool2d(image, kernel, _pair(_shape(op["stride"])), _pair(_shape(op["padding"])))
    reading.take(0, pool.out_size * math.prod(kernel))
    return pool


def _conv(op: dict[str, Any], reading: _Reading) -> Conv2d:
    above, beside = (_pair(_shape(side)) for side in op["padding"])
    conv = Conv2d(
        reading.weights[op["weight"]],
        _shape(op["image_shape"]),
        _pair(_shape(op["stride"])),
        (above, beside),
        _pair(_shape(op["dilation"])),
        int(op["groups"]),
        op["padding_mode"],
    )
    # Padding is written out, and every output takes one multiplication for each of the kernel's taps.
    padded = (n + sum(side) for n, side in zip(conv.in_shape[1:], conv.padding, strict=True))
    reading.take(conv.in_shape[0] * math.prod(padded), conv.out_size * math.prod(conv.weight.shape[1:]))
    return conv


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
