"""How each module becomes nodes of a network: `lower(module, value)`."""

from collections.abc import Sequence
from functools import singledispatch

from torch import nn
from torch.nn.utils import parametrize

from curvcert import activations
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network.block import MaxPool
from curvcert.network.builder import Value
from curvcert.network.movement import flatten, pad_last, reshape
from curvcert.operators import AveragePool2d, Conv2d, Dense, batch_norm_in_eval
from curvcert.operators.conv import Pair

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
    if parametrize.is_parametrized(module):
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} has a parametrisation. Make its weights plain with "
            "torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=True)."
        )
    raise UnsupportedModule(
        f"{path}: {type(module).__name__} is not supported. Replace it by supported layers, or register a rule "
        "with curvcert.network.lower.register (an activation: curvcert.activations.register_activation)."
    )


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


def is_known(module: nn.Module) -> bool:
    """Tell whether a module has a rule of its own."""
    if type(module) in lower.registry:
        return True
    try:
        activations.from_module(module)
    except UnsupportedActivation:
        return False
    return True


@lower.register
def _(module: nn.Linear, value: Value, path: str) -> Value:
    if value.shape[-1:] != (module.in_features,):
        raise InvalidInput(f"{path}: Linear expects {module.in_features} features, got shape {value.shape}.")
    if len(value.shape) > 1:
        raise UnsupportedModule(f"{path}: Linear on inputs of shape {value.shape} is not supported. Flatten first.")
    return value.linear(Dense(value.weight(module.weight)), module.bias, path)


@lower.register
def _(module: nn.Conv2d, value: Value, path: str) -> Value:
    if module.padding_mode not in ("zeros", "circular"):
        raise UnsupportedModule(
            f"{path}: padding mode {module.padding_mode!r} is not supported. Use zeros or circular."
        )
    _require_image(value, path, module)
    conv = Conv2d(
        value.weight(module.weight),
        value.shape,
        _two(module.stride),
        _conv_padding(module),
        _two(module.dilation),
        module.groups,
        module.padding_mode,
    )
    return value.linear(conv, None if module.bias is None else module.bias[:, None, None], path)


def _conv_padding(module: nn.Conv2d) -> tuple[Pair, Pair]:
    if module.padding == "valid":
        return (0, 0), (0, 0)
    if module.padding == "same":
        spans = [d * (k - 1) for d, k in zip(_two(module.dilation), _two(module.kernel_size), strict=True)]
        return (spans[0] // 2, spans[0] - spans[0] // 2), (spans[1] // 2, spans[1] - spans[1] // 2)
    h, w = _two(module.padding)  # type: ignore[arg-type]
    return (h, h), (w, w)


def _two(size: int | Sequence[int]) -> Pair:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _require_image(value: Value, path: str, module: nn.Module) -> None:
    if len(value.shape) != 3:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects images of shape (channels, height, width), got {value.shape}. "
            "The example input needs its batch dimension, and no Flatten before this layer."
        )


@lower.register
def _(module: nn.AvgPool2d, value: Value, path: str) -> Value:
    padding = _two(module.padding)
    if module.ceil_mode or module.divisor_override or (padding != (0, 0) and not module.count_include_pad):
        raise UnsupportedModule(
            f"{path}: AvgPool2d with ceil_mode, divisor_override or count_include_pad=False is not supported. "
            "Use its defaults."
        )
    _require_image(value, path, module)
    stride = _two(module.kernel_size if module.stride is None else module.stride)
    return value.linear(AveragePool2d(value.shape, _two(module.kernel_size), stride, padding), name=path)


@lower.register
def _(module: nn.MaxPool2d, value: Value, path: str) -> Value:
    if module.ceil_mode or _two(module.dilation) != (1, 1) or module.return_indices:
        raise UnsupportedModule(
            f"{path}: MaxPool2d with ceil_mode, dilation or return_indices is not supported. Use its defaults."
        )
    _require_image(value, path, module)
    stride = _two(module.kernel_size if module.stride is None else module.stride)
    return value.max_pool(MaxPool(value.shape, _two(module.kernel_size), stride, _two(module.padding), path))


@lower.register(nn.BatchNorm1d)
@lower.register(nn.BatchNorm2d)
def _(module: nn.BatchNorm1d | nn.BatchNorm2d, value: Value, path: str) -> Value:
    if module.running_mean is None or module.running_var is None:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} without running statistics depends on the whole batch. "
            "Use track_running_stats=True."
        )
    dimensions = (1, 2) if isinstance(module, nn.BatchNorm1d) else (3,)
    if len(value.shape) not in dimensions or value.shape[0] != module.num_features:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects {module.num_features} channels, got shape {value.shape}."
        )
    if value.live:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} divides by statistics that move while it is trained, so the network has "
            "no constants yet. Leave it out, or train with its statistics frozen as a curvcert.nn.Normalise."
        )
    mean, variance = value.weight(module.running_mean), value.weight(module.running_var)
    weight = None if module.weight is None else value.weight(module.weight)
    bias = None if module.bias is None else value.weight(module.bias)
    scale, offset = batch_norm_in_eval(value.shape, mean, variance, module.eps, weight, bias)
    return value.linear(scale, offset, path)


@lower.register
def _(module: nn.Flatten, value: Value, path: str) -> Value:
    return flatten(value, module.start_dim, module.end_dim, path)


@lower.register
def _(module: nn.Unflatten, value: Value, path: str) -> Value:
    sizes = tuple(module.unflattened_size)
    if module.dim != 1 or len(value.shape) != 1 or not all(isinstance(n, int) for n in sizes):
        raise UnsupportedModule(f"{path}: Unflatten is supported on dimension 1 of vectors, into unnamed dimensions.")
    return reshape(value, sizes, path)


@lower.register(nn.ZeroPad1d)
@lower.register(nn.ZeroPad2d)
def _(module: nn.ZeroPad1d | nn.ZeroPad2d, value: Value, path: str) -> Value:
    return pad_last(value, module.padding, path)


@lower.register(nn.Identity)
@lower.register(nn.Dropout)
@lower.register(nn.Dropout1d)
@lower.register(nn.Dropout2d)
@lower.register(nn.Dropout3d)
@lower.register(nn.AlphaDropout)
@lower.register(nn.FeatureAlphaDropout)
def _(module: nn.Module, value: Value, path: str) -> Value:
    return value
