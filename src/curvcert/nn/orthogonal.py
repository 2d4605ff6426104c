r"""Layers that keep the l2 norm of gradients: orthogonal matrices between shifts of channels and folds.

A stack of layers maps images of c channels by

.. math:: x \mapsto |Q S x + b| - |b|,

where S shifts each group of channels by a pixel, around the edges, to one of nine neighbours, and the orthogonal Q
mixes the channels of a pixel.  S is a permutation, and where no entry is at a fold the derivative is an orthogonal
matrix: the layer is 1-Lipschitz, and loses nothing on the way.  With a large b a channel is hardly ever folded.  A
layer has :math:`c^2` weights, a ninth of what kernels of 3 x 3 pixels have.

Whatever the weights W, the matrix is :math:`Q = p(p(\dots p(W/\beta)))` with :math:`p(X) = (3X - XX^TX)/2`, which maps
singular values in [0, 1] into [0, 1] and towards 1, and :math:`\beta = \|(WW^T)^2\|_F^{1/4}`, at least the largest
singular value of W (the eighth power of which is one of the summands of :math:`\beta^8`).  So :math:`\|Q\|_2 \le 1` for
any number of steps, and Q tends to the orthogonal factor of W, the nearest orthogonal matrix.  A certificate takes
none of this on trust: it bounds the norm of every matrix that it finds.

In training mode a forward pass puts Q in the place of W.  Where the steps sufficed, Q is its own factor, and no output
changes.  The weights stay where the gradient is simple: at an orthonormal W the derivative of Q is the projection to
the tangent space, :math:`G \mapsto G - \tfrac12 (G Q^T + Q G^T) Q` (for as many columns as rows, or more).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from curvcert.activations import leaky_relu
from curvcert.errors import InvalidInput
from curvcert.network import lower
from curvcert.network.builder import Value
from curvcert.nn.sll import require_positive
from curvcert.operators import Conv2d, Dense
from curvcert.operators.permutation import ChannelShift

STEPS = 8
"""Steps towards the orthogonal factor: of 256 rows, singular values within a factor of 4 come within 1e-3 of 1."""

NEIGHBOURS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""By how many rows and columns the groups of channels are shifted."""

UNFOLDED = 0.5
"""Where every other channel is folded at first: beyond most of its values."""

_TINY = 1e-30


def orthogonal_factor(weight: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows columns"]:
    """Return matrices with orthonormal rows, or columns if there are fewer of these; their norms are at most 1.

    >>> Q = orthogonal_factor(torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]]))
    >>> torch.allclose(Q @ Q.T, torch.eye(2), atol=1e-5)
    True
    """
    if weight.shape[-2] > weight.shape[-1]:
        return orthogonal_factor(weight.mT).mT
    # The size of the weights cancels; without it powers of them neither overflow nor vanish.
    scaled = weight / weight.detach().abs().amax(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    gram = scaled @ scaled.mT
    X: Tensor = scaled * (torch.linalg.matrix_norm(gram @ gram, keepdim=True) + _TINY) ** -0.25
    for _ in range(STEPS):
        X = 1.5 * X - 0.5 * (X @ X.mT) @ X
    return X


class _AtOrthonormal(torch.autograd.Function):
    """The identity on orthonormal matrices, which lets pass of a gradient what is tangent to them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, Q: Tensor) -> Tensor:
        ctx.save_for_backward(Q)
        return Q.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (Q,), (G,) = ctx.saved_tensors, gradients
        if Q.shape[-2] > Q.shape[-1]:
            inner = Q.mT @ G
            return G - 0.5 * Q @ (inner + inner.mT), None
        inner = G @ Q.mT
        return G - 0.5 * (inner + inner.mT) @ Q, None


class _Orthogonal(nn.Module):
    """A layer with weights of which the orthogonal factor counts."""

    weight: nn.Parameter

    def effective(self) -> Tensor:
        """Return the orthogonal factor of the weights, differentiably; in training mode they become it."""
        if not self.training:
            return orthogonal_factor(self.weight)
        with torch.no_grad():
            Q = orthogonal_factor(self.weight)
            self.weight.copy_(Q)
        found: Tensor = _AtOrthonormal.apply(self.weight, Q)  # type: ignore[no-untyped-call]
        return found


class OrthogonalStack(_Orthogonal):
    """Layers x -> |Q S x + b| - |b| on images of any size, each with weights of its own: 1-Lipschitz in l2.

    >>> OrthogonalStack(channels=9, depth=2)(torch.zeros(1, 9, 4, 4)).shape
    torch.Size([1, 9, 4, 4])

    Raises:
        InvalidInput: if a size is not positive.
    """

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        require_positive(self, channels=channels, depth=depth)
        self.channels, self.depth = channels, depth
        self.weight = nn.Parameter(torch.empty(depth, channels, channels))
        self.bias = nn.Parameter(_folds(channels).repeat(depth, 1))
        for matrix in self.weight:
            nn.init.orthogonal_(matrix)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch channels h w"]:
        """Return what the layers make of a batch."""
        y = x.permute(0, 2, 3, 1)
        for Q, bias in zip(self.effective(), self.bias, strict=True):
            y = _folded(F.linear(_shifted(y), Q), bias)
        return y.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"channels={self.channels}, depth={self.depth}"


class OrthogonalDownsample(_Orthogonal):
    """x -> |Q P x + b| - |b|, where P makes channels of the pixels of each 2 x 2 window: 1-Lipschitz in l2.

    >>> OrthogonalDownsample(4, 8)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])

    Raises:
        InvalidInput: if a size is not positive.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        require_positive(self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(out_channels, 4 * in_channels))
        self.bias = nn.Parameter(_folds(out_channels))
        nn.init.orthogonal_(self.weight)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch channels2 h2 w2"]:
        """Return what the layer makes of a batch."""
        y = x.permute(0, 2, 3, 1).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        y = F.linear(y.permute(0, 1, 3, 5, 2, 4).flatten(3), self.effective())
        return _folded(y, self.bias).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"in_channels={self.in_channels}, out_channels={self.out_channels}"


