"""How each module becomes nodes of a network: `lower(module, value)`."""

from functools import singledispatch

import torch
from torch import nn
from torch.nn.utils import parametrize

from curvcert import activations
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network import composed, elementwise, windows
from curvcert.network.builder import Value
from curvcert.network.movement import (
    axis_of,
    blocks_to_space,
    flatten,
    mix_groups,
    pad_last,
    space_to_blocks,
    unflatten,
)
from curvcert.network.remedies import remedy
from curvcert.network.windows import linear

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
    return linear(value, module.weight, module.bias, path)


@lower.register(nn.Conv1d)
@lower.register(nn.Conv2d)
def _(module: nn.Conv1d | nn.Conv2d, value: Value, path: str) -> Value:
    return windows.convolution(
        value,
        module.weight,
        module.bias,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.padding_mode,
        path,
    )


@lower.register(nn.ConvTranspose1d)
@lower.register(nn.ConvTranspose2d)
def _(module: nn.ConvTranspose1d | nn.ConvTranspose2d, value: Value, path: str) -> Value:
    return windows.transposed_convolution(
        value,
        module.weight,
        module.bias,
        module.stride,
        module.padding,  # type: ignore[arg-type]
        module.output_padding,
        module.groups,
        module.dilation,
        path,
    )


@lower.register(nn.AvgPool1d)
@lower.register(nn.AvgPool2d)
def _(module: nn.AvgPool1d | nn.AvgPool2d, value: Value, path: str) -> Value:
    plane = isinstance(module, nn.AvgPool2d)
    divisor = module.divisor_override if isinstance(module, nn.AvgPool2d) else None
    options = module.ceil_mode, module.count_include_pad, divisor
    return windows.average_pool(
        value, module.kernel_size, module.stride, module.padding, *options, axes=1 + plane, path=path
    )


@lower.register(nn.AdaptiveAvgPool1d)
@lower.register(nn.AdaptiveAvgPool2d)
def _(module: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d, value: Value, path: str) -> Value:
    axes = 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2
    return windows.adaptive_average_pool(value, module.output_size, axes, path)


@lower.register(nn.MaxPool1d)
@lower.register(nn.MaxPool2d)
def _(module: nn.MaxPool1d | nn.MaxPool2d, value: Value, path: str) -> Value:
    dilation = module.dilation if isinstance(module.dilation, tuple) else (module.dilation,)
    if module.ceil_mode or set(dilation) != {1} or module.return_indices:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} with ceil_mode, dilation or return_indices is not supported. Use its "
            "defaults."
        )
    axes = 1 if isinstance(module, nn.MaxPool1d) else 2
    return windows.max_pool(value, module.kernel_size, module.stride, module.padding, axes, path)


@lower.register
def _(module: nn.Upsample, value: Value, path: str) -> Value:
    return windows.interpolated(
        value,
        module.size,
        module.scale_factor,
        module.mode,
        module.align_corners,
        module.recompute_scale_factor,
        path,
    )


@lower.register
def _(module: nn.UpsamplingNearest2d, value: Value, path: str) -> Value:
    return windows.interpolated(value, module.size, module.scale_factor, "nearest", None, None, path)


@lower.register
def _(module: nn.UpsamplingBilinear2d, value: Value, path: str) -> Value:
    return windows.interpolated(value, module.size, module.scale_factor, "bilinear", True, None, path)


@lower.register(nn.BatchNorm1d)
@lower.register(nn.BatchNorm2d)
def _(module: nn.BatchNorm1d | nn.BatchNorm2d, value: Value, path: str) -> Value:
    if module.running_mean is None or module.running_var is None:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} without running statistics depends on the whole batch. "
            "Use track_running_stats=True."
        )
    dimensions = (1, 2) if isinstance(module, nn.BatchNorm1d) else (3,)
    if len(value.shape) not in dimensions:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects {module.num_features} channels, got shape {value.shape}."
        )
    return windows.batch_normalised(
        value, module.running_mean, module.running_var, module.weight, module.bias, module.eps, path
    )


@lower.register
def _(module: nn.LayerNorm, value: Value, path: str) -> Value:
    return composed.layer_norm(value, len(module.normalized_shape), module.weight, module.bias, module.eps, path)


@lower.register
def _(module: nn.RMSNorm, value: Value, path: str) -> Value:
    # Without a number of its own torch takes that of the dtype which is computed in: float64 in the network.
    eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps
    return composed.layer_norm(value, len(module.normalized_shape), module.weight, None, eps, path, centred=False)


