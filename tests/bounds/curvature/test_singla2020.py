"""The rival: its bounds hold on both sides, and its certified radii are below every adversarial distance."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from curvcert import curvature
from curvcert.activations import TANH
from curvcert.bounds.curvature.singla2020 import CRCOptions, crc_eigenvalue_bounds, crc_radii
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.operators import Dense
from tests.bounds.cases import feed_forward, one_dimensional, randn, residual
from tests.bounds.curvature.cases import SMOOTH

F64 = torch.float64


def eigenvalue_bounds(network: Network) -> tuple[Tensor, Tensor]:
    return crc_eigenvalue_bounds(make_problem(network, 2, None, None, None, "all", None))[:2]


def hessians(network: Network, x: Tensor, output: int) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(network(x)[:, output].sum(), x, create_graph=True)
    return torch.stack([torch.autograd.grad(g[:, i].sum(), x, retain_graph=True)[0] for i in range(g.shape[1])], dim=1)


@pytest.mark.parametrize("name", ["tanh", "softplus(5)", "gelu", "sigmoid", "elu"])
@pytest.mark.parametrize("widths", [(3, 5, 3), (3, 4, 4, 2)], ids=str)
def test_eigenvalues_lie_between_the_two_sides(name, widths) -> None:
    network = feed_forward(widths, SMOOTH[name], seed=31)
    lower, upper = eigenvalue_bounds(network)
    differences = network.all_differences()
    x = 2 * randn(400, 3, seed=1)
    for output in range(differences.outputs):
        eigenvalues = torch.linalg.eigvalsh(hessians(differences, x, output))
        assert float(lower[output]) <= float(eigenvalues.min())
        assert float(eigenvalues.max()) <= float(upper[output])


def test_the_two_sides_differ_for_a_convex_activation() -> None:
    network = feed_forward((3, 5, 1), SMOOTH["softplus(5)"], seed=2)
    lower, upper = crc_eigenvalue_bounds(make_problem(network, 2, None, None, None, None, None))[:2]
    assert float(-lower) != pytest.approx(float(upper), rel=0.01)


def distance_to_boundary(f: Network, x: Tensor) -> float:
    """Return the least distance of a point with f >= 0 that rays and descent find."""
    directions = torch.nn.functional.normalize(randn(3000, x.shape[1], seed=9), dim=1)
    steps = torch.linspace(0, 6, 601, dtype=F64)
    values = f((x[None] + steps[:, None, None] * directions[None]).flatten(0, 1)).reshape(601, 3000)
    first = torch.where(values >= 0, steps[:, None], torch.inf).amin(dim=0)
    return float(first.min())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_radii_are_below_every_distance_found(seed) -> None:
    network = feed_forward((2, 4, 3), TANH, seed=seed)
    x = randn(1, 2, seed=seed + 40)
    label = int(network(x).argmax())
    rows = torch.stack([_difference(3, i, label) for i in range(3) if i != label])
    scalars = network.read_out(rows)
    lower, upper = crc_eigenvalue_bounds(_scalars(scalars))[:2]
    radii = crc_radii(scalars, x, lower, upper)
    assert radii.shape == (1, 2) and bool((radii > 0).all())
    for k in range(2):
        found = distance_to_boundary(scalars.logit(k), x)
        assert float(radii[0, k]) <= found
        # And not below what the closed form of the same curvature gives.
        m, K = -float(scalars(x)[0, k]), float(torch.maximum(-lower, upper)[k])
        g = float(scalars.jacobian(x)[0, k].norm())
        assert float(radii[0, k]) >= 0.95 * 2 * m / (g + (g * g + 2 * K * m) ** 0.5)


def _difference(n: int, i: int, j: int) -> Tensor:
    row = torch.zeros(n, dtype=F64)
    row[i], row[j] = 1.0, -1.0
    return row


def _scalars(network: Network):
    problem = make_problem(network, 2, None, None, None, None, None)
    object.__setattr__(problem, "scalars", True)
    return problem


def test_a_radius_is_exact_for_a_line() -> None:
    # tanh(x) - tanh(1) at x = 0 is negative up to 1; CRC stops short of that, and never beyond.
    network = one_dimensional(1.0, TANH)
    shifted = Network.of_blocks(
        (network.blocks[0].__class__(**{**vars(network.blocks[0]), "c": -torch.tanh(torch.ones(1, dtype=F64))}),)
    )
    lower, upper = crc_eigenvalue_bounds(make_problem(shifted, 2, None, None, None, None, None))[:2]
    radius = float(crc_radii(shifted, torch.zeros(1, 1, dtype=F64), lower, upper))
    assert 0.7 < radius <= 1.0
    assert float(crc_radii(shifted, torch.full((1, 1), 1.5, dtype=F64), lower, upper)) == 0.0
    short = float(crc_radii(shifted, torch.zeros(1, 1, dtype=F64), lower, upper, CRCOptions(3, 3)))
    assert 0 < short <= 1.0


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="feed-forward"):
        curvature(residual(3, 4, TANH), method="crc", pair="all")
    with pytest.raises(InvalidInput, match="scalar"):
        curvature(feed_forward((3, 4, 2), TANH), method="crc")
    with pytest.raises(InvalidInput, match="p = 2"):
        curvature(feed_forward((3, 4, 2), TANH), 1, method="crc", pair="all")
    network = one_dimensional(1.0, TANH)
    one = torch.ones(1, dtype=F64)
    with pytest.raises(InvalidInput, match="lower <= 0"):
        crc_radii(network, torch.zeros(1, 1, dtype=F64), one, one)


@pytest.mark.parametrize("name", ["tanh", "softplus(5)"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_sides_hold_a_deep_network_in_one_dimension(name: str, sign: float) -> None:
    """A steep neuron behind a flat one bends most at the last layer, whose read-out's sign counts."""
    first, second = (one_dimensional(w, SMOOTH[name]).blocks[0] for w in (1.0, 3.0))
    network = Network.of_blocks((first, second.read_out(Dense(torch.full((1, 1), sign, dtype=F64)))))
    lower, upper = crc_eigenvalue_bounds(make_problem(network, 2, None, None, None, None, None))[:2]
    bends = hessians(network, torch.linspace(-3, 3, 2001, dtype=F64)[:, None], 0)
    assert float(lower) <= float(bends.min()) and float(bends.max()) <= float(upper)


@pytest.mark.parametrize("inner", [0, 1])
def test_a_search_that_has_not_begun_costs_radius(inner: int) -> None:
    """tanh(x) - tanh(1) reaches 0 at 1, whatever the search for the dual's minimiser has come to."""
    block = replace(one_dimensional(1.0, TANH).blocks[0], c=-torch.tanh(torch.ones(1, dtype=F64)))
    network, x = Network.of_blocks((block,)), torch.zeros(1, 1, dtype=F64)
    lower, upper = crc_eigenvalue_bounds(make_problem(network, 2, None, None, None, None, None))[:2]
    assert float(crc_radii(network, x, lower, upper, CRCOptions(20, inner))) <= 1.0
