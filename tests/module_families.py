"""Modules as data: graphs that are no chains, as people write them in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class NestedResidual(nn.Module):
    """x + f(x + g(x)), with two activations in the outer branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.outer = nn.Sequential(nn.Sigmoid(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.outer(x + self.inner(x)))


class DenseNet(nn.Module):
    """Every layer reads all that came before; the sum of two branches at the end makes it no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + 3 * k, 3) for k in range(3))
        self.last, self.side = nn.Linear(13, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for layer in self.layers:
            found = torch.cat([found, torch.tanh(layer(found))], 1)
        return self.last(found) + torch.sin(self.side(x))


class UNet(nn.Module):
    """Convolutions down and up again, with a skip at both sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 12, 1)
        self.last = nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        low = torch.tanh(self.down(first))
        low = low + nn.functional.silu(self.middle(low))
        up = torch.tanh(self.up(low)).reshape(-1, 3, 4, 4)
        return self.last(torch.cat([up, first], 1).flatten(1))


class InputConvex(nn.Module):
    """Every layer also reads the input."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.passes = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.last, self.activation = nn.Linear(5, 3), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        z = self.activation(self.reads[0](x))
        for on, read in zip(self.passes, list(self.reads)[1:], strict=True):
            z = self.activation(on(z) + read(x))
        return self.last(z)


class RungeKutta(nn.Module):
    """A step of the classical Runge-Kutta method: one vector field, used four times."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = 0.5
        k1 = self.field(x)
        k2 = self.field(x + h / 2 * k1)
        k3 = self.field(x + h / 2 * k2)
        k4 = self.field(x + h * k3)
        return self.last(x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))


class Ensemble(nn.Module):
    """The mean of two networks of different shapes, the second on the mirrored input."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.other = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) + self.other(x.flip(1))) / 2


class Halves(nn.Module):
    """Two halves, each changed by what the other becomes, joined the other way round and turned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        a = a + torch.tanh(self.left(b))
        b = b + torch.sin(self.right(a))
        return self.last(torch.cat([b, a], 1).flip(1))


class Rectified(nn.Module):
    """A residual block of two rectifiers, and max-pooling beside average pooling: kinks, which have no curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.relu(self.second(torch.relu(self.first(x))))
        pooled = [nn.functional.max_pool2d(y, 2), nn.functional.avg_pool2d(y, 2)]
        return self.last(torch.cat(pooled, 1).flatten(1))


@dataclass(frozen=True)
class ModuleGraph:
    """A kind of module, and the shape of one input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    smooth: bool = True

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", "")

    def model(self, seed: int = 1) -> nn.Module:
        """Return the module in eval mode, always with the same weights for a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().eval()

    def inputs(self, batch: int = 3) -> Tensor:
        """Return random inputs."""
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(2))


MODULES = [
    ModuleGraph(NestedResidual),
    ModuleGraph(DenseNet),
    ModuleGraph(UNet, (1, 4, 4)),
    ModuleGraph(InputConvex),
    ModuleGraph(RungeKutta),
    ModuleGraph(Ensemble),
    ModuleGraph(Halves),
    ModuleGraph(Rectified, (1, 4, 4), smooth=False),
]
SMOOTH_MODULES = [graph for graph in MODULES if graph.smooth]
"""Those that have a curvature."""
NAMES = [graph.name for graph in MODULES]


def trained(graph: ModuleGraph, steps: int = 60) -> nn.Module:
    """Return the module after some steps of training in the ordinary way, on classes that a random direction cuts."""
    model, x = graph.model(), torch.randn(200, *graph.shape, generator=torch.Generator().manual_seed(3))
    projected = x.flatten(1) @ torch.linspace(-1.0, 1.0, x[0].numel())
    y = (projected > -0.5).long() + (projected > 0.5).long()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model
