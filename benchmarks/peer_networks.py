"""The networks that certificates are compared on: ordinary ones, and ones trained for certificates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import RESULTS
from curvcert.data import load_digits
from curvcert.data.demo_network import load_demo_network
from curvcert.data.mnist_sample import load_mnist_network, load_mnist_sample
from curvcert.training import load_kept

STEPS, BATCH, RATE = 2000, 128, 2e-3


@dataclass(frozen=True)
class Peer:
    """A network to compare on: what it is, how it was trained, and the images that it reads.

    `ordinary` says that it was trained for accuracy alone, `smooth` that it has no kinks.
    """

    model: Callable[[Path], nn.Module]
    images: Callable[[], tuple[Tensor, Tensor]]
    ordinary: bool = True
    smooth: bool = True
    dense: bool = True


def dense(activation: Callable[[], nn.Module], *widths: int) -> nn.Sequential:
    """Return a dense network of images with an activation between its layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def convolutional(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return two convolutions and two dense layers on the digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        activation(),
        nn.Conv2d(8, 16, 4, stride=2, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(256, 32),
        activation(),
        nn.Linear(32, 10),
    )


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the test images of the embedded digits."""
    data = load_digits("test")
    return data.as_float64(), data.labels


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """Return the embedded test images of MNIST."""
    data = load_mnist_sample()
    return data.as_float64(), data.labels


def trained(name: str, make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Return a network trained on the digits by cross-entropy alone; kept in a folder, as training takes a while."""
    path = folder / f"{name}.safetensors"
    torch.manual_seed(0)
    model = make()
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    data = load_digits("train")
    x, y = data.as_float64().float(), data.labels
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        index = torch.randint(len(x), (BATCH,))
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model.eval()


def _ordinary(name: str, make: Callable[[], nn.Module], smooth: bool = True, dense: bool = True) -> Peer:
    return Peer(lambda folder: trained(name, make, folder), digits, smooth=smooth, dense=dense)


def _dense_ones() -> dict[str, Peer]:
    ones: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
        ("tanh", nn.Tanh, (64, 64)),
        ("tanh", nn.Tanh, (100, 100, 100)),
        ("tanh", nn.Tanh, (100, 100, 100, 100, 100)),
        ("sigmoid", nn.Sigmoid, (100, 100)),
        ("sigmoid", nn.Sigmoid, (200, 200, 200, 200)),
        ("softplus", nn.Softplus, (100, 100)),
        ("softplus", nn.Softplus, (100, 100, 100, 100)),
        ("SiLU", nn.SiLU, (100, 100, 100)),
        ("GELU", nn.GELU, (100, 100, 100)),
        ("ReLU", nn.ReLU, (100, 100, 100)),
        ("ReLU", nn.ReLU, (100, 100, 100, 100, 100)),
    )
    found = {}
    for activation, make, hidden in ones:
        name = f"{activation} 64-{hidden[0]}^{len(hidden)}-10"
        found[name] = _ordinary(
            name.replace("^", "x").replace(" ", "-"),
            lambda make=make, hidden=hidden: dense(make, 64, *hidden, 10),  # type: ignore[misc]
            smooth=activation != "ReLU",
        )
    return found


PEERS: Mapping[str, Peer] = {
    **_dense_ones(),
    "conv tanh": _ordinary("conv-tanh", lambda: convolutional(nn.Tanh), dense=False),
    "conv SiLU": _ordinary("conv-SiLU", lambda: convolutional(nn.SiLU), dense=False),
    "demo conv tanh": Peer(lambda _: load_demo_network(), digits, ordinary=False, dense=False),
    "MNIST-6F standard": Peer(lambda _: load_kept(RESULTS, "MNIST-6F-standard-seed0")[0], mnist),
    "MNIST-6F CCRC": Peer(lambda _: load_kept(RESULTS, "MNIST-6F-ccrc-seed0")[0], mnist, ordinary=False),
    "embedded MNIST": Peer(lambda _: load_mnist_network(), mnist, ordinary=False),
}
"""Every network by its name: 17 of them."""
