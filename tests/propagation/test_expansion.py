"""Expansions about a point: every term beside a dense reference, and no rise beyond what forms say."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from curvcert.activations import GELU, SIGMOID, TANH, Activation
from curvcert.activations.quotients import second_quotient_range
from curvcert.network import Network, trace
from curvcert.network.evaluation import evaluate_with_error
from curvcert.operators import NormBounds
from curvcert.operators.trust_region import QuadraticForm
from curvcert.propagation import expansion as module
from curvcert.propagation.expansion import Expansion
from curvcert.propagation.expansion_remainders import Ball
from curvcert.propagation.quadratic_forms import Form, Functions
from curvcert.propagation.reach import NetworkFacts
from tests.graph_families import SMOOTH, Graph

F64 = torch.float64


def convolutional(scale: float = 2.0, seed: int = 0) -> Network:
    """Return two convolutions and two dense layers."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 4, stride=2, padding=1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3),
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return trace(model, torch.zeros(1, 1, 6, 6, dtype=F64))


def expanded(network: Network, seed: int = 0) -> tuple[Expansion, Functions, Tensor]:
    """Return an expansion about a random point, the differences of the outputs to the first one, and the point."""
    x = torch.randn(1, *network.in_shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    facts = NetworkFacts(network, 2, NormBounds())
    found = Expansion(facts, evaluate_with_error(network, x, facts.norms))
    n = network.outputs
    rows = torch.eye(n, dtype=F64)[1:] - torch.eye(n, dtype=F64)[0]
    return found, Functions(found, rows), x


def rises(network: Network, rows: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return how far linear functions of the outputs rise at some steps, (functions, steps)."""
    values = network(torch.cat([x, x + d.reshape(-1, *x.shape[1:])])).flatten(1) @ rows.T
    return (values[1:] - values[0]).T


def steps_of(functions: Functions, t: float, many: int = 60) -> Tensor:
    """Return random steps of length t, and those along the gradients, both ways."""
    d = torch.randn(many, functions.gradient.shape[1], dtype=F64, generator=torch.Generator().manual_seed(1))
    d = torch.cat([d, functions.gradient, -functions.gradient])
    return t * d / torch.linalg.vector_norm(d, dim=1, keepdim=True)


def climbed(network: Network, rows: Tensor, x: Tensor, functions: Functions, t: float, climbs: int = 12) -> Tensor:
    """Return the largest rise of every function that ascent finds in a ball."""
    best = []
    for k in range(len(rows)):
        d = steps_of(functions, t, 12).requires_grad_()
        for _ in range(climbs):
            (slope,) = torch.autograd.grad(rises(network, rows, x, d)[k].sum(), d)
            d = d + t * 0.5 * slope / torch.linalg.vector_norm(slope, dim=1, keepdim=True).clamp(min=1e-300)
            d = (d * (t / torch.linalg.vector_norm(d, dim=1, keepdim=True)).clamp(max=1.0)).detach().requires_grad_()
        best.append(rises(network, rows, x, d.detach())[k].max())
    return torch.stack(best)


def differences(network: Network) -> Tensor:
    return torch.eye(network.outputs, dtype=F64)[1:] - torch.eye(network.outputs, dtype=F64)[0]


@pytest.mark.parametrize("act", [TANH, SIGMOID, GELU], ids=lambda act: act.name)
def test_quotients_hold_at_every_step(act: Activation) -> None:
    z = torch.linspace(-4, 4, 41, dtype=F64)
    for reach in (1e-3, 0.3, 2.0):
        low, high = second_quotient_range(act, z, z, torch.full_like(z, reach))
        for share in torch.linspace(-1, 1, 15).tolist():
            if share:
                step = share * reach
                quotient = 2 * (act.value(z + step) - act.value(z) - act.derivative(z) * step) / step**2
                slack = 1e-14 / step**2
                assert bool(((quotient >= low - slack) & (quotient <= high + slack)).all())
        assert bool(((high - low) <= 1.3 * reach * 2).all())


def test_the_largest_value_over_a_ball_is_that_of_eigenvalues() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 60):
        H = torch.randn(n, n, dtype=F64, generator=generator)
        H, g = (H + H.T) / 2, torch.randn(3, n, dtype=F64, generator=generator)
        values, vectors = torch.linalg.eigh(H)
        t = torch.tensor([0.1, 1.0, 10.0], dtype=F64)
        found = QuadraticForm(H, torch.zeros((), dtype=F64)).largest(g, t)
        for k in range(3):
            share = (vectors.T @ g[k]).square()
            for j, radius in enumerate(t.tolist()):
                shift = max(0.0, float(values[-1])) + torch.logspace(-9, 4, 4000, dtype=F64)
                dual = shift * radius**2 / 2 + (share / (shift[:, None] - values)).sum(dim=1) / 2
                assert float(dual.min()) * (1 - 2e-3) - 1e-12 <= float(found[k, j]) <= float(dual.min()) * 1.001 + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_every_term_is_beside_its_dense_reference(seed: int) -> None:
    network = convolutional(seed=seed)
    found, functions, x = expanded(network, seed)
    t = 0.4
    ball = Ball(found, t)
    d = steps_of(functions, t)
    for k, own in found.neurons.items():
        z = own.node.source
        J = torch.autograd.functional.jacobian(lambda v, z=z: _value(network, v, z), x)[..., 0, :, :, :].flatten(1)
        rows = torch.linalg.vector_norm(J, dim=1)
        assert bool((rows <= found.rows[z]).all()) and torch.allclose(rows, found.rows[z], rtol=1e-9)
        q = torch.rand(len(J), dtype=F64, generator=torch.Generator().manual_seed(seed))
        exact = torch.linalg.matrix_norm(q[:, None] * J, 2)
        assert exact <= found.weighted_norm(z, q) <= 1.3 * exact
        moved = torch.stack([_value(network, x + step.reshape(x.shape), z) - _value(network, x, z) for step in d])
        rest, steps = moved - d @ J.T, ball.steps[k]
        assert bool((moved.abs() <= steps.far.flatten() * (1 + 1e-12)).all())
        assert bool((rest.abs() <= steps.rest.flatten() + 1e-13).all())
        assert bool((torch.linalg.vector_norm(rest, dim=1) <= steps.rest_norm + 1e-13).all())
        remainder = own.node.activation.value(_value(network, x, z) + moved) - own.node.activation.value(
            _value(network, x, z)
        )
        remainder = remainder - own.slope.flatten() * moved
        assert bool((torch.linalg.vector_norm(remainder, dim=1) <= ball.remainders[k][1] + 1e-13).all())
        square = own.node.activation
        assert square.curvature is not None
        if k in ball.third:
            third = remainder - found.bends[k] * (d @ J.T).square() / 2
            assert bool((torch.linalg.vector_norm(third, dim=1) <= ball.third[k] + 1e-13).all())


def _value(network: Network, x: Tensor, z: int) -> Tensor:
    values: list[Tensor] = []
    for node in network.nodes[: z + 1]:
        if not node.sources:
            values.append(x)
        elif hasattr(node, "terms"):
            values.append(sum(term.map.apply(values[term.source]) for term in node.terms) + node.offset)
        else:
            values.append(node.activation.value(values[node.sources[0]]))
    return values[-1][0].flatten()


@pytest.mark.parametrize("t", [0.05, 0.3, 1.0])
def test_no_ascent_rises_further(t: float) -> None:
    network = convolutional()
    found, functions, x = expanded(network)
    ball = Ball(found, t)
    smaller = Ball(found, 0.7 * t, larger=ball)
    shared = Form(functions, [0, 1], ball)
    bound = torch.stack([Form(functions, [k], ball).rises([k], [ball])[0, 0] for k in range(2)])
    both = shared.rises([0, 1], [smaller, ball])
    for radius, limits in ((t, bound), (t, both[:, 1]), (0.7 * t, both[:, 0])):
        assert bool((climbed(network, differences(network), x, functions, radius) <= limits).all())


def test_small_balls_lose_only_the_third_order() -> None:
    network = convolutional()
    found, functions, x = expanded(network)
    g = torch.linalg.vector_norm(functions.gradient[0])
    losses = []
    for t in (0.02, 0.01):
        truth = climbed(network, differences(network), x, functions, t, 40)[0]
        losses.append(float(Form(functions, [0], Ball(found, t)).rises([0], [Ball(found, t)])[0, 0] - truth))
    assert 0 <= losses[1] < losses[0] / 5 < float(g) * 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])
def test_no_ascent_rises_further_on_graphs(graph: Graph) -> None:
    network = graph.network(1)
    found, functions, x = expanded(network)
    for t in (0.1, 0.6):
        ball = Ball(found, t)
        bound = Form(functions, list(range(len(functions.gradient))), ball).rises(
            range(len(functions.gradient)), [ball]
        )[:, 0]
        assert bool((climbed(network, differences(network), x, functions, t, 6) <= bound).all())


# Faults that the tests above have to notice


def _holds(network: Network, t: float) -> bool:
    found, functions, x = expanded(network)
    ball = Ball(found, t)
    bound = Form(functions, [0], ball).rises([0], [ball])[0, 0]
    d = steps_of(functions, t)
    for own in found.neurons.values():
        z = own.node.source
        J = torch.autograd.functional.jacobian(lambda v, z=z: _value(network, v, z), x)[..., 0, :, :, :].flatten(1)
        moved = torch.stack([_value(network, x + step.reshape(x.shape), z) - _value(network, x, z) for step in d])
        if bool((torch.linalg.vector_norm(moved - d @ J.T, dim=1) > ball.rest[z][1] + 1e-12).any()):
            return False
    return bool(climbed(network, differences(network), x, functions, t)[0] <= bound)


def cubes() -> Network:
    """Return a network of one neuron behind another, all of whose bounds are nearly attained."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)).double().eval()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (1.0, -1.5, 3.0, 1.5, [[-1.0], [1.0]], 0.0), strict=True):
            parameter.copy_(torch.as_tensor(value, dtype=F64))
    return trace(model, torch.zeros(1, 1, dtype=F64))


def test_a_weight_of_the_wrong_sign_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Form._worst_quotients

    def wrong(self: Form, k: int) -> Tensor:
        return original(self, k).clamp(max=0.0) * 2

    assert _holds(convolutional(3.0), 0.3)
    monkeypatch.setattr(Form, "_worst_quotients", wrong)
    assert not all(_holds(convolutional(3.0, seed), 0.3) for seed in range(4))


def test_path_maps_that_are_too_short_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, dtype=F64)
    network, facts = cubes(), NetworkFacts(cubes(), 2, NormBounds())
    found = Expansion(facts, evaluate_with_error(facts.network, x, facts.norms))
    t = 1e-3
    z = found.last
    exact = max(
        float((_value(network, x + s * t, z) - _value(network, x, z)).abs() - found.rows[z] * t) for s in (-1, 1)
    )
    rest = float(Ball(found, t).rest[z][1])
    assert exact <= rest <= 1.05 * exact
    paths = Expansion.path_norms.func
    monkeypatch.setattr(
        module.Expansion, "path_norms", property(lambda self: {k: 0.9 * v for k, v in paths(self).items()})
    )
    bent = Expansion.bent_paths.func
    monkeypatch.setattr(
        module.Expansion,
        "bent_paths",
        property(lambda self: {k: (0.9 * a, 0.9 * b) for k, (a, b) in bent(self).items()}),
    )
    assert float(Ball(Expansion(facts, found.evaluation), t).rest[z][1]) < exact


def test_slopes_that_are_off_are_paid_for() -> None:
    """Slopes may be any floats: what they are off the true ones is part of the bound."""
    network = convolutional()
    found, functions, x = expanded(network)
    for k, own in found.neurons.items():
        shifted = own.slope + 1e-3
        found.neurons[k] = replace(own, slope=shifted, slope_error=own.slope_error + 1e-3 * (1 + 1e-9))
        found.slopes[k] = shifted
    found._find_tangents()
    functions = Functions(found, differences(network))
    ball = Ball(found, 0.2)
    bound = Form(functions, [0], ball).rises([0], [ball])[0, 0]
    truth = climbed(network, differences(network), x, functions, 0.2)[0]
    assert truth <= bound and math.isfinite(float(bound))
