"""Small classifiers, trained a little on two-dimensional blobs and on the embedded digits."""

from functools import cache

import torch
from torch import Tensor, nn

from curvcert.data import load_digits
from curvcert.network import Network, trace


def blobs(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three noisy clusters in the unit square."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.2, 0.2], [0.8, 0.3], [0.4, 0.8]])
    y = torch.arange(n) % 3
    return (centres[y] + 0.1 * torch.randn(n, 2, generator=generator)).clamp(0, 1), y


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 150) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model.eval()


@cache
def planar(activation: type[nn.Module] = nn.Tanh) -> Network:
    model = nn.Sequential(nn.Linear(2, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, 3))
    x, y = blobs()
    return trace(train(model, x, y), x[:1])


@cache
def digits_network() -> tuple[Network, nn.Module]:
    data = load_digits("train")
    x, y = data.as_float64()[:600].float(), data.labels[:600]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    return trace(train(model, x, y), x[:1]), model


def digits(n: int = 40) -> tuple[Tensor, Tensor]:
    data = load_digits("test")
    return data.as_float64()[:n], data.labels[:n]
