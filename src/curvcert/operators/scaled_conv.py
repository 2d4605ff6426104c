"""A convolution between scales per channel, such as those of batch norm, as one convolution."""

from dataclasses import replace

from torch import Tensor

from curvcert.operators.base import AbstractLinearMap, Composition
from curvcert.operators.conv import Conv2d
from curvcert.operators.structured import Diagonal


def scaled_conv(op: AbstractLinearMap) -> tuple[Conv2d, int] | None:
    """Return the convolution that a product is, and how often each of its weights was rounded; None for others.

    >>> import torch
    >>> conv = Conv2d(torch.ones(1, 1, 1, 1), (1, 2, 2))
    >>> scaled, roundings = scaled_conv(Diagonal(torch.full((1, 1, 1), 3.0), (1, 2, 2)) @ conv)
    >>> scaled.weight.flatten().tolist(), roundings
    ([3.0], 1)
    """
    factors = op.factors if isinstance(op, Composition) else (op,)
    convs = [k for k, factor in enumerate(factors) if isinstance(factor, Conv2d)]
    if len(convs) != 1:
        return None
    (place,) = convs
    conv = factors[place]
    assert isinstance(conv, Conv2d)
    weight = conv.weight
    for k, factor in enumerate(factors):
        if k == place:
            continue
        scale = _per_channel(factor)
        if scale is None:
            return None
        if k < place:
            weight = weight * scale.reshape(-1, 1, 1, 1)
        else:
            grouped = weight.unflatten(0, (conv.groups, -1))
            weight = (grouped * scale.reshape(conv.groups, 1, -1, 1, 1)).flatten(0, 1)
    return replace(conv, weight=weight), len(factors) - 1


def _per_channel(op: AbstractLinearMap) -> Tensor | None:
    if not isinstance(op, Diagonal) or len(op.shape) != 3:
        return None
    weight = op.weight.expand(op.shape)
    first = weight[:, :1, :1]
    return first.flatten() if bool((weight == first).all()) else None
