"""Which module computes which activation: `from_module`, and how a user adds to it."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from curvcert.activations import table
from curvcert.activations.base import Activation
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedActivation

Factory = Callable[[nn.Module], Activation]

AGREEMENT = 1e-6
"""How far a registered module may be from its declared phi, relative to 1 + |phi|: float32 parameters."""

FARTHEST = 1e9
"""How far from 0 a registered module is sampled."""

_registered: set[type[nn.Module]] = set()


def from_module(module: nn.Module) -> Activation:
    """Return the activation that a module computes.

    A subclass of a known module is refused if it has its own `forward`: it may compute anything.

    >>> from_module(nn.Softplus(beta=2.0)).name
    'softplus(2)'
    >>> from_module(nn.Threshold(0.1, 20))
    Traceback (most recent call last):
    ...
    curvcert.errors.UnsupportedActivation: No activation is known for Threshold. Declare it with \
declare_activation and make it known with register_activation(Threshold, ...).

    Raises:
        UnsupportedActivation: if the module's type is not known.
        SoundnessError: if a registered module does not compute its declared activation.
    """
    known = next((base for base in type(module).__mro__ if base in _row.registry), object)
    if known is not object and getattr(type(module), "forward", None) is not getattr(known, "forward", None):
        raise UnsupportedActivation(
            f"{type(module).__name__} is a {known.__name__} with its own forward, which may compute "
            "anything. Declare it with declare_activation and make it known with register_activation."
        )
    act = _row(module)
    if known not in _registered:
        return act
    _check_agreement(module, act)
    stated = f"module {type(module).__qualname__}: computes activation {act.name!r} as registered, sampled only"
    return replace(act, assumes=tuple(dict.fromkeys((*act.assumes, stated))))


def register_activation(module_type: type[nn.Module], activation: Activation | Factory) -> None:
    """Make `from_module` return an activation, or what a factory makes of the module, for a module type.

    That the module computes it is a statement of the caller's.  Samples up to 1e9 from 0 may contradict it, nothing
    proves it, and whatever rests on it says so in `assumes`.

    >>> class Sine(nn.Module):
    ...     def forward(self, x):
    ...         return torch.sin(x)
    >>> register_activation(Sine, table.SIN)
    >>> from_module(Sine()).assumes
    ("module Sine: computes activation 'sin' as registered, sampled only",)

    Raises:
        InvalidInput: if the type is no module type, or is one of torch's that has a row already.
    """
    if not (inspect.isclass(module_type) and issubclass(module_type, nn.Module)):
        raise InvalidInput(f"register_activation needs a subclass of nn.Module, got {module_type!r}.")
    if module_type in _row.registry and module_type not in _registered:
        raise InvalidInput(
            f"{module_type.__name__} has a proven row already. Register a subclass with its own name instead."
        )
    if not callable(activation) and not isinstance(activation, Activation):
        raise InvalidInput(f"register_activation needs an Activation or a factory, got {activation!r}.")
    add_row(module_type, activation)
    _registered.add(module_type)


def add_row(module_type: type[nn.Module], activation: Activation | Factory) -> None:
    """Do the same for a module type of curvcert's own, whose forward pass is known: nothing is assumed then."""
    _row.register(module_type, (lambda module: activation) if isinstance(activation, Activation) else activation)


@torch.no_grad()
def _check_agreement(module: nn.Module, act: Activation) -> None:
    if not isinstance(act, Activation):
        raise InvalidInput(f"The factory of {type(module).__name__} must return an Activation, got {act!r}.")
    z = _sample_points()
    expected, got = act.value(z), module(z)
    if got.shape != z.shape:
        raise SoundnessError(f"{type(module).__name__} is not elementwise: {tuple(z.shape)} became {tuple(got.shape)}.")
    excess = (got - expected).abs() - AGREEMENT * (1 + expected.abs()) - act.deviation
    worst = int(excess.nan_to_num(math.inf).argmax())
    if not float(excess[worst]) <= 0:
        raise SoundnessError(
            f"{type(module).__name__} does not compute activation {act.name!r}: at {z[worst]:.6g} it gives "
            f"{got[worst]:.9g}, not {expected[worst]:.9g}. Correct the declared value or the registration."
        )


@cache
def _sample_points() -> Tensor:
    """Return a grid on [-50, 50], and magnitudes from there to FARTHEST, each 0.2% above the one before."""
    large = 10.0 ** torch.linspace(1.69, math.log10(FARTHEST), 8_000, dtype=torch.float64)
    return torch.cat((torch.linspace(-50.0, 50.0, 10_001, dtype=torch.float64), large, -large))


@singledispatch
def _row(module: nn.Module) -> Activation:
    name = type(module).__name__
    raise UnsupportedActivation(
        f"No activation is known for {name}. Declare it with declare_activation and make it known with "
        f"register_activation({name}, ...)."
    )


def _gelu(module: nn.GELU) -> Activation:
    rows = {"none": table.GELU, "tanh": table.GELU_TANH}
    if module.approximate not in rows:
        raise UnsupportedActivation(f"GELU({module.approximate!r}) is not known. Use 'none' or 'tanh'.")
    return rows[module.approximate]


_OF_TORCH: dict[type[nn.Module], Activation | Callable[[Any], Activation]] = {
    nn.Tanh: table.TANH,
    nn.Sigmoid: table.SIGMOID,
    nn.Softplus: lambda module: table.torch_softplus(module.beta, module.threshold),
    nn.ELU: lambda module: table.elu(module.alpha),
    nn.CELU: lambda module: table.celu(module.alpha),
    nn.GELU: _gelu,
    nn.SiLU: table.SILU,
    nn.Mish: table.MISH,
    nn.Softsign: table.SOFTSIGN,
    nn.ReLU: table.RELU,
    nn.LeakyReLU: lambda module: table.leaky_relu(module.negative_slope),
    nn.ReLU6: table.RELU6,
    nn.Hardtanh: lambda module: table.hardtanh(module.min_val, module.max_val),
    nn.SELU: table.SELU,
    nn.Tanhshrink: table.TANHSHRINK,
    nn.Hardswish: table.HARDSWISH,
    nn.Softshrink: lambda module: table.softshrink(module.lambd),
    # In eval mode the slope is the mean of those that training draws.
    nn.RReLU: lambda module: table.leaky_relu((module.lower + module.upper) / 2),
}
"""The modules of torch, each with its row; curvcert's own are registered beside them, in `nn/activations.py`."""

for _module, _activation in _OF_TORCH.items():
    add_row(_module, _activation)
