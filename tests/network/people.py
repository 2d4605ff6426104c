"""Networks as people write them: a row for every layer, function and coding style that `trace` is asked to take.

`ROWS` is the measure of the front end; `REFUSED` names the rows that it does not take, each with the reason.
"""

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, prune

from tests.network.cases import Function, batch_norm


@dataclass(frozen=True)
class Row:
    """A named module with the shape of one input; `options` go to `trace`."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[int, ...], ...] = ()

    def model(self) -> nn.Module:
        """Return the module in eval mode, always with the same weights."""
        torch.manual_seed(1)
        made = self.make()
        return made if isinstance(made, fx.GraphModule) else made.eval()

    def example(self) -> Tensor | tuple[Tensor, ...]:
        """Return a batch of random inputs; several tensors for a module with several inputs."""
        generator = torch.Generator().manual_seed(2)
        batch = tuple(torch.randn(2, *shape, generator=generator) for shape in (self.shape, *self.more))
        return batch if self.more else batch[0]


ROWS: list[Row] = []
VECTOR, SIGNAL, IMAGE, VOLUME, TOKENS = (4,), (2, 6), (2, 4, 6), (2, 4, 4, 4), (3, 4)


def weight(*shape: int, seed: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def _module(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = VECTOR, **options: Any) -> None:
    ROWS.append(Row(name, make, shape, tuple(options.items())))


def _call(
    name: str, function: Callable[[Function, Tensor], object], shape: tuple[int, ...] = VECTOR, **parts: Any
) -> None:
    ROWS.append(Row(name, lambda: Function(function, **parts), shape))


# Linear layers.
for _name, _make, _shape in [
    ("Linear", lambda: nn.Linear(4, 3), VECTOR),
    ("Linear without bias", lambda: nn.Linear(4, 3, bias=False), VECTOR),
    ("Linear on tokens", lambda: nn.Linear(4, 3), TOKENS),
    ("Linear on an image's last axis", lambda: nn.Linear(6, 3), IMAGE),
    ("Conv1d", lambda: nn.Conv1d(2, 3, 3, 2, 1), SIGNAL),
    ("Conv1d with groups and dilation", lambda: nn.Conv1d(2, 4, 2, dilation=2, groups=2), SIGNAL),
    ("Conv1d causal", lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(2, 3, 3)), SIGNAL),
    ("Conv2d", lambda: nn.Conv2d(2, 3, 3, padding=1), IMAGE),
    ("Conv2d with stride", lambda: nn.Conv2d(2, 3, 3, 2), IMAGE),
    ("Conv2d depthwise", lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), IMAGE),
    ("Conv2d same", lambda: nn.Conv2d(2, 3, 3, padding="same"), IMAGE),
    ("Conv2d reflect", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    ("Conv2d replicate", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), IMAGE),
    ("Conv2d circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    ("Conv3d", lambda: nn.Conv3d(2, 3, 3, padding=1), VOLUME),
    ("Conv3d with stride and groups", lambda: nn.Conv3d(2, 4, 2, 2, groups=2), VOLUME),
    ("Conv3d dilated, circular", lambda: nn.Conv3d(2, 2, 2, padding=1, dilation=2, padding_mode="circular"), VOLUME),
    ("ConvTranspose1d", lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1, 1), SIGNAL),
    ("ConvTranspose2d", lambda: nn.ConvTranspose2d(2, 3, 4, 2, 1), IMAGE),
    ("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, 2, 2), VOLUME),
    ("AvgPool1d", lambda: nn.AvgPool1d(2), SIGNAL),
    ("AvgPool1d, ceil_mode", lambda: nn.AvgPool1d(4, ceil_mode=True), SIGNAL),
    ("AvgPool2d", lambda: nn.AvgPool2d(2), IMAGE),
    ("AvgPool2d, count_include_pad", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    ("AvgPool2d, divisor", lambda: nn.AvgPool2d(2, divisor_override=3), IMAGE),
    ("AvgPool3d", lambda: nn.AvgPool3d(2), VOLUME),
    ("AvgPool3d with padding", lambda: nn.AvgPool3d(3, 2, 1, count_include_pad=False), VOLUME),
    ("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(4), SIGNAL),
    ("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((2, 3)), IMAGE),
    ("AdaptiveAvgPool2d, global", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    ("AdaptiveAvgPool3d", lambda: nn.AdaptiveAvgPool3d((2, 3, 1)), VOLUME),
    ("Upsample nearest", lambda: nn.Upsample(scale_factor=2), IMAGE),
    ("Upsample bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    ("Upsample bicubic", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    ("Upsample trilinear", lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    ("PixelShuffle", lambda: nn.PixelShuffle(2), (4, 2, 3)),
    ("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGE),
    ("ChannelShuffle", lambda: nn.ChannelShuffle(2), (4, 2, 2)),
    ("Unfold", lambda: nn.Unfold(2), IMAGE),
    ("Fold", lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((4, 6), 2, stride=2)), IMAGE),
    ("Flatten", lambda: nn.Flatten(), IMAGE),
    ("Unflatten", lambda: nn.Unflatten(1, (2, 2)), VECTOR),
    ("ZeroPad2d", lambda: nn.ZeroPad2d((1, 0, 2, 1)), IMAGE),
    ("ZeroPad3d", lambda: nn.ZeroPad3d(1), VOLUME),
    ("ConstantPad2d", lambda: nn.ConstantPad2d(1, 0.5), IMAGE),
    ("ReflectionPad1d", lambda: nn.ReflectionPad1d(2), SIGNAL),
    ("ReflectionPad3d", lambda: nn.ReflectionPad3d(1), VOLUME),
    ("ReplicationPad2d", lambda: nn.ReplicationPad2d(1), IMAGE),
    ("CircularPad2d", lambda: nn.CircularPad2d(1), IMAGE),
    ("BatchNorm1d", lambda: batch_norm(nn.BatchNorm1d(4)), VECTOR),
    ("BatchNorm2d", lambda: batch_norm(nn.BatchNorm2d(2)), IMAGE),
    ("BatchNorm3d", lambda: batch_norm(nn.BatchNorm3d(2)), VOLUME),
    (
        "InstanceNorm1d, tracked",
        lambda: batch_norm(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
        SIGNAL,
    ),
    ("InstanceNorm2d, tracked", lambda: batch_norm(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)), IMAGE),
    ("Dropout", lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), VECTOR),
    ("Dropout2d", lambda: nn.Dropout2d(0.5), IMAGE),
    ("Identity", lambda: nn.Identity(), VECTOR),
]:
    _module(_name, _make, _shape)

# Functions that are linear.
_call("F.linear", lambda m, x: F.linear(x, m.w, m.b), w=weight(3, 4), b=weight(3))
_call("x @ W.T", lambda m, x: x @ m.w.T, w=weight(3, 4))
_call("matmul and bias", lambda m, x: torch.matmul(x, m.w) + m.b, w=weight(4, 3), b=weight(3))
_call("addmm", lambda m, x: torch.addmm(m.b, x, m.w), w=weight(4, 3), b=weight(3))
_call("addmm with factors", lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), w=weight(4, 3), b=weight(3))
_call("baddbmm", lambda m, x: torch.baddbmm(x, x, m.w.expand(len(x), 4, 4)), TOKENS, w=weight(4, 4))
_call("mv", lambda m, x: (x @ m.w)[:, None], w=weight(4))
_call("matrix from the left", lambda m, x: m.w @ x, TOKENS, w=weight(2, 3))
_call("bmm with one matrix per group", lambda m, x: torch.einsum("bgi,goi->bgo", x, m.w), TOKENS, w=weight(3, 2, 4))
_call("einsum over tokens", lambda m, x: torch.einsum("bnd,de->bne", x, m.w), TOKENS, w=weight(4, 2))
_call("einsum over two axes", lambda m, x: torch.einsum("bnd,nde->be", x, m.w), TOKENS, w=weight(3, 4, 2))
_call("einsum trace", lambda m, x: torch.einsum("bii->bi", x), (3, 3))
_call("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([2], [1])), TOKENS, w=weight(2, 4))
_call("inner", lambda m, x: torch.inner(x, m.w), w=weight(3, 4))
_call(
    "bilinear with a constant",
    lambda m, x: F.bilinear(x, m.u.expand(len(x), 3), m.w),
    w=weight(2, 4, 3),
    u=weight(1, 3),
)
_call(
    "graph adjacency",
    lambda m, x: torch.tanh(m.adjacency @ m.a(x)),
    TOKENS,
    adjacency=torch.rand(3, 3),
    a=nn.Linear(4, 2),
)
_call("F.conv2d", lambda m, x: F.conv2d(x, m.w, padding=1), IMAGE, w=weight(3, 2, 3, 3))
_call("F.conv_transpose2d", lambda m, x: F.conv_transpose2d(x, m.w, stride=2), IMAGE, w=weight(2, 3, 2, 2))
_call("F.conv3d", lambda m, x: F.conv3d(x, m.w), VOLUME, w=weight(2, 2, 2, 2, 2))
_call("F.avg_pool2d", lambda m, x: F.avg_pool2d(x, 2), IMAGE)
_call("F.adaptive_avg_pool2d", lambda m, x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1), IMAGE)
_call("F.interpolate", lambda m, x: F.interpolate(x, size=(3, 4), mode="bilinear", align_corners=True), IMAGE)
_call("F.interpolate nearest", lambda m, x: F.interpolate(x, scale_factor=2.0), IMAGE)
_call("F.pad", lambda m, x: F.pad(x, (1, 2, 0, 1)), IMAGE)
_call("F.pad reflect", lambda m, x: F.pad(x, (1, 1), mode="reflect"), SIGNAL)
_call("F.pad constant", lambda m, x: F.pad(x, (1, 1), value=2.0), SIGNAL)
_call("F.pixel_shuffle", lambda m, x: F.pixel_shuffle(x, 2), (4, 2, 2))
_call("F.batch_norm", lambda m, x: F.batch_norm(x, m.mean, m.var), mean=torch.randn(4), var=torch.rand(4) + 0.5)
_call("mean over pixels", lambda m, x: x.mean((2, 3)), IMAGE)
_call("mean kept", lambda m, x: x - x.mean(-1, keepdim=True))
_call("sum", lambda m, x: x.sum(1), TOKENS)
_call("sum of everything in a sample", lambda m, x: x.flatten(1).sum(1, keepdim=True), IMAGE)
_call("cumsum", lambda m, x: x.cumsum(1), TOKENS)
_call("diff", lambda m, x: torch.diff(x, dim=1), TOKENS)
_call("view with -1", lambda m, x: x.view(x.size(0), -1), IMAGE)
_call("view with the batch as -1", lambda m, x: x.view(-1, 48), IMAGE)
_call("flatten(1)", lambda m, x: torch.flatten(x, 1), IMAGE)
_call("permute", lambda m, x: x.permute(0, 2, 3, 1), IMAGE)
_call("transpose", lambda m, x: x.transpose(1, 2).contiguous().view(x.shape[0], -1), TOKENS)
_call("batch moved and back", lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), TOKENS, a=nn.Linear(4, 2))
_call("batch and tokens as one", lambda m, x: m.a(x.reshape(-1, 4)).reshape(len(x), 3, -1), TOKENS, a=nn.Linear(4, 2))
_call("mT", lambda m, x: x.mT, TOKENS)
_call("movedim", lambda m, x: x.movedim(1, -1), IMAGE)
_call("squeeze and unsqueeze", lambda m, x: x.unsqueeze(2).squeeze(2))
_call("squeeze without a dimension", lambda m, x: m.a(x[:, :, None]).squeeze(), a=nn.Linear(1, 1))
_call("unflatten", lambda m, x: x.unflatten(1, (2, 2)))
_call("stack", lambda m, x: torch.stack([x, 2 * x, -x], dim=1))
_call("cat", lambda m, x: torch.cat([x, m.a(x)], dim=1), a=nn.Linear(4, 2))
_call("cat with a constant", lambda m, x: torch.cat([x, torch.ones(len(x), 1)], dim=1))
_call("class token", lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1), TOKENS, token=weight(1, 1, 4))
_call("hstack", lambda m, x: torch.hstack((x, x)))
_call("split", lambda m, x: sum(torch.split(x, 2, dim=1)))
_call("split into sizes", lambda m, x: torch.cat(torch.split(x, [1, 3], 1)[::-1], 1))
_call("chunk", lambda m, x: x.chunk(2, 1)[0] - x.chunk(2, 1)[1])
_call("unbind", lambda m, x: sum(x.unbind(1)), TOKENS)
_call("slices", lambda m, x: x[:, 1:3] + x[:, ::2])
_call("ellipsis and None", lambda m, x: x[..., None, 1:], TOKENS)
_call("an index list", lambda m, x: x[:, [2, 0, 2]])
_call("an index buffer", lambda m, x: x[:, m.order], order=torch.tensor([3, 1, 0]))
_call("two index lists", lambda m, x: x[:, [0, 1, 2], [1, 2, 3]], TOKENS)
_call("a mask buffer", lambda m, x: x[:, m.mask], mask=torch.tensor([True, False, True, True]))
_call("index_select", lambda m, x: x.index_select(1, m.order), order=torch.tensor([3, 1, 0]))
_call("gather", lambda m, x: x.gather(1, m.order.expand(len(x), 3)), order=torch.tensor([[3, 1, 0]]))
_call("take_along_dim", lambda m, x: torch.take_along_dim(x, m.order, 1), order=torch.tensor([[3, 1, 0]]))
_call("flip", lambda m, x: x.flip(1))
_call("roll", lambda m, x: torch.roll(x, 1, 1))
_call("rot90", lambda m, x: torch.rot90(x, 1, (2, 3)), IMAGE)
_call("expand", lambda m, x: x[:, None].expand(-1, 3, -1))
_call("expand_as", lambda m, x: x[:, :1].expand_as(x) + x)
_call("repeat", lambda m, x: x.repeat(1, 2))
_call("repeat_interleave", lambda m, x: x.repeat_interleave(2, dim=1))
_call("tril", lambda m, x: torch.tril(x), (3, 3))
_call("diagonal", lambda m, x: x.diagonal(dim1=1, dim2=2), (3, 3))
_call("diag_embed", lambda m, x: torch.diag_embed(x))
_call("unfold", lambda m, x: x.unfold(1, 2, 1))
_call("masked_fill", lambda m, x: x.masked_fill(m.mask, 0.0), mask=torch.tensor([True, False, True, False]))
_call(
    "where on a constant mask",
    lambda m, x: torch.where(m.mask, x, -2 * x),
    mask=torch.tensor([True, False, True, False]),
)
_call("a constant mask as a factor", lambda m, x: x * m.mask, mask=torch.tensor([1.0, 0.0, 1.0, 0.0]))
_call("lerp", lambda m, x: torch.lerp(x, m.w.expand_as(x), 0.25), w=weight(4))
_call("addcmul with constants", lambda m, x: torch.addcmul(x, m.w, m.w, value=2.0), w=weight(4))
_call("normalisation by constants", lambda m, x: (x - m.mean) / m.std, mean=torch.randn(4), std=torch.rand(4) + 1)
_call("rsub", lambda m, x: 1 - x)
_call("sum of a list", lambda m, x: sum([x, 2 * x, 3 * x]))
_call("fftless circulant", lambda m, x: sum(m.w[k] * x.roll(k, 1) for k in range(3)), w=weight(3))

# Functions of every entry.
for _name, _make in [
    ("Tanh", nn.Tanh),
    ("Sigmoid", nn.Sigmoid),
    ("Softplus", nn.Softplus),
    ("ELU", nn.ELU),
    ("ELU(0.5)", lambda: nn.ELU(0.5)),
    ("CELU", nn.CELU),
    ("SELU", nn.SELU),
    ("GELU", nn.GELU),
    ("GELU by tanh", lambda: nn.GELU("tanh")),
    ("SiLU", nn.SiLU),
    ("Mish", nn.Mish),
    ("Softsign", nn.Softsign),
    ("Tanhshrink", nn.Tanhshrink),
    ("LogSigmoid", nn.LogSigmoid),
    ("ReLU", nn.ReLU),
    ("ReLU in place", lambda: nn.ReLU(inplace=True)),
    ("LeakyReLU", nn.LeakyReLU),
    ("ReLU6", nn.ReLU6),
    ("Hardtanh", nn.Hardtanh),
    ("Hardswish", nn.Hardswish),
    ("Hardsigmoid", nn.Hardsigmoid),
    ("PReLU", nn.PReLU),
    ("PReLU of channels", lambda: nn.PReLU(4)),
    ("RReLU", nn.RReLU),
    ("Softshrink", nn.Softshrink),
]:
    _module(_name, lambda make=_make: nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)))
_module("MaxPool1d", lambda: nn.MaxPool1d(2), SIGNAL)
_module("MaxPool2d", lambda: nn.MaxPool2d(2), IMAGE)
_module("MaxPool2d with padding", lambda: nn.MaxPool2d(3, 2, 1), IMAGE)
_module("MaxPool2d, ceil_mode", lambda: nn.MaxPool2d(2, ceil_mode=True), (2, 5, 5))
_module("MaxPool3d", lambda: nn.MaxPool3d(2), VOLUME)
_module("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d(2), IMAGE)
_call("global max", lambda m, x: x.amax((2, 3)), IMAGE)
_call("max over points", lambda m, x: torch.max(x, dim=1)[0], TOKENS)
_call("maximum", lambda m, x: torch.maximum(x[:, :2], x[:, 2:]))
_call("minimum", lambda m, x: torch.minimum(x, m.w), w=weight(4))
_call("tanh()", lambda m, x: x.tanh())
_call("torch.sigmoid", lambda m, x: torch.sigmoid(x))
_call("sin and cos", lambda m, x: torch.cat([torch.sin(x), torch.cos(x)], 1))
_call("siren", lambda m, x: m.b(torch.sin(30 * m.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 2))
_call("random features", lambda m, x: math.sqrt(2 / 5) * torch.cos(m.a(x)), a=nn.Linear(4, 5))
_call("atan", lambda m, x: torch.atan(x))
_call("erf", lambda m, x: torch.erf(x))
_call("exp", lambda m, x: torch.exp(x))
_call("exp of tanh", lambda m, x: torch.exp(torch.tanh(x)))
_call("log of softplus", lambda m, x: torch.log(1 + F.softplus(x)))
_call("log1p of a square", lambda m, x: torch.log1p(x.square()))
_call("square", lambda m, x: torch.square(m.a(x)), a=nn.Linear(4, 3))
_call("x ** 2", lambda m, x: m.a(x) ** 2, a=nn.Linear(4, 3))
_call("x ** 3", lambda m, x: m.a(x) ** 3, a=nn.Linear(4, 3))
_call("square of tanh", lambda m, x: torch.tanh(x).pow(2))
_call("squared ReLU", lambda m, x: F.relu(x) ** 2)
_call("sqrt of one and a square", lambda m, x: torch.sqrt(1 + x**2))
_call("reciprocal of one and a square", lambda m, x: 1 / (1 + x**2))
_call("reciprocal of softplus", lambda m, x: torch.reciprocal(1 + F.softplus(x)))
_call("sinh in a bounded place", lambda m, x: torch.sinh(torch.tanh(x)))
_call("abs", lambda m, x: x.abs())
_call("clamp", lambda m, x: x.clamp(-1, 1))
_call("clamp from below", lambda m, x: torch.clamp(x, min=0.0))
_call("where on sign", lambda m, x: torch.where(x > 0, x, 0.1 * x))
_call("ELU by where", lambda m, x: torch.where(x > 0, x, torch.exp(x) - 1))
_call("ReLU by max", lambda m, x: torch.max(x, torch.zeros_like(x)))
_call("ReLU by a mask", lambda m, x: x * (x > 0))
_call("silu by sigmoid", lambda m, x: x * torch.sigmoid(x))
_call("swish with beta", lambda m, x: x * torch.sigmoid(m.beta * x), beta=torch.tensor(0.7))
_call("quick gelu", lambda m, x: x * torch.sigmoid(1.702 * x))
_call("gelu by erf", lambda m, x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))))
_call(
    "gelu by tanh", lambda m, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
)
_call("softplus by log and exp", lambda m, x: torch.log(1 + torch.exp(x)))
_call("softplus by log1p", lambda m, x: torch.log1p(torch.exp(x)))
_call("softplus by logaddexp", lambda m, x: torch.logaddexp(x, torch.zeros_like(x)))
_call("sigmoid by exp", lambda m, x: 1 / (1 + torch.exp(-x)))
_call("tanh by exp", lambda m, x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)))
_call("gaussian", lambda m, x: torch.exp(-(x**2)))
_call("mish by parts", lambda m, x: x * torch.tanh(F.softplus(x)))
_call("snake", lambda m, x: x + torch.sin(x) ** 2)
_call("F.silu", lambda m, x: F.silu(x))
_call("F.softplus with beta", lambda m, x: F.softplus(x, beta=2.0))
_call("F.relu in place", lambda m, x: F.relu(m.a(x), inplace=True), a=nn.Linear(4, 3))
_call("F.hardtanh", lambda m, x: F.hardtanh(x, -2.0, 2.0))

# Products of values.
_call("gate", lambda m, x: torch.sigmoid(m.a(x)) * torch.tanh(m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
_module("GLU", lambda: nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2)))
_call("SwiGLU", lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3), c=nn.Linear(3, 2))
_call(
    "highway",
    lambda m, x: torch.sigmoid(m.a(x)) * torch.tanh(m.b(x)) + (1 - torch.sigmoid(m.a(x))) * x,
    a=nn.Linear(4, 4),
    b=nn.Linear(4, 4),
)
_call(
    "squeeze and excite",
    lambda m, x: x * torch.sigmoid(m.a(x.mean((2, 3))))[:, :, None, None],
    IMAGE,
    a=nn.Linear(2, 2),
)
_call(
    "RealNVP",
    lambda m, x: torch.cat([x[:, :2], x[:, 2:] * torch.exp(torch.tanh(m.s(x[:, :2]))) + m.t(x[:, :2])], 1),
    s=nn.Linear(2, 2),
    t=nn.Linear(2, 2),
)
_call("hard boundary condition", lambda m, x: x[:, :1] * (1 - x[:, :1]) * torch.tanh(m.a(x)), a=nn.Linear(4, 1))
_call("Lyapunov function", lambda m, x: (torch.tanh(m.a(x)) ** 2).sum(1, keepdim=True), a=nn.Linear(4, 3))
_call("quadratic form", lambda m, x: (x * (x @ m.w)).sum(-1, keepdim=True), w=weight(4, 4))
_call(
    "attention",
    lambda m, x: torch.softmax(m.q(x) @ m.k(x).transpose(1, 2) / 2.0, -1) @ m.v(x),
    TOKENS,
    q=nn.Linear(4, 4),
    k=nn.Linear(4, 4),
    v=nn.Linear(4, 4),
)
_call(
    "scaled_dot_product_attention",
    lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)),
    TOKENS,
    q=nn.Linear(4, 4),
    k=nn.Linear(4, 4),
    v=nn.Linear(4, 4),
)
_call(
    "factorisation machine",
    lambda m, x: (x @ m.v).square().sum(1, keepdim=True) - (x.square() @ m.v.square()).sum(1, keepdim=True),
    v=weight(4, 3),
)
_call(
    "FiLM",
    lambda m, x: m.g(x)[:, :, None, None] * torch.tanh(m.c(x[:, :2, None, None])) + m.b(x)[:, :, None, None],
    g=nn.Linear(4, 3),
    b=nn.Linear(4, 3),
    c=nn.Conv2d(2, 3, 1),
)
_module("Bilinear of two parts", lambda: Function(lambda m, x: m.a(x[:, :2], x[:, 2:]), a=nn.Bilinear(2, 2, 3)))
_call("softmax inside", lambda m, x: m.b(torch.softmax(m.a(x), 1)), a=nn.Linear(4, 3), b=nn.Linear(3, 2))
_call("last softmax", lambda m, x: torch.softmax(m.a(x), 1), a=nn.Linear(4, 3))
_call("last log_softmax", lambda m, x: F.log_softmax(m.a(x), dim=-1), a=nn.Linear(4, 3))
_call("logsumexp", lambda m, x: torch.logsumexp(m.a(x), 1, keepdim=True), a=nn.Linear(4, 3))
_module("Softmax module", lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)))
_module("LayerNorm", lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)))
_module("RMSNorm", lambda: nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5, eps=1e-5), nn.Tanh(), nn.Linear(5, 2)))
_call("RMSNorm by hand", lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * m.w, w=weight(4))
_call(
    "LayerNorm by hand",
    lambda m, x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
)
_module("GroupNorm", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()), IMAGE)
_module("InstanceNorm2d", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.Tanh()), IMAGE)
_call("F.layer_norm", lambda m, x: F.layer_norm(x, (4,)))
_call("F.normalize", lambda m, x: F.normalize(m.a(x), dim=1), a=nn.Linear(4, 3))
_call("normalise by hand", lambda m, x: x / (1e-3 + x.norm(dim=1, keepdim=True)))
_call(
    "cosine head",
    lambda m, x: F.linear(F.normalize(m.a(x), dim=1), F.normalize(m.w, dim=1)),
    a=nn.Linear(4, 3),
    w=weight(2, 3),
)
_call("cdist", lambda m, x: torch.cdist(x, m.centres), centres=weight(3, 4))
_call("RBF layer", lambda m, x: torch.exp(-(x[:, None] - m.centres).square().sum(-1)), centres=weight(3, 4))
_call("prototype distances", lambda m, x: -(x[:, None, :] - m.centres[None]).pow(2).sum(2), centres=weight(3, 4))
_call("MultiheadAttention", lambda m, x: m.a(x, x, x)[0], TOKENS, a=nn.MultiheadAttention(4, 2, batch_first=True))
_call(
    "MultiheadAttention, sequence first",
    lambda m, x: m.a(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    TOKENS,
    a=nn.MultiheadAttention(4, 2),
)
_module("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), TOKENS)
_module(
    "TransformerEncoderLayer, norm first, GELU",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True, norm_first=True),
    TOKENS,
)
_module(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    TOKENS,
)
_call("RNN", lambda m, x: m.a(x)[0][:, -1], TOKENS, a=nn.RNN(4, 3, batch_first=True))
_call("GRU", lambda m, x: m.a(x)[0][:, -1], TOKENS, a=nn.GRU(4, 3, batch_first=True))
_call("LSTM", lambda m, x: m.a(x)[1][0][-1], TOKENS, a=nn.LSTM(4, 3, batch_first=True))
_call(
    "GRU of two layers, both ways",
    lambda m, x: m.a(x)[0].flatten(1),
    TOKENS,
    a=nn.GRU(4, 2, 2, batch_first=True, bidirectional=True),
)
_call("RNNCell", lambda m, x: m.a(x), a=nn.RNNCell(4, 3))
_call("GRUCell", lambda m, x: m.a(x), a=nn.GRUCell(4, 3))
_call("LSTMCell", lambda m, x: m.a(x)[0], a=nn.LSTMCell(4, 3))


def _unrolled(m: Function, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 3)
    for t in range(x.size(1)):
        h = torch.tanh(m.a(x[:, t]) + m.b(h))
    return h


_call("Elman network by hand", _unrolled, TOKENS, a=nn.Linear(4, 3), b=nn.Linear(3, 3))


# Styles.
def _by_shape(m: Function, x: Tensor) -> Tensor:
    if x.dim() == 3 and x.shape[1] == 3:
        x = x.flatten(1)
    assert x.ndim == 2, "vectors"
    if len(x) == 0 or x.shape[-1] != 12:
        raise ValueError(f"expected 12 features, got {x.shape}")
    return torch.tanh(m.a(x))


_call("control flow on shapes", _by_shape, TOKENS, a=nn.Linear(12, 2))


class Optional(nn.Module):
    """An optional argument, keyword-only flags, *args and **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *args: Any, scale: float = 2.0, **kwargs: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        if mask is not None:
            h = h * mask
        return h * scale if not kwargs and not args else h


