"""No second derivative and no difference of Jacobians that a search can find exceeds a bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvcert import curvature
from curvcert.bounds.curvature import BLOCK_BOUNDS, CURVATURE_METHODS, Compositional
from curvcert.bounds.lipschitz import batching
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.network import Network
from tests.bounds.cases import feed_forward, one_dimensional, randn, residual
from tests.bounds.curvature.cases import CASES, JUMPS, SMOOTH, trained
from tests.bounds.curvature.search import ROUNDING, CurvatureSearch
from tests.sampling import crossed

INF = math.inf
NORMS = [(1.0, 1.0), (2.0, 2.0), (INF, INF)]
MIXED = [(1.0, INF), (2.0, 1.0), (1.5, 3.0), (3.0, 1.5), (INF, 2.0), (INF, 1.0)]

MADE = {
    "dense": lambda activation: feed_forward((3, 4, 4, 2), activation, seed=11),
    "residual": lambda activation: residual(3, 4, activation, seed=12).logit(0),
}


def applicable(network: Network, p: float, q: float, at: Tensor | None, radius: Tensor | None, **target) -> list[str]:
    problem = make_problem(network, p, q, at, radius, target.get("pair"), target.get("logit"))
    return [name for name, method in CURVATURE_METHODS.items() if method.reason_to_skip(problem) is None]


def assert_above(bound: Tensor, found: Tensor, what: str) -> None:
    assert bool((found.reshape(bound.shape) <= bound * (1 + ROUNDING)).all()), (
        f"{what}: found {found.tolist()} above {bound.tolist()}"
    )


def points(network: Network, batch: int = 3, seed: int = 1) -> Tensor:
    scale = torch.logspace(-1, 0.3, batch, dtype=torch.float64).reshape(-1, *(1,) * len(network.in_shape))
    return scale * randn(batch, *network.in_shape, seed=seed)


def check_scalars(network: Network, p: float, x: Tensor, r: Tensor, steps: int = 8, starts: int = 8) -> None:
    """Check every method and scope for all pairs, or for the only output."""
    pair = "all" if network.outputs > 1 else None
    differences = network.all_differences() if pair else network
    search = CurvatureSearch(differences, p, p, scalars=True, steps=steps)
    found = (
        torch.maximum(search.everywhere(starts), search.quotients(starts)),
        search.from_anchors(x, 4),
        search.in_balls(x, r, 3),
    )
    for scope, curve in zip(({}, {"at": x}, {"at": x, "radius": r}), found, strict=True):
        for name in applicable(network, p, p, scope.get("at"), scope.get("radius"), pair=pair):
            bound = curvature(network, p, method=name, pair=pair, **scope)
            assert_above(
                bound.value, curve if bound.value.dim() == curve.dim() else curve.squeeze(-1), f"{name} {list(scope)}"
            )
            assert bound.per_layer or not bound.value.any()


def check_vector(network: Network, p: float, q: float) -> None:
    """Check every method and scope for the outputs as one vector."""
    x = points(network)
    search = CurvatureSearch(network, p, q, steps=8)
    found = torch.maximum(search.everywhere(8), search.quotients(6))
    for name in BLOCK_BOUNDS:
        if name == "product" or (p == q == 2 and name != "contraction"):
            assert_above(curvature(network, p, q, Compositional([name])).value, found, name)
    assert_above(curvature(network, p, q, "compositional").value, found, "compositional")
    assert_above(curvature(network, p, q, "unrolled").value, found, "unrolled")
    assert_above(curvature(network, p, q, "anchored", at=x).value, search.from_anchors(x, 4), "anchored")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "norms"), crossed(CASES, NORMS))
def test_nothing_exceeds_a_bound_of_the_vector(case, norms) -> None:
    check_vector(case.make(), *norms)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "norms"), crossed([CASES[k] for k in (0, 6, 10)], MIXED))
def test_nothing_exceeds_a_bound_in_mixed_norms(case, norms) -> None:
    check_vector(case.make(), *norms)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "p"), crossed(CASES, [1.0, 2.0, INF], always=[2.0]))
def test_nothing_exceeds_a_bound_of_the_pairs(case, p) -> None:
    network = case.make()
    check_scalars(network, p, points(network), torch.tensor([0.0, 0.1, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("p", [1.5, 3.0])
def test_nothing_exceeds_a_bound_between_the_usual_norms(p) -> None:
    network = CASES[0].make()
    check_scalars(network, p, points(network), torch.tensor([0.0, 0.1, 0.5], dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "p", "name"), crossed(MADE, [1.0, 2.0, INF], SMOOTH, every=3))
def test_nothing_exceeds_a_bound_with_any_activation(kind, p, name) -> None:
    network, r = MADE[kind](SMOOTH[name]), torch.tensor([0.05, 2.0], dtype=torch.float64)
    check_scalars(network, p, points(network, 2), r, steps=4, starts=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("regularised", [False, True], ids=["plain", "regularised"])
@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_nothing_exceeds_a_bound_of_a_trained_network(kind, regularised, p) -> None:
    network = trained(kind, regularised)
    pair = network.difference(3, 8)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_scalars(pair, p, x, torch.tensor([36 / 255, 0.5], dtype=torch.float64), steps=10, starts=6)


@pytest.mark.parametrize("name", JUMPS)
def test_second_derivatives_that_jump_are_covered(name) -> None:
    # Across the jump at 0 the quotient of phi' reaches its one-sided limit on one side only.
    network = feed_forward((2, 5, 1), SMOOTH[name], seed=21, gain=2.0)
    found = CurvatureSearch(network, 2.0, 2.0, scalars=True, steps=25).quotients(40)
    bound = curvature(network)
    assert_above(bound.value, found.squeeze(), name)
    assert float(found) > 0.5 * float(bound)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    widths=st.lists(st.integers(1, 6), min_size=3, max_size=5),
    name=st.sampled_from(sorted(SMOOTH)),
    p=st.sampled_from([1.0, 1.25, 2.0, 3.0, 7.0, INF]),
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([0.1, 1.0, 4.0]),
    radius=st.sampled_from([0.0, 1e-6, 0.3, 5.0]),
)
def test_random_networks(widths, name, p, seed, gain, radius) -> None:
    network = feed_forward(tuple(widths), SMOOTH[name], seed=seed, gain=gain)
    check_scalars(
        network, p, points(network, 2, seed), torch.full((2,), radius, dtype=torch.float64), steps=4, starts=4
    )


def test_a_block_that_occurs_twice_is_measured_in_its_own_place() -> None:
    # In 1 -> inf a block's constant is far below the one in 1 -> 1 that the first place needs.
    block = feed_forward((6, 6, 6), SMOOTH["tanh"], gain=3.0).blocks[0]
    twin = feed_forward((6, 6, 6), SMOOTH["tanh"], gain=3.0).blocks[0]
    for p, q in ((1.0, INF), (2.0, INF), (INF, 1.0)):
        once, twice = (curvature(Network.of_blocks((block, other)), p, q, "compositional") for other in (twin, block))
        assert float(once) == pytest.approx(float(twice), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-120, 1e-30, 1e30, 1e60])
def test_weights_of_any_size(scale) -> None:
    network = feed_forward((3, 4, 2), SMOOTH["tanh"], gain=1.0)
    block = network.blocks[0]
    scaled = Network.of_blocks((block.read_out(scale * feed_forward((2, 2, 2), SMOOTH["tanh"]).blocks[0].W),))
    search = CurvatureSearch(scaled.all_differences(), 2.0, 2.0, scalars=True, steps=5)
    found = search.everywhere(8)
    for name in ("compositional", "unrolled", "crc"):
        assert_above(curvature(scaled, method=name, pair="all").value, found, name)


def test_a_batch_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network = feed_forward((3, 4, 4, 2), SMOOTH["tanh"])
    x, r = points(network, 7), torch.linspace(0, 1, 7, dtype=torch.float64)
    whole = curvature(network, at=x, pair="all"), curvature(network, at=x, radius=r, pair="all")
    monkeypatch.setattr(batching, "_ELEMENTS", 32)
    pieces = curvature(network, at=x, pair="all"), curvature(network, at=x, radius=r, pair="all")
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a.value, b.value, rtol=1e-12, atol=0)
        assert b.scope.x is not None and len(b.scope.x) == 7
        assert [term.value.shape for term in a.per_layer] == [term.value.shape for term in b.per_layer]


def deep(seed: int, name: str) -> Network:
    """Three neurons one behind the other: in one dimension a grid sees every bend, and a bound has little to give."""
    signs, draws = (1.0, -1.0, (-1.0) ** seed), randn(3, 2, seed=seed).tolist()
    pairs = zip(signs, draws, strict=True)
    return Network.of_blocks(tuple(one_dimensional(s * (2.0 + w), SMOOTH[name], b).blocks[0] for s, (w, b) in pairs))


@pytest.mark.parametrize("name", ["tanh", "gelu"])
def test_nothing_on_a_grid_in_one_dimension_exceeds_a_bound(name) -> None:
    for seed in range(3):
        network, x = deep(seed, name), randn(16, 1, seed=seed)
        r = torch.logspace(-2, 0.7, 16, dtype=torch.float64)
        around = x + r[:, None] * torch.linspace(-1, 1, 301, dtype=torch.float64)
        slopes = network.jacobian(around.reshape(-1, 1)).reshape(around.shape)
        bends = (slopes.diff(dim=1) / around.diff(dim=1)).abs().amax(dim=1)
        assert_above(curvature(network, method="local", at=x, radius=r).value, bends, f"local, {seed}")
        for method in ("compositional", "unrolled"):
            assert_above(curvature(network, method=method).value, bends.amax(), f"{method}, {seed}")
        far = torch.cat([around, x + torch.linspace(-20, 20, 1000, dtype=torch.float64)], dim=1)
        change = (network.jacobian(far.reshape(-1, 1)).reshape(far.shape) - network.jacobian(x).reshape(-1, 1)).abs()
        found = torch.where((far - x).abs() > 1e-4, change / (far - x).abs().clamp(min=1e-4), 0.0).amax(dim=1)
        assert_above(curvature(network, method="anchored", at=x).value, found, f"anchored, {seed}")
