"""How each module becomes nodes of a network: `lower(module, value)`."""

from functools import singledispatch

from torch import nn

from curvcert import activations
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network.builder import Value
from curvcert.network.remedies import remedy

LARGEST_DEVIATION = 1e-6
"""How far a module may be from its activation: torch's Softplus jumps at its threshold, by 2.1e-9 as it comes."""


@singledispatch
def lower(module: nn.Module, value: Value, path: str) -> Value:
    """Return module(value); a module of an unknown type is refused by name.

    Rules are looked up by the exact type: a subclass may compute something else.

    >>> class Doubled(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> @lower.register
    ... def _(module: Doubled, value: Value, path: str) -> Value:
    ...     return value.times(torch.tensor(2.0))
    >>> import torch
    >>> from curvcert.network.builder import start
    >>> lower(Doubled(), start((3,), torch.device("cpu")), "doubled").shape
    (3,)
    """
    general = "Replace it by supported layers, or register a rule with curvcert.network.lower.register (an activation: "
    general += "curvcert.activations.register_activation)."
    name = type(module).__name__
    raise UnsupportedModule(f"{path}: {name} is not supported. {remedy(name) or general}")


def lower_exactly(module: nn.Module, value: Value, path: str) -> Value:
    """Lower a module by the rule for its own type, never by a base class's."""
    if type(module) in lower.registry:
        try:
            return lower.registry[type(module)](module, value, path)
        except InvalidInput as error:
            if str(error).startswith(path):
                raise
            raise InvalidInput(f"{path}: {error}") from error
    try:
        activation = activations.from_module(module)
    except UnsupportedActivation:
        return lower.registry[object](module, value, path)
    if activation.deviation > LARGEST_DEVIATION:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} is off its activation {activation.name!r} by up to "
            f"{activation.deviation:.3g}, so a bound for one is none for the other. For Softplus keep the default "
            "threshold of 20, or take curvcert.nn.CentredSoftplus, which has none."
        )
    return value.activate(activation, path)


def has_a_rule_of_its_own(module: nn.Module) -> bool:
    """Whether a module is read as a whole: it was registered, as a layer or an activation, and is none of torch's."""
    if type(module) in lower.registry:
        return True
    if type(module).__module__.startswith("torch."):
        return False
    try:
        activations.from_module(module)
    except UnsupportedActivation:
        return False
    return True
