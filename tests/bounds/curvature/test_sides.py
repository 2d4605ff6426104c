"""Curvature from one side: never above that of both, exact where it can be, and not exceeded by what a search finds."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from curvcert import curvature
from curvcert.activations import ACTIVATIONS, SILU, TANH, softplus
from curvcert.bounds.curvature import CURVATURE_METHODS
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.bounds.types import SIDES, Anchor, Ball, Global, Scope, Side
from curvcert.errors import InvalidInput
from curvcert.falsifier import falsify_bound
from curvcert.falsifier.bound_search import BoundSearch, Target
from curvcert.network import Network
from tests.bounds.cases import feed_forward
from tests.graph_families import SMOOTH

F64 = torch.float64
GELU = ACTIVATIONS["gelu"]

NETWORKS = {
    "softplus": lambda: feed_forward((4, 6, 5, 3), softplus(1.0), seed=1),
    "one layer": lambda: feed_forward((4, 6, 3), softplus(2.0), seed=2),
    "deep gelu": lambda: feed_forward((3, 5, 4, 4, 3), GELU, seed=3),
    "tanh": lambda: feed_forward((4, 5, 5, 3), TANH, seed=4),
    "silu graph": lambda: SMOOTH[0].network(5),
    "input convex": lambda: SMOOTH[3].network(6),
}
ONE_SIDED: tuple[Side, ...] = ("above", "below")

every_network = pytest.mark.parametrize("network", [make() for make in NETWORKS.values()], ids=list(NETWORKS))


def points(network: Network) -> Tensor:
    return torch.randn(2, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def asked(network: Network, p: float, side: Side) -> list[tuple[str, Scope, Tensor, Tensor]]:
    """Return the value of every method in every scope, from that side and from both."""
    x, found = points(network), []
    ball = Ball(x, torch.full((len(x),), 0.4, dtype=F64))
    scopes: tuple[tuple[Scope, dict], ...] = (
        (Global(), {}),
        (Anchor(x), {"at": x}),
        (ball, {"at": x, "radius": ball.r}),
    )
    for scope, where in scopes:
        problem = make_problem(network, p, None, where.get("at"), where.get("radius"), "all", None)
        for name, method in CURVATURE_METHODS.items():
            if method.reason_to_skip(problem) is None:
                bounds = [curvature(network, p, method=name, pair="all", side=s, **where) for s in (side, "both")]
                assert [bound.side for bound in bounds] == [side, "both"]
                found.append((name, scope, *(bound.value for bound in bounds)))
    return found


@pytest.mark.slow
@every_network
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("side", ONE_SIDED)
def test_no_search_finds_more_and_both_sides_are_no_less(network: Network, p: float, side: Side) -> None:
    searches: dict[int, tuple] = {}
    for name, scope, one, both in asked(network, p, side):
        assert bool((one <= both * (1 + 1e-9)).all()), name
        kind = {Global: 0, Anchor: 1, Ball: 2}[type(scope)]
        search = BoundSearch(network, "curvature", p, p, Target.of(network, "all"), scope, 12, 8, side=side)
        searches.setdefault(kind, search.run())
        found = search.compare(one, searches[kind], name)
        assert not found.counterexamples, (name, scope)
        assert not found.unconfirmed, (name, scope)


def hessians(network: Network, x: Tensor) -> Tensor:
    """Return the Hessians of f_0 - f_1, by autograd."""

    def pair(one: Tensor) -> Tensor:
        out = network(one[None])[0]
        return out[0] - out[1]

    return torch.stack([torch.func.hessian(pair)(one) for one in x])


@pytest.mark.slow
@every_network
def test_the_eigenvalues_met_anywhere_lie_between_both_sides(network: Network) -> None:
    x = torch.randn(60, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(2)) * 2
    eigenvalues = torch.linalg.eigvalsh(hessians(network, x))
    for method in ("auto", "unrolled"):
        above, below = (float(curvature(network, method=method, pair=(0, 1), side=side)) for side in ONE_SIDED)
        assert float(eigenvalues.max()) <= above
        assert float(-eigenvalues.min()) <= below


@pytest.mark.parametrize("method", ["unrolled", "crc", "compositional"])
def test_one_neuron_is_exact_from_either_side(method: str) -> None:
    low, high = SILU.curvature
    network = feed_forward((1, 1, 1), SILU, seed=1)
    w, v = (float(A.as_matrix()) for A in (network.blocks[0].W, network.blocks[0].G))
    q = {"above": high, "below": -low} if v > 0 else {"above": -low, "below": high}
    for side in ONE_SIDED:
        assert float(curvature(network, method=method, logit=0, side=side)) == pytest.approx(abs(v) * w * w * q[side])


def test_a_convex_activation_about_halves_what_is_known_from_the_other_side() -> None:
    network = feed_forward((6, 10, 10, 2), softplus(1.0), seed=9)
    both, above, below = (float(curvature(network, pair=(0, 1), side=side)) for side in SIDES)
    assert both == pytest.approx(max(above, below))
    assert min(above, below) < 0.8 * both


@pytest.mark.parametrize("side", ONE_SIDED)
def test_what_is_too_small_is_found(side: Side) -> None:
    network = feed_forward((2, 3, 2), softplus(1.0), seed=3)
    bound = curvature(network, pair=(0, 1), side=side)
    assert not falsify_bound(bound, network, "curvature", pair=(0, 1)).counterexamples
    object.__setattr__(bound, "value", bound.value * 0.2)
    examples = falsify_bound(bound, network, "curvature", pair=(0, 1)).counterexamples
    assert {example.kind for example in examples} == {"bend"}


def test_a_side_is_that_of_a_scalar_and_one_of_three() -> None:
    network = NETWORKS["softplus"]()
    with pytest.raises(InvalidInput, match="that of a scalar"):
        curvature(network, side="above")
    with pytest.raises(InvalidInput, match="one of both, above, below"):
        curvature(network, pair=(0, 1), side="left")  # type: ignore[arg-type]
    assert set(get_args(Side)) == set(SIDES)
    assert "from below" in repr(curvature(network, pair=(0, 1), side="below"))
