"""Smooth networks as data, and networks trained on the embedded digits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvcert.activations import ACTIVATIONS, ELU, TANH, Activation, softplus
from curvcert.data import load_digits
from curvcert.network import Network, trace
from tests.bounds.cases import convolutional, feed_forward, linear, residual

F64 = torch.float64

SMOOTH: dict[str, Activation] = {name: act for name, act in ACTIVATIONS.items() if act.curvature is not None} | {
    "softplus(5)": softplus(5.0),
    "elu": ELU,
}
JUMPS = ("elu", "softsign")
"""Activations whose second derivative jumps: C1 only."""


@dataclass(frozen=True)
class Case:
    """A named network."""

    name: str
    make: Callable[[], Network]


class ResidualConv(nn.Module):
    """x + G phi(W x) with convolutions, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.last = nn.Linear(2 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.outer(F.softplus(self.inner(x)))
        return self.last(torch.tanh(x).flatten(1))


def traced(model: nn.Module, *shape: int) -> Network:
    return trace(model.double().eval(), torch.zeros(1, *shape, dtype=F64))


def strided(stride: int, dilation: int, groups: int) -> Network:
    """Two convolutions, the first with a stride, a dilation and groups."""
    torch.manual_seed(stride + 10 * dilation + 100 * groups)
    first = nn.Conv2d(2, 4, 2, stride, 1, dilation, groups)
    size = (4 + 2 - dilation - 1) // stride + 1
    model = nn.Sequential(
        first, nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(2 * (size - 1) ** 2, 2)
    )
    return traced(model, 2, 4, 4)


def residual_conv() -> Network:
    torch.manual_seed(3)
    return traced(ResidualConv(), 2, 4, 4)


CASES = [
    Case("shallow tanh", lambda: feed_forward((4, 6, 3), TANH)),
    Case("deep gelu", lambda: feed_forward((3, 5, 4, 5, 3), ACTIVATIONS["gelu"], seed=7)),
    Case("sin", lambda: feed_forward((3, 4, 4, 2), ACTIVATIONS["sin"], seed=3)),
    Case("one output", lambda: feed_forward((5, 6, 1), TANH, seed=8)),
    Case("narrow middle", lambda: feed_forward((6, 1, 6, 3), TANH, seed=9)),
    Case("residual tanh", lambda: residual(4, 5, TANH)),
    Case("residual silu", lambda: residual(3, 4, ACTIVATIONS["silu"], seed=6)),
    Case("linear", lambda: linear(3, 5)),
    Case("conv with average pooling", lambda: convolutional("average")),
    Case("conv with a stride", lambda: strided(2, 1, 1)),
    Case("conv with dilation and groups", lambda: strided(1, 2, 2)),
    Case("residual conv", residual_conv),
]
IDS = [case.name for case in CASES]


@lru_cache
def trained(kind: str, regularised: bool) -> Network:
    """Train a small tanh network on the digits, with the product of squared norms as a regulariser or without."""
    torch.manual_seed(0)
    if kind == "mlp":
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)
        )
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.Conv2d(4, 6, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 10)
        )
    digits = load_digits()
    x, y = digits.as_float64().float(), digits.labels
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for step in range(120):
        pick = torch.arange(step * 128, step * 128 + 128) % len(x)
        loss = F.cross_entropy(model(x[pick]), y[pick])
        if regularised:
            sizes = [m.weight.flatten(1).square().sum() for m in model if isinstance(m, nn.Linear | nn.Conv2d)]
            loss = loss + 1e-4 * torch.stack(sizes).prod()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        assert float((model(x).argmax(1) == y).float().mean()) > 0.7
    return traced(model, 1, 8, 8)
