"""Kernels in place of matrices: every map beside its matrix, every constant beside the largest value that is found."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian

import curvcert
from curvcert.certificates import checkable
from curvcert.certificates.checkable import known_by_kernels
from curvcert.checker import check_certificate, evaluate_network, reading
from curvcert.checker.facts import Facts
from curvcert.checker.limits import TooLarge
from curvcert.checker.model import Affine, Model, pair_rows
from curvcert.checker.outward import Enclosed
from curvcert.checker.reading import read_model
from curvcert.checker.windows import Stencil, Window, unit
from curvcert.network import Network
from curvcert.network.network_file import save_network
from curvcert.nn import SLLConv2d, SLLDense
from tests.certificates.saved import forged


@pytest.fixture
def without_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every network as one whose matrices are too large."""

    def refuse(*_: object) -> None:
        raise TooLarge("too large")

    monkeypatch.setattr(reading, "_explicit_nodes", refuse)


def windows() -> list[Window]:
    """Windows of all kinds: strides, paddings that differ, kernels beyond the image, a point, few positions."""
    draw = np.random.default_rng(0)
    found = []
    sizes = ((2, 5, 6), (3, 4, 4))
    for (c, h, w), taps, stride, first in product(
        sizes, ((1, 1), (3, 2), (4, 4)), ((1, 1), (2, 1), (2, 3)), (0, -1, -2)
    ):
        height, width = ((n - 2 * first - k) // s + 1 for n, k, s in zip((h, w), taps, stride, strict=True))
        kernel, off = draw.normal(size=(3, c, *taps)), np.zeros((3, c))
        if height > 0 and width > 0:
            found.append(Window(Stencil(kernel, (first, first), stride, off), (c, h, w), (3, height, width)))
    # On a circle of three positions the frequency at which these signs add up is missing.
    signs = np.array([[[[-1.0, 1.0, -1.0]]]])
    return [*found, Window(Stencil(signs, (0, -1), (1, 1), np.zeros((1, 1))), (1, 1, 3), (1, 1, 3))]


def matrix_of(window: Window) -> np.ndarray:
    """Return the matrix, position by position."""
    stencil, (_, h, w), (_, height, width) = window.stencil, window.source, window.target
    matrix = np.zeros((*window.target, *window.source))
    outputs, inputs, *taps = stencil.kernel.shape
    for i, j, a, b in np.ndindex(height, width, *taps):
        y, x = i * stencil.stride[0] + stencil.first[0] + a, j * stencil.stride[1] + stencil.first[1] + b
        if 0 <= y < h and 0 <= x < w:
            for o, c in np.ndindex(outputs, inputs):
                matrix[o, i, j, c, y, x] = stencil.kernel[o, c, a, b]
    return matrix.reshape(*window.shape)


def test_windows_are_the_matrices_that_they_stand_for() -> None:
    draw = np.random.default_rng(1)
    for window in windows():
        A, x, g = matrix_of(window), draw.normal(size=window.shape[1]), draw.normal(size=(3, window.shape[0]))
        np.testing.assert_allclose(window.on(x), A @ x, atol=1e-12)
        np.testing.assert_allclose(window.size_on(abs(x)), abs(A) @ abs(x), atol=1e-12)
        np.testing.assert_allclose(window.pulled(g), g @ A, atol=1e-12)
        np.testing.assert_allclose(window.size_pulled(abs(g)), abs(g) @ abs(A), atol=1e-12)
        np.testing.assert_allclose(window.row_lengths, np.linalg.norm(A, axis=1), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(window.column_lengths, np.linalg.norm(A, axis=0), rtol=1e-9, atol=1e-12)


def test_norms_of_windows_are_bounds() -> None:
    tight = []
    for window in windows():
        A = matrix_of(window)
        for p in (1, 2, np.inf):
            assert np.linalg.norm(A, p) <= window.norm_in(p)
        tight.append(np.linalg.norm(A, 2) / window.norm)
        assert np.linalg.norm(abs(A), 2) <= window.absolute
        both = np.sqrt(np.linalg.eigvalsh((A @ A.T) ** 2)[-1])
        top = np.linalg.svd(A)[2][0]
        assert np.linalg.norm((A @ top) ** 2) <= min(window.hadamard, both) * (1 + 1e-12)
    assert max(tight) > 0.9 and np.median(tight) > 0.6


def test_a_norm_counts_what_the_kernel_is_wrong_by() -> None:
    window = windows()[3]
    wrong = Stencil(window.stencil.kernel, window.stencil.first, window.stencil.stride, np.full((3, 2), 0.1))
    for p in (1, 2, np.inf):
        assert Window(wrong, window.source, window.target).norm_in(p) >= window.norm_in(p) + 0.1


def test_composed_kernels_are_products_and_sums() -> None:
    """On an image that is large beside the kernels, position by position."""
    draw = np.random.default_rng(2)
    for stride, second in product(((1, 1), (2, 1)), ((1, 1), (2, 2))):
        one = Stencil(draw.normal(size=(3, 2, 3, 2)), (-1, 0), stride, np.zeros((3, 2)))
        two = Stencil(draw.normal(size=(2, 3, 2, 3)), (0, -1), second, np.zeros((2, 3)))
        whole = one.behind(two).plus(one.behind(two).times(-0.5))
        first = Window(one, (2, 24, 24), (3, 20 // stride[0], 20 // stride[1]))
        then = Window(two, first.target, (2, 8 // second[0], 8 // second[1]))
        both = Window(whole, first.source, then.target)
        inner = slice(2, 8 // second[0] - 2)
        shown = both.on(x := draw.normal(size=first.shape[1])).reshape(then.target)[:, inner, inner]
        np.testing.assert_allclose(shown, 0.5 * then.on(first.on(x)).reshape(then.target)[:, inner, inner], atol=1e-12)
    assert unit(3).norm(2.0, (4, 4)) == pytest.approx(1)


class Skip(nn.Module):
    """A sum of an image and two convolutions of it with an activation between them."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__()
        self.inner, self.act = nn.Conv2d(channels, 3, 3, padding=1), act
        self.outer = nn.Conv2d(3, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.act(self.inner(x)))


def network(seed: int, layers: Sequence[nn.Module], size: int = 6, gain: float = 1.5) -> Network:
    torch.manual_seed(seed)
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)).double()
    model(torch.zeros(1, 2, size, size, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= gain
    return curvcert.trace(model.eval(), torch.zeros(1, 2, size, size, dtype=torch.float64))


CASES = {
    "strides": lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 4, 2, 1), nn.Tanh()],
    "a small image": lambda: [
        nn.Conv2d(2, 4, 4, 2, 1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, 1, 1),
        nn.Softplus(),
        nn.Conv2d(4, 3, 3, 2, 1),
        nn.Tanh(),
    ],
    "dense layers": lambda: [nn.Conv2d(2, 3, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.LazyLinear(5), nn.Tanh()],
    "two convolutions in a row": lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()],
    "a pool between": lambda: [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Sigmoid(),
        nn.AvgPool2d(2, 1),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.Tanh(),
    ],
    "a skip": lambda: [
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Tanh(),
        Skip(2, nn.Tanh()),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Tanh(),
    ],
    "an activation of an activation": lambda: [nn.Conv2d(2, 3, 3, 2, 1), nn.SiLU(), nn.Tanh()],
    "contracting blocks": lambda: [
        SLLConv2d(2, 3, 3, "tanh"),
        SLLConv2d(2, 3, 3, "tanh"),
        nn.Flatten(),
        SLLDense(72, 9, "tanh"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("without_matrices")
def test_constants_are_bounds_and_values_are_the_networks(tmp_path: Path, name: str) -> None:
    for seed in range(1):
        net = network(seed, CASES[name](), gain=1.0 if "contracting" in name else 1.5)
        model = read_model(save_network(net, tmp_path / "network"))
        assert model.wide
        x = torch.randn(3, *net.in_shape, dtype=torch.float64)
        value, error = evaluate_network(tmp_path / "network", x.numpy())
        assert (np.abs(value - net(x).detach().numpy()) <= error + 1e-12).all()
        assert error.max() < 1e-10
        facts = Facts(model)
        slopes, bends = climbed(net, x)
        for p in (1.0, 2.0, np.inf):
            assert slopes[p] <= facts.L(p)[0, 1]
        assert bends <= facts.K[0, 1]
        assert facts.L(2.0)[0, 1] < 12 * slopes[2.0]


@pytest.mark.parametrize("name", [name for name in CASES if name != "contracting blocks"])
@pytest.mark.usefixtures("without_matrices")
def test_any_slopes_that_activations_have_are_within_the_constants(tmp_path: Path, name: str) -> None:
    """Gradients forward and back with slopes that are lowest, steepest or anything between, position by position."""
    model = read_model(save_network(network(3, CASES[name](), size=4), tmp_path / "network"))
    facts, draw, last = Facts(model), np.random.default_rng(0), len(model.nodes) - 1
    growth, curvature = facts.image_growth(2.0), facts.image_curvature
    matrices = {
        k: [(term.source, np.eye(node.size) if term.map is None else columns_of(term.map)) for term in node.terms]
        for k, node in enumerate(model.nodes)
        if isinstance(node, Affine)
    }
    for attempt in range(8):
        slopes = {k: drawn(node.act.slope, node.size, attempt, draw) for k, node in model.activated.items()}
        J, B = {0: np.eye(model.nodes[0].size)}, dict.fromkeys(range(last + 1), np.zeros(()))
        for k in range(1, last + 1):
            J[k] = sum(A @ J[v] for v, A in matrices[k]) if k in matrices else slopes[k][:, None] * J[read_by(model, k)]
            assert np.linalg.norm(J[k], 2) <= growth.values[k]
        for k, (M, error) in growth.above.items():
            assert np.linalg.eigvalsh(M - J[k] @ J[k].T)[0] >= -error - 1e-12 * np.linalg.norm(M, 2)
        B[last] = pair_rows(3, None)
        for k in range(last, 0, -1):
            for v, A in matrices.get(k, [(read_by(model, k), None)]):
                B[v] = B[v] + (B[k] * slopes[k] if A is None else B[k] @ A)
        for k, size in curvature.sizes.items():
            assert (np.linalg.norm(B[k], axis=1) <= size).all()
        for k, (low, high) in curvature.entries.items():
            assert ((low <= B[k] + 1e-9) & (B[k] <= high + 1e-9)).all()
        for p, dual in ((1.0, np.inf), (2.0, 2.0), (np.inf, 1.0)):
            assert (np.linalg.norm(B[0], ord=dual, axis=1) <= facts.L(p)[np.triu_indices(3, 1)]).all()


def read_by(model: Model, k: int) -> int:
    return model.activated[k].source if k in model.activated else 0


def columns_of(A: Window | Enclosed) -> np.ndarray:
    return np.array([A.on(e) for e in np.eye(A.shape[1])]).T


def drawn(slope: tuple[float, float], size: int, attempt: int, draw: np.random.Generator) -> np.ndarray:
    low, high = slope
    if attempt < 2:
        return np.full(size, slope[attempt])
    return (
        draw.uniform(low, high, size) if attempt == 2 else np.where(draw.random(size) < 0.25 * (attempt - 3), low, high)
    )


def climbed(net: Network, x: torch.Tensor) -> tuple[dict[float, float], float]:
    """Return the steepest gradients (in dual norms) and the largest Hessian of f_0 - f_1 that ascents meet."""

    def difference(point: torch.Tensor) -> torch.Tensor:
        return net(point[None])[0] @ torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)

    slopes, bends = dict.fromkeys((1.0, 2.0, np.inf), 0.0), 0.0
    for p, dual in ((1.0, np.inf), (2.0, 2.0), (np.inf, 1.0)):
        for start in (*x, torch.zeros_like(x[0])):
            point = start.clone().requires_grad_()
            optimiser = torch.optim.Adam([point], lr=0.1)
            for _ in range(15):
                (g,) = torch.autograd.grad(difference(point), point, create_graph=True)
                size = torch.linalg.vector_norm(g, ord=dual)
                slopes[p] = max(slopes[p], float(size.detach()))
                optimiser.zero_grad()
                (-size).backward()
                optimiser.step()
            if p == 2:
                H = hessian(difference, point.detach()).reshape(x[0].numel(), -1)
                bends = max(bends, float(torch.linalg.matrix_norm(H, 2)))
    return slopes, bends


@pytest.mark.usefixtures("without_matrices")
def test_an_attained_constant_is_no_smaller(tmp_path: Path) -> None:
    """Where everything is positive and activations are at their steepest, L is the network's slope at 0."""
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 4, 2, 1), nn.Tanh()]
    net = network(0, layers)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.abs() if parameter.ndim > 1 else torch.zeros_like(parameter))
        model[-1].weight[1] = 0
    net = curvcert.trace(model.eval(), torch.zeros(1, 2, 6, 6, dtype=torch.float64))
    point = torch.zeros(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(net(point)[0, 0], point)
    facts = Facts(read_model(save_network(net, tmp_path / "network")))
    for p, dual in ((1.0, np.inf), (2.0, 2.0), (np.inf, 1.0)):
        size = float(torch.linalg.vector_norm(g, ord=dual))
        assert size * (1 - 1e-12) <= facts.L(p)[0, 1] < (2.0 if p == 2 else 4.0) * size


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_certificates_of_images_are_proven_and_forgeries_are_not(tmp_path: Path, p: float) -> None:
    net = network(1, CASES["strides"]())
    torch.manual_seed(0)
    x = torch.randn(3, *net.in_shape, dtype=torch.float64)
    y = net(x).argmax(dim=1)
    curvcert.certify(net, x, y, method="product", p=p).save(tmp_path / "certificate")
    path = save_network(net, tmp_path / "network")
    found = check_certificate(tmp_path / "certificate", path, x.numpy(), y.numpy())
    assert found.holds, str(found)

    def larger(header, arrays) -> None:
        for name in ("radius", "pair_radius"):
            arrays[name] *= 40
        arrays["attack_radius"][:] = arrays["search_radius"][:] = np.inf

    found = check_certificate(forged(tmp_path / "certificate", larger), path, x.numpy(), y.numpy())
    assert set(found.status) <= {"cannot check", "contradicted"}
    assert "contradicted" in found.status and found.radii_proven[0] == 0


@pytest.mark.usefixtures("without_matrices")
def test_what_no_engine_of_images_reaches_is_not_refused(tmp_path: Path) -> None:
    net = network(1, CASES["strides"]())
    torch.manual_seed(0)
    x = torch.randn(2, *net.in_shape, dtype=torch.float64)
    y = net(x).argmax(dim=1)
    curvcert.certify(net, x, y, method="shell").save(tmp_path / "certificate")
    found = check_certificate(tmp_path / "certificate", save_network(net, tmp_path / "network"), x.numpy(), y.numpy())
    assert set(found.status) <= {"proven", "cannot check"} and not found.refused


@pytest.mark.usefixtures("without_matrices")
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_checkable_certificates_of_large_images_are_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    net = network(1, CASES["strides"]())
    assert not known_by_kernels(net)
    monkeypatch.setattr(checkable, "MOST_ENTRIES", -(2**20))
    assert known_by_kernels(net)
    torch.manual_seed(0)
    x = torch.randn(2, *net.in_shape, dtype=torch.float64)
    certificate = curvcert.certify(net, x, method="checkable", p=p).save(tmp_path / "certificate")
    assert set(certificate.radii) == {"lipschitz"}
    path = save_network(net, tmp_path / "network")
    found = check_certificate(tmp_path / "certificate", path, x.numpy())
    assert found.holds and found.radii_proven == (2, 2), str(found)


def test_images_too_large_for_matrices_are_known_as_the_checker_knows_them(tmp_path: Path) -> None:
    for side in (32, 96):
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(side), nn.Flatten(), nn.Linear(4, 3)
        net = curvcert.trace(nn.Sequential(*layers).eval(), torch.zeros(1, 1, side, side))
        assert known_by_kernels(net) == read_model(save_network(net, tmp_path / "network")).wide == (side == 96)
