"""Networks as data: every case inherits the suite of test_tracing.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvcert.nn as cnn


@dataclass(frozen=True)
class Case:
    """A named module with the shape of one input; `smooth` if it has a curvature constant."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    smooth: bool = True
    blocks: int | None = None

    def model(self) -> nn.Module:
        """Return the module in eval mode, always with the same weights."""
        torch.manual_seed(1)
        return self.make().eval()

    def inputs(self, batch: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a batch of random inputs."""
        generator = torch.Generator().manual_seed(2)
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64).to(dtype)


class Function(nn.Module):
    """A forward pass given as a function of the module and x, with parts as attributes."""

    def __init__(self, function: Callable[["Function", Tensor], object], **parts: object) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Residual(nn.Module):
    """x + skip * inner(x)."""

    def __init__(self, inner: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.inner(x)


class SLL(nn.Module):
    """x - 2 W' phi(W x + b), with a functional activation."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(features, inner), nn.Linear(inner, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x - 2 * self.up(torch.tanh(self.down(x)))


class BasicBlock(nn.Module):
    """A residual block as users write it: batch norm, in-place ReLU, +=."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = batch_norm(nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv2(out)
        out += x
        return self.relu(out)


def batch_norm(layer: nn.Module) -> nn.Module:
    """Give a batch norm statistics and weights that are not those of its birth."""
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.2, 3.0)
        if layer.affine:
            layer.weight.normal_()
            layer.bias.normal_()
    return layer


def conv_net(conv: nn.Conv2d) -> nn.Module:
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 5), activation, nn.Linear(5, 3))


def _conv(name: str, shape: tuple[int, ...], *args: object, **options: object) -> Case:
    def make() -> nn.Module:
        model = conv_net(nn.Conv2d(*args, **options))
        model(torch.zeros(1, *shape))
        return model

    return Case(name, make, shape, blocks=1)


def _functional(name: str, function: Callable[[Tensor], Tensor], smooth: bool = True) -> Case:
    make = lambda: Function(lambda m, x: m.out(function(m.inner(x))), inner=nn.Linear(4, 6), out=nn.Linear(6, 3))  # noqa: E731
    return Case(f"functional {name}", make, (4,), smooth, blocks=1)


DENSE = [
    Case("dense", lambda: mlp(nn.Tanh()), (4,), blocks=2),
    Case("dense without bias", lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh()), (4,), blocks=1),
    Case("ends in an activation", lambda: nn.Sequential(nn.Linear(4, 5), nn.Sigmoid()), (4,), blocks=1),
    Case("starts with an activation", lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), (4,), blocks=1),
    Case("only an activation", nn.Tanh, (4,), blocks=1),
    Case("two activations in a row", lambda: nn.Sequential(nn.Tanh(), nn.Sigmoid()), (4,), blocks=2),
    Case("single logit", lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 1)), (4,)),
    Case("regression", lambda: nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2)), (2,)),
    Case("linear", lambda: nn.Linear(4, 3), (4,), blocks=1),
    Case("deep linear", lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 2)), (4,), blocks=1),
    Case("adjacent linear maps", lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Tanh()), (4,), blocks=1),
    Case("identity", nn.Identity, (4,), blocks=1),
    Case("flatten alone", nn.Flatten, (2, 3), blocks=1),
    Case(
        "nested",
        lambda: nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Dropout(0.5)),
            nn.Sequential(nn.Identity(), nn.Linear(6, 6), nn.AlphaDropout(), nn.Sequential(nn.Softplus())),
            nn.Linear(6, 3),
        ),
        (2, 2),
        blocks=2,
    ),
    Case(
        "batch norm 1d",
        lambda: nn.Sequential(nn.Linear(4, 6), batch_norm(nn.BatchNorm1d(6)), nn.Tanh(), nn.Linear(6, 2)),
        (4,),
        blocks=1,
    ),
    Case(
        "batch norm 1d, not affine, at the end",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), batch_norm(nn.BatchNorm1d(6, affine=False, eps=0.1))),
        (4,),
        blocks=1,
    ),
    Case("batch norm 1d on sequences", lambda: nn.Sequential(batch_norm(nn.BatchNorm1d(3)), nn.Flatten()), (3, 4)),
    Case("unflatten", lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 2, -1)), nn.Tanh()), (4,)),
    Case(
        "shared layer",
        lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()))(nn.Linear(4, 4)),
        (4,),
        blocks=2,
    ),
    Case("constant output", lambda: Function(lambda m, x: m.out(0 * x), out=nn.Linear(4, 2)), (4,)),
]

CONV = [
    _conv("conv", (2, 5, 6), 2, 3, 3),
    _conv("conv strided, padded", (2, 7, 8), 2, 3, 4, stride=2, padding=1),
    _conv("conv uneven", (2, 7, 8), 2, 3, (2, 3), stride=(2, 1), padding=(0, 2)),
    _conv("conv same", (2, 5, 5), 2, 3, 3, padding="same"),
    _conv("conv same, even kernel", (2, 5, 5), 2, 3, (2, 4), padding="same"),
    _conv("conv same, dilated", (2, 6, 5), 2, 3, (2, 3), padding="same", dilation=(3, 2)),
    _conv("conv valid", (2, 5, 5), 2, 3, 3, padding="valid"),
    _conv("conv dilated", (2, 8, 8), 2, 3, 3, dilation=2, padding=1),
    _conv("conv grouped", (4, 5, 5), 4, 6, 3, groups=2),
    _conv("conv depthwise without bias", (4, 5, 5), 4, 4, 3, groups=4, bias=False),
    _conv("conv circular", (2, 5, 5), 2, 3, 3, padding=1, padding_mode="circular"),
    _conv("conv circular, same, even kernel", (2, 5, 5), 2, 3, 4, padding="same", padding_mode="circular"),
    Case(
        "conv with batch norm and pooling",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            batch_norm(nn.BatchNorm2d(4)),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 3, 3),
            batch_norm(nn.BatchNorm2d(3, affine=False)),
            nn.Softplus(),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        (2, 6, 7),
        blocks=2,
    ),
    Case("average pooling", lambda: nn.AvgPool2d((3, 2), stride=[2, 1], padding=[1, 0]), (2, 6, 7)),
    Case("image-shaped output", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2)), (1, 5, 5)),
    Case("image of sines", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), cnn.Sin()), (1, 3, 3)),
    Case("partial flatten", lambda: nn.Sequential(nn.Tanh(), nn.Flatten(2), nn.Flatten(1, 2)), (2, 3, 2)),
]

RESIDUAL = [
    Case("residual", lambda: Residual(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))), (4,), blocks=1),
    Case(
        "residual, scaled, then linear",
        lambda: nn.Sequential(Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 0.3), nn.Linear(4, 3)),
        (4,),
        blocks=1,
    ),
    Case("SLL", lambda: nn.Sequential(SLL(4, 7), SLL(4, 3), nn.Linear(4, 3)), (4,), blocks=2),
    Case(
        "residual after an activation",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Residual(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))),
        (3,),
        blocks=2,
    ),
    Case(
        "residual after an activation and a linear map",
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 4), Residual(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))),
        (3,),
        blocks=2,
    ),
    Case(
        "residual by minus",
        lambda: Function(lambda m, x: torch.tanh(m.inner(x)) - m.skip(x), inner=nn.Linear(4, 3), skip=nn.Linear(4, 3)),
        (4,),
        blocks=1,
    ),
    Case(
        "two uses of one branch",
        lambda: Function(
            lambda m, x: (lambda h: m.a(h) + m.b(h) + x)(torch.tanh(m.inner(x))),
            inner=nn.Linear(4, 5),
            a=nn.Linear(5, 4),
            b=nn.Linear(5, 4),
        ),
        (4,),
        blocks=1,
    ),
    Case("linear sum", lambda: Function(lambda m, x: m.a(x) + 2 * x - x / 4, a=nn.Linear(3, 3)), (3,), blocks=1),
    Case(
        "activation of a residual",
        lambda: nn.Sequential(Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Sigmoid(), nn.Linear(4, 2)),
        (4,),
        blocks=2,
    ),
    Case(
        "basic blocks",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(True), BasicBlock(2), BasicBlock(2), nn.Flatten()),
        (1, 5, 5),
        smooth=False,
    ),
]

ARITHMETIC = [
    Case(
        "normalised by buffers",
        lambda: Function(
            lambda m, x: m.net((x - m.mean) / m.std),
            mean=torch.tensor([0.4914, 0.4822]).reshape(1, 2, 1, 1),
            std=torch.tensor([0.2470, 0.2435]).reshape(2, 1, 1),
            net=nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten()),
        ),
        (2, 4, 4),
        blocks=1,
    ),
    Case("normalised by constants", lambda: Function(lambda m, x: torch.tanh((x - 0.1307) / 0.3081)), (4,), blocks=1),
    Case(
        "normalised by a tensor made on the way",
        lambda: Function(lambda m, x: torch.tanh(x * (1 / torch.tensor([3.0, 7.0])))),
        (2,),
        blocks=1,
    ),
    Case("Normalise", lambda: nn.Sequential(cnn.Normalise([0.5, -0.1], [0.3, 7.0]), nn.Conv2d(2, 1, 2)), (2, 3, 3)),
    Case("Normalise, one channel", lambda: nn.Sequential(cnn.Normalise([0.13], [0.31]), nn.Tanh()), (1, 3, 3)),
    Case("constants on the left", lambda: Function(lambda m, x: 1 - torch.tanh(3 - (-(2 * x)))), (4,), blocks=1),
    Case(
        "buffers on the left", lambda: Function(lambda m, x: m.b - torch.tanh(m.b * x), b=torch.rand(4)), (4,), blocks=1
    ),
    Case("parameter as a factor", lambda: Function(lambda m, x: m.p * x + m.p, p=nn.Parameter(torch.rand(4))), (4,)),
    Case("in-place arithmetic", lambda: Function(lambda m, x: m.a(x).mul_(2).add_(1).tanh(), a=nn.Linear(4, 3)), (4,)),
    Case("overwrites its input", lambda: Function(lambda m, x: torch.tanh(x.add_(1))), (4,)),
    Case("torch.add", lambda: Function(lambda m, x: torch.sub(torch.mul(torch.div(x, 3), 2), 1).add(5)), (4,)),
    Case("view by size", lambda: Function(lambda m, x: m.a(x.view(x.size(0), -1)), a=nn.Linear(12, 3)), (3, 4)),
    Case("view by shape", lambda: Function(lambda m, x: m.a(x.reshape(x.shape[0], 12)), a=nn.Linear(12, 3)), (3, 4)),
    Case("view by -1", lambda: Function(lambda m, x: m.a(x.view(-1, 12)), a=nn.Linear(12, 3)), (3, 4)),
    Case("view by product", lambda: Function(lambda m, x: x.view(-1, x.shape[1] * x.shape[2]).tanh()), (3, 4)),
    Case("view as image", lambda: Function(lambda m, x: m.a(x.view(-1, 1, 3, 4)), a=nn.Conv2d(1, 1, 2)), (12,)),
    Case("torch.flatten", lambda: Function(lambda m, x: m.a(torch.flatten(x, 1)), a=nn.Linear(12, 3)), (3, 4)),
    Case("flatten by name", lambda: Function(lambda m, x: x.flatten(end_dim=-1, start_dim=1).tanh()), (3, 4)),
    Case("dropout in eval", lambda: Function(lambda m, x: F.dropout(x, 0.5, m.training).tanh()), (4,)),
    Case("by keyword", lambda: Function(lambda m, x: m.a(input=x), a=nn.Linear(4, 3)), (4,)),
]


def _halves(m: Function, x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return a - b.tanh()


def _grown(m: Function, x: Tensor) -> Tensor:
    return m.b(torch.cat((m.a(x).tanh(), x[:, :1]), dim=-3))


def _function(
    name: str, shape: tuple[int, ...], function: Callable[..., Tensor], **parts: Callable[[], nn.Module]
) -> Case:
    return Case(name, lambda: Function(function, **{key: make() for key, make in parts.items()}), shape)


def _vector(name: str, function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (6,)) -> Case:
    return Case(name, lambda: Function(lambda m, x: function(x).tanh()), shape, blocks=1)


MOVEMENT = [
    _vector("slice", lambda x: x[:, 1:-1]),
    _vector("strided slices", lambda x: x[:, ::2, 1:6:3], (5, 7)),
    _vector("one entry", lambda x: x[:, 1], (3, 4)),
    _vector("the last entry", lambda x: x[..., -1], (3, 4)),
    _vector("cut by shape", lambda x: x[:, x.shape[1] // 2 :]),
    _vector("flip by keyword", lambda x: torch.flip(x, dims=[1])),
    _vector("mirror image added", lambda x: x + x.fliplr()),
    _vector("concatenated along the width", lambda x: torch.cat([x, 2 * x, x[:, :, 1:]], 2), (2, 3)),
    _vector("stack", lambda x: torch.stack((x, -x), dim=1)),
    _vector("stacked behind", lambda x: torch.stack([x, 3 * x], -1).flatten(1)),
    _vector("uneven chunks", lambda x: torch.cat(torch.chunk(x, 3, dim=1)[::-1], 1), (7,)),
    _vector("split", lambda x: torch.split(x, [1, 5], 1)[1]),
    _vector("split by one size", lambda x: x.split(4, dim=1)[1]),
    _vector("unbind", lambda x: x.unbind(1)[2], (3, 4)),
    _vector("narrow, select", lambda x: x.narrow(1, -2, 1).select(2, 1), (3, 4)),
    _vector("transpose", lambda x: x.transpose(1, -1).flatten(1), (2, 3, 4)),
    _vector("squeeze", lambda x: x.unsqueeze(2).squeeze(-1).squeeze((2, 1)), (1, 4, 1)),
    _vector("padding", lambda x: F.pad(x, (1, 2))),
    _vector("padding and cropping", lambda x: F.pad(x, (-1, 2, 1, -2), "constant", 0.0), (4, 3)),
    _function(
        "padding before a window",
        (2, 4, 5),
        lambda m, x: F.avg_pool2d(F.pad(m.c(m.p(x)).tanh(), (1, 1, 1, 1)), 3),
        p=lambda: nn.ZeroPad2d((1, 0, 2, 1)),
        c=lambda: nn.Conv2d(2, 3, 3, 2, 1),
    ),
    _function("halves", (6,), _halves),
    _function("permute", (3, 4, 2), lambda m, x: m.a(x.permute(0, 3, 1, 2)).tanh(), a=lambda: nn.Conv2d(2, 3, 2)),
    _function("flip of an image", (2, 3, 4), lambda m, x: m.a(x.flip(-1, 1)).tanh(), a=lambda: nn.Conv2d(2, 3, 2)),
    _function("a new axis", (4, 5), lambda m, x: m.a(x[:, None, :3, ..., 1:]), a=lambda: nn.Conv2d(1, 2, 2)),
    _function("with its activation", (4,), lambda m, x: torch.cat([x, m.a(x).tanh()], 1), a=lambda: nn.Linear(4, 2)),
    _function(
        "joined images",
        (2, 4, 5),
        _grown,
        a=lambda: nn.Conv2d(2, 3, 3, padding=1),
        b=lambda: nn.Conv2d(4, 2, 2),
    ),
    Case("joined, then in place", lambda: Function(lambda m, x: F.relu(torch.cat([x, x], 1), True)), (3,), False, 1),
]

KINKS = [
    Case("relu", lambda: mlp(nn.ReLU()), (4,), smooth=False, blocks=2),
    Case(
        "max pooling",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        (1, 6, 6),
        smooth=False,
        blocks=3,
    ),
    Case("max pooling first", lambda: nn.Sequential(nn.MaxPool2d(3, [2, 1], 1), nn.Tanh()), (2, 5, 4), False, 2),
    Case("max pooling last", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d((2, 3))), (1, 5, 7), False, 2),
    Case(
        "functional pooling",
        lambda: Function(
            lambda m, x: F.avg_pool2d(F.max_pool2d(torch.tanh(m.a(x)), (1, 2), 1), 2, 1, 1), a=nn.Conv2d(1, 2, 2)
        ),
        (1, 4, 4),
        smooth=False,
        blocks=3,
    ),
]

MODULES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "Tanh": (nn.Tanh, True),
    "Sigmoid": (nn.Sigmoid, True),
    "Softplus": (nn.Softplus, True),
    "Softplus(3, 30)": (lambda: nn.Softplus(3.0, 30.0), True),
    "Softplus(0.5)": (lambda: nn.Softplus(0.5), True),
    "ELU": (nn.ELU, True),
    "ELU(0.7)": (lambda: nn.ELU(0.7), False),
    "CELU(2)": (lambda: nn.CELU(2.0), True),
    "GELU": (nn.GELU, True),
    "GELU tanh": (lambda: nn.GELU("tanh"), True),
    "SiLU": (nn.SiLU, True),
    "Mish": (nn.Mish, True),
    "Softsign": (nn.Softsign, True),
    "Sin": (cnn.Sin, True),
    "Arctan": (cnn.Arctan, True),
    "Erf": (cnn.Erf, True),
    "ISRU": (cnn.ISRU, True),
    "Gaussian": (cnn.Gaussian, True),
    "Tanhshrink": (nn.Tanhshrink, True),
    "Hardswish": (nn.Hardswish, False),
    "CentredSoftplus": (cnn.CentredSoftplus, True),
    "CentredSoftplus(4)": (lambda: cnn.CentredSoftplus(4.0), True),
    "ReLU": (nn.ReLU, False),
    "ReLU in place": (lambda: nn.ReLU(inplace=True), False),
    "LeakyReLU": (nn.LeakyReLU, False),
    "LeakyReLU(-0.3)": (lambda: nn.LeakyReLU(-0.3), False),
    "ReLU6": (nn.ReLU6, False),
    "Hardtanh": (lambda: nn.Hardtanh(-0.4, 0.3), False),
    "SELU": (nn.SELU, False),
}

ACTIVATIONS = [Case(name, lambda make=make: mlp(make()), (4,), smooth) for name, (make, smooth) in MODULES.items()]

FUNCTIONAL = [
    _functional("tanh", torch.tanh),
    _functional("method tanh", lambda x: x.tanh()),
    _functional("sigmoid", F.sigmoid),
    _functional("method sigmoid", lambda x: x.sigmoid()),
    _functional("softplus", lambda x: F.softplus(x, 2.0, threshold=30)),
    _functional("elu", lambda x: F.elu(x, 0.5), smooth=False),
    _functional("celu", lambda x: F.celu(x, alpha=0.5, inplace=True)),
    _functional("gelu", F.gelu),
    _functional("gelu tanh", lambda x: F.gelu(x, approximate="tanh")),
    _functional("silu", F.silu),
    _functional("mish", F.mish),
    _functional("softsign", F.softsign),
    _functional("sin", torch.sin),
    _functional("method atan", lambda x: x.atan()),
    _functional("arctan", torch.arctan),
    _functional("erf", torch.erf),
    _functional("relu", lambda x: F.relu(x, True), smooth=False),
    _functional("method relu", lambda x: x.relu(), smooth=False),
    _functional("leaky relu", lambda x: F.leaky_relu(x, 0.2), smooth=False),
    _functional("relu6", F.relu6, smooth=False),
    _functional("hardtanh", lambda x: F.hardtanh(x, -0.2, 0.1), smooth=False),
    _functional("selu", F.selu, smooth=False),
]

STRUCTURES = [*DENSE, *CONV, *RESIDUAL, *ARITHMETIC, *MOVEMENT, *KINKS]
"""One network of each structure: the others differ from the first of them in their activation alone."""
CASES = [*STRUCTURES, *ACTIVATIONS, *FUNCTIONAL]
IDS = [case.name for case in CASES]
