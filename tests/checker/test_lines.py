"""The independent checker on line certificates: it proves those that are made, and none beyond the truth."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvcert.checker.evaluation import Backed, Passed, backward, forward, gradient_norms, margins
from curvcert.checker.facts import Facts
from curvcert.checker.lines import by_lines, zones
from curvcert.checker.reading import read_model
from curvcert.checker.shells import Pairs, centres, spent
from curvcert.network import Network, trace
from curvcert.network.network_file import save_network
from tests.certificates.cases import blobs, planar, train
from tests.certificates.saved import Files, forged, saved, shallow
from tests.checker.checking import REFUSED, refused, verdict


class Residual(nn.Module):
    """A residual block between two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.outer, self.down = (nn.Linear(*s) for s in ((2, 6), (6, 6), (6, 6), (6, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return self.down(x + self.outer(torch.tanh(self.inner(x))))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 1, 1)),
        nn.Conv2d(2, 4, 3, padding=2),
        nn.SiLU(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


@cache
def trained(module: Callable[[], nn.Module]) -> Network:
    x, y = blobs()
    return trace(train(module(), x, y, steps=60), x[:1])


def by_name(method: str, factor: float = 1.0):
    """Call every sample's method by one name, and scale its radii."""

    def change(header, arrays) -> None:
        header["methods"], header["proven_by"] = [method], [[method]]
        arrays["method"][:] = 0
        for name in ("radius", "pair_radius"):
            arrays[name] *= factor
        arrays["attack_radius"][:] = np.inf

    return change


def nearest(network: Network, x: Tensor, label: int, other: int | None = None, reach: float = 3.0) -> float:
    """Return the distance of a point of the plane where the label does not win, by looking everywhere."""
    angles = torch.linspace(0, 2 * torch.pi, 181, dtype=torch.float64)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    steps = torch.linspace(0.0, reach, 400, dtype=torch.float64)
    logits = network((x + steps[:, None, None] * circle).reshape(-1, 2)).reshape(len(steps), len(circle), -1)
    gap = logits - logits[..., [label]]
    gap[..., label] = -torch.inf
    lost = (gap.amax(dim=2) if other is None else gap[..., other]) >= 0
    return float(steps[lost.any(dim=1)].min()) if bool(lost.any()) else float("inf")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Files:
    """A certificate of four samples, by the line among others."""
    files = saved(tmp_path_factory.mktemp("lines"), n=4)
    assert "line" in files.held.method
    return files


@pytest.fixture(scope="module")
def truth(genuine) -> np.ndarray:
    x = torch.tensor(genuine.x, dtype=torch.float64)
    return np.array([nearest(planar(), one, int(own)) for one, own in zip(x, genuine.held.label, strict=True)])


# --- What is made is proven ---------------------------------------------------------------------------------------


def test_line_certificates_of_a_dense_network_are_proven(genuine) -> None:
    found = verdict(genuine)
    assert found.holds, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("module", (Residual, convolution))
@pytest.mark.parametrize("method", ("checkable", "line"))
def test_line_certificates_with_skips_and_convolutions_are_proven(tmp_path, module, method) -> None:
    files = saved(tmp_path, trained(module), n=3, method=method)
    assert "line" in files.held.method
    found = verdict(files)
    assert found.holds, str(found)


def test_radii_that_a_line_decided_are_proven(tmp_path) -> None:
    files = saved(tmp_path, trained(dense), n=4, method="line", epsilons=(0.1, 0.15, 0.2))
    assert "line" in files.held.method
    found = verdict(files)
    assert found.holds, str(found)


def test_shells_do_not_prove_what_a_line_does(genuine) -> None:
    facts = Facts(read_model(genuine.network))
    k = genuine.held.method.index("line")
    label, r = int(genuine.held.label[k]), float(genuine.held.radius[k])
    passed, backed = looked_at(facts, genuine.x[k].astype(np.float64), label)
    g, m = gradient_norms(backed, 2.0), margins(passed.outputs, label, facts.deviations[label])
    others = np.flatnonzero(np.arange(3) != label)
    pairs = Pairs(others, g[others], facts.K[label][others], facts.L(2.0)[label][others])
    lost = spent(facts, centres(facts, passed, backed), np.full(2, r), pairs, 48, True)
    assert not (lost < m[others]).all()
    assert by_lines(facts, passed, backed, label, np.where(np.arange(3) == label, 0.0, r))[others].all()


# --- What is false is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", (1.05, 100.0))
def test_inflated_radii_are_refused(genuine, truth, factor) -> None:
    beyond = genuine.held.radius.numpy() * factor > truth
    assert beyond.any() and (genuine.held.radius.numpy() <= truth).all()
    for method in ("line", "shell"):
        found = verdict(genuine, certificate=forged(genuine.certificate, by_name(method, factor)))
        assert {status for status, false in zip(found.status, beyond, strict=True) if false} <= REFUSED


def test_one_inflated_pair_is_refused(genuine) -> None:
    k = genuine.held.method.index("line")
    label = int(genuine.held.label[k])
    x = torch.tensor(genuine.x[k], dtype=torch.float64)
    farther = max((i for i in range(3) if i != label), key=lambda i: nearest(planar(), x, label, i))

    def change(header, arrays) -> None:
        arrays["pair_radius"][k, farther] = 1.001 * nearest(planar(), x, label, farther)

    found = verdict(genuine, certificate=forged(genuine.certificate, change))
    assert [status == "proven" for status in found.status] == [j != k for j in range(4)]
    assert f"of class {farther} is more than is proven" in found.reasons[k]


def test_a_name_alone_decides_nothing(genuine, tmp_path) -> None:
    lipschitz = saved(tmp_path, n=2, method="lipsdp-recursion")
    renamed = verdict(lipschitz, certificate=forged(lipschitz.certificate, by_name("line")))
    assert renamed.holds, str(renamed)
    raised = verdict(lipschitz, certificate=forged(lipschitz.certificate, by_name("line", 100.0)))
    assert refused(raised)
    other = verdict(genuine, certificate=forged(genuine.certificate, by_name("lipsdp-recursion")))
    assert not other.holds and any("method that it names" in reason for reason in other.reasons)


def test_there_are_no_lines_in_other_norms_or_with_kinks(tmp_path) -> None:
    for network, p in ((planar(), 1.0), (planar(), float("inf")), (shallow(nn.ReLU), 2.0)):
        files = saved(tmp_path, network, n=2, p=p, method="lipschitz")
        assert verdict(files).holds
        found = verdict(files, certificate=forged(files.certificate, by_name("line")))
        assert refused(found) and "called line" in found.reasons[0]


# --- Its own mathematics -------------------------------------------------------------------------------------------


def looked_at(facts: Facts, x: np.ndarray, label: int) -> tuple[Passed, Backed]:
    passed = forward(facts.model, x)
    rows = np.eye(facts.model.classes) - np.eye(facts.model.classes)[label]
    return passed, backward(facts.model, passed, rows)


def facts_of(network: Network, folder) -> Facts:
    return Facts(read_model(save_network(network, folder / "network.safetensors")))


def test_lines_reach_far_and_never_beyond_the_truth(tmp_path) -> None:
    network = planar()
    facts = facts_of(network, tmp_path)
    for x in blobs(3)[0].double():
        label = int(network(x[None]).argmax())
        passed, backed = looked_at(facts, x.numpy(), label)
        rest = np.arange(3) != label
        truth = np.array([nearest(network, x, label, i) if i != label else 0.0 for i in range(3)])
        assert np.isfinite(truth).all()
        assert by_lines(facts, passed, backed, label, 0.85 * truth)[rest].all()
        assert not by_lines(facts, passed, backed, label, 1.001 * truth).any()


@pytest.mark.parametrize("inputs", (1, 5))
def test_a_line_that_bends_down_is_followed_to_its_end(tmp_path, inputs) -> None:
    """F(x) = tanh(u.x) - tanh(1/2) reaches 0 at distance 1/2, where a tangent at 0 does at tanh(1/2)."""
    model = nn.Sequential(nn.Linear(inputs, 1), nn.Tanh(), nn.Linear(1, 2)).double()
    u = torch.full((1, inputs), inputs**-0.5, dtype=torch.float64)
    parts = (u, torch.zeros(1)), (torch.tensor([[0.0], [1.0]]), torch.tensor([np.tanh(0.5), 0.0]))
    for layer, (weight, bias) in zip((model[0], model[2]), parts, strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
    facts = facts_of(trace(model.eval(), torch.zeros(1, inputs)), tmp_path)
    passed, backed = looked_at(facts, np.zeros(inputs), 0)
    assert np.tanh(0.5) < 0.47
    for r, holds in ((0.3, True), (0.495, True), (0.5, False), (0.6, False)):
        assert by_lines(facts, passed, backed, 0, np.array([0.0, r])).tolist() == [False, holds]


@pytest.mark.parametrize("far", (0.0, 1.0))
def test_curvature_across_the_line_counts(tmp_path, far) -> None:
    """F(x) = s x_1 + 2 log cosh(x_2 / 2) - 1/4 hardly rises along its gradient at 0, and reaches 0 across it.

    That is at x_2 = 2 arcosh(exp(1/8)), about 1.02.  Another neuron curves much more, 20 away: balls are needed then.
    """
    steep, bias = 0.001, torch.tensor([0.0, 0.0, 40.0, -160.0])
    model = nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    model[0].weight.data.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [0.0, 8.0]]))
    model[0].bias.data.copy_(bias)
    model[2].weight.data.copy_(torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, steep, far]]))
    model[2].bias.data.copy_(torch.tensor([0.0, -2 * np.log(2) - 40 * steep - 0.25]))
    facts = facts_of(trace(model.eval(), torch.zeros(1, 2)), tmp_path)
    assert (facts.K[0, 1] > 10) == (far > 0)
    passed, backed = looked_at(facts, np.zeros(2), 0)
    for r, holds in ((0.95, True), (1.03, False)):
        assert by_lines(facts, passed, backed, 0, np.array([0.0, r])).tolist() == [False, holds]


