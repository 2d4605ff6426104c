"""Data that comes with curvcert: the 8 x 8 digits, and a small network trained on them."""

from curvcert.data.demo_network import load_demo_network
from curvcert.data.digits import Digits, load_digits

__all__ = ["Digits", "load_demo_network", "load_digits"]
