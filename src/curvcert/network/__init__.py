"""Networks: frozen blocks in float64, and how modules become them."""

from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.lowering import lower
from curvcert.network.network import Network
from curvcert.network.tracing import trace

__all__ = ["AbstractBlock", "Affine", "Block", "MaxPool", "Network", "lower", "trace"]
