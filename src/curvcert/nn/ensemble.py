r"""Several networks of one architecture as one that sums their logits: an ensemble that can be bounded and certified.

The sum classifies as the mean does, with the same radii, and needs no division.  The first layer stacks the rows of
all members, which read the same input; behind it each member keeps to its own channels, by grouped convolutions (a
dense layer is one on 1 x 1 images); the last layer adds up.  There are as many weights as in all members together.

A network beside its own mirror image answers for an image and its mirror image alike.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvcert import activations
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.nn.activations import Normalise

_WEIGHTED = (nn.Linear, nn.Conv2d)
_CHANNELWISE = (nn.AvgPool2d, nn.Identity)


def side_by_side(models: Sequence[nn.Sequential]) -> nn.Sequential:
    """Return one network whose logits are the sums of the models' logits.

    Args:
        models: networks of the same architecture, each a `Sequential` of `Linear`, `Conv2d`, `Flatten`, `AvgPool2d`
            and activations without weights, perhaps behind a `Normalise` that is the same in all; a `Linear` is last.

    >>> from curvcert.nn import architecture
    >>> members = [architecture("digits") for _ in range(2)]
    >>> x = torch.rand(3, 1, 8, 8)
    >>> together = side_by_side(members)
    >>> torch.allclose(together(x), members[0](x) + members[1](x), atol=1e-5)
    True
    >>> sum(p.numel() for p in together.parameters()) < 2 * sum(p.numel() for p in members[0].parameters())
    True

    Raises:
        InvalidInput: if there are no models, or they differ in more than their weights.
        UnsupportedModule: if a layer is of another kind, by its name.
    """
    if not models:
        raise InvalidInput("side_by_side needs at least one model, got none.")
    if len({len(model) for model in models}) > 1:
        raise InvalidInput(f"Models side by side have as many layers each, got {[len(model) for model in models]}.")
    columns = list(zip(*models, strict=True))
    weighted = [k for k, layers in enumerate(columns) if type(layers[0]) in _WEIGHTED]
    if len(weighted) < 2 or type(columns[-1][0]) is not nn.Linear:
        raise InvalidInput("Models side by side have two layers with weights or more, and a Linear as the last layer.")
    found: list[nn.Module] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # New layers draw weights, which are then overwritten.
        for k, layers in enumerate(columns):
            _require_alike(layers, f"Layer {k}")
            if k == weighted[0]:
                found.append(_reading_the_same(layers, f"Layer {k}"))
            elif k == weighted[-1]:
                found.append(_adding_up(layers))
            elif k in weighted:
                found += _apart(layers)
            else:
                found.append(_kept(layers[0], f"Layer {k}", before_weights=k < weighted[0]))
    return nn.Sequential(*found).train(models[0].training)


def with_mirror_image(model: nn.Sequential, shape: Sequence[int]) -> nn.Sequential:
    """Return the network whose logits are the model's for an image plus the model's for its mirror image.

    Args:
        model: a network as in `side_by_side`.
        shape: the shape of one image: channels, height, width.

    >>> from curvcert.nn import architecture
    >>> model, x = architecture("digits"), torch.rand(3, 1, 8, 8)
    >>> torch.allclose(with_mirror_image(model, (1, 8, 8))(x), model(x) + model(x.flip(-1)), atol=1e-5)
    True

    Raises:
        InvalidInput, UnsupportedModule: as `side_by_side` and `mirror_image` do.
    """
    return side_by_side([model, mirror_image(model, shape)])


def mirror_image(model: nn.Sequential, shape: Sequence[int]) -> nn.Sequential:
    """Return a network that does to images of this shape what the model does to their mirror images, left for right.

    Kernels are mirrored, and the columns of the dense layer behind the images.

    >>> from curvcert.nn import architecture
    >>> model, x = architecture("digits"), torch.rand(3, 1, 8, 8)
    >>> torch.allclose(mirror_image(model, (1, 8, 8))(x), model(x.flip(-1)), atol=1e-5)
    True

    Raises:
        InvalidInput: if the shape is not that of an image, or a window leaves columns out on one side.
        UnsupportedModule: if a layer is not among those of `side_by_side`, by its name.
    """
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InvalidInput(f"An image has a shape of (channels, height, width), got {tuple(shape)}.")
    mirrored = copy.deepcopy(model)
    x = torch.zeros(1, *shape).to(next(model.parameters()))
    image: tuple[int, ...] | None = tuple(shape)
    with torch.no_grad():
        for k, layer in enumerate(mirrored):
            path, before = f"Layer {k}", tuple(x.shape[1:])
            try:
                x = layer(x)
            except RuntimeError as error:
                raise InvalidInput(f"{path}: {layer!r} does not take {before}, of images {tuple(shape)}.") from error
            if type(layer) is nn.Linear:
                if len(before) != 1:
                    raise UnsupportedModule(f"{path}: a Linear of a mirror image needs a Flatten before it.")
                if image is not None:
                    layer.weight.copy_(layer.weight.unflatten(1, image).flip(-1).flatten(1))
                image = None
            elif type(layer) in (nn.Conv2d, nn.AvgPool2d):
                _require_symmetric(layer, before[-1], path)
                if isinstance(layer, nn.Conv2d):
                    layer.weight.copy_(layer.weight.flip(-1))
            else:
                _kept(layer, path, before_weights=True)
            image = tuple(x.shape[1:]) if x.dim() == 4 else image
    return mirrored


def _require_symmetric(layer: Any, width: int, path: str) -> None:
    """Raise unless the windows of a layer cover the image alike from the left and from the right."""
    if isinstance(layer.padding, str) or getattr(layer, "ceil_mode", False):
        raise UnsupportedModule(f"{path}: a mirror image needs padding in numbers and no ceil_mode, got {layer!r}.")
    kernel, stride, padding, dilation = (
        value[-1] if isinstance(value, tuple) else value
        for value in (layer.kernel_size, layer.stride, layer.padding, getattr(layer, "dilation", 1))
    )
    if left_out := (width + 2 * padding - dilation * (kernel - 1) - 1) % stride:
        raise InvalidInput(
            f"{path}: {layer!r} leaves out {left_out} columns of {width} on the right, which a mirror image has on the "
            "left. Choose a padding or a width with which the windows end at the edge."
        )


def _require_alike(layers: Sequence[nn.Module], path: str) -> None:
    """Raise unless the layers differ in nothing but weights; of activations the name counts, as the bounds see them."""
    if len({(type(layer), repr(layer), _activation_name(layer)) for layer in layers}) > 1:
        raise InvalidInput(f"{path}: models side by side are of one architecture, got {layers[0]!r} and {layers[1]!r}.")


def _reading_the_same(layers: Sequence[Any], path: str) -> nn.Module:
    """Return the first layer with weights: the rows of all, on one input."""
    first = layers[0]
    if isinstance(first, nn.Linear):
        merged: nn.Linear | nn.Conv2d = nn.Linear(
            first.in_features, len(layers) * first.out_features, first.bias is not None
        )
    else:
        if first.groups != 1:
            raise UnsupportedModule(f"{path}: the first convolution of models side by side has no groups.")
        merged = _convolution(first, first.in_channels, len(layers), groups=1)
    return _filled(merged, torch.cat(_weights(layers)), _biases(layers))


def _apart(layers: Sequence[Any]) -> Iterator[nn.Module]:
    """Yield a layer in the middle, which keeps every member to its own channels."""
    first, members = layers[0], len(layers)
    if isinstance(first, nn.Conv2d):
        merged = _convolution(first, members * first.in_channels, members, members * first.groups)
        yield _filled(merged, torch.cat(_weights(layers)), _biases(layers))
        return
    yield nn.Unflatten(1, (members * first.in_features, 1, 1))
    merged = nn.Conv2d(
        members * first.in_features, members * first.out_features, 1, groups=members, bias=first.bias is not None
    )
    yield _filled(merged, torch.cat(_weights(layers))[:, :, None, None], _biases(layers))
    yield nn.Flatten()


def _adding_up(layers: Sequence[Any]) -> nn.Module:
    """Return the last layer: the sum over all members."""
    first = layers[0]
    merged = nn.Linear(len(layers) * first.in_features, first.out_features, first.bias is not None)
    bias = None if first.bias is None else torch.stack([layer.bias for layer in layers]).sum(dim=0)
    return _filled(merged, torch.cat(_weights(layers), dim=1), bias)


def _kept(layer: nn.Module, path: str, before_weights: bool) -> nn.Module:
    """Return a layer without weights, which serves all members."""
    flattens = type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    if flattens or type(layer) in _CHANNELWISE or (before_weights and type(layer) is Normalise) or _is_plain(layer):
        return copy.deepcopy(layer)
    raise UnsupportedModule(
        f"{path}: {type(layer).__name__} is not among the layers of models side by side: Linear, Conv2d, Flatten(), "
        "AvgPool2d, activations without weights, and a Normalise in front."
    )


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is an activation without weights."""
    return _activation_name(layer) is not None and not layer.state_dict()


def _activation_name(layer: nn.Module) -> str | None:
    try:
        return activations.from_module(layer).name
    except UnsupportedActivation:
        return None


def _convolution(like: Any, inputs: int, members: int, groups: int) -> nn.Conv2d:
    return nn.Conv2d(
        inputs,
        members * like.out_channels,
        like.kernel_size,
        like.stride,
        like.padding,
        like.dilation,
        groups,
        like.bias is not None,
        like.padding_mode,
    )


def _weights(layers: Sequence[Any]) -> list[Tensor]:
    return [layer.weight for layer in layers]


def _biases(layers: Sequence[Any]) -> Tensor | None:
    return None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])


def _filled(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Module:
    layer.to(weight)
    layer.weight.copy_(weight)
    if bias is not None and layer.bias is not None:
        layer.bias.copy_(bias)
    return layer
