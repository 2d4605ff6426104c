"""From the value that a front end ends with to a `Network`."""

import torch

from curvcert.network.builder import Value
from curvcert.network.network import Network
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.padding import with_padding_joined


def built(output: Value, source_dtype: torch.dtype) -> Network:
    """Return the network with this output: without what it does not depend on, rows of affine maps as one node."""
    builder = output.builder
    nodes = with_padding_joined(fused(builder.nodes, output.number))
    # Not through the input itself: a softmax of the input alone leaves no network before it.
    before = builder.scores.get(output.number, 0)
    return Network(nodes, source_dtype, logits=built(Value(builder, before), source_dtype) if before else None)
