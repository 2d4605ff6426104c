"""Attack certificates of ordinary networks: from points on the ray along which the margin falls the fastest."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from curvcert.bounds.lipschitz.problem import Problem, outputs_of
from curvcert.bounds.types import Global
from curvcert.certificates import Certificate, certify
from curvcert.certificates.attack_radius import replays, walked_witnesses
from curvcert.certificates.methods.balls import Centres
from curvcert.certificates.pointwise import evaluate_points
from curvcert.data import load_digits
from curvcert.network import Network, trace
from curvcert.norms import steepest_direction, vector_norm

SAMPLES = 60


@cache
def ordinary() -> Network:
    """A network trained for accuracy alone, deep enough that its global curvature is out of proportion."""
    data = load_digits("train")
    x, y = data.as_float64()[:600].float(), data.labels[:600]
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.enable_grad():
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return trace(model.eval(), x[:1])


def inputs() -> Tensor:
    return load_digits("test").as_float64()[:SAMPLES]


@cache
def certified(p: float, box: tuple[float, float] | None = None) -> Certificate:
    return certify(ordinary(), inputs(), p=p, box=box, epsilons=1e-6, progress=False)


def first_change_on_the_ray(p: float) -> Tensor:
    """Return the first distance of a dense grid at which the class changes along the steepest direction."""
    network, x = ordinary(), inputs()
    logits, jacobian, each = network(x), network.jacobian(x), torch.arange(len(x))
    label = logits.argmax(dim=1)
    gradients = (jacobian - jacobian[each, label][:, None]).flatten(2)
    dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[p]
    reach = (logits.gather(1, label[:, None]) - logits) / vector_norm(gradients, dual, dim=2).clamp(min=1e-300)
    reach, target = reach.scatter(1, label[:, None], torch.inf).min(dim=1)
    direction = steepest_direction(gradients[each, target], p)
    first = torch.full_like(reach, torch.inf)
    for times in torch.linspace(0, 5, 501).tolist():
        points = x + (times * reach[:, None] * direction).reshape(x.shape)
        changed = network(points).argmax(dim=1) != label
        first = torch.where(changed & first.isinf(), times * reach, first)
    return first


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
class TestOrdinaryNetworks:
    def test_have_them_where_one_step_does_not_reach(self, p: float) -> None:
        one_step = certify(ordinary(), inputs(), p=p, method="unrolled", progress=False)
        assert int(one_step.attack_radius.isfinite().sum()) <= SAMPLES // 10
        assert int(certified(p).attack_radius.isfinite().sum()) >= SAMPLES * 9 // 10

    def test_each_replays_at_its_distance(self, p: float) -> None:
        cert = certified(p)
        found = cert.attack_radius.isfinite()
        assert bool(replays(ordinary(), cert.witness[found], cert.label[found]).all())
        distance = vector_norm((cert.witness - inputs())[found].flatten(1), p, dim=1)
        torch.testing.assert_close(cert.attack_radius[found], distance, rtol=1e-12, atol=0)
        assert bool((cert.radius <= cert.attack_radius).all())

    def test_they_are_where_the_class_first_changes_on_the_ray(self, p: float) -> None:
        near = certified(p).attack_radius <= 1.02 * first_change_on_the_ray(p)
        assert int(near.sum()) >= SAMPLES * 9 // 10

    def test_a_box_keeps_them_inside(self, p: float) -> None:
        cert = certified(p, box=(0.0, 1.0))
        found = cert.attack_radius.isfinite()
        assert int(found.sum()) >= SAMPLES // 6
        assert bool(((cert.witness[found] >= 0) & (cert.witness[found] <= 1)).all())
        assert bool(replays(ordinary(), cert.witness[found], cert.label[found]).all())


@pytest.mark.slow
def test_no_step_runs_on_what_a_witness_rules_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cert, counts = certified(2.0), []
    relaxed = Centres.relaxed

    def counted(centres: Centres, index: Tensor, radius: Tensor) -> Tensor:
        counts.append(len(centres.known))
        return relaxed(centres, index, radius)

    monkeypatch.setattr(Centres, "relaxed", counted)
    for eps in cert.attack_radius.quantile(torch.tensor([0.1, 0.5], dtype=torch.float64)).tolist():
        counts.clear()
        decided = certify(ordinary(), inputs(), epsilons=eps, progress=False)
        assert 0 < max(counts) <= int((cert.attack_radius > eps).sum()) < SAMPLES
        alone = certify(ordinary(), inputs(), method="linear", epsilons=eps, progress=False)
        assert bool(((decided.radius >= eps) | (alone.radius < eps)).all())


def test_nothing_is_claimed_that_the_curvature_does_not_prove() -> None:
    network, x = ordinary(), inputs()
    eye = torch.eye(10, dtype=torch.float64)
    outputs = outputs_of(Problem(network.read_out(eye), 2, 2, Global(), scalars=True), network)
    none = torch.zeros(10, 10, dtype=torch.float64)
    points = evaluate_points(outputs, x, None, none)
    for K, shown in ((0.0, SAMPLES), (math.inf, 0), (math.nan, 0)):
        radius, _ = walked_witnesses(outputs, x, points, torch.full_like(points.margin, K), none, None)
        assert int(radius.isfinite().sum()) in range(shown * 9 // 10, shown + 1)
