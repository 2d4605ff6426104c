"""The networks of the baseline: small ones with weights drawn from seeds of their own, and the kept trained ones.

A small network is built as a module and traced, as a user's would be.  Its weights come from a generator of its own,
whatever PyTorch's initialisation does, and are rounded to float32: where another machine's logarithm differs in its
last bit, the weights are the same.  Names are parts of the record's keys, so they stay.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS
from curvcert.data import load_demo_network, load_digits, load_mnist_network, load_mnist_sample
from curvcert.network import Network, trace
from curvcert.nn import SLLConv2d, SLLDense, make_activation, side_by_side
from curvcert.training import load_kept

SAMPLES = 2
"""Points of every network, at which anchored and local bounds and radii are taken."""

NORMS = (1.0, 2.0, math.inf)

SMOOTH = ("tanh", "sigmoid", "centred_softplus", "gelu", "silu", "sin")


@final
@dataclass(frozen=True)
class Subject:
    """A network by name, its points, and what is asked of it: the norms, and the methods where not all of them."""

    name: str
    make: Callable[[], nn.Module]
    points: Callable[[], Tensor]
    norms: tuple[float, ...] = NORMS
    methods: tuple[str, ...] | None = None

    def network(self) -> Network:
        """Return the traced network."""
        x = self.points()
        model = self.make().eval()
        return trace(model, x[:1].to(next(model.parameters()).dtype))

    def asks(self, method: str) -> bool:
        """Whether a method is asked of this network."""
        return self.methods is None or method in self.methods


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return x + inner(x)."""
        moved: Tensor = x + self.inner(x)
        return moved


def drawn(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a module in float64 with weights and statistics drawn from the seed.

    >>> from torch import nn
    >>> twice = [drawn(lambda: nn.Linear(2, 2), seed=1).weight for _ in range(2)]
    >>> bool((twice[0] == twice[1]).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the weights that it is built with are overwritten
        model = make().double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
                tensor.copy_(_scaled(name, noise).float())
    return model


def _scaled(name: str, noise: Tensor) -> Tensor:
    """Return weights that neither vanish nor blow up, small offsets, and positive variances."""
    if name.endswith("running_var"):
        return 0.5 + noise.square()
    if noise.dim() < 2:
        return 0.4 * noise
    return 1.2 * noise / math.sqrt(noise.numel() / len(noise))


def _points(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.7 * torch.randn(SAMPLES, *shape, dtype=torch.float64, generator=generator).float().double()


def _small(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Subject:
    # The seed comes from the name: a network that is added moves no other one.
    seed = zlib.crc32(name.encode())
    return Subject(name, partial(drawn, make, seed), partial(_points, shape, seed + 1))


def _dense(activation: str, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), make_activation(activation)]
    return nn.Sequential(*layers[:-1])


def _residual(activation: str) -> nn.Sequential:
    return nn.Sequential(*(Residual(_dense(activation, 4, 6, 4)) for _ in range(2)), nn.Linear(4, 3))


def _convolutional(activation: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        make_activation(activation),
        nn.Conv2d(2, 3, 2, stride=2),
        make_activation(activation),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def _contracting(activation: str) -> nn.Sequential:
    return nn.Sequential(SLLDense(5, 7, activation), SLLDense(5, 4, activation), nn.Linear(5, 3))


def _several(make: Callable[[str], nn.Module], kind: str, activations: tuple[str, ...], *shape: int) -> list[Subject]:
    """Return a network of one kind for every activation."""
    return [_small(f"{kind}-{activation}", partial(make, activation), shape) for activation in activations]


def _single_ones() -> list[Subject]:
    """Return what the kinds above leave out, one network each."""
    makers: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "linear": (lambda: nn.Linear(5, 3), (5,)),
        "one-output-silu": (lambda: _dense("silu", 4, 6, 5, 1), (4,)),
        "ends-in-sigmoid": (lambda: nn.Sequential(_dense("tanh", 4, 6, 3), nn.Sigmoid()), (4,)),
        "deep-tanh": (lambda: _dense("tanh", 4, *(6,) * 7, 3), (4,)),
        "wide-gelu": (lambda: _dense("gelu", 8, 40, 40, 4), (8,)),
        "torch-softplus": (lambda: _dense("softplus", 4, 7, 6, 3), (4,)),
        "mixed": (
            lambda: nn.Sequential(_dense("tanh", 4, 6, 5), nn.SiLU(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)),
            (4,),
        ),
        "two-side-by-side": (
            lambda: side_by_side([nn.Sequential(nn.Flatten(), *_dense("tanh", 4, 5, 5, 3)) for _ in range(2)]),
            (4,),
        ),
        "residual-relu": (lambda: _residual("relu"), (4,)),
        "conv-max-pool-relu": (
            lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
            (1, 6, 6),
        ),
        "conv-batch-norm-average-pool-tanh": (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.Tanh(),
                nn.AvgPool2d(2),
                nn.Conv2d(4, 3, 2),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(3, 3),
            ),
            (2, 4, 4),
        ),
        "conv-grouped-dilated-circular-sin": (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, groups=2, dilation=2, padding=2),
                make_activation("sin"),
                nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
                make_activation("sin"),
                nn.Flatten(),
                nn.Linear(32, 3),
            ),
            (2, 4, 4),
        ),
        "sll-conv-tanh": (
            lambda: nn.Sequential(SLLConv2d(2, 3), SLLConv2d(2, 2), nn.Flatten(), nn.Linear(32, 3)),
            (2, 4, 4),
        ),
        "residual-conv-silu": (
            lambda: nn.Sequential(
                Residual(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.SiLU(), nn.Conv2d(3, 2, 3, padding=1))),
                nn.Flatten(),
                nn.Linear(18, 3),
            ),
            (2, 3, 3),
        ),
    }  # fmt: skip
    return [_small(name, make, shape) for name, (make, shape) in makers.items()]


