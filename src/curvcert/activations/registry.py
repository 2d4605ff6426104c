"""Which module computes which activation: `from_module`, and how a user adds to it."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, singledispatch

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


@_row.register(nn.Tanh)
def _(module: nn.Tanh) -> Activation:
    return table.TANH


@_row.register(nn.Sigmoid)
def _(module: nn.Sigmoid) -> Activation:
    return table.SIGMOID


@_row.register(nn.Softplus)
def _(module: nn.Softplus) -> Activation:
    return table.torch_softplus(module.beta, module.threshold)


@_row.register(nn.ELU)
def _(module: nn.ELU) -> Activation:
    return table.elu(module.alpha)


@_row.register(nn.CELU)
def _(module: nn.CELU) -> Activation:
    return table.celu(module.alpha)


@_row.register(nn.GELU)
def _(module: nn.GELU) -> Activation:
    if module.approximate == "none":
        return table.GELU
    if module.approximate == "tanh":
        return table.GELU_TANH
    raise UnsupportedActivation(f"GELU({module.approximate!r}) is not known. Use 'none' or 'tanh'.")


@_row.register(nn.SiLU)
def _(module: nn.SiLU) -> Activation:
    return table.SILU


@_row.register(nn.Mish)
def _(module: nn.Mish) -> Activation:
    return table.MISH


@_row.register(nn.Softsign)
def _(module: nn.Softsign) -> Activation:
    return table.SOFTSIGN


@_row.register(nn.ReLU)
def _(module: nn.ReLU) -> Activation:
    return table.RELU


@_row.register(nn.LeakyReLU)
def _(module: nn.LeakyReLU) -> Activation:
    return table.leaky_relu(module.negative_slope)


@_row.register(nn.ReLU6)
def _(module: nn.ReLU6) -> Activation:
    return table.RELU6


@_row.register(nn.Hardtanh)
def _(module: nn.Hardtanh) -> Activation:
    return table.hardtanh(module.min_val, module.max_val)


@_row.register(nn.SELU)
def _(module: nn.SELU) -> Activation:
    return table.SELU


@_row.register(nn.Tanhshrink)
def _(module: nn.Tanhshrink) -> Activation:
    return table.TANHSHRINK


@_row.register(nn.Hardswish)
def _(module: nn.Hardswish) -> Activation:
    return table.HARDSWISH


@_row.register(nn.Softshrink)
def _(module: nn.Softshrink) -> Activation:
    return table.softshrink(module.lambd)


@_row.register(nn.RReLU)
def _(module: nn.RReLU) -> Activation:
    # In eval mode the slope is the mean of those that training draws.
    return table.leaky_relu((module.lower + module.upper) / 2)