class Nested(nn.Module):
    """What it calls has keyword arguments and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layers = Optional(), nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.heads = nn.ModuleDict({"mean": nn.Linear(3, 2), "other": nn.Linear(3, 1)})

    def features(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.inner(x=x, scale=1.0)
        kept = {}
        for k, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) + h
            kept[f"h{k}"] = h
        return h, kept

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.features(x)
        return self.heads["mean"](h + kept["h0"])


_module("optional arguments", Optional)
_module("ModuleList, ModuleDict, keywords", Nested)


@dataclass
class Output:
    """A dataclass that a forward pass returns."""

    logits: Tensor
    hidden: Tensor | None = None


_Pair = namedtuple("_Pair", ["mean", "scale"])
_TWO = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 2)}


def _output(name: str, function: Callable[[Function, Tensor], object], output: Any) -> None:
    make = lambda: Function(function, a=nn.Linear(4, 3), b=nn.Linear(4, 2))  # noqa: E731
    ROWS.append(Row(name, make, VECTOR, () if output is None else (("output", output),)))


_output("dictionary output", lambda m, x: {"logits": m.a(x), "other": m.b(x)}, "logits")
_output("dictionary of one", lambda m, x: OrderedDict(logits=torch.tanh(m.a(x))), None)
_output("tuple output", lambda m, x: (m.a(x), m.b(x)), 1)
_output("named tuple output", lambda m, x: _Pair(m.a(x), m.b(x).exp()), "mean")
_output("dataclass output", lambda m, x: Output(m.a(x), m.b(x)), "logits")
_output("tuple with None", lambda m, x: (m.a(x), None), None)
_output("dictionary in a tuple", lambda m, x: ({"p": m.a(x)}, m.b(x)), (0, "p"))


class Controlled(nn.Module):
    """A function of a state and a control."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(2, 5)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.tanh(self.a(x) + self.b(u))


