"""Constants in training: near the true bounds, from below, differentiable, and resumed from a state dict."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from curvcert.bounds.curvature.blocks import block_curvature
from curvcert.bounds.curvature.compositional import compositional_bound, unit_lipschitz
from curvcert.bounds.curvature.unrolled_sizes import unrolled_sizes_bound
from curvcert.bounds.lipschitz.liplt import liplt_bound, liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.product import product_bound
from curvcert.bounds.types import Bound, Estimate, Global
from curvcert.errors import InvalidInput
from curvcert.losses import Constants
from curvcert.losses.constants import GeneralConstants
from curvcert.network import Block, LiveNetwork, Network, trace
from curvcert.operators import Identity, NormBounds, Zero
from curvcert.operators.estimates import NormEstimates
from tests.bounds.curvature.search import ROUNDING, CurvatureSearch
from tests.losses.cases import F64, MODELS, conv, dense
from tests.module_families import SMOOTH_MODULES, ModuleGraph

NAMES = ("lipschitz", "curvature", "pair_lipschitz", "pair_curvature")


def problems(network: Network) -> tuple[Problem, Problem]:
    whole = Problem(network, 2, 2, Global())
    return whole, Problem(network.all_differences(), 2, 2, Global(), scalars=True)


def chain_curvature(whole: Problem, norms: NormBounds, block_bound: str) -> Tensor:
    """Return the paper's recursion where the last block's curvature is that of Phi(W x) times the norm of G."""
    K = torch.zeros((), dtype=F64)
    for unit, L in zip(whole.network.activated, liplt_prefixes(whole, norms), strict=False):
        block = unit.block
        zero = Zero(block.in_shape, block.W.out_shape)
        inner = replace(block, H=zero, G=Identity(block.W.out_shape), c=torch.zeros_like(block.b))
        omega, _ = block_curvature(inner, 2, 2, norms, [block_bound])
        last = unit is whole.network.units[-1]
        K = omega * norms.norm(block.G, 2, 2) * L**2 + unit_lipschitz(unit, whole, norms, last) * K
    return K


def bounds(model: nn.Module, shape: tuple[int, ...], block_bound: str = "product") -> dict[str, Tensor]:
    """Return upper bounds by the same recursions, with norms that are bounds."""
    whole, pairs = problems(trace(model.eval(), torch.zeros(1, *shape, dtype=F64)))
    norms = NormBounds()
    chain = not any(block.is_residual for block in whole.network.blocks if isinstance(block, Block))
    compositional = compositional_bound(whole, norms, [block_bound]).value
    return {
        "lipschitz": liplt_bound(whole, norms).value,
        "curvature": chain_curvature(whole, norms, block_bound) if chain else compositional,
        "pair_lipschitz": liplt_bound(pairs, norms).value,
        "pair_curvature": unrolled_sizes_bound(pairs, norms, [block_bound]).value,
    }


def listed(name: str, value: Tensor) -> Tensor:
    """Return a table of pairs in the order of the bounds."""
    if not name.startswith("pair"):
        return value
    assert torch.equal(value, value.T)
    assert float(value.diagonal().abs().max()) == 0.0
    return torch.stack([value[i, j] for i, j in combinations(range(len(value)), 2)])


@pytest.mark.parametrize(
    ("name", "block_bound"),
    [("dense", "product"), ("dense", "hadamard"), ("conv", "product"), ("SLL", "product"), ("SLL", "hadamard")],
)
def test_estimates_approach_the_bounds_from_below(name: str, block_bound) -> None:
    make, shape = MODELS[name]
    model = make()
    upper = bounds(model, shape, block_bound)
    constants = Constants(model, torch.zeros(1, *shape, dtype=F64), block_bound, steps=60)
    for _ in range(1 if name == "SLL" else 4):
        now = constants()
        found = {key: listed(key, getattr(now, key).detach()) for key in NAMES}
    for key in NAMES:
        # A convolution's norm bound has a slack of its own, and SLL's norms converge slowly.
        slack = {"dense": 1e-6, "conv": 0.05, "SLL": 0.05}[name]
        assert bool((found[key] <= upper[key] * (1 + 1e-12)).all()), key
        assert bool((found[key] >= upper[key] * (1 - slack)).all()), (key, found[key] / upper[key])


def test_a_convolution_keeps_the_product_bound() -> None:
    model, x = conv(), torch.zeros(1, 1, 4, 4, dtype=F64)
    found = [Constants(model, x, block_bound)().curvature for block_bound in ("product", "hadamard")]
    assert torch.equal(*found)


@pytest.mark.parametrize("make", [dense, conv])
def test_the_chain_gives_the_numbers_of_the_general_recursions(make) -> None:
    model = make()
    x = torch.zeros(1, *(MODELS[make.__name__][1]), dtype=F64)
    constants = Constants(model, x, steps=400)
    general = GeneralConstants(LiveNetwork(model, x), "product", steps=400)()
    now = constants()
    for key in ("lipschitz", "pair_lipschitz", "pair_curvature"):
        torch.testing.assert_close(getattr(now, key), getattr(general, key), rtol=1e-5, atol=0)
    # The general recursion also tries other norms inside the last block.
    assert now.curvature.item() >= general.curvature.item() * (1 - 1e-6)


def test_reading_other_constants_at_another_step_mixes_no_warm_starts() -> None:
    model, x = dense(), torch.zeros(1, 4, dtype=F64)
    constants = GeneralConstants(LiveNetwork(model, x), "product", steps=1)
    for _ in range(100):
        expected = constants().pair_curvature
    _ = constants().lipschitz, constants().curvature
    torch.testing.assert_close(constants().pair_curvature, expected, rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key"), [*product(("dense", "conv"), NAMES), ("SLL", "curvature"), ("SLL", "pair_curvature")]
)
def test_gradients_are_finite_differences(name: str, key: str) -> None:
    make, shape = MODELS[name]
    model = make()
    constants = Constants(model, torch.zeros(1, *shape, dtype=F64), steps=60)
    for _ in range(2 if name == "SLL" else 8):
        value = getattr(constants(), key).sum()
    value.backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    generator = torch.Generator().manual_seed(11)
    direction = [torch.randn(p.shape, dtype=F64, generator=generator) for p in weights]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(weights, direction, strict=True))
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
        values.append(float(getattr(constants(), key).detach().sum()))
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=-step)
    # Off a chain, the last block's form starts its iteration afresh at every step, and ends it early.
    rounding = 1e-2 if name == "SLL" and key == "pair_curvature" else 1e-4
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=rounding)


def test_one_warm_step_at_a_time_follows_moving_weights() -> None:
    model = dense(torch.float32)
    constants = Constants(model, torch.zeros(1, 4))
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=1e-4)
        found = float(constants().curvature.detach())
    assert found == pytest.approx(float(bounds(model.to(F64), (4,))["curvature"]), rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_resumes_the_norms_bit_for_bit(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.zeros(1, *shape, dtype=F64)
    constants, twin = Constants(model, x), Constants(model, x)
    for both in (constants, twin):
        _ = both().pair_curvature  # makes the buffers
    for _ in range(3):
        _ = constants().pair_curvature
    assert constants.state_dict()
    twin.load_state_dict(constants.state_dict())
    assert torch.equal(constants().pair_curvature, twin().pair_curvature)
    assert not torch.equal(Constants(model, x)().pair_curvature, constants().pair_curvature)


@pytest.mark.parametrize("name", MODELS)
def test_restarting_forgets_what_was_found(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.zeros(1, *shape, dtype=F64)
    constants = Constants(model, x)
    first = constants().curvature
    for _ in range(3):
        _ = constants().curvature
    constants.restart()
    torch.testing.assert_close(constants().curvature, first, rtol=1e-12, atol=0)


def test_the_model_is_not_inside() -> None:
    constants = Constants(dense(), torch.zeros(1, 4, dtype=F64))
    assert list(constants.parameters()) == []


def test_pairs_need_two_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    constants = Constants(model, torch.zeros(1, 2))
    assert float(constants().curvature.detach()) > 0
    with pytest.raises(InvalidInput, match="two outputs"):
        _ = GeneralConstants(LiveNetwork(model, torch.zeros(1, 2)), "product", steps=1)().pair_curvature


@pytest.mark.parametrize("recursion", [product_bound, liplt_bound, compositional_bound])
def test_one_recursion_gives_a_bound_or_an_estimate(recursion) -> None:
    whole, _ = problems(trace(dense().eval(), torch.zeros(1, 4, dtype=F64)))
    bound, estimate = recursion(whole, NormBounds()), recursion(whole, NormEstimates(steps=300))
    assert isinstance(bound, Bound)
    assert isinstance(estimate, Estimate)
    assert not isinstance(estimate, Bound)
    assert 1 - 1e-6 <= float(estimate) / float(bound) <= 1 + 1e-12


@pytest.mark.parametrize("block_bound", ["product", "hadamard"])
@pytest.mark.parametrize("name", MODELS)
def test_unrolled_by_sizes_is_a_bound(name: str, block_bound: str) -> None:
    make, shape = MODELS[name]
    network = trace(make().eval(), torch.zeros(1, *shape, dtype=F64))
    _, pairs = problems(network)
    bound = unrolled_sizes_bound(pairs, NormBounds(), [block_bound])
    assert isinstance(bound, Bound)
    found = CurvatureSearch(pairs.network, 2, 2, scalars=True).everywhere(starts=6)
    assert bool((found <= bound.value * (1 + ROUNDING)).all())
    assert bool((found > 0).all())


def test_unrolled_by_sizes_is_exact_for_one_neuron() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)).to(F64)
    model[0].weight.data.fill_(3.0)
    model[2].weight.data.copy_(torch.tensor([[2.0], [-1.0]]))
    _, pairs = problems(trace(model.eval(), torch.zeros(1, 1, dtype=F64)))
    bound = unrolled_sizes_bound(pairs, NormBounds())
    assert float(bound) == pytest.approx(3 * 9 * 4 / 27**0.5, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("graph", SMOOTH_MODULES, ids=lambda graph: graph.name)
def test_constants_of_graphs_approach_the_bounds(graph: ModuleGraph) -> None:
    model = graph.model().to(F64)
    whole, pairs = problems(trace(model, graph.inputs()))
    upper = {
        "lipschitz": liplt_bound(whole, NormBounds()).value,
        "curvature": compositional_bound(whole, NormBounds(), ["product"]).value,
        "pair_lipschitz": liplt_bound(pairs, NormBounds()).value,
        "pair_curvature": unrolled_sizes_bound(pairs, NormBounds(), ["product"]).value,
    }
    constants = Constants(model, graph.inputs().to(F64), steps=60)
    for key in NAMES:
        found = [listed(key, getattr(constants(), key).detach()) for _ in range(3)][-1]
        # A convolution's norms differ by what its border is counted as.
        torch.testing.assert_close(found, upper[key], rtol=0.05 if len(graph.shape) > 1 else 1e-5, atol=0)
