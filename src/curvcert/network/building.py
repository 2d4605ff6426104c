"""From the value that a front end ends with to a `Network`."""

import torch

from curvcert.network.builder import Value
from curvcert.network.network import Network
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.padding import with_padding_joined


def built(output: Value, source_dtype: torch.dtype) -> Network:
    """Return the network with this output: without what it does not depend on, rows of affine maps as one node."""
    nodes = with_padding_joined(fused(output.builder.nodes, output.number))
    return Network(nodes, source_dtype)
