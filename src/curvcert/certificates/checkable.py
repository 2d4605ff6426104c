"""What "checkable" certificates rest on: the constants and the methods that the independent checker reaches."""

import math
from collections import Counter

from curvcert.certificates.constants import Tables
from curvcert.certificates.methods import Wanted
from curvcert.checker.limits import MOST_ENTRIES, TooLarge, require_room
from curvcert.network import Network
from curvcert.network.nodes import AffineNode, ElementwiseNode, InputNode
from curvcert.operators.base import weights


def checkable(network: Network, p: float) -> tuple[Tables, Wanted]:
    """Return the constants and the methods that the checker reaches.

    That is curvature in l2 alone, and of kernels Lipschitz constants by LipLT: its curvatures of those are loose.  Of
    declared activations it takes slopes, and nothing else.
    """
    if known_by_kernels(network):
        return Tables("liplt", required=False), lambda method: False
    if any(isinstance(node, ElementwiseNode) and node.activation.profiles is None for node in network.nodes):
        return Tables("auto", required=False), lambda method: False
    if p == 2:
        return Tables("auto", "auto", required=False), lambda method: method.checkable
    return Tables("auto", required=False), lambda method: method.checkable and method.tables.K is None


def known_by_kernels(network: Network) -> bool:
    """Whether the checker reads a network's maps as kernels, because as matrices they are too large together.

    >>> import torch
    >>> from curvcert.network import trace
    >>> from torch import nn
    >>> known_by_kernels(trace(nn.Linear(2, 3).eval(), torch.zeros(1, 2)))
    False
    """
    nodes, held = network.nodes, 0
    if not all(isinstance(node, InputNode | AffineNode | ElementwiseNode) for node in nodes):
        return False  # it reads no others at all
    sizes, sources = [math.prod(node.shape) for node in nodes], [list(node.sources) for node in nodes]
    activated = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode)]
    readers = Counter(source for read in sources for source in read)
    for k in activated:
        # The sum in front of an activation is part of its block, unless others read it too.
        if isinstance(nodes[sources[k][0]], AffineNode) and readers[sources[k][0]] == 1:
            sources[k] = []
    for node in nodes:
        if isinstance(node, AffineNode):
            held += node.offset.numel() + sum(weight.numel() for term in node.terms for weight in weights(term.map))
    try:
        require_room(sizes, sources, activated, MOST_ENTRIES + 2 * held)
    except TooLarge:
        return True
    return False