def _kept(name: str) -> nn.Module:
    return load_kept(RESULTS, name)[0]


def _digits() -> Tensor:
    return load_digits("test").as_float64()[:SAMPLES]


def _mnist() -> Tensor:
    return load_mnist_sample().as_float64()[:SAMPLES]


def _trained() -> list[Subject]:
    """Return the embedded networks and those of results/weights; of the dear ones what they give within a minute."""
    images = partial(_points, (3, 32, 32), 0)
    return [
        Subject("digits-embedded", load_demo_network, _digits),
        Subject("mnist-embedded", load_mnist_network, _mnist),
        *(Subject(name, partial(_kept, name), _mnist) for name in ("MNIST-3F-standard-seed0", "MNIST-6F-ccrc-seed0")),
        *(
            Subject(name, partial(_kept, name), _mnist, norms=(2.0,))
            for name in ("MNIST-4F-standard-seed0", "MNIST-5F-standard-seed0", "MNIST-6F-standard-seed0")
        ),
        *(
            Subject(name, partial(_kept, name), images, norms=(2.0,), methods=("product",))
            for name in ("6C2F-ours-seed0", "Lip-3C1F-ours-seed0")
        ),
    ]


def _all() -> Mapping[str, Subject]:
    found = [
        *_several(lambda act: _dense(act, 4, 8, 3), "dense-2", SMOOTH, 4),
        *_several(lambda act: _dense(act, 5, 7, 6, 5, 3), "dense-4", (*SMOOTH, "relu", "leaky_relu"), 5),
        *_several(_residual, "residual", SMOOTH, 4),
        *_several(_convolutional, "conv", (*SMOOTH, "relu"), 1, 4, 4),
        *_several(_contracting, "sll", ("tanh", "sigmoid", "centred_softplus", "relu"), 5),
        *_single_ones(),
        *_trained(),
    ]
    return {subject.name: subject for subject in found}


SUBJECTS = _all()
"""Every network of the baseline, by name."""