class OrthonormalLinear(_Orthogonal):
    """A linear layer with orthonormal rows: the difference of two outputs is sqrt(2)-Lipschitz in l2.

    >>> weight = OrthonormalLinear(4, 2).eval().effective()
    >>> torch.allclose((weight[0] - weight[1]).square().sum(), torch.tensor(2.0))
    True

    Raises:
        InvalidInput: if a size is not positive.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        require_positive(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.orthogonal_(self.weight)

    def forward(self, x: Float[Tensor, "batch inputs"]) -> Float[Tensor, "batch outputs"]:
        """Return the outputs."""
        return F.linear(x, self.effective(), self.bias)

    def extra_repr(self) -> str:
        """Return what the module's repr shows in brackets."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _folds(channels: int) -> Tensor:
    """Return where channels are folded at first: at 0, and every other one where it hardly ever is."""
    positions = torch.zeros(channels)
    positions[1::2] = UNFOLDED
    return positions


def _folded(x: Tensor, bias: Tensor) -> Tensor:
    """Return |x + b| - |b|, channels last: 0 stays 0."""
    return (x + bias).abs() - bias.abs()


def _groups(channels: int) -> list[int]:
    """Return how many channels are shifted to each neighbour.

    >>> _groups(11)
    [2, 2, 1, 1, 1, 1, 1, 1, 1]
    """
    share, rest = divmod(channels, len(NEIGHBOURS))
    return [share + (k < rest) for k in range(len(NEIGHBOURS))]


def _shifted(y: Tensor) -> Tensor:
    """Return images, channels last, with each group of channels shifted around the edges."""
    groups = y.split(_groups(y.shape[3]), dim=3)
    return torch.cat([group.roll(by, (1, 2)) for group, by in zip(groups, NEIGHBOURS, strict=True)], dim=3)


def _folding(value: Value, bias: Tensor, path: str) -> Value:
    """Return |value + b| - |b|."""
    b = value.weight(bias)[:, None, None]
    return value.shift(b).activate(leaky_relu(-1.0), path).shift(-b.abs())


@lower.register(OrthogonalStack)
def _(module: OrthogonalStack, value: Value, path: str) -> Value:
    _require_channels(module, value, module.channels, path)
    groups = zip(_groups(module.channels), NEIGHBOURS, strict=True)
    shift = ChannelShift(value.shape, tuple((n, *by) for n, by in groups if n)).to(device=value.device)
    for Q, bias in zip(module.effective(), module.bias, strict=True):
        mixed = Conv2d(value.weight(Q)[:, :, None, None], value.shape)
        value = _folding(value.linear(mixed @ shift), bias, path)
    return value


@lower.register(OrthogonalDownsample)
def _(module: OrthogonalDownsample, value: Value, path: str) -> Value:
    _require_channels(module, value, module.in_channels, path)
    if any(side % 2 for side in value.shape[1:]):
        raise InvalidInput(f"{path}: OrthogonalDownsample needs an even height and width, got shape {value.shape}.")
    kernel = module.effective().unflatten(1, (module.in_channels, 2, 2))
    return _folding(value.linear(Conv2d(value.weight(kernel), value.shape, stride=(2, 2))), module.bias, path)


@lower.register(OrthonormalLinear)
def _(module: OrthonormalLinear, value: Value, path: str) -> Value:
    if value.shape != (module.in_features,):
        raise InvalidInput(f"{path}: OrthonormalLinear expects {module.in_features} features, got shape {value.shape}.")
    return value.linear(Dense(value.weight(module.effective())), module.bias)


def _require_channels(module: nn.Module, value: Value, channels: int, path: str) -> None:
    if len(value.shape) != 3 or value.shape[0] != channels:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects images of {channels} channels, got shape {value.shape}. "
            "Pad channels with PadChannels."
        )
