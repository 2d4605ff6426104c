"""Linear layers for 1-Lipschitz networks: padding of channels, scaled pooling, a last layer with unit rows."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from curvcert.errors import InvalidInput
from curvcert.network import lower
from curvcert.network.builder import Value
from curvcert.operators import AveragePool2d, Conv2d, Dense

ROW_FLOOR = 1e-12
"""Added to a row's squared norm, so that a zero row stays zero, with a finite gradient."""


class PadChannels(nn.Module):
    """The image with zero channels behind its own, an isometry.

    >>> PadChannels(3)(torch.ones(1, 1, 1, 1)).flatten()
    tensor([1., 0., 0.])

    Raises:
        InvalidInput: if the number of channels is not positive, or the image has more.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise InvalidInput(f"PadChannels needs a positive number of channels, got {channels!r}.")
        self.channels = channels

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch padded h w"]:
        """Return the padded images."""
        return F.pad(x, (0, 0, 0, 0, 0, self._missing(x.shape[1])))

    def _missing(self, channels: int) -> int:
        if channels > self.channels:
            raise InvalidInput(f"PadChannels({self.channels}) got an image of {channels} channels, which is more.")
        return self.channels - channels

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"channels={self.channels}"


class ScaledAveragePool2d(nn.Module):
    r"""k times the mean over each k x k window: 1-Lipschitz in l2, where the mean itself is 1/k-Lipschitz.

    The windows don't overlap: the map has orthonormal rows, :math:`k^2` entries of 1/k each.

    >>> ScaledAveragePool2d(2)(torch.ones(1, 1, 2, 2)).item()
    2.0

    Raises:
        InvalidInput: if k is not a positive integer.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        if isinstance(kernel_size, bool) or not isinstance(kernel_size, int) or kernel_size < 1:
            raise InvalidInput(f"ScaledAveragePool2d needs a positive integer kernel size, got {kernel_size!r}.")
        self.kernel_size = kernel_size

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch channels h2 w2"]:
        """Return the scaled means."""
        return self.kernel_size * F.avg_pool2d(x, self.kernel_size)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"kernel_size={self.kernel_size}"


class UnitRowLinear(nn.Module):
    r"""A linear layer whose rows are divided by their norms: every output is 1-Lipschitz in l2.

    The difference of two outputs is :math:`\|w_i - w_j\|_2`-Lipschitz, at most 2, and a certificate computes it.

    >>> layer = UnitRowLinear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
    >>> layer(torch.tensor([[5.0, 10.0]])).item()
    11.0

    Raises:
        InvalidInput: if a size is not positive.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if min(in_features, out_features) < 1:
            raise InvalidInput(f"UnitRowLinear needs positive sizes, got {in_features} and {out_features}.")
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_normal_(self.weight)
        bound = 1.0 / math.sqrt(in_features)
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound)) if bias else None

    def effective(self) -> Float[Tensor, "outputs inputs"]:
        """Return the weight with unit rows, differentiably; a zero row stays zero."""
        return self.weight * (self.weight.square().sum(dim=1, keepdim=True) + ROW_FLOOR).rsqrt()

    def forward(self, x: Float[Tensor, "batch inputs"]) -> Float[Tensor, "batch outputs"]:
        """Return the outputs."""
        return F.linear(x, self.effective(), self.bias)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _require_image(module: nn.Module, value: Value, path: str) -> None:
    if len(value.shape) != 3:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects images of shape (channels, height, width), got {value.shape}."
        )


@lower.register(PadChannels)
def _(module: PadChannels, value: Value, path: str) -> Value:
    _require_image(module, value, path)
    kernel = torch.eye(module.channels, value.shape[0], dtype=torch.float64, device=value.device)
    module._missing(value.shape[0])
    return value.linear(Conv2d(kernel[:, :, None, None], value.shape))


@lower.register(ScaledAveragePool2d)
def _(module: ScaledAveragePool2d, value: Value, path: str) -> Value:
    _require_image(module, value, path)
    k = module.kernel_size
    return value.linear(float(k) * AveragePool2d(value.shape, (k, k), (k, k)))


@lower.register(UnitRowLinear)
def _(module: UnitRowLinear, value: Value, path: str) -> Value:
    if value.shape != (module.in_features,):
        raise InvalidInput(f"{path}: UnitRowLinear expects {module.in_features} features, got shape {value.shape}.")
    return value.linear(Dense(value.weight(module.effective())), module.bias)
