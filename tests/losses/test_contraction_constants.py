"""Constants of SLL stacks in training: from below near what certifies, differentiable, without a word to the host."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.losses import Constants
from curvcert.losses.constants import GeneralStep
from curvcert.losses.contraction_constants import ContractionStep, as_sll_stack
from curvcert.network import trace
from curvcert.nn import Normalise, PadChannels, ScaledAveragePool2d, SLLConv2d, SLLDense, UnitRowLinear, lip_3c1f
from curvcert.operators import Conv2d
from curvcert.operators.khatri_rao import conv_hadamard_norm_upper_bound
from tests.bounds.curvature.search import ROUNDING, CurvatureSearch

F64 = torch.float64
NAMES = ("lipschitz", "curvature", "pair_lipschitz", "pair_curvature")
C = 4 / 27**0.5


def stack(dtype: torch.dtype = F64, std: float = 1.0) -> nn.Sequential:
    """Return a small Lip-3C1F: channels padded, convolutions, pooling, a dense layer and unit rows."""
    torch.manual_seed(7)
    model = nn.Sequential(
        Normalise([0.4], [std]),
        PadChannels(2),
        nn.Sequential(SLLConv2d(2, 3, 3), SLLConv2d(2, 2, 3)),
        ScaledAveragePool2d(2),
        nn.Flatten(),
        SLLDense(8, 6),
        UnitRowLinear(8, 3),
    ).to(dtype)
    for module in model.modules():
        if isinstance(module, SLLDense | SLLConv2d):
            nn.init.normal_(module.log_scale, std=0.3)
    return model


def conv_last() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(SLLConv2d(1, 2, 3), nn.Flatten(), nn.Linear(16, 3)).to(F64)


MODELS = {"stack": stack, "scaled": lambda: stack(std=0.5), "conv last": conv_last}
X = torch.zeros(1, 1, 4, 4, dtype=F64)


def listed(table: Tensor) -> Tensor:
    assert torch.equal(table, table.T)
    assert float(table.diagonal().abs().max()) == 0.0
    return torch.stack([table[i, j] for i, j in combinations(range(len(table)), 2)])


@torch.no_grad()
def own_constant(layer: SLLDense | SLLConv2d) -> float:
    """Return c ||D^(1/2) W|| sqrt(lambda_max((D^(1/4) W W' D^(1/4)) squared entrywise)), from matrices and bounds."""
    weight, d = layer.effective()
    if isinstance(layer, SLLDense):
        V = d[:, None] ** 0.25 * weight
        square = float(torch.linalg.eigvalsh((V @ V.T) ** 2)[-1])
        return C * float(torch.linalg.matrix_norm(d[:, None] ** 0.5 * weight, 2)) * square**0.5
    root, quarter = (
        Conv2d(d[:, None, None, None] ** power * weight, (weight.shape[1], 4, 4), padding=((1, 1), (1, 1)))
        for power in (0.5, 0.25)
    )
    return C * float(torch.linalg.matrix_norm(root.as_matrix(), 2)) * float(conv_hadamard_norm_upper_bound(quarter))


def converged(model: nn.Module, block_bound="hadamard", x: Tensor = X) -> ContractionStep:
    step = Constants(model, x, block_bound, steps=600)()
    assert isinstance(step, ContractionStep)
    return step


@pytest.mark.parametrize("name", MODELS)
def test_the_constants_are_sums_over_the_layers(name: str) -> None:
    model = MODELS[name]()
    scale, last = 2.0 if name == "scaled" else 1.0, model[-1]
    V = (last.effective() if isinstance(last, UnitRowLinear) else last.weight).detach()
    now = converged(model)
    distances = torch.stack([(V[i] - V[j]).norm() for i, j in combinations(range(3), 2)])
    torch.testing.assert_close(listed(now.pair_lipschitz.detach()), scale * distances)
    length = float(torch.linalg.matrix_norm(V, 2))
    assert now.lipschitz.item() == pytest.approx(scale * length)
    layers = [module for module in model.modules() if isinstance(module, SLLDense | SLLConv2d)]
    total = sum(own_constant(layer) for layer in layers)
    assert now.curvature.item() == pytest.approx(scale**2 * length * total, rel=1e-4)
    if name == "conv last":
        torch.testing.assert_close(listed(now.pair_curvature.detach()), distances * total, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_bound", ["product", "hadamard"])
def test_nothing_that_a_search_finds_exceeds_the_converged_constants(name: str, block_bound) -> None:
    model = MODELS[name]()
    network = trace(model.eval(), X)
    now = converged(model, block_bound)
    found = CurvatureSearch(network, 2.0, 2.0).everywhere(6)
    assert float(found) <= now.curvature.item() * (1 + 1e-3)
    pairs = CurvatureSearch(network.all_differences(), 2.0, 2.0, scalars=True).everywhere(6)
    assert bool((pairs <= listed(now.pair_curvature.detach()) * (1 + 1e-3)).all())
    assert bool((pairs >= 0.05 * listed(now.pair_curvature.detach())).all())


def test_hadamard_is_never_above_product() -> None:
    model = stack()
    product, hadamard = converged(model, "product"), converged(model)
    assert hadamard.curvature.item() <= product.curvature.item() * (1 + ROUNDING)
    assert bool((hadamard.pair_curvature <= product.pair_curvature * (1 + ROUNDING)).all())


def test_certified_constants_are_not_far_from_those_in_training() -> None:
    model = stack()
    network, now = trace(model.eval(), X), converged(model)
    assert bool((lipschitz(network, pair="all").value <= listed(now.pair_lipschitz.detach()) * (1 + 1e-9)).all())
    ratio = curvature(network, pair="all").value / listed(now.pair_curvature.detach())
    assert float(ratio.min()) > 0.3 and float(ratio.max()) < 1.05


def test_the_last_layer_alone_is_exact() -> None:
    layer, last = SLLDense(1, 1), nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.fill_(3.0), layer.log_scale.zero_(), last.weight.copy_(torch.tensor([[2.0], [-1.0]]))
    now = converged(nn.Sequential(layer, last).to(F64), x=torch.zeros(1, 1, dtype=F64))
    # x - (2/3) tanh(3 x), up to the floor in T
    assert now.pair_curvature[0, 1].item() == pytest.approx(3 * 6 * C, rel=1e-6)
    assert now.curvature.item() == pytest.approx(5**0.5 * 6 * C, rel=1e-6)


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("block_bound", ["product", "hadamard"])
def test_gradients_are_finite_differences(key: str, block_bound) -> None:
    model = stack()
    constants = Constants(model, X, block_bound, steps=300)
    _ = getattr(constants(), key)
    getattr(constants(), key).sum().backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    assert len(weights) >= (1 if "lipschitz" in key else 7)
    generator = torch.Generator().manual_seed(11)
    direction = [torch.randn(p.shape, dtype=F64, generator=generator) for p in weights]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(weights, direction, strict=True))
    values = []
    for step in (1e-5, -2e-5, 1e-5):
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
        values.append(float(getattr(constants(), key).detach().sum()))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3)


class HostForbidden(TorchDispatchMode):
    """Refuse what waits for the device or copies from the host: what no CUDA graph can capture."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block_bound", ["product", "hadamard"])
def test_a_step_never_asks_the_host(block_bound) -> None:
    model = stack(torch.float32)
    constants = Constants(model, X, block_bound)
    with HostForbidden():
        now = constants()
        total = now.lipschitz + now.curvature + now.pair_lipschitz.sum() + now.pair_curvature.sum()
        total.backward()
    assert now.dtype == total.dtype == torch.float32
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    with pytest.raises(AssertionError, match="lift_fresh"), HostForbidden():
        torch.tensor([1.0])


@pytest.mark.parametrize("block_bound", ["product", "hadamard"])
def test_a_step_makes_every_tensor_on_the_device_of_the_weights(block_bound) -> None:
    model = stack(torch.float32)
    constants = Constants(model, X, block_bound)
    # On the meta device no value can be read, and none of the host's tensors can be mixed in.
    model.to("meta"), constants.to("meta")
    now = constants()
    total = now.lipschitz + now.curvature + now.pair_lipschitz.sum() + now.pair_curvature.sum()
    total.backward()
    assert total.is_meta and all(p.grad.is_meta for p in model.parameters() if p.grad is not None)


def test_one_warm_step_at_a_time_follows_moving_weights() -> None:
    model = stack(torch.float32)
    constants = Constants(model, X, "hadamard")
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=1e-4)
        found = constants()
        _ = found.curvature, found.pair_curvature
    truth = converged(model.to(F64))
    assert found.curvature.item() == pytest.approx(truth.curvature.item(), rel=1e-3)
    torch.testing.assert_close(found.pair_curvature.double(), truth.pair_curvature, rtol=1e-3, atol=0)


def test_a_state_dict_resumes_and_a_restart_forgets() -> None:
    model = stack()
    constants, twin = Constants(model, X, "hadamard"), Constants(model, X, "hadamard")
    assert list(constants.parameters()) == []
    first = constants().pair_curvature
    for _ in range(3):
        _ = constants().pair_curvature
    twin.load_state_dict(constants.state_dict())
    assert torch.equal(constants().pair_curvature, twin().pair_curvature)
    constants.restart()
    assert torch.equal(constants().pair_curvature, first)


@pytest.mark.parametrize(
    "inner",
    [(nn.Tanh(),), (nn.Linear(4, 4),), (nn.AvgPool1d(1),), (nn.Linear(4, 4), nn.Tanh())],
    ids=["activation", "linear", "pooling", "layer"],
)
def test_what_is_no_stack_is_left_to_the_general_recursions(inner) -> None:
    model = nn.Sequential(SLLDense(4), *inner, nn.Linear(4, 2)).to(F64)
    assert as_sll_stack(model, torch.zeros(1, 4, dtype=F64)) is None
    assert as_sll_stack(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 4)) is None


def test_a_subclass_may_compute_something_else() -> None:
    class Doubled(SLLDense):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert as_sll_stack(nn.Sequential(Doubled(4), nn.Linear(4, 2)), torch.zeros(1, 4)) is None


def test_an_activation_in_between_takes_the_general_path() -> None:
    model = nn.Sequential(SLLDense(4), nn.Tanh(), nn.Linear(4, 2))
    assert isinstance(Constants(model, torch.zeros(1, 4))(), GeneralStep)


def test_the_architecture_is_a_stack_with_its_last_layer_folded() -> None:
    model = lip_3c1f(channels=4, hidden=8, mean_shift=[0.5, 0.5, 0.5])
    found = as_sll_stack(model, torch.zeros(1, 3, 32, 32))
    assert found is not None
    assert found.shapes == ((4, 32, 32),) * 3 + ((256,),)
    assert found.folded and found.fixed == 1.0