def test_a_flat_point_has_no_line(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[2].weight.data.zero_()
    model[2].bias.data.copy_(torch.tensor([1.0, 0.0]))
    facts = facts_of(trace(model.eval(), torch.zeros(1, 2)), tmp_path)
    passed, backed = looked_at(facts, np.zeros(2), 0)
    with np.errstate(invalid="ignore"):
        assert not by_lines(facts, passed, backed, 0, np.array([0.0, 1.0])).any()


@pytest.mark.parametrize("count", (2, 8, 24))
def test_zones_cover_the_ball(count) -> None:
    for r in (1.0, 0.1, 1 / 3, 7e-200):
        found = list(zones(r, count))[::-1]
        assert (found[0].low, found[-1].high, len(found)) == (-r, r, count)
        assert all(before.high == after.low for before, after in pairwise(found))
        for zone in found:
            alpha = np.linspace(zone.low, zone.high, 50)
            across = r * np.sqrt(np.maximum(0.0, (1 - alpha / r) * (1 + alpha / r)))
            distance = np.hypot(alpha - zone.at, across)
            assert zone.low <= zone.at <= zone.high
            for share in (zone.peak(1.0, 0.3), zone.peak(-1.0, 0.0), zone.peak(0.0, 1.0), zone.peak(0.0, 0.0)):
                width = [zone.width(float(a), share) for a in alpha]
                assert (across <= np.array(width) * (1 + 1e-15)).all()
                assert np.ptp(np.diff(width)) <= 1e-12 * r + 1e-140  # a straight line
            assert (distance <= zone.reach * (1 + 1e-15)).all()
            assert all(d * d <= zone.squared(float(a)) * (1 + 1e-15) for a, d in zip(alpha, distance, strict=True))
