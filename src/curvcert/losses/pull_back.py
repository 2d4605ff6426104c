r"""Gradients by explicit formulas, layer by layer: what a loss that contains gradients differentiates fast.

Differentiating `autograd.grad(..., create_graph=True)` once more makes torch convolve with whole images as kernels.
Written out, :math:`g \mapsto W^T(\phi'(z) \circ g)` is made of ordinary layers, whose own gradients are fast.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvcert import activations
from curvcert.errors import UnsupportedActivation
from curvcert.nn import Normalise, PadChannels, ScaledAveragePool2d, SLLConv2d, SLLDense, UnitRowLinear

# Covectors g have the shape (rows, batch, *out_shape); what a rule returns, (rows, batch, *in_shape).


Rule = Callable[..., Tensor]

_RULES: dict[type[nn.Module], Rule] = {}
"""By the type of the module itself: a subclass may compute anything.  A plain table, which torch.compile can read."""


def _rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


def pull_back(module: nn.Module, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return Dh(x)' g of a module with y = h(x); by the table's derivative for an activation.

    >>> layer, x = nn.Tanh(), torch.zeros(1, 1)
    >>> pull_back(layer, x, layer(x), torch.tensor([[[2.0]]]))
    tensor([[[2.]]])
    """
    rule = _RULES.get(type(module))
    if rule is None:
        return activations.from_module(module).derivative(x) * g
    return rule(module, x, y, g)


def has_rule(module: nn.Module) -> bool:
    """Whether a module's gradient can be written out.

    >>> has_rule(nn.Linear(1, 1)), has_rule(nn.LayerNorm(1))
    (True, False)
    """
    if type(module) in _RULES:
        return True
    try:
        activations.from_module(module)
    except UnsupportedActivation:
        return False
    return True


def layers_with_rules(model: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a (nested) Sequential if each has a rule, else None.

    >>> layers_with_rules(nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.Tanh())))
    [Linear(in_features=1, out_features=2, bias=True), Tanh()]
    """
    if type(model) is not nn.Sequential:
        return [model] if has_rule(model) and not list(model.children()) else None
    found: list[nn.Module] = []
    for child in model:
        nested = layers_with_rules(child) if type(child) is nn.Sequential else [child]
        if nested is None or not all(map(has_rule, nested)):
            return None
        found += nested
    return found


def _joined(g: Tensor) -> Tensor:
    """Return the rows of all samples as one batch."""
    return g.flatten(0, 1)


def _split(images: Tensor, g: Tensor) -> Tensor:
    """Return one batch as the rows of all samples, as many as g has."""
    return images.reshape(*g.shape[:2], *images.shape[1:])


@_rule(nn.Linear)
def _through_linear(module: nn.Linear, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g @ module.weight


@_rule(nn.Conv2d)
def _through_conv2d(module: nn.Conv2d, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return _convolved_back(module, x, g)


def _convolved_back(module: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        back = torch.func.vjp(module, x)[1]
        return torch.stack([back(row)[0] for row in g])
    extra = []
    for size, out, k, s, p, d in zip(
        x.shape[2:], g.shape[3:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True
    ):
        extra.append(size - ((out - 1) * s - 2 * int(p) + d * (k - 1) + 1))
    image = F.conv_transpose2d(
        _joined(g), module.weight, None, module.stride, module.padding, extra, module.groups, module.dilation
    )
    return _split(image, g)


@_rule(nn.Tanh)
def _through_tanh(module: nn.Tanh, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return (1 - y * y) * g


@_rule(nn.Sigmoid)
def _through_sigmoid(module: nn.Sigmoid, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return y * (1 - y) * g


@_rule(nn.Identity)
def _through_identity(module: nn.Identity, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g


@_rule(nn.Flatten, nn.Unflatten)
def _through_reshape(module: nn.Module, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g.reshape(len(g), *x.shape)


@_rule(Normalise)
def _through_normalise(module: Normalise, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g / module.std.reshape(-1, *(1,) * (x.dim() - 2))


@_rule(PadChannels)
def _through_pad_channels(module: PadChannels, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g[:, :, : x.shape[1]]


@_rule(ScaledAveragePool2d)
def _through_scaled_average_pool2d(module: ScaledAveragePool2d, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    k = module.kernel_size
    spread = _split(F.interpolate(_joined(g) / k, scale_factor=k, mode="nearest"), g)
    return F.pad(spread, (0, x.shape[3] - spread.shape[4], 0, x.shape[2] - spread.shape[3]))


@_rule(UnitRowLinear)
def _through_unit_row_linear(module: UnitRowLinear, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g @ module.effective()


@_rule(SLLDense)
def _through_sll_dense(module: SLLDense, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    weight, diagonal = module.effective()
    z = F.linear(x, weight, module.bias)
    inner = pull_back(module.activation, z, module.activation(z), (g @ weight.T) * diagonal)
    return g - inner @ weight


@_rule(SLLConv2d)
def _through_sll_conv2d(module: SLLConv2d, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    weight, diagonal = module.effective()
    z = F.conv2d(x, weight, module.bias, padding=module.padding)
    image = _split(F.conv2d(_joined(g), weight, padding=module.padding), g)
    inner = pull_back(module.activation, z, module.activation(z), image * diagonal[:, None, None])
    return g - _split(F.conv_transpose2d(_joined(inner), weight, padding=module.padding), g)