ROWS.append(Row("two inputs", Controlled, VECTOR, more=((2,),)))
ROWS.append(Row("two inputs, one fixed", Controlled, VECTOR, (("fixed", (1,)),), more=((2,),)))


def _in_place(m: Function, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.b(x)
    h.mul_(0.5).tanh_()
    h[:, 0] = 0.0
    h[:, 1:3] *= 2
    return h


def _filled(m: Function, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 3, 4)
    for k in range(3):
        out[:, k] = torch.tanh(x * (k + 1))
    return out


_call("in-place operations", _in_place, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
_call("written into zeros", _filled)
_call("written into a copy", lambda m, x: x.clone().index_fill_(1, torch.tensor([0]), 1.0))
_call(
    "list comprehension",
    lambda m, x: torch.stack([layer(x) for layer in m.layers], 1).mean(1),
    layers=nn.ModuleList(nn.Linear(4, 2) for _ in range(3)),
)
_call("functional with a generator", lambda m, x: torch.cat([f(x) for f in (torch.tanh, torch.sigmoid)], -1))


def _hooked() -> nn.Module:
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape) if len(seen) < 3 else None)
    model[0].register_forward_pre_hook(lambda module, args: None)
    return model


class SameLinear(nn.Linear):
    """A subclass that changes nothing about the forward pass."""

    def extra_repr(self) -> str:
        return "the same"


