"""Maps with few parameters or none: diagonal, batch normalisation in eval mode, average pooling."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, Shape
from curvcert.operators.conv import Conv2d, Pair
from curvcert.operators.description import Description, Reading, Weights, description, pair, reads, shape, stored


@final
@dataclass(frozen=True, eq=False)
class Diagonal(AbstractLinearMap):
    """x -> w x elementwise; w broadcasts to `shape`, so (channels, 1, 1) scales channels.

    >>> Diagonal(torch.tensor([2.0, 3.0]), shape=(2,)).apply(torch.ones(2))
    tensor([2., 3.])
    """

    weight: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        if not self.weight.dtype.is_floating_point:
            raise InvalidInput(f"Diagonal expected real floating-point weights, got {self.weight.dtype}.")
        given, wanted = self.weight.shape, self.shape
        # torch.broadcast_shapes loads half a second of symbolic algebra when it is first called.
        sizes = zip(reversed(given), reversed(wanted), strict=False)
        if len(given) > len(wanted) or any(n not in (1, m) for n, m in sizes):
            raise InvalidInput(f"Diagonal weight {tuple(self.weight.shape)} does not broadcast to {self.shape}.")

    @property
    def in_shape(self) -> Shape:
        return self.shape

    @property
    def out_shape(self) -> Shape:
        return self.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def _apply(self, x: Tensor) -> Tensor:
        return x * self.weight

    def _adjoint(self, y: Tensor) -> Tensor:
        return y * self.weight

    def _matrix(self) -> Tensor:
        return torch.diag(self.weight.expand(self.shape).reshape(-1))


def batch_norm_in_eval(
    shape: Shape,
    mean: Float[Tensor, " channels"],
    variance: Float[Tensor, " channels"],
    eps: float,
    weight: Float[Tensor, " channels"] | None = None,
    bias: Float[Tensor, " channels"] | None = None,
) -> tuple[Diagonal, Float[Tensor, "channels ..."]]:
    r"""Return batch normalisation with fixed statistics as a diagonal map and an offset.

    .. math:: y_c = \frac{w_c}{\sqrt{v_c + \epsilon}} x_c + b_c - \frac{w_c m_c}{\sqrt{v_c + \epsilon}}

    The two coefficients are rounded to the nearest float64 values; that map is the one certified.

    >>> scale, offset = batch_norm_in_eval((1,), torch.ones(1), torch.full((1,), 3.0), eps=1.0)
    >>> scale.weight, offset
    (tensor([0.5000], dtype=torch.float64), tensor([-0.5000], dtype=torch.float64))
    """
    if bool((variance.double() + eps <= 0).any()):
        raise InvalidInput("Batch normalisation needs variance + eps > 0 in every channel.")
    factor = (variance.double() + eps).rsqrt()
    factor = factor if weight is None else factor * weight.double()
    offset = -factor * mean.double() if bias is None else bias.double() - factor * mean.double()
    per_channel = (len(mean), *(1 for _ in shape[1:]))
    return Diagonal(factor.reshape(per_channel), shape), offset.reshape(per_channel)


@final
@dataclass(frozen=True, eq=False)
class AveragePool2d(AbstractLinearMap):
    """Means over windows; zero padding counts in the mean (PyTorch's default).

    >>> AveragePool2d((1, 2, 2), (2, 2), (2, 2)).apply(torch.ones(1, 2, 2, dtype=torch.float64))
    tensor([[[1.]]], dtype=torch.float64)
    """

    image_shape: Shape
    kernel_size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    @property
    def in_shape(self) -> Shape:
        return self.image_shape

    @cached_property
    def as_conv(self) -> Conv2d:
        """The depthwise convolution by 1/(kh kw), equal to the pooling but for that one rounding."""
        kh, kw = self.kernel_size
        weight = torch.full((self.in_shape[0], 1, kh, kw), 1.0 / (kh * kw), dtype=self.dtype, device=self.device)
        (ph, pw) = self.padding
        return Conv2d(weight, self.in_shape, self.stride, ((ph, ph), (pw, pw)), groups=self.in_shape[0])

    @property
    def out_shape(self) -> Shape:
        return self.as_conv.out_shape

    def _apply(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.as_conv._adjoint(y)

    def _matrix(self) -> Tensor:
        return self.as_conv._matrix()


@description.register
def _(op: Diagonal, weights: Weights) -> Description:
    return {"map": "diagonal", "weight": stored(op.weight, weights), "shape": list(op.shape)}


@reads("diagonal")
def _diagonal(entry: Description, reading: Reading) -> Diagonal:
    return Diagonal(reading.weight(entry["weight"]), shape(entry["shape"]))


@description.register
def _(op: AveragePool2d, weights: Weights) -> Description:
    sizes = {name: list(getattr(op, name)) for name in ("image_shape", "kernel_size", "stride", "padding")}
    return {"map": "average_pool", **sizes}


@reads("average_pool")
def _average_pool(entry: Description, reading: Reading) -> AveragePool2d:
    image, kernel = shape(entry["image_shape"]), pair(entry["kernel_size"])
    # Its shape is that of a convolution by a kernel of equal weights, which is formed for it.
    reading.take(image[0] * math.prod(kernel))
    pool = AveragePool2d(image, kernel, pair(entry["stride"]), pair(entry["padding"]))
    reading.take(0, pool.out_size * math.prod(kernel))
    return pool
