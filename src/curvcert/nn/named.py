"""Activations by name: the modules behind the rows of the table."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import nn

from curvcert.errors import InvalidInput, meant
from curvcert.nn.activations import ISRU, Arctan, CentredSoftplus, Erf, Gaussian, Sin

ActivationChoice = str | nn.Module | Callable[[], nn.Module]
"""What a layer takes for an activation: a name, a module (copied), or what makes one, such as `nn.Tanh`."""

ACTIVATION_MODULES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "tanh": nn.Tanh,
        "sigmoid": nn.Sigmoid,
        "softplus": nn.Softplus,
        "centred_softplus": CentredSoftplus,
        "elu": nn.ELU,
        "celu": nn.CELU,
        "gelu": nn.GELU,
        "gelu_tanh": partial(nn.GELU, approximate="tanh"),
        "silu": nn.SiLU,
        "mish": nn.Mish,
        "sin": Sin,
        "arctan": Arctan,
        "erf": Erf,
        "softsign": nn.Softsign,
        "isru": ISRU,
        "gaussian": Gaussian,
        "tanhshrink": nn.Tanhshrink,
        "hardswish": nn.Hardswish,
        "relu": nn.ReLU,
        "leaky_relu": nn.LeakyReLU,
        "relu6": nn.ReLU6,
        "hardtanh": nn.Hardtanh,
        "softshrink": nn.Softshrink,
        "selu": nn.SELU,
    }
)
"""Every activation of the table, by name, at its default parameters."""


def make_activation(choice: ActivationChoice) -> nn.Module:
    """Return a new module for an activation.

    >>> make_activation("gelu_tanh")
    GELU(approximate='tanh')
    >>> make_activation(lambda: CentredSoftplus(beta=5.0))
    CentredSoftplus(beta=5.0)

    Raises:
        InvalidInput: if the name is not known, or the choice makes no module.
    """
    if isinstance(choice, str):
        if choice not in ACTIVATION_MODULES:
            raise InvalidInput(
                f"Unknown activation {choice!r}. Choose one of: {', '.join(ACTIVATION_MODULES)}."
                f"{meant(str(choice), ACTIVATION_MODULES)}"
            )
        return ACTIVATION_MODULES[choice]()
    made = copy.deepcopy(choice) if isinstance(choice, nn.Module) else choice() if callable(choice) else choice
    if not isinstance(made, nn.Module):
        raise InvalidInput(
            f"An activation is a name, a module or what makes one, got {made!r}. Pass 'tanh', or nn.Tanh."
        )
    return made
