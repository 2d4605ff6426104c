"""Networks: frozen blocks in float64, and how modules become them."""

from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool
from curvcert.network.live import LiveNetwork
from curvcert.network.lowering import lower
from curvcert.network.network import Network
from curvcert.network.onnx_import import load_onnx
from curvcert.network.tracing import trace

__all__ = ["AbstractBlock", "Affine", "Block", "LiveNetwork", "MaxPool", "Network", "load_onnx", "lower", "trace"]
