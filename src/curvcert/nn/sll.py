r"""SDP-based Lipschitz layers, dense and convolutional: residual, and 1-Lipschitz in l2 whatever the weights.

.. math:: y = x - 2 W^T T^{-1} \phi(W x + b), \qquad T_{ii} = \sum_j |WW^T|_{ij}\, q_j / q_i, \quad q = e^s,

with :math:`\phi` of slopes in [0, 1] and learned W, b and s.  The matrix :math:`Q^{-1} |WW^T| Q` has the row sums T,
so that :math:`T^{-1/2} WW^T T^{-1/2}`, which is similar to :math:`Q^{-1} T^{-1} WW^T Q`, has no eigenvalue above 1
(its row sums of absolute values are at most 1), and

.. math:: \rho = \|T^{-1/2} W\|_2^2 \le 1, \qquad L^2 \le 1 + 4 \rho \max(\rho - 1, 0).

The second inequality is that of `curvcert.bounds.lipschitz.monotone`, where it is derived: a certificate computes
an upper bound on :math:`\rho` from the weights that it finds, and takes nothing from these lines on trust.

A tiny constant is added to T, so that a neuron with zero weights is no division by zero; it only makes
:math:`\rho` smaller.  `curvcert.trace` reads T from a float64 copy of the layer.  A float32 layer computes its own T in
float32, so that its outputs are those of the traced network up to float32 rounding, like those of any layer.

Reference: Araujo, Havens, Delattre, Allauzen and Hu (ICLR 2023), "A unified algebraic perspective on Lipschitz
neural networks", theorem 3; W here is their :math:`W^T`.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from curvcert.activations import from_module
from curvcert.errors import InvalidInput, UnsupportedActivation
from curvcert.network import lower
from curvcert.network.builder import Value
from curvcert.network.lowering import lower_exactly
from curvcert.network.nodes import ElementwiseNode
from curvcert.nn.named import ActivationChoice, make_activation
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Diagonal

FLOOR = 1e-6
"""Added to T: far below what T is for weights of an ordinary size, and the reason that none divides by zero."""


def contracting_diagonal(
    gram: Float[Tensor, "hidden hidden"], log_scale: Float[Tensor, " hidden"]
) -> Float[Tensor, " hidden"]:
    r"""Return :math:`2 / T` with :math:`T_i = \sum_j |A|_{ij} e^{s_j - s_i}`, differentiably.

    `gram` is :math:`A = WW^T`, or a matrix with entries at least as large in absolute value.

    >>> contracting_diagonal(torch.tensor([[3.0, -1.0], [-1.0, 7.0]]), torch.zeros(2))
    tensor([0.5000, 0.2500])
    """
    sums = gram.abs() @ log_scale.exp()
    return 2.0 / (sums * (-log_scale).exp() + FLOOR)


class SLLDense(nn.Module):
    r"""x - 2 W' T^{-1} phi(W x + b) on vectors: 1-Lipschitz in l2, for any weights.

    `hidden` is the number of inner units, as many as the features by default.  The activation, by name or as a
    module, needs slopes in [0, 1].

    >>> layer = SLLDense(1, activation="relu")
    >>> _ = nn.init.constant_(layer.weight, 3.0), nn.init.zeros_(layer.bias)
    >>> layer(torch.tensor([[1.0], [-2.0]])).round(decimals=4)
    tensor([[-1.],
            [-2.]], grad_fn=<RoundBackward1>)

    Raises:
        InvalidInput: if a size is not positive.
        UnsupportedActivation: if the activation has slopes outside [0, 1].
    """

    def __init__(self, features: int, hidden: int | None = None, activation: ActivationChoice = nn.Tanh) -> None:
        super().__init__()
        self.features, self.hidden = features, features if hidden is None else hidden
        require_positive(self, features=self.features, hidden=self.hidden)
        self.activation = _contractive(make_activation(activation), type(self).__name__)
        self.weight = nn.Parameter(torch.empty(self.hidden, self.features))
        self.bias = nn.Parameter(torch.empty(self.hidden))
        self.log_scale = nn.Parameter(torch.empty(self.hidden))
        _reset(self.weight, self.bias, self.log_scale)

    def effective(self) -> tuple[Float[Tensor, "hidden features"], Float[Tensor, " hidden"]]:
        """Return W and the diagonal of D = 2 T^{-1}, differentiably: the layer is x - W' D phi(W x + b)."""
        return self.weight, contracting_diagonal(self.weight @ self.weight.T, self.log_scale)

    def forward(self, x: Float[Tensor, "batch features"]) -> Float[Tensor, "batch features"]:
        """Return x - W' D phi(W x + b)."""
        weight, diagonal = self.effective()
        inner: Tensor = self.activation(F.linear(x, weight, self.bias))
        return x - (inner * diagonal) @ weight

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"features={self.features}, hidden={self.hidden}"