class ScaledLinear(nn.Linear):
    """A subclass with its own forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class OwnSequential(nn.Sequential):
    """A Sequential with its own forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class WeightStandardised(nn.Conv2d):
    """A convolution whose kernel is computed anew at every call."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.flatten(1).std(1)[:, None, None, None] + 1e-5)
        return self._conv_forward(x, w, self.bias)


_KEPT: dict[str, Any] = {}


def _keeping(name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        _KEPT[name] = output.detach()

    return hook


def _with_features() -> nn.Module:
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), []
    model[1].register_forward_hook(_keeping("hidden"))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return model


_module("observing hooks", _hooked)
_module("hooks that keep features", _with_features)
_module("a hook that scales", lambda: _scaled_by_a_hook())


def _scaled_by_a_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    return model


_module("harmless subclass", lambda: nn.Sequential(SameLinear(4, 3), nn.Tanh()))
_module("subclass with its own forward", lambda: nn.Sequential(ScaledLinear(4, 3), nn.Tanh()))
_module("Sequential with its own forward", lambda: OwnSequential(nn.Linear(4, 4), nn.Tanh()))
_module("weight standardisation", lambda: WeightStandardised(2, 3, 3), IMAGE)
_module("spectral_norm", lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()))
_module("weight_norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()))
_module("orthogonal", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh()))
_module("spectral_norm of a convolution", lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), IMAGE)
_module("old spectral_norm", lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Tanh()))
_module("old weight_norm", lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh()))
_module("pruned", lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(4, 3), "weight", 3), nn.Tanh()))
_call("float()", lambda m, x: torch.tanh(m.a(x.float())), a=nn.Linear(4, 3))
_call("to(dtype)", lambda m, x: torch.tanh(m.a(x.to(m.a.weight.dtype))), a=nn.Linear(4, 3))
_call("to(device)", lambda m, x: torch.tanh(m.a(x.to(m.a.weight.device))), a=nn.Linear(4, 3))
_call("zeros of a dtype", lambda m, x: torch.tanh(m.a(x) + torch.zeros(3, dtype=torch.float32)), a=nn.Linear(4, 3))
_call(
    "checkpointing",
    lambda m, x: torch.utils.checkpoint.checkpoint(m.a, x, use_reentrant=False),
    a=nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
)
_module("DataParallel", lambda: nn.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.Tanh())))
_module("compiled", lambda: torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), backend="eager"))
_module("an fx module", lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh())).eval())
_module(
    "an exported module",
    lambda: torch.export.export(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        (torch.zeros(2, 4),),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    ).module(),
)


class Hamiltonian(nn.Module):
    """The symplectic gradient of a learned energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return torch.cat([g[:, 2:], -g[:, :2]], dim=1)


