"""On an accelerator the same bounds and certificates come out, to float tolerance, and stay above the CPU's truth."""

import math

import pytest
import torch
from torch import nn

from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.certificates import certify
from curvcert.certificates.methods.balls import PRECISION
from curvcert.network import Network, trace
from curvcert.nn.architectures import lip_3c1f
from curvcert.operators import Conv2d, Dense, norm_upper_bound
from curvcert.operators.conv import folds
from curvcert.operators.verified import largest_eigenvalues_upper_bound

pytestmark = pytest.mark.gpu


def network() -> Network:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 4, 2, 1),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    return trace(model.eval(), torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("n", [5, 64, 300, 700])
def test_norms_are_upper_bounds_there_too(n: int) -> None:
    W = torch.randn(n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    truth = float(torch.linalg.svdvals(W)[0])
    assert truth * (1 - 1e-14) <= float(norm_upper_bound(Dense(W.cuda()))) <= truth * (1 + 1e-8)
    K = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    here, there = (norm_upper_bound(Conv2d(k, (3, 9, 9), padding=((1, 1), (1, 1)))) for k in (K, K.cuda()))
    assert math.isclose(float(here), float(there), rel_tol=1e-8)


@pytest.mark.parametrize("n", [1, 20, 100, 300])
def test_eigenvalues_of_a_batch_are_bounded_there_too(n: int) -> None:
    W = torch.randn(5, n, n + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    W[1], W[2] = 0.0, 1e-100 * W[2]
    truth = torch.linalg.eigvalsh(W @ W.mT).amax(dim=1)
    bounds = largest_eigenvalues_upper_bound((W @ W.mT).cuda(), torch.zeros(5, dtype=torch.float64).cuda()).cpu()
    assert bool((bounds >= truth * (1 - 1e-13)).all())
    assert bool((bounds <= truth * (1 + 1e-5) + 1e-30 * (truth == 0)).all())


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_the_adjoint_of_a_convolution_is_the_same_there(mode: str) -> None:
    K, y = torch.randn(4, 3, 3, 2, dtype=torch.float64), torch.randn(6, 4, 5, 8, dtype=torch.float64)
    conv = Conv2d(K, (3, 10, 9), (2, 1), ((1, 0), (0, 0)), padding_mode=mode)  # type: ignore[arg-type]
    there = conv.to(device="cuda")
    assert folds(there)
    assert not folds(conv)
    torch.testing.assert_close(there.adjoint(y.cuda()).cpu(), conv.adjoint(y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_bounds_and_certificates_agree(p: float) -> None:
    here = network()
    there = here.to("cuda")
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    for function in (lipschitz, curvature):
        values = [function(net, p=p, pair="all").value.cpu() for net in (here, there)]
        torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)
    certificates = [certify(net, x, p=p) for net in (here, there)]
    # Roundings may turn the last step of a search for the largest radius.
    torch.testing.assert_close(certificates[0].radius, certificates[1].radius.cpu(), rtol=2 * PRECISION, atol=1e-9)
    assert certify(here, x, p=p, method="lipschitz", device="cuda").radius.device.type == "cuda"


@pytest.mark.parametrize("batch", [1, 7, 250])
def test_float32_there_is_not_tf32(batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 256, 10)).eval()
    x = torch.rand(batch, 64, 16, 16)
    there = trace(model, x[:1]).to("cuda")
    off = (there.in_source_dtype(x.cuda()).double() - there(x.cuda())).abs().amax()
    assert 0 < float(off) < 1e-5


def test_a_network_of_sll_layers_is_traced_there() -> None:
    """Their transposed convolutions sum in any order, unless told not to."""
    model, x = lip_3c1f().cuda().eval(), torch.rand(4, 3, 32, 32)
    network = trace(model, x.cuda())
    torch.testing.assert_close(network(x.cuda()).float(), model(x.cuda()), rtol=1e-4, atol=1e-5)


def test_global_state_is_left_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    certify(network().to("cuda"), torch.rand(2, 1, 8, 8))
    assert torch.backends.cuda.matmul.allow_tf32 == before
