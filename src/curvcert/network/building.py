"""From the value that a front end ends with to a `Network`; and the one place where graphs are refused."""

import torch

from curvcert.errors import UnsupportedBlock, UnsupportedModule
from curvcert.network.builder import Value
from curvcert.network.network import Network
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.padding import with_padding_joined


def built(output: Value, source_dtype: torch.dtype) -> Network:
    """Return the network with this output: without what it does not depend on, rows of affine maps as one node.

    Raises:
        UnsupportedModule: where it is no composition of blocks.
    """
    nodes = with_padding_joined(fused(output.builder.nodes, output.number))
    network = Network(nodes, source_dtype)
    require_chain(network)
    return network


def require_chain(network: Network) -> None:
    """Raise, with the name of the node where it ends, unless a network is a composition of blocks.

    Not every bound has its rules for other graphs yet, and none may meet one that it would misread.
    """
    try:
        _ = network.chain
    except UnsupportedBlock as error:
        raise UnsupportedModule(str(error)) from error