_module("Hamiltonian network", Hamiltonian)
_call(
    "gradient by torch.func",
    lambda m, x: torch.func.vmap(torch.func.grad(lambda z: m.a(z).sum()))(x),
    a=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
)
_call("detach and back", lambda m, x: m.a(x) + 0 * x.detach().sum(1, keepdim=True), a=nn.Linear(4, 3))
_call("torch.no_grad inside", lambda m, x: _without_gradients(m.a, x), a=nn.Linear(4, 3))


def _without_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(layer(x))


class Custom(torch.autograd.Function):
    """A function with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


_call("autograd.Function", lambda m, x: Custom.apply(m.a(x)), a=nn.Linear(4, 3))
_call(
    "Residual of two activations",
    lambda m, x: torch.tanh(x + m.b(torch.tanh(m.a(torch.tanh(x))))),
    a=nn.Linear(4, 4),
    b=nn.Linear(4, 4),
)
_call("DenseNet", lambda m, x: m.b(torch.cat([x, torch.tanh(m.a(x))], 1)), a=nn.Linear(4, 4), b=nn.Linear(8, 3))


class UNet(nn.Module):
    """One level down and up, with a skip joined to it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.silu(self.a(x))
        return self.out(torch.cat([top, torch.tanh(self.up(F.silu(self.b(top))))], dim=1))


