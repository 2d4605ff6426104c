"""From the value that a front end ends with to a `Network`."""

from collections.abc import Sequence

import torch

from curvcert.network.builder import Value
from curvcert.network.network import Network
from curvcert.network.nodes import AbstractNode
from curvcert.network.rewriting.endings import without_last_normalisation
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.padding import with_padding_joined


def built(output: Value, source_dtype: torch.dtype) -> Network:
    """Return the network with this output: without what it does not depend on, rows of affine maps as one node."""
    builder = output.builder
    return Network(_made(builder.nodes, output.number), source_dtype, logits=_logits(output, source_dtype))


def _made(nodes: Sequence[AbstractNode], output: int) -> tuple[AbstractNode, ...]:
    return with_padding_joined(fused(nodes, output))


def _logits(output: Value, source_dtype: torch.dtype) -> Network | None:
    """Return a simpler network whose outputs are in the same order, if the output is made of one."""
    builder = output.builder
    # Not through the input itself: a softmax of the input alone leaves no network before it.
    before = builder.scores.get(output.number, 0)
    if before:
        return built(Value(builder, before), source_dtype)
    found = None if builder.live else without_last_normalisation(builder.nodes, output.number)
    return None if found is None else Network(_made(found, len(found) - 1), source_dtype)
