"""PGD of our own: in the ball, in the box, and at least as strong as foolbox's."""

import math
from typing import Any

import pytest
import torch

from curvcert.attacks import pgd
from curvcert.certificates import certify
from curvcert.errors import InvalidInput
from curvcert.norms import vector_norm
from tests.certificates.cases import blobs, digits, digits_network, planar

NORMS = [1.0, 2.0, math.inf]
EPS = {1.0: 1.5, 2.0: 0.35, math.inf: 0.06}


@pytest.mark.slow
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_what_it_finds_is_misclassified_in_the_ball_and_in_the_box(p: float, box: tuple[float, float] | None) -> None:
    network, _ = digits_network()
    x, y = digits()
    attack = pgd(network, x, y, EPS[p], p=p, steps=30, restarts=2, box=box)
    found = attack.broken
    assert bool(found.any())
    assert not bool(found.all())
    assert bool((network(attack.points[found]).argmax(dim=1) != y[found]).all())
    distance = vector_norm((attack.points[found] - x[found]).flatten(1), p, dim=1)
    assert float(distance.max()) <= EPS[p] * (1 + 1e-12)
    assert bool(attack.points[~found].isnan().all())
    if box is not None:
        assert float(attack.points[found].min()) >= 0 and float(attack.points[found].max()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("p", NORMS)
def test_it_breaks_at_least_as_many_points_as_foolbox(p: float) -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed (extra 'attack')")
    network, model = digits_network()
    x, y = digits()
    kinds = {
        1.0: foolbox.attacks.L1ProjectedGradientDescentAttack,
        2.0: foolbox.attacks.L2ProjectedGradientDescentAttack,
    }
    rival = kinds.get(p, foolbox.attacks.LinfProjectedGradientDescentAttack)(steps=100)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    broken = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(10):
        _, _, hit = rival(wrapped, x.float(), y, epsilons=EPS[p])
        broken |= hit
    ours = pgd(network, x, y, EPS[p], p=p, box=(0.0, 1.0))
    assert int(ours.broken.sum()) >= int(broken.sum())


def test_a_radius_a_sample_and_the_same_seed_give_the_same_points() -> None:
    x, y = blobs(30)
    eps = torch.linspace(0.01, 0.3, 30, dtype=torch.float64)
    first, second = (pgd(planar(), x.double(), y, eps, steps=20, restarts=2) for _ in range(2))
    assert torch.equal(first.broken, second.broken)
    torch.testing.assert_close(first.points, second.points, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("arguments", [{"p": 3.0}, {"p": 0.5}, {"steps": 0}, {"restarts": 0}])
def test_bad_input(arguments: dict[str, float]) -> None:
    x, y = blobs(3)
    with pytest.raises(InvalidInput):
        pgd(planar(), x.double(), y, 0.1, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("p", NORMS)
def test_foolbox_breaks_nothing_inside_a_certified_ball(p: float) -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed (extra 'attack')")
    network, model = digits_network()
    x, y = digits()
    radius = certify(network, x, y, p=p).radius
    attacks = {
        1.0: [foolbox.attacks.L1ProjectedGradientDescentAttack(steps=50), foolbox.attacks.SparseL1DescentAttack()],
        2.0: [foolbox.attacks.L2ProjectedGradientDescentAttack(steps=50), foolbox.attacks.L2FastGradientAttack()],
        math.inf: [
            foolbox.attacks.LinfProjectedGradientDescentAttack(steps=50),
            foolbox.attacks.LinfFastGradientAttack(),
        ],
    }
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    for eps in [float(radius.quantile(share)) for share in (0.25, 0.5, 0.9)]:
        for attack in attacks[p]:
            _, _, broken = attack(wrapped, x.float(), y, epsilons=eps)
            assert not bool((broken & (radius > eps * (1 + 1e-6))).any())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"box": (1.0, 0.0)}, "lowest <= highest"),
        ({"box": (0.5, 0.6)}, "outside of the box"),
        ({"eps": -1.0}, "at least 0"),
        ({"eps": math.nan}, "at least 0"),
        ({"eps": torch.ones(2)}, "one per sample"),
        ({"y": torch.full((4,), 30)}, "Labels lie in 0 .. 9, got 30 .. 30"),
        ({"y": torch.zeros(4)}, "one whole number per sample"),
        ({"y": torch.zeros(3, dtype=torch.long)}, "one whole number per sample"),
    ],
)
def test_what_no_ball_is_searched_for_is_refused(wrong: dict[str, Any], said: str) -> None:
    network, _ = digits_network()
    x, y = digits()
    with pytest.raises(InvalidInput, match=said):
        pgd(network, **({"x": x[:4], "y": y[:4], "eps": 0.1, "box": (0.0, 1.0), "steps": 1, "restarts": 1} | wrong))
