r"""A network as a plain file: how every node computes its value, map by map, with its float64 weights.

The file is what an independent checker reads, and its digest is what names a network in a certificate.  The
digest is taken over the nodes, not over the file: SHA-256 of the description as canonical JSON, followed by every
array's shape and little-endian float64 bytes in the order in which the description names them.

The description is that of the graph, for a network that is a composition of blocks too: `in_shape`, and `nodes`, one
entry for each node after the input, which is node 0.  What an entry reads are earlier nodes, by their numbers:

- `{"kind": "affine", "terms": [{"source": k, "map": ...}, ...], "offset": "t0", "offset_error": "t1" or null}`,
- `{"kind": "elementwise", "source": k, "activation": {"name": ..., "deviation": ..., "declared": [...]}}`,
- `{"kind": "max_pool", "source": k, "image_shape": ..., "kernel_size": ..., "stride": ..., "padding": ...}`.
"""

import hashlib
import json
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from curvcert.errors import UnsupportedModule, UnsupportedOperator
from curvcert.network.network import Network
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, MaxPoolNode
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
from curvcert.operators.circuit import Circuit
from curvcert.operators.permutation import Flip, Permutation
from curvcert.operators.segments import Segment
from curvcert.operators.slices import Slice
from curvcert.tensor_files import write_tensor_file

KIND, VERSION = "curvcert-network", 2

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
    """Return the digest of a network's nodes: equal nodes have equal digests, wherever they came from.

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
    nodes = [_node(node, weights) for node in network.nodes[1:]]
    return {"in_shape": list(network.in_shape), "nodes": nodes}, weights


def _stored(value: Tensor | None, weights: Weights) -> str | None:
    """Append an array and return its name."""
    if value is None:
        return None
    weights.append(np.ascontiguousarray(value.detach().cpu().double().numpy(), "<f8"))
    return f"t{len(weights) - 1}"


@singledispatch
def _node(node: AbstractNode, weights: Weights) -> Description:
    raise UnsupportedModule(f"A network file has no word for a {type(node).__name__}.")


@_node.register
def _(node: AffineNode, weights: Weights) -> Description:
    terms = [{"source": term.source, "map": _map(term.map, weights)} for term in node.terms]
    offsets = {name: _stored(getattr(node, name), weights) for name in ("offset", "offset_error")}
    return {"kind": "affine", "terms": terms, **offsets}


@_node.register
def _(node: ElementwiseNode, weights: Weights) -> Description:
    activation = {
        "name": node.activation.name,
        "deviation": node.activation.deviation,
        "declared": list(node.activation.assumes),
    }
    return {"kind": "elementwise", "source": node.source, "activation": activation}


@_node.register
def _(node: MaxPoolNode, weights: Weights) -> Description:
    sizes = {name: list(getattr(node.pool, name)) for name in ("image_shape", "kernel_size", "stride", "padding")}
    return {"kind": "max_pool", "source": node.source, **sizes}


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
def _(op: Flip, weights: Weights) -> Description:
    return {"map": "flip", "shape": list(op.shape), "axes": list(op.axes)}


@_map.register
def _(op: Slice, weights: Weights) -> Description:
    sizes = {name: list(getattr(op, name)) for name in ("starts", "steps")}
    return {"map": "slice", "in_shape": list(op.source), "out_shape": list(op.target), **sizes}


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


@_map.register
def _(op: Segment, weights: Weights) -> Description:
    return {"map": "segment", "total": op.total, "start": op.start, "shape": list(op.part)}


@_map.register
def _(op: Circuit, weights: Weights) -> Description:
    steps = [[{"source": source, "map": _map(part, weights)} for source, part in step] for step in op.steps]
    return {"map": "circuit", "steps": steps}
