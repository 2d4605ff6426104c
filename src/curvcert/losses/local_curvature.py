r"""The curvature of a pair about one sample, estimated by one tangent: what the quadratic certificate pays for.

Near x the Hessian of :math:`f_r - f_y` is :math:`\sum_k J_k^T \mathrm{diag}(u_k \circ \phi_k'') J_k`, with J the
Jacobians of the pre-activations and u the covectors on the activations.  For a direction v of independent entries of
mean 0 and variance 1,

.. math:: \mathrm{E} \sum_k \sum_l |u_{k,l}|\, |\phi_k''|_{k,l}\, (J_k v)_l^2
          = \mathrm{tr} \sum_k J_k^T \mathrm{diag} |u_k \circ \phi_k''| J_k,

which bounds the largest eigenvalue, from some twenty to thirty times above on trained networks.  :math:`|\phi''|` is
taken at both ends of :math:`z \pm \varepsilon |J_k v|`, since the certificate holds over a range, where it grows.
A tangent costs about as much as a forward pass.  Estimates: for training, never for a certificate.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from curvcert import activations
from curvcert.activations import Activation
from curvcert.activations.base import no_curvature
from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.losses.pull_back import layers_with_rules, pull_back
from curvcert.nn import Normalise, PadChannels, ScaledAveragePool2d, UnitRowLinear

_AFFINE = (
    nn.Linear,
    nn.Conv2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    Normalise,
    PadChannels,
    ScaledAveragePool2d,
    UnitRowLinear,
)

_COMMON = {nn.Tanh: activations.TANH, nn.Sigmoid: activations.SIGMOID, nn.SiLU: activations.SILU}
"""Looked up without the registry, which torch.compile cannot read."""

_GOLDEN = (math.sqrt(5.0) - 1) / 2

_TURNS = 997.0
"""Turns of a phase while a pixel goes from 0 to 1: neighbouring levels of a byte end up anywhere on the circle."""


def logits_norm_and_local_curvature(
    model: nn.Module, x: Float[Tensor, "batch ..."], y: Int64[Tensor, " batch"], epsilon: float
) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    r"""Return the logits, and of the runner-up's pair the gradient's norm and the trace above, along one direction.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 2, bias=False))
    >>> for layer, weight in ((model[0], [[1.0]]), (model[2], [[1.0], [-1.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight))
    >>> found = logits_norm_and_local_curvature(model, torch.zeros(1, 1), torch.tensor([0]), 0.0)
    >>> [float(each) for each in found[1:]]  # tanh(x) - tanh(-x) is straight at 0
    [2.0, 0.0]

    Raises:
        UnsupportedModule: the model is no `Sequential` of affine layers and activations: SLL blocks hold both in one.
    """
    layers = layers_with_rules(model)
    if layers is None:
        raise _unsupported(model)
    states = [x.detach()]
    for layer in layers:
        states.append(layer(states[-1]))
    logits = states[-1]
    with torch.no_grad():
        runner_up = logits.scatter(1, y[:, None], -torch.inf).argmax(dim=1, keepdim=True)
        gap = torch.zeros_like(logits).scatter(1, runner_up, 1.0).scatter(1, y[:, None], -1.0)
    covectors: list[Tensor] = []
    g = gap[None]
    for layer, before, after in zip(reversed(layers), reversed(states[:-1]), reversed(states[1:]), strict=True):
        covectors.append(g[0])
        g = pull_back(layer, before, after, g)
    bend, t = logits.new_zeros(len(x)), direction(x)
    for layer, before, after, u in zip(layers, states[:-1], states[1:], reversed(covectors), strict=True):
        activation = _activation(layer)
        if activation is None:
            t = _through_affine(layer, after, t)
            continue
        bend = bend + (u.abs() * _steepest_bend(activation, before, epsilon * t) * t.square()).flatten(1).sum(dim=1)
        t = pull_back(layer, before, after, t[None])[0]  # the Jacobian of an activation is its own transpose
    return logits, torch.linalg.vector_norm(g[0].flatten(1), dim=1, keepdim=True), bend[:, None]


def direction(x: Tensor) -> Tensor:
    r"""Return a direction for each sample: :math:`\sqrt 2 \sin(2\pi(\theta_i + 997 x_i))`, no random number is drawn.

    The phases :math:`\theta_i = i^2 (\sqrt 5 - 1)/2` have a flat spectrum.  So a direction looks random, differs from
    image to image and from crop to crop, and is the same after a run is resumed, and on whatever rank has the sample.
    """
    place = torch.arange(x[0].numel(), dtype=torch.float64, device=x.device)
    phases = (place.square() * _GOLDEN).frac().to(x.dtype).reshape(x.shape[1:])
    return math.sqrt(2.0) * torch.sin(2 * math.pi * (phases + _TURNS * x).frac())


def _activation(layer: nn.Module) -> Activation | None:
    """Return the table's row of an activation, None for a layer that is affine."""
    if isinstance(layer, _AFFINE):
        return None
    if type(layer) in _COMMON:
        return _COMMON[type(layer)]
    try:
        return activations.from_module(layer)
    except UnsupportedActivation:
        raise _unsupported(layer) from None


def _unsupported(module: nn.Module) -> UnsupportedModule:
    return UnsupportedModule(
        'The certified-margin loss with certificate "quadratic" needs an nn.Sequential of linear layers, convolutions '
        f'and smooth activations, got {type(module).__name__}. Use certificate "line" for this model.'
    )


def _steepest_bend(activation: Activation, z: Tensor, reach: Tensor) -> Tensor:
    """Return the larger of |phi''| at both ends of a range."""
    second = activation.second_derivative
    if second is None:
        raise no_curvature(activation)
    return torch.maximum(second(z + reach).abs(), second(z - reach).abs())


def _through_affine(layer: nn.Module, y: Tensor, t: Tensor) -> Tensor:
    """Return the image of a tangent under an affine layer, whose output has the shape of y."""
    if isinstance(layer, nn.Linear):
        return F.linear(t, layer.weight)
    if isinstance(layer, UnitRowLinear):
        return F.linear(t, layer.effective())
    if isinstance(layer, nn.Conv2d):
        image: Tensor = layer._conv_forward(t, layer.weight, None)
        return image
    if isinstance(layer, Normalise):
        return t / layer.std.reshape(-1, *(1,) * (t.dim() - 2))
    if isinstance(layer, PadChannels | ScaledAveragePool2d):
        return layer.forward(t)
    return t.reshape(y.shape)
