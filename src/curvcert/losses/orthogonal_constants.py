"""The constants of a stack of orthogonal layers: 1 for each of them, whatever the weights, and no curvature."""

import math

import torch
from torch import Tensor, nn

from curvcert.activations import leaky_relu
from curvcert.activations.base import no_curvature
from curvcert.losses.contraction_constants import leaves
from curvcert.nn import Normalise, OrthogonalDownsample, OrthogonalStack, OrthonormalLinear, PadChannels

_CONTRACTIONS = (PadChannels, OrthogonalStack, OrthogonalDownsample, nn.Flatten, nn.Identity)


class OrthogonalConstants(nn.Module):
    """The Lipschitz constants of an `nn.Sequential` of orthogonal layers; the same at every step.

    >>> from curvcert.nn import ortho_fold
    >>> constants = OrthogonalConstants.of(ortho_fold(widths=(9, 12), depths=(1, 1)))
    >>> constants.pair_lipschitz[0, :2]
    tensor([0.0000, 1.4142])
    """

    lipschitz: Tensor
    pair_lipschitz: Tensor

    def __init__(self, classes: int, before: float, like: Tensor) -> None:
        """Take the number of classes and the norm of what stands before the layers."""
        super().__init__()
        self.dtype = like.dtype
        table = before * math.sqrt(2) * (1 - torch.eye(classes, dtype=like.dtype))
        self.register_buffer("lipschitz", torch.tensor(before, dtype=like.dtype).to(like.device), persistent=False)
        self.register_buffer("pair_lipschitz", table.to(like.device), persistent=False)

    @staticmethod
    def of(model: nn.Module) -> "OrthogonalConstants | None":
        """Return the constants of a module, or None if it is no such stack."""
        *inner, last = leaves(model)
        if type(last) is not OrthonormalLinear or last.out_features > last.in_features:
            return None
        if any(type(layer) not in (Normalise, *_CONTRACTIONS) for layer in inner):
            return None
        scales = [float((1.0 / layer.std).max()) for layer in inner if isinstance(layer, Normalise)]
        return OrthogonalConstants(last.out_features, math.prod(scales), last.weight)

    @property
    def curvature(self) -> Tensor:
        """Raise: a fold has no curvature constant."""
        raise no_curvature(leaky_relu(-1.0))

    @property
    def pair_curvature(self) -> Tensor:
        """Raise: a fold has no curvature constant."""
        raise no_curvature(leaky_relu(-1.0))

    def restart(self) -> None:
        """Do nothing: there are no singular vectors."""

    def forward(self) -> "OrthogonalConstants":
        """Return the constants."""
        return self