class SLLConv2d(nn.Module):
    r"""x - 2 W' T^{-1} phi(W x + b) on images, W a convolution with zero padding: 1-Lipschitz in l2, for any weights.

    With the channel autocorrelations :math:`R_{ij}(\tau) = \sum_{c,u} K_{ic}(u + \tau) K_{jc}(u)` of the kernel,
    :math:`|WW^T|` summed over pixels is at most :math:`\sum_\tau |R_{ij}(\tau)|`: T has one entry a channel, and
    serves images of every size.

    >>> layer = SLLConv2d(channels=3, hidden_channels=5, kernel_size=3)
    >>> layer(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])

    Args:
        channels: of the input and the output.
        hidden_channels: of the convolution; as many as the channels by default.
        kernel_size: side of the square kernel.
        activation: by name or as a module, with slopes in [0, 1].
        padding: zeros around the image; half the kernel by default, so that no pixel of the input is left out.

    Raises:
        InvalidInput: if a size is not positive.
        UnsupportedActivation: if the activation has slopes outside [0, 1].
    """

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        kernel_size: int = 3,
        activation: ActivationChoice = nn.Tanh,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.hidden_channels = channels, channels if hidden_channels is None else hidden_channels
        self.kernel_size = kernel_size
        sizes = {"channels": channels, "hidden_channels": self.hidden_channels, "kernel_size": kernel_size}
        require_positive(self, **sizes)
        self.padding = kernel_size // 2 if padding is None else padding
        if not 0 <= self.padding < kernel_size:
            raise InvalidInput(f"SLLConv2d needs a padding from 0 to kernel_size - 1, got {self.padding}.")
        self.activation = _contractive(make_activation(activation), type(self).__name__)
        self.weight = nn.Parameter(torch.empty(self.hidden_channels, channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(self.hidden_channels))
        self.log_scale = nn.Parameter(torch.empty(self.hidden_channels))
        _reset(self.weight, self.bias, self.log_scale)

    def effective(self) -> tuple[Float[Tensor, "hidden channels k k"], Float[Tensor, " hidden"]]:
        """Return the kernel of W and D = 2 T^{-1}, one entry a hidden channel, differentiably."""
        lags = F.conv2d(self.weight, self.weight, padding=self.kernel_size - 1)
        return self.weight, contracting_diagonal(lags.abs().sum(dim=(2, 3)), self.log_scale)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch channels h w"]:
        """Return x - W' D phi(W x + b)."""
        weight, diagonal = self.effective()
        inner = self.activation(F.conv2d(x, weight, self.bias, padding=self.padding))
        return x - F.conv_transpose2d(inner * diagonal[:, None, None], weight, padding=self.padding)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        sizes = f"channels={self.channels}, hidden_channels={self.hidden_channels}"
        return f"{sizes}, kernel_size={self.kernel_size}, padding={self.padding}"


def residual_contraction(
    value: Value, W: AbstractLinearMap, diagonal: Tensor, bias: Tensor, activation: nn.Module, path: str
) -> Value:
    """Return value - W' D phi(W value + b), whose Lipschitz constant a bound can prove."""
    W = W.to(value.dtype, value.device)
    inner = lower_exactly(activation, value.linear(W, name=path).shift(bias), path)
    if not isinstance(inner.node, ElementwiseNode):
        raise UnsupportedActivation(f"{path}: {type(activation).__name__} is no activation. Use one of the table.")
    return value.plus(inner.linear(-1.0 * (W.T @ Diagonal(diagonal, W.out_shape))), path)


@lower.register(SLLDense)
def _(module: SLLDense, value: Value, path: str) -> Value:
    if value.shape != (module.features,):
        raise InvalidInput(f"{path}: SLLDense expects vectors of {module.features} features, got shape {value.shape}.")
    weight, diagonal = map(value.weight, module.effective())
    return residual_contraction(value, Dense(weight), diagonal, module.bias, module.activation, path)


@lower.register(SLLConv2d)
def _(module: SLLConv2d, value: Value, path: str) -> Value:
    if len(value.shape) != 3 or value.shape[0] != module.channels:
        raise InvalidInput(
            f"{path}: SLLConv2d expects images of {module.channels} channels, got shape {value.shape}. "
            "Pad channels with PadChannels."
        )
    weight, diagonal = map(value.weight, module.effective())
    conv = Conv2d(weight, value.shape, padding=((module.padding,) * 2,) * 2)
    bias = module.bias[:, None, None]
    return residual_contraction(value, conv, diagonal[:, None, None], bias, module.activation, path)


def _contractive(activation: nn.Module, owner: str) -> nn.Module:
    """Return the activation if its slopes lie in [0, 1], without which the layer is not 1-Lipschitz."""
    row = from_module(activation)
    lower_slope, upper_slope = row.slope
    if lower_slope < 0.0 or upper_slope > 1.0:
        raise UnsupportedActivation(
            f"{owner} needs an activation with slopes in [0, 1], since it is 1-Lipschitz for no other; "
            f"{row.name!r} has slopes in [{lower_slope:.6g}, {upper_slope:.6g}]. Use tanh or centred_softplus."
        )
    return activation


def require_positive(module: nn.Module, **sizes: int) -> None:
    """Raise unless every size of a layer is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"{type(module).__name__} needs a positive integer for {name}, got {size!r}.")


def _reset(weight: Tensor, bias: Tensor, log_scale: Tensor) -> None:
    nn.init.xavier_normal_(weight)
    bound = 1.0 / math.sqrt(weight[0].numel())
    nn.init.uniform_(bias, -bound, bound)
    nn.init.zeros_(log_scale)
