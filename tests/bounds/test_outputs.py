"""Bounds on outputs: above and below everything sampled or climbed, exact where that is known, clear in refusals."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import curvcert
from curvcert.activations import RELU, TANH
from curvcert.bounds.outputs import _changes, output_bounds
from curvcert.errors import InvalidInput
from curvcert.falsifier import falsify_outputs, load_counterexample, replay, save_counterexample
from curvcert.network import Network, trace
from curvcert.network.builder import start
from curvcert.norms import vector_norm
from curvcert.operators import Dense
from tests.graph_families import GRAPHS
from tests.sampling import crossed

F64 = torch.float64
NORMS = [1.0, 2.0, 3.0, math.inf]


def _in_ball(x: torch.Tensor, r: torch.Tensor, p: float, count: int, seed: int) -> torch.Tensor:
    """Return points of the closed balls, most of them near the sphere."""
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(count, *x.shape, dtype=F64, generator=g)
    d = d * (torch.rand(count, *x.shape, generator=g) < 0.7)
    d = d / vector_norm(d.flatten(2), p, dim=2)[:, :, None].clamp(min=1e-300)
    return x + d * r[:, None] * torch.rand(count, len(x), 1, dtype=F64, generator=g) ** 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(GRAPHS, NORMS))
def test_outputs_of_every_graph_stay_within_their_bounds(graph, p: float):
    net, g = graph.network(1), torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, dtype=F64, generator=g)
    r = torch.tensor([0.0, 1e-6, 0.1, 0.5, 3.0], dtype=F64)
    points = _in_ball(x, r, p, 200, 1)
    lo, hi = x - 0.4 * torch.rand(5, 4, dtype=F64, generator=g), x + 0.4 * torch.rand(5, 4, dtype=F64, generator=g)
    C, c = torch.randn(2, net.outputs, dtype=F64, generator=g), torch.tensor([1.0, -2.0], dtype=F64)
    for box in (None, (lo, hi)):
        inside = points if box is None else points.clamp(lo, hi)
        y = net(inside.reshape(-1, 4)).reshape(200, 5, -1)
        found = output_bounds(net, x, r, p, box)
        assert bool((y >= found.lower - 1e-14).all()) and bool((y <= found.upper + 1e-14).all())
        rows = output_bounds(net, x, r, p, box, C, c)
        value = y @ C.T + c
        assert bool((value >= rows.lower - 1e-14).all()) and bool((value <= rows.upper + 1e-14).all())
    assert float(found.width[0].max()) < 1e-9


@pytest.mark.parametrize("p", NORMS)
def test_linear_networks_are_exact(p: float):
    g = torch.Generator().manual_seed(0)
    W = torch.randn(3, 5, dtype=F64, generator=g)
    net = Network(start((5,), torch.device("cpu")).linear(Dense(W), torch.ones(3)).builder.nodes)
    x = torch.randn(2, 5, dtype=F64, generator=g)
    found = output_bounds(net, x, 0.5, p)
    from_rows = 0.5 * vector_norm(W, 1 / (1 - 1 / p) if p > 1 else math.inf, dim=1)
    assert torch.allclose(found.width, 2 * from_rows.expand(2, 3), rtol=1e-12)
    assert torch.allclose((found.lower + found.upper) / 2, net(x), rtol=1e-12)


def test_one_neuron_of_every_kind_is_exact_over_a_box():
    for act, lo, hi in ((RELU, -1.0, 3.0), (TANH, -1.0, 3.0)):
        net = Network(start((1,), torch.device("cpu")).activate(act, "a").builder.nodes)
        found = output_bounds(net, box=(torch.tensor([lo]), torch.tensor([hi])))
        ends = act.value(torch.tensor([lo, hi], dtype=F64))
        assert float(found.upper) >= float(ends.max()) and float(found.lower) <= float(ends.min())
        assert float(found.width) <= 1.6 * float(ends.max() - ends.min())


def test_max_pooling_and_convolutions_are_bounded():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 2, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3),
    )  # fmt: skip
    net = trace(model.eval(), torch.zeros(1, 1, 8, 8))
    x = torch.rand(3, 1, 8, 8, dtype=F64)
    for p, r in ((2.0, 0.3), (math.inf, 0.05), (1.0, 1.0)):
        found = output_bounds(net, x, r, p)
        points = _in_ball(x.flatten(1), torch.full((3,), r, dtype=F64), p, 1000, 1).reshape(-1, 1, 8, 8)
        y = net(points).reshape(1000, 3, -1)
        assert bool((y >= found.lower).all()) and bool((y <= found.upper).all())
        # Random points of a ball come somewhere near the truth in linf alone.
        assert p != math.inf or bool((found.width < 40 * (y.amax(0) - y.amin(0))).all())


def test_rows_of_their_own_for_every_sample_and_boxes_of_every_shape():
    net = GRAPHS[0].network(0)
    x = torch.zeros(2, 4, dtype=F64)
    C = torch.eye(net.outputs, dtype=F64)[None].repeat(2, 1, 1) * torch.tensor([1.0, 2.0], dtype=F64)[:, None, None]
    one, own = output_bounds(net, x, 0.1), output_bounds(net, x, 0.1, C=C)
    assert torch.allclose(own.width, one.width * torch.tensor([[1.0], [2.0]], dtype=F64), rtol=1e-9)
    boxes = [(-0.2, 0.2), (-0.2 * torch.ones(4), 0.2 * torch.ones(4)), (x - 0.2, x + 0.2)]
    widths = [output_bounds(net, x, 0.3, box=box).width for box in boxes]
    assert all(torch.allclose(width, widths[0], rtol=1e-6) for width in widths)
    assert bool((widths[0] <= output_bounds(net, x, 0.3).width).all())


def test_a_declared_activation_is_named():
    class Wave(nn.Module):
        def forward(self, x):
            return torch.cos(x)

    curvcert.activations.register_activation(
        Wave,
        curvcert.activations.declare_activation("wave", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0), (-1.0, 1.0)),
    )
    net = trace(nn.Sequential(nn.Linear(2, 3), Wave(), nn.Linear(3, 1)).eval(), torch.zeros(1, 2))
    found = output_bounds(net, torch.zeros(1, 2), 0.1)
    assert "wave" in repr(found) and found.assumes == net.assumes


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "needs a region"),
        ({"radius": 0.1}, "pass at=x as well"),
        ({"at": torch.zeros(1, 4), "radius": -1.0}, "at least 0"),
        ({"at": torch.zeros(1, 4), "radius": 0.1, "box": (0.1, 0.2)}, "does not contain x"),
        ({"box": (torch.ones(4), torch.zeros(4))}, "lowest <= highest"),
        ({"box": (torch.zeros(3), torch.ones(3))}, "sides of a box"),
        ({"box": 3}, "two numbers or tensors"),
        ({"at": torch.zeros(1, 4), "radius": 0.1, "C": torch.zeros(2, 9)}, "C is finite"),
        ({"at": torch.zeros(1, 4), "radius": 0.1, "c": torch.zeros(9)}, "one number per row"),
        ({"at": torch.zeros(1, 4), "radius": 0.1, "p": 0.5}, "1 <= p"),
    ],
)
def test_wrong_questions_are_refused(asked: dict, told: str):
    with pytest.raises(InvalidInput, match=told):
        output_bounds(GRAPHS[0].network(0), **asked)


WHERE = {
    "ball": {"at": torch.zeros(2, 4, dtype=F64), "radius": 0.4},
    "box": {"box": (-0.3, torch.tensor([0.1, 0.2, 0.3, 0.4]))},
    "cut": {"at": torch.zeros(2, 4, dtype=F64), "radius": 0.4, "box": (-0.1, 0.2)},
    "half-open cut": {"at": torch.zeros(2, 4, dtype=F64), "radius": 0.4, "p": 1, "box": (0.0, math.inf)},
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_the_falsifier_finds_nothing_against_bounds_and_short_ones_out(where, tmp_path):
    g = torch.Generator().manual_seed(3)
    net = Network(
        start((4,), torch.device("cpu")).linear(Dense(torch.randn(3, 4, dtype=F64, generator=g))).builder.nodes
    )
    where = where | {"C": torch.randn(2, 3, dtype=F64, generator=g), "c": torch.tensor([5.0, -7.0])}
    found = output_bounds(net, **where)
    right = falsify_outputs(found, net, **where)
    assert not right and right.unconfirmed == 0 and right.closest["output"] > 0.97
    for side, sign in (("lower", 1), ("upper", -1)):
        short = replace(found, **{side: getattr(found, side) + sign * 0.1 * found.width})
        wrong = falsify_outputs(short, net, **where)
        assert wrong.counterexamples and wrong.unconfirmed == 0
        example = wrong.counterexamples[0]
        again = load_counterexample(save_counterexample(example, tmp_path / "example.safetensors"))
        assert (
            replay(again).refuted
            and not replay(replace(again, claimed=again.claimed + float(found.width.max()))).refuted
        )
        assert not replay(replace(again, y=again.y + 10)).refuted


def test_a_remainder_a_tenth_too_small_is_found_out(monkeypatch):
    net = Network(start((1,), torch.device("cpu")).activate(TANH, "a").builder.nodes)
    box = (torch.tensor([-1.0]), torch.tensor([3.0]))
    assert not falsify_outputs(output_bounds(net, box=box), net, box=box)
    at, r = torch.ones(1, 1, dtype=F64), 2.0
    assert not falsify_outputs(output_bounds(net, at, r), net, at, r)
    monkeypatch.setattr("curvcert.bounds.outputs._changes", lambda *a: [0.9 * side for side in _changes(*a)])
    assert falsify_outputs(output_bounds(net, at, r), net, at, r)


def test_models_narrow_what_they_are_made_for_and_cost_nothing_elsewhere(monkeypatch):
    torch.manual_seed(0)
    net = trace(
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).eval(),
        torch.zeros(1, 8),
    )
    x = torch.randn(3, 8, dtype=F64)
    both = output_bounds(net, x, 0.5)
    cut = output_bounds(net, x, 0.5, box=(x - 0.1, x + 0.1))
    monkeypatch.setattr("curvcert.bounds.outputs._MODELS_COST", 0)
    linear = output_bounds(net, x, 0.5)
    assert bool((both.width <= linear.width).all()) and float((both.width / linear.width).mean()) < 0.9
    assert bool((cut.width <= output_bounds(net, x, 0.5, box=(x - 0.1, x + 0.1)).width).all())
