"""The checker's lines: never below what is sampled or climbed, as good as the certificates, and no less than proofs."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import curvcert
from curvcert.checker.activations import activation
from curvcert.checker.evaluation import forward
from curvcert.checker.reading import read_model
from curvcert.checker.relaxation import Ball, Relaxation, remainders, resting
from curvcert.network.network_file import save_network
from tests.certificates.cases import blobs, train
from tests.certificates.saved import forged, saved
from tests.checker.checking import verdict

NAMES = ("tanh", "sigmoid", "softplus(1)", "gelu", "silu", "sin", "softsign", "celu(1)", "relu", "leaky_relu(-0.5)")
KINKED = ("relu6", "hardtanh(-1,1)", "softshrink(0.5)", "hardswish")


def _ranges(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    low = draw.normal(size=count) * 3
    return low, low + 10.0 ** draw.uniform(-4, 1, count)


@pytest.mark.parametrize("name", (*NAMES, *KINKED))
def test_remainders_enclose_samples_closely(name: str) -> None:
    act = activation(name)
    assert act is not None
    low, high = _ranges(0, 400)
    s = np.random.default_rng(1).uniform(*act.slope, 400)
    least, most = remainders(act, s, s, low, high)
    z = low + np.linspace(0, 1, 2001)[:, None] * (high - low)
    values = act.value.function(z) - s * z
    assert bool((values.min(axis=0) >= least).all()) and bool((values.max(axis=0) <= most).all())
    cell = (high - low) / 2000  # what samples may miss: a bend of a smooth function, or a whole kink
    slack = 1e-10 * (1 + np.abs(values).max(axis=0)) + (act.c * cell**2 if act.smooth else 2 * act.steepest * cell)
    assert bool((most <= values.max(axis=0) + slack).all()) and bool((least >= values.min(axis=0) - slack).all())


@pytest.mark.parametrize("name", ("tanh", "gelu", "relu"))
def test_lines_rest_on_the_function(name: str) -> None:
    act = activation(name)
    assert act is not None
    low, high = _ranges(2, 200)
    middle = 0.5 * (low + high)
    for sign, s in zip((1.0, -1.0), resting(act, low, high), strict=True):
        z = low + np.linspace(0, 1, 65)[:, None] * (high - low)
        line = s * (z - middle)
        height = (sign * (act.value.function(z) - line)).max(axis=0)
        for other in (0.9, 1.1):  # at the middle no other line from this side is nearer
            turned = (sign * (act.value.function(z) - other * line)).max(axis=0)
            assert bool((height <= turned + 2e-3 * (high - low)).all())


def _network(name: str, seed: int, skip: bool) -> nn.Module:
    torch.manual_seed(seed)
    made = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "hardtanh(-1,1)": nn.Hardtanh}[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.act = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3), made()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.act(self.a(x))
            g = self.act(self.b(h))
            return self.c(g + h if skip else g)

    return Net().double().eval()


@pytest.mark.parametrize("p", (1.0, 2.0, math.inf))
@pytest.mark.parametrize("boxed", (False, True), ids=["whole balls", "cut balls"])
@pytest.mark.parametrize(("name", "skip"), (("tanh", False), ("relu", True), ("gelu", True), ("hardtanh(-1,1)", False)))
def test_no_point_of_the_region_rises_further(name: str, skip: bool, boxed: bool, p: float, tmp_path) -> None:
    model = _network(name, 3, skip)
    net = curvcert.trace(model, torch.zeros(1, 5, dtype=torch.float64))
    read = read_model(save_network(net, tmp_path / "network"))
    rows = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0], [-1.0, 0.0, 1.0]])
    for seed, radius in enumerate((0.05, 0.6, 3.0)):
        x = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        passed = forward(read, x.numpy())
        sides = (np.zeros(5), np.ones(5)) if boxed else None
        found = Relaxation(read, passed, Ball.about(x.numpy(), p, radius, sides)).rises(rows)
        climbed = _climbed(model, x, torch.from_numpy(rows), p, radius, boxed)
        assert bool((climbed <= found).all()), (climbed, found)


def test_one_neuron_rises_as_far_as_it_does(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double().eval()
    for layer, weight in ((model[0], [[1.0]]), (model[2], [[1.0], [-1.0]])):
        layer.weight.data.copy_(torch.tensor(weight))
        layer.bias.data.zero_()
    net = curvcert.trace(model, torch.zeros(1, 1, dtype=torch.float64))
    read, x = read_model(save_network(net, tmp_path / "network")), np.ones(1)
    found = Relaxation(read, forward(read, x), Ball.about(x, math.inf, 2.0, None)).rises(np.eye(2))
    assert bool((found >= [2.0, 1.0]).all()) and bool((found <= [2.0 + 1e-12, 1.0 + 1e-12]).all())


def _climbed(model: nn.Module, x: torch.Tensor, rows: torch.Tensor, p: float, r: float, boxed: bool) -> np.ndarray:
    """Return how far each row was seen to rise in the ball, or in its cut with the unit box, by ascent."""
    best = torch.zeros(len(rows), dtype=torch.float64)
    start = rows @ model(x[None])[0]
    d = torch.randn(len(rows), 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(60):
        length = torch.linalg.vector_norm(d, p, dim=2, keepdim=True).clamp(min=1e-12)
        d = torch.where((length > r) | (step == 0), d * (r / length), d)
        d = (((x + d).clamp(0, 1) if boxed else x + d) - x).detach().requires_grad_()
        rise = (
            torch.einsum("kj,knj->kn", rows, model((x + d).flatten(0, 1)).reshape(len(rows), 40, -1)) - start[:, None]
        )
        best = torch.maximum(best, rise.detach().amax(dim=1))
        (gradient,) = torch.autograd.grad(rise.sum(), d)
        d = d.detach() + 0.2 * r * torch.nn.functional.normalize(gradient, dim=2)
    return best.numpy()


@pytest.fixture(scope="module", params=(1.0, 2.0, math.inf))
def kinked(request, tmp_path_factory):
    x, y = blobs()
    model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.LeakyReLU(0.1), nn.Linear(12, 3))
    net = curvcert.trace(train(model, x, y), x[:1])
    folders = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    options = {"method": "auto", "p": request.param}
    return saved(folders[0], net, **options), saved(folders[1], net, box=(-2, 3), inside_box=True, **options)


def test_radii_by_lines_are_proven_again(kinked) -> None:
    for files in kinked:
        assert "linear" in files.held.method
        found = verdict(files)
        assert found.holds, found
        assert found.radii_proven[0] == found.radii_proven[1] > 0


@pytest.mark.parametrize(("factor", "open_"), [(1.005, True), (1.05, False)])
def test_longer_ones_are_not(kinked, factor: float, open_: bool) -> None:
    """A little beyond what these lines prove others might: whatever is further is refused."""
    for files in kinked:

        def lengthen(_: dict, arrays: dict) -> None:
            for name in ("radius", "pair_radius", "radii.linear"):
                arrays[name] *= factor

        found = verdict(files, certificate=forged(files.certificate, lengthen))
        by_lines = [s for s, way in zip(found.status, files.held.method, strict=True) if way == "linear"]
        assert by_lines and "proven" not in by_lines
        assert ("cannot check" in by_lines) == open_
        assert found.radii_proven[0] <= found.radii_proven[1] - len(by_lines)
