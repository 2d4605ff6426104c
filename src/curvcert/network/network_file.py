r"""A network as a plain file: how every node computes its value, map by map, with its float64 weights.

The file is what an independent checker reads, and its digest is what names a network in a certificate.  The
digest is taken over the nodes, not over the file: SHA-256 of the description as canonical JSON, followed by every
array's shape and little-endian float64 bytes in the order in which the description names them.

The description is that of the graph, for a network that is a composition of blocks too: `in_shape`, and `nodes`, one
entry for each node after the input, which is node 0.  What an entry reads are earlier nodes, by their numbers:

- `{"kind": "affine", "terms": [{"source": k, "map": ...}, ...], "offset": "t0", "offset_error": "t1" or null}`,
- `{"kind": "elementwise", "source": k, "activation": {"name": ..., "deviation": ..., "declared": [...]}}`,
- `{"kind": "max_pool", "source": k, "image_shape": ..., "kernel_size": ..., "stride": ..., "padding": ...}`,
- `{"kind": "product", "left": k, "right": l}`.
"""

import hashlib
import json
from functools import singledispatch
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from curvcert.errors import UnsupportedModule
from curvcert.network.network import Network
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, MaxPoolNode, ProductNode
from curvcert.operators.description import Description, Weights, description, stored
from curvcert.tensor_files import write_tensor_file

KIND, VERSION = "curvcert-network", 2


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
    header, weights = _described(network)
    arrays: dict[str, NDArray[Any]] = {f"t{k}": weight for k, weight in enumerate(weights)}
    return write_tensor_file(path, KIND, VERSION, header, arrays)


def network_digest(network: Network) -> str:
    """Return the digest of a network's nodes: equal nodes have equal digests, wherever they came from.

    >>> import torch
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval()
    >>> network_digest(trace(model, torch.zeros(1, 2))) == network_digest(trace(model.double(), torch.zeros(5, 2)))
    True
    """
    header, weights = _described(network)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    for weight in weights:
        digest.update(f"{list(weight.shape)}".encode())
        digest.update(weight.data)
    return digest.hexdigest()


def _described(network: Network) -> tuple[Description, Weights]:
    weights: Weights = []
    nodes = [_node(node, weights) for node in network.nodes[1:]]
    return {"in_shape": list(network.in_shape), "nodes": nodes}, weights


@singledispatch
def _node(node: AbstractNode, weights: Weights) -> Description:
    raise UnsupportedModule(f"A network file has no word for a {type(node).__name__}.")


@_node.register
def _(node: AffineNode, weights: Weights) -> Description:
    terms = [{"source": term.source, "map": description(term.map, weights)} for term in node.terms]
    offsets = {name: stored(getattr(node, name), weights) for name in ("offset", "offset_error")}
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


@_node.register
def _(node: ProductNode, weights: Weights) -> Description:
    return {"kind": "product", "left": node.left, "right": node.right}
