"""No slope that a search can find exceeds a bound, in any norm, scope or target; and the search has teeth."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvcert import lipschitz
from curvcert.activations import TANH
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.network import Network
from curvcert.operators import NormBounds
from tests.bounds.cases import CASES, ROWS, feed_forward, linear, one_dimensional, randn, residual
from tests.bounds.search import ROUNDING, Search
from tests.sampling import crossed

INF = math.inf
NORMS = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (INF, INF), (2.0, INF), (1.0, 2.0), (3.0, 1.5)]
GLOBAL = ("product", "liplt", "lipsdp-recursion", "lipsdp")
MADE = {
    "dense": lambda activation: feed_forward((3, 4, 4, 2), activation, seed=11),
    "residual": lambda activation: residual(3, 4, activation, seed=12),
}


def applicable(network: Network, p: float, q: float, at: Tensor | None, radius: Tensor | None, **target) -> list[str]:
    problem = make_problem(network, p, q, at, radius, target.get("pair"), target.get("logit"))
    return [name for name, method in LIPSCHITZ_METHODS.items() if method.reason_to_skip(problem) is None]


def assert_above(bound: Tensor, found: Tensor, what: str) -> None:
    assert bool((found <= bound * (1 + ROUNDING)).all()), f"{what}: found {found.tolist()} above {bound.tolist()}"


def points(network: Network, batch: int = 3, seed: int = 1) -> Tensor:
    scale = torch.logspace(-1, 0.5, batch, dtype=torch.float64).reshape(-1, *(1,) * len(network.in_shape))
    return scale * randn(batch, *network.in_shape, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "norms"), crossed(CASES, NORMS, every=4, always=[(2.0, 2.0)]))
def test_no_slope_exceeds_a_bound_of_the_vector(case, norms) -> None:
    network, (p, q) = case.make(), norms
    x, r = points(network), torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
    search = Search(network, p, q, steps=12)
    found = search.everywhere(), search.from_anchors(x), search.in_balls(x, r)
    for scope, slope in zip(({}, {"at": x}, {"at": x, "radius": r}), found, strict=True):
        for name in applicable(network, p, q, scope.get("at"), scope.get("radius")):
            bound = lipschitz(network, p, q, name, **scope)
            assert_above(bound.value, slope, f"{name} {list(scope)}")
            assert bound.per_layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "p"), crossed([case for case in CASES if case.name != "one output"], [1.0, 2.0, 3.0, INF], always=[2.0])
)
def test_no_slope_exceeds_a_bound_of_the_pairs(case, p) -> None:
    network = case.make()
    x, r = points(network), torch.tensor([0.1, 0.5, 0.5], dtype=torch.float64)
    search = Search(network.all_differences(), p, p, scalars=True, steps=12)
    found = search.everywhere(), search.from_anchors(x), search.in_balls(x, r)
    for scope, slope in zip(({}, {"at": x}, {"at": x, "radius": r}), found, strict=True):
        for name in applicable(network, p, p, scope.get("at"), scope.get("radius"), pair="all"):
            assert_above(lipschitz(network, p, method=name, pair="all", **scope).value, slope, f"{name} {list(scope)}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "p", "name"), crossed(MADE, [1.0, 2.0, INF], ROWS, every=3))
def test_no_slope_exceeds_a_bound_with_any_activation(kind, p, name) -> None:
    network = MADE[kind](ROWS[name])
    x, r = points(network), torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    search = Search(network, p, p, steps=12)
    everywhere = search.everywhere()
    for method in GLOBAL:
        if method in applicable(network, p, p, None, None):
            assert_above(lipschitz(network, p, method=method).value, everywhere, method)
    assert_above(lipschitz(network, p, method="anchored", at=x).value, search.from_anchors(x), "anchored")
    assert_above(lipschitz(network, p, method="local", at=x, radius=r).value, search.in_balls(x, r), "local")


exponents = st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0, 7.0, INF])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    widths=st.lists(st.integers(1, 6), min_size=3, max_size=5),
    name=st.sampled_from(sorted(ROWS)),
    p=exponents,
    q=exponents,
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([0.1, 1.0, 4.0]),
    radius=st.sampled_from([0.0, 1e-6, 0.3, 5.0]),
)
def test_random_networks(widths, name, p, q, seed, gain, radius) -> None:
    network = feed_forward(tuple(widths), ROWS[name], seed=seed, gain=gain)
    x = points(network, seed=seed)
    r = torch.full((len(x),), radius, dtype=torch.float64)
    search = Search(network, p, q, steps=5, seed=seed)
    assert_above(lipschitz(network, p, q).value, search.everywhere(8), "auto")
    assert_above(lipschitz(network, p, q, at=x).value, search.from_anchors(x, 4), "auto, anchored")
    assert_above(lipschitz(network, p, q, at=x, radius=r).value, search.in_balls(x, r, 3), "auto, local")


@pytest.mark.parametrize("scale", [1e-120, 1e-30, 1e30, 1e60])
def test_weights_of_any_size(scale) -> None:
    network = feed_forward((3, 4, 2), TANH, gain=1.0)
    blocks = tuple(block.read_out(scale * linear(len(block.c), len(block.c)).blocks[0].H) for block in network.blocks)
    scaled = Network.of_blocks(blocks)
    search = Search(scaled, 2.0, 2.0, steps=5)
    found = search.everywhere(8)
    for name in GLOBAL:
        assert_above(lipschitz(scaled, method=name).value, found, name)


def test_a_block_that_occurs_twice_is_measured_in_its_own_place() -> None:
    # In 2 -> inf, the norm of the square is not the square of the norm.
    block = linear(6, 6).blocks[0]
    network = Network.of_blocks((block, block))
    A = block.H.as_matrix()
    exact = float(torch.linalg.vector_norm(A @ A, dim=1).max())
    for name in ("product", "liplt"):
        assert float(lipschitz(network, 2, INF, name)) >= exact


# The teeth: a norm that is 5% too small is found out where the bound is tight.


def _tight() -> Network:
    """tanh(1.7 x): every bound about 0 is exact."""
    return one_dimensional(1.7, TANH)


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("method", ["product", "liplt", "anchored", "local"])
def test_the_search_finds_a_norm_that_is_too_small(monkeypatch: pytest.MonkeyPatch, p, method) -> None:
    network, x = _tight(), torch.zeros(1, 1, dtype=torch.float64)
    scope = {"anchored": {"at": x}, "local": {"at": x, "radius": 0.5}}.get(method, {})
    honest = NormBounds.norm
    monkeypatch.setattr(NormBounds, "norm", lambda self, op, p, q: 0.95 * honest(self, op, p, q))
    assert float(Search(network, p, p).everywhere()) > float(lipschitz(network, p, method=method, **scope))


def test_the_search_finds_rows_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    network = linear(3, 4)
    honest = NormBounds.row_norms
    monkeypatch.setattr(NormBounds, "row_norms", lambda self, op, r: 0.95 * honest(self, op, r))
    search = Search(network.all_differences(), 2.0, 2.0, scalars=True)
    assert bool((search.everywhere() > lipschitz(network, method="product", pair="all").value).all())


@pytest.mark.parametrize("method", [*GLOBAL, "anchored", "local"])
def test_the_search_finds_a_result_that_is_too_small(monkeypatch: pytest.MonkeyPatch, method) -> None:
    network, x = _tight(), torch.zeros(1, 1, dtype=torch.float64)
    scope = {"anchored": {"at": x}, "local": {"at": x, "radius": 0.5}}.get(method, {})
    honest = NormBounds.result
    monkeypatch.setattr(NormBounds, "result", lambda self, value, *rest: honest(self, 0.95 * value, *rest))
    assert float(Search(network, 2.0, 2.0).everywhere()) > float(lipschitz(network, method=method, **scope))


def test_the_search_finds_an_anchored_bound_used_for_a_ball() -> None:
    # Anchored at 2 the slope is 0.58, but the ball of radius 2 about it holds 0, where it is 1.
    network, x = one_dimensional(1.0, TANH), torch.full((1, 1), 2.0, dtype=torch.float64)
    anchored = lipschitz(network, method="anchored", at=x).value
    found = Search(network, 2.0, 2.0).in_balls(x, torch.full((1,), 2.0, dtype=torch.float64))
    assert bool((found > anchored).all())
    assert float(lipschitz(network, at=x, radius=2.0).value) >= float(found)


def test_the_search_is_tight_on_linear_networks() -> None:
    network = linear(4, 5)
    A = network.blocks[0].H.as_matrix()
    columns, rows = A.abs().sum(dim=0).max(), A.abs().sum(dim=1).max()
    for (p, q), value in {(2.0, 2.0): torch.linalg.matrix_norm(A, 2), (1.0, 1.0): columns, (INF, INF): rows}.items():
        assert float(Search(network, p, q).everywhere()) == pytest.approx(float(value), rel=1e-6)


def deep(seed: int, name: str) -> Network:
    """Three neurons one behind the other: in one dimension a grid sees every slope, and a bound has little to give."""
    signs, draws = (1.0, -1.0, (-1.0) ** seed), randn(3, 2, seed=seed).tolist()
    pairs = zip(signs, draws, strict=True)
    return Network.of_blocks(tuple(one_dimensional(s * (2.0 + w), ROWS[name], b).blocks[0] for s, (w, b) in pairs))


@pytest.mark.parametrize("name", ["tanh", "gelu"])
def test_no_slope_on_a_grid_in_one_dimension_exceeds_a_local_or_anchored_bound(name) -> None:
    for seed in range(3):
        network, x = deep(seed, name), randn(16, 1, seed=seed)
        r = torch.logspace(-2, 0.7, 16, dtype=torch.float64)
        around = x + r[:, None] * torch.linspace(-1, 1, 301, dtype=torch.float64)
        slopes = network.jacobian(around.reshape(-1, 1)).reshape(around.shape).abs().amax(dim=1)
        assert_above(lipschitz(network, method="local", at=x, radius=r).value, slopes, f"local, {seed}")
        far = torch.cat([around, x + torch.linspace(-20, 20, 1000, dtype=torch.float64)], dim=1)
        rise = (network(far.reshape(-1, 1)).reshape(far.shape) - network(x)).abs()
        found = torch.where((far - x).abs() > 1e-4, rise / (far - x).abs().clamp(min=1e-4), 0.0).amax(dim=1)
        assert_above(lipschitz(network, method="anchored", at=x).value, found, f"anchored, {seed}")
