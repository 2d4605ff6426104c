"""Products of values: what they compute, how far rounding takes them, and how they stand in files."""

import pytest
import torch
from torch import Tensor, nn

import curvcert
from curvcert.checker.reading import read_model
from curvcert.errors import UnsupportedModule
from curvcert.network import Network, trace
from curvcert.network.evaluation import evaluate_with_error
from curvcert.network.network_file import network_digest
from curvcert.network.network_reading import load_network
from tests.network.cases import Function


class Gated(nn.Module):
    """A gate of every kind of shape: beside a value of its own shape, one per channel, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.one = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 1)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.value(x) * torch.sigmoid(self.gate(x))
        return self.last(h * torch.tanh(self.one(x))) * 0.5


@pytest.fixture
def gated() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    model = Gated().eval().double()
    return model, trace(model, torch.zeros(1, 3, dtype=torch.float64))


def test_values_and_jacobians_are_the_modules(gated: tuple[nn.Module, Network]) -> None:
    model, network = gated
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(network(x), model(x), atol=1e-14, rtol=1e-12)
    expected = torch.stack([torch.func.jacrev(model)(one) for one in x])
    torch.testing.assert_close(network.jacobian(x), expected, atol=1e-14, rtol=1e-12)


def test_rounding_is_bounded(gated: tuple[nn.Module, Network]) -> None:
    """Float32 copies of all values err by far more than float64 ones: their errors are bounded by theirs, scaled."""
    _, network = gated
    x = 10 * torch.randn(20, 3, dtype=torch.float64)
    output = evaluate_with_error(network, x).output
    single = (network.in_dtype(x.float().double(), torch.float32) - network(x.float().double())).abs()
    scale = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    assert bool((single <= scale * evaluate_with_error(network, x.float().double()).output.error).all())
    assert float(output.error.max()) < 1e-11


def test_a_file_holds_products(gated: tuple[nn.Module, Network], tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, network = gated
    path = curvcert.save_network(network, tmp_path / "net.safetensors")
    again = load_network(path)
    assert network_digest(again) == network_digest(network)
    x = torch.randn(3, 3, dtype=torch.float64)
    assert torch.equal(again(x), network(x))
    with pytest.raises(UnsupportedModule, match="products of values"):
        read_model(path)


def test_shapes_that_do_not_fit_are_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] * x[:, :3]

    with pytest.raises(Exception, match=r"size|shape"):
        trace(Wrong().eval(), torch.zeros(1, 3))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10])
def test_softmaxes_are_torchs_however_large_their_inputs(n: int) -> None:
    scale = nn.Parameter(torch.ones(n, dtype=torch.float64))
    for function in (torch.softmax, torch.log_softmax):
        network = trace(
            Function(lambda m, x, f=function: f(m.scale * x, 1), scale=scale).eval(),
            torch.zeros(1, n, dtype=torch.float64),
        )
        for size in (1.0, 30.0, 1e4):
            x = size * torch.randn(40, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
            torch.testing.assert_close(network(x), function(x, 1), rtol=1e-12, atol=1e-14)
    summed = trace(
        Function(lambda m, x: torch.logsumexp(m.scale * x, 1, keepdim=True), scale=scale).eval(),
        torch.zeros(1, n, dtype=torch.float64),
    )
    x = 500 * torch.randn(40, n, dtype=torch.float64)
    torch.testing.assert_close(summed(x), torch.logsumexp(x, 1, keepdim=True), rtol=1e-12, atol=1e-12)