@lower.register
def _(module: nn.GroupNorm, value: Value, path: str) -> Value:
    return composed.group_norm(value, module.num_groups, module.weight, module.bias, module.eps, path)


@lower.register(nn.InstanceNorm1d)
@lower.register(nn.InstanceNorm2d)
def _(module: nn.InstanceNorm1d | nn.InstanceNorm2d, value: Value, path: str) -> Value:
    weight, bias = module.weight, module.bias
    if module.running_mean is not None and module.running_var is not None:
        return windows.batch_normalised(value, module.running_mean, module.running_var, weight, bias, module.eps, path)
    return composed.group_norm(value, value.shape[0], weight, bias, module.eps, path)


@lower.register(nn.Softmax)
@lower.register(nn.LogSoftmax)
def _(module: nn.Softmax | nn.LogSoftmax, value: Value, path: str) -> Value:
    axis = axis_of(value, module.dim, path)  # type: ignore[arg-type]
    rule = composed.softmax if isinstance(module, nn.Softmax) else composed.log_softmax
    return rule(value, axis, path)


@lower.register
def _(module: nn.GLU, value: Value, path: str) -> Value:
    axis = axis_of(value, module.dim, path)
    half = value.shape[axis] // 2
    if 2 * half != value.shape[axis]:
        raise InvalidInput(f"{path}: GLU halves {value.shape[axis]} entries along axis {axis}.")
    gate = value.cut(axis, half, half, name=path).activate(activations.SIGMOID, path)
    return value.cut(axis, 0, half, name=path).multiplied(gate, path)


@lower.register
def _(module: nn.PReLU, value: Value, path: str) -> Value:
    return elementwise.parametric_relu(value, module.weight, path)


@lower.register
def _(module: nn.LogSigmoid, value: Value, path: str) -> Value:
    return elementwise.log_sigmoid(value, path)


@lower.register
def _(module: nn.Hardsigmoid, value: Value, path: str) -> Value:
    return elementwise.hard_sigmoid(value, path)


@lower.register
def _(module: nn.Flatten, value: Value, path: str) -> Value:
    return flatten(value, module.start_dim, module.end_dim, path)


@lower.register
def _(module: nn.Unflatten, value: Value, path: str) -> Value:
    sizes = tuple(module.unflattened_size)
    if not isinstance(module.dim, int) or not all(isinstance(n, int) for n in sizes):
        raise UnsupportedModule(f"{path}: Unflatten into named dimensions is not supported. Give numbers.")
    return unflatten(value, module.dim, sizes, path)


@lower.register(nn.ZeroPad1d)
@lower.register(nn.ZeroPad2d)
@lower.register(nn.ConstantPad1d)
@lower.register(nn.ConstantPad2d)
def _(module: nn.ConstantPad1d | nn.ConstantPad2d, value: Value, path: str) -> Value:
    return pad_last(value, module.padding, path, number=float(module.value))


@lower.register(nn.ReflectionPad1d)
@lower.register(nn.ReflectionPad2d)
def _(module: nn.ReflectionPad1d | nn.ReflectionPad2d, value: Value, path: str) -> Value:
    return pad_last(value, module.padding, path, "reflect")


@lower.register(nn.ReplicationPad1d)
@lower.register(nn.ReplicationPad2d)
def _(module: nn.ReplicationPad1d | nn.ReplicationPad2d, value: Value, path: str) -> Value:
    return pad_last(value, module.padding, path, "replicate")


@lower.register(nn.CircularPad1d)
@lower.register(nn.CircularPad2d)
def _(module: nn.CircularPad1d | nn.CircularPad2d, value: Value, path: str) -> Value:
    return pad_last(value, module.padding, path, "circular")


@lower.register
def _(module: nn.PixelShuffle, value: Value, path: str) -> Value:
    return blocks_to_space(value, module.upscale_factor, path)


@lower.register
def _(module: nn.PixelUnshuffle, value: Value, path: str) -> Value:
    return space_to_blocks(value, module.downscale_factor, path)


@lower.register
def _(module: nn.ChannelShuffle, value: Value, path: str) -> Value:
    return mix_groups(value, module.groups, path)


@lower.register(nn.Identity)
@lower.register(nn.Dropout)
@lower.register(nn.Dropout1d)
@lower.register(nn.Dropout2d)
@lower.register(nn.Dropout3d)
@lower.register(nn.AlphaDropout)
@lower.register(nn.FeatureAlphaDropout)
def _(module: nn.Module, value: Value, path: str) -> Value:
    return value