class Mixer(nn.Module):
    """Tokens and channels mixed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(3, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.tokens(x.transpose(1, 2))).transpose(1, 2)
        return (x + F.gelu(self.channels(x))).mean(dim=1)


class Patches(nn.Module):
    """Images cut into patches as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 5)
        self.position = nn.Parameter(torch.randn(1, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 4)
        return torch.tanh(self.a(x) + self.position).mean(1)


class Windows(nn.Module):
    """Tokens shifted and cut into windows that join the batch, as Swin transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = torch.roll(x.permute(0, 2, 3, 1), (-1, -1), (1, 2))
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        x = torch.tanh(self.a(x)).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, (1, 1), (1, 2)).permute(0, 3, 1, 2)


class TimeDistributed(nn.Module):
    """A convolution for every frame of a film."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        return torch.tanh(self.a(x.flatten(0, 1))).view(b, t, -1).mean(1)


_module("U-Net", UNet, IMAGE)
_module("MLP mixer", Mixer, TOKENS)
_module("patches with positions", Patches, IMAGE)
_module("windows", Windows, IMAGE)
_module("a convolution for each frame", TimeDistributed, (3, 2, 4, 4))
_call("DeepSets", lambda m, x: m.b(torch.tanh(m.a(x)).sum(1)), TOKENS, a=nn.Linear(4, 5), b=nn.Linear(5, 2))
_call("neural ODE by Euler's steps", lambda m, x: _euler(m, x), a=nn.Linear(4, 4))
_call("DEQ with fixed steps", lambda m, x: _fixed_steps(m, x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def _euler(m: Function, x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + 0.25 * torch.tanh(m.a(x))
    return x


def _fixed_steps(m: Function, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(3):
        z = torch.tanh(m.a(z) + m.b(x))
    return z


REFUSED: dict[str, str] = {
    "squeeze without a dimension": "a batch of one sample loses its first dimension: the module itself does so",
}
"""The rows that `trace` refuses, with the reason."""
