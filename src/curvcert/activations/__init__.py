"""Activations: phi and its derivatives, their global, interval and anchored ranges, all proven.

Use `from_module(nn.Tanh())` or a row of the table, and ask for a range:

>>> import torch
>>> z = torch.zeros(1, dtype=torch.float64)
>>> anchored_curvature_range(from_module(torch.nn.Softplus()), z)[1].item() <= 0.25
True
"""

from curvcert.activations.anchored import anchored_curvature_range, anchored_slope_range
from curvcert.activations.base import Activation, Profile, Turn, from_profiles
from curvcert.activations.declaration import declare_activation
from curvcert.activations.interval import derivative_range, is_defined, second_derivative_range, value_range
from curvcert.activations.registry import from_module, register_activation
from curvcert.activations.remainder import remainder_ends, remainder_range
from curvcert.activations.table import (
    ACTIVATIONS,
    ARCTAN,
    ELU,
    ERF,
    GAUSSIAN,
    GELU,
    GELU_TANH,
    HARDSWISH,
    ISRU,
    MISH,
    RELU,
    RELU6,
    SELU,
    SIGMOID,
    SILU,
    SIN,
    SOFTSIGN,
    TANH,
    TANHSHRINK,
    celu,
    elu,
    hardtanh,
    leaky_relu,
    softplus,
    softshrink,
    torch_softplus,
)
from curvcert.activations.unbounded import EXP, LOG, power
from curvcert.activations.written_out import gelu, gelu_tanh, selu

__all__ = [
    "ACTIVATIONS",
    "ARCTAN",
    "ELU",
    "ERF",
    "EXP",
    "GAUSSIAN",
    "GELU",
    "GELU_TANH",
    "HARDSWISH",
    "ISRU",
    "LOG",
    "MISH",
    "RELU",
    "RELU6",
    "SELU",
    "SIGMOID",
    "SILU",
    "SIN",
    "SOFTSIGN",
    "TANH",
    "TANHSHRINK",
    "Activation",
    "Profile",
    "Turn",
    "anchored_curvature_range",
    "anchored_slope_range",
    "celu",
    "declare_activation",
    "derivative_range",
    "elu",
    "from_module",
    "from_profiles",
    "gelu",
    "gelu_tanh",
    "hardtanh",
    "is_defined",
    "leaky_relu",
    "power",
    "register_activation",
    "remainder_ends",
    "remainder_range",
    "second_derivative_range",
    "selu",
    "softplus",
    "softshrink",
    "torch_softplus",
    "value_range",
]
