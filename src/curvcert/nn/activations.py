"""The activations of the table that torch has no module for, and the normalisation of inputs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvcert import activations
from curvcert.activations.registry import add_row
from curvcert.errors import InvalidInput
from curvcert.network import lower
from curvcert.network.builder import Value


class Sin(nn.Module):
    """sin x.

    >>> Sin()(torch.tensor([0.0]))
    tensor([0.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return sin x, elementwise."""
        return torch.sin(x)


class Arctan(nn.Module):
    """arctan x.

    >>> 4 * Arctan()(torch.ones(1))
    tensor([3.1416])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return arctan x, elementwise."""
        return torch.arctan(x)


class Erf(nn.Module):
    """erf x.

    >>> Erf()(torch.tensor([0.0, 10.0]))
    tensor([0., 1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return erf x, elementwise."""
        return torch.erf(x)


class Gaussian(nn.Module):
    """exp(-x^2).

    >>> Gaussian()(torch.tensor([0.0, 100.0]))
    tensor([1., 0.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return exp(-x^2), elementwise."""
        return torch.exp(-x * x)


class ISRU(nn.Module):
    """x / sqrt(1 + x^2), without overflow.

    >>> ISRU()(torch.tensor([0.75, -1e30]))
    tensor([ 0.6000, -1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(1 + x^2), elementwise."""
        return x / torch.hypot(torch.ones_like(x), x)


class CentredSoftplus(nn.Module):
    r"""log((1 + e^(beta x)) / 2) / beta: softplus less its value at 0, so that 0 goes to 0.

    Computed as :math:`\max(x, 0) + \log(1 + (e^{-\beta |x|} - 1)/2)/\beta`: exact to rounding near 0 and far
    from it, and without the jump of torch's Softplus at its threshold.

    >>> layer = CentredSoftplus(beta=2.0)
    >>> layer(torch.tensor([0.0, 1e-30, 100.0]))
    tensor([0.0000e+00, 5.0000e-31, 9.9653e+01])

    Raises:
        InvalidInput: if beta is not a positive number.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        if not 0.0 < float(beta) < math.inf:
            raise InvalidInput(f"CentredSoftplus needs a positive beta, got {beta!r}. Use beta=1.")
        self.beta = float(beta)

    def forward(self, x: Tensor) -> Tensor:
        """Return softplus(x) - softplus(0), elementwise."""
        positive = torch.where(x >= 0, x, torch.zeros_like(x))
        # |x| with derivative 1 at 0, so that the derivative here is 1/2, as it should be.
        size = torch.where(x >= 0, x, -x)
        return positive + torch.log1p(0.5 * torch.expm1(-self.beta * size)) / self.beta

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"beta={self.beta}"


add_row(Sin, activations.SIN)
add_row(Arctan, activations.ARCTAN)
add_row(Erf, activations.ERF)
add_row(Gaussian, activations.GAUSSIAN)
add_row(ISRU, activations.ISRU)


def _centred_softplus(module: nn.Module) -> activations.Activation:
    return activations.softplus(float(module.beta), centred=True)  # type: ignore[arg-type]


add_row(CentredSoftplus, _centred_softplus)


class Normalise(nn.Module):
    """(x - mean) / std, channel by channel: as the first layer, it makes radii those of the raw input.

    `mean` and `std` are buffers of shape (channels,); the channels are dimension 1 of the batch.

    >>> Normalise(mean=[1.0, 2.0], std=[0.5, 4.0])(torch.tensor([[2.0, 4.0]]))
    tensor([[2.0000, 0.5000]])

    Raises:
        InvalidInput: unless mean and std are finite, of the same length, and std is positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        center, width = (torch.as_tensor(t).detach().to(torch.get_default_dtype(), copy=True) for t in (mean, std))
        if center.dim() != 1 or center.shape != width.shape or not bool((width > 0).all()):
            raise InvalidInput(
                "Normalise needs a mean and a positive std for each channel, got shapes "
                f"{tuple(center.shape)} and {tuple(width.shape)} and std {width.tolist()}."
            )
        if not bool(torch.isfinite(center).all() and torch.isfinite(width).all()):
            raise InvalidInput("Normalise needs a finite mean and std.")
        self.register_buffer("mean", center)
        self.register_buffer("std", width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std for a batch of shape (batch, channels, ...)."""
        per_channel = (-1, *(1,) * (x.dim() - 2))
        return (x - self.mean.reshape(per_channel)) / self.std.reshape(per_channel)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


@lower.register(Normalise)
def _(module: Normalise, value: Value, path: str) -> Value:
    if value.shape[0] != len(module.mean):
        raise InvalidInput(f"{path}: Normalise expects {len(module.mean)} channels, got shape {value.shape}.")
    per_channel = (-1, *(1,) * (len(value.shape) - 1))
    mean, std = (buffer.to(torch.float64).reshape(per_channel) for buffer in (module.mean, module.std))
    return value.shift(-mean).times(1.0 / std)
