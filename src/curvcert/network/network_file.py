r"""A network as a plain file: what every block is made of, map by map, with its float64 weights.

The file is what an independent checker reads, and its digest is what names a network in a certificate.  The
digest is taken over the blocks, not over the file: SHA-256 of the description as canonical JSON, followed by every
array's shape and little-endian float64 bytes in the order in which the description names them.
"""

import hashlib
import json
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from curvcert.errors import UnsupportedBlock, UnsupportedOperator
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.network import Network
from curvcert.operators import (
    AbstractLinearMap,
    AveragePool2d,
    Composition,
    Conv2d,
    Dense,
    Diagonal,
    Identity,
    Reshape,
    Scaled,
    Sum,
    Transposed,
    Zero,
)
from curvcert.operators.permutation import ChannelShift, Permutation
from curvcert.tensor_files import write_tensor_file

KIND, VERSION = "curvcert-network", 1

Weights = list[NDArray[np.float64]]
Description = dict[str, Any]


def save_network(network: Network, path: Path | str) -> Path:
    """Write a network to a file that `curvcert check` reads, and return its path.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_network(net, f"{folder}/net.safetensors").name
    'net.safetensors'

    Raises:
        UnsupportedOperator: if a map is of a type that the file has no word for.
    """
    description, weights = _described(network)
    arrays: dict[str, NDArray[Any]] = {f"t{k}": weight for k, weight in enumerate(weights)}
    return write_tensor_file(path, KIND, VERSION, description, arrays)


def network_digest(network: Network) -> str:
    """Return the digest of a network's blocks: equal blocks have equal digests, wherever they came from.

    >>> import torch
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval()
    >>> network_digest(trace(model, torch.zeros(1, 2))) == network_digest(trace(model.double(), torch.zeros(5, 2)))
    True
    """
    description, weights = _described(network)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    for weight in weights:
        digest.update(f"{list(weight.shape)}".encode())
        digest.update(weight.data)
    return digest.hexdigest()


def _described(network: Network) -> tuple[Description, Weights]:
    weights: Weights = []
    blocks = [_block(block, weights) for block in network.blocks]
    return {"in_shape": list(network.in_shape), "blocks": blocks}, weights


def _stored(value: Tensor | None, weights: Weights) -> str | None:
    """Append an array and return its name."""
    if value is None:
        return None
    weights.append(np.ascontiguousarray(value.detach().cpu().double().numpy(), "<f8"))
    return f"t{len(weights) - 1}"


@singledispatch
def _block(block: AbstractBlock, weights: Weights) -> Description:
    raise UnsupportedBlock(f"A network file has no word for a {type(block).__name__}.")


@_block.register
def _(block: Block, weights: Weights) -> Description:
    maps = {name: _map(getattr(block, name), weights) for name in ("H", "G", "W")}
    offsets = {name: _stored(getattr(block, name), weights) for name in ("b", "b_error", "c", "c_error")}
    activation = {
        "name": block.activation.name,
        "deviation": block.activation.deviation,
        "declared": list(block.activation.assumes),
    }
    return {"kind": "block", **maps, **offsets, "activation": activation}


@_block.register
def _(block: Affine, weights: Weights) -> Description:
    offsets = {name: _stored(getattr(block, name), weights) for name in ("c", "c_error")}
    return {"kind": "affine", "H": _map(block.H, weights), **offsets}


@_block.register
def _(block: MaxPool, weights: Weights) -> Description:
    sizes = {name: list(getattr(block, name)) for name in ("image_shape", "kernel_size", "stride", "padding")}
    return {"kind": "max_pool", **sizes}


@singledispatch
def _map(op: AbstractLinearMap, weights: Weights) -> Description:
    raise UnsupportedOperator(f"A network file has no word for the linear map {type(op).__name__}.")


@_map.register
def _(op: Dense, weights: Weights) -> Description:
    return {"map": "dense", "weight": _stored(op.weight, weights)}


@_map.register
def _(op: Conv2d, weights: Weights) -> Description:
    return {
        "map": "conv",
        "weight": _stored(op.weight, weights),
        "image_shape": list(op.image_shape),
        "stride": list(op.stride),
        "padding": [list(side) for side in op.padding],
        "dilation": list(op.dilation),
        "groups": op.groups,
        "padding_mode": op.padding_mode,
    }


@_map.register
def _(op: Diagonal, weights: Weights) -> Description:
    return {"map": "diagonal", "weight": _stored(op.weight, weights), "shape": list(op.shape)}


@_map.register
def _(op: AveragePool2d, weights: Weights) -> Description:
    sizes = {name: list(getattr(op, name)) for name in ("image_shape", "kernel_size", "stride", "padding")}
    return {"map": "average_pool", **sizes}


@_map.register
def _(op: Permutation, weights: Weights) -> Description:
    return {"map": "permutation", "in_shape": list(op.in_shape), "axes": list(op.axes)}


@_map.register
def _(op: ChannelShift, weights: Weights) -> Description:
    return {"map": "channel_shift", "image_shape": list(op.in_shape), "groups": [list(group) for group in op.groups]}


@_map.register(Identity | Zero | Reshape)
def _(op: AbstractLinearMap, weights: Weights) -> Description:
    return {"map": type(op).__name__.lower(), "in_shape": list(op.in_shape), "out_shape": list(op.out_shape)}


@_map.register
def _(op: Transposed, weights: Weights) -> Description:
    return {"map": "transposed", "of": _map(op.map, weights)}


@_map.register
def _(op: Scaled, weights: Weights) -> Description:
    return {"map": "scaled", "factor": op.factor, "of": _map(op.map, weights)}


@_map.register
def _(op: Sum, weights: Weights) -> Description:
    return {"map": "sum", "terms": [_map(term, weights) for term in op.terms]}


@_map.register
def _(op: Composition, weights: Weights) -> Description:
    return {"map": "product", "factors": [_map(factor, weights) for factor in op.factors]}
