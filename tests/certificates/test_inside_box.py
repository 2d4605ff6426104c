"""Radii of balls cut with a box: never refuted inside it, larger than whole balls', infinite where all is proven."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvcert.attacks import Attack, pgd
from curvcert.certificates import Certificate, certify, load_certificate, with_search
from curvcert.certificates.methods.balls import PRECISION
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.falsifier import falsify, load_counterexample, replay, save_counterexample
from curvcert.network import Network, trace
from curvcert.norms import vector_norm
from tests.certificates.cases import blobs, digits, digits_network, planar
from tests.certificates.saved import forged, saved
from tests.checker.checking import refused, verdict

F64 = torch.float64
UNIT = (0.0, 1.0)


def inside(net: Network, x: Tensor, y: Tensor | None, p: float, method: str, box=UNIT, **options) -> Certificate:
    return certify(net, x, y, p, method, box, inside_box=True, progress=False, **options)


def assert_holds_on_a_grid(net: Network, x: Tensor, cert: Certificate, lower: float, upper: float) -> None:
    """Every point of a fine grid of the plane's box that lies in a certified ball keeps the label."""
    axis = torch.linspace(lower, upper, 161, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)
    predicted = net(grid).argmax(dim=1)
    for k in cert.correct.nonzero().flatten().tolist():
        near = vector_norm(grid - x[k].double(), cert.p, dim=1) <= cert.radius[k]
        assert bool((predicted[near] == cert.label[k]).all())


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_no_radius_is_refuted_inside_the_box(activation: type[nn.Module], p: float) -> None:
    net, (x, y) = planar(activation), blobs(30, seed=1)
    for method in ("linear", "lipschitz"):
        cert = inside(net, x, y, p, method)
        assert not falsify(net, x, y, cert, restarts=3, steps=12)
        assert_holds_on_a_grid(net, x, cert, *UNIT)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_cutting_gains_where_the_box_is_near(p: float) -> None:
    net, (x, y) = planar(nn.ReLU), blobs(60, seed=2)
    whole = certify(net, x, y, p, "linear", progress=False)
    cut = inside(net, x, y, p, "linear")
    assert bool((cut.radius >= whole.radius * 0.98).all())
    gains = (cut.radius / whole.radius)[cut.correct]
    assert float(gains.max()) > 1.02


@pytest.mark.slow
def test_all_methods_together_are_no_worse_than_alone() -> None:
    net, (x, y) = planar(), blobs(24, seed=3)
    best = inside(net, x, y, 2, "auto")
    assert best.inside_box and "inside the box [0, 1]" in repr(best) and "inside the box" in best._repr_html_()
    whole = certify(net, x, y, progress=False)
    # A descent that starts at another radius ends elsewhere.
    assert bool((best.radius >= whole.radius * (1 - 8 * PRECISION)).all())
    assert_holds_on_a_grid(net, x, best, *UNIT)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "quadratic", "lipschitz", "unrolled", "auto"])
def test_a_box_that_is_proven_whole_has_an_infinite_radius(method: str) -> None:
    net, (x, y) = planar(), blobs(12, seed=4)
    x = x.double()
    box = (x - 1e-4, x + 2e-4)
    cert = inside(net, x, y, 2, method, box)
    clear = cert.correct & (certify(net, x, y, 2, method, progress=False).radius > 1e-3)
    assert int(clear.sum()) > 6 and bool(cert.radius[clear].isinf().all())
    assert cert.certified_accuracy(1e6) >= float(clear.double().mean())
    assert bool(cert.attack_radius[clear].isinf().all())
    # And where the box holds a misclassified point it is finite, and shorter than the way there.
    wide = inside(net, x, y, 2, method, (-1.0, 2.0))
    found = pgd(net, x, y, 3.0, 2, steps=40, restarts=4, box=(-1.0, 2.0))
    away = vector_norm((found.points - x).flatten(1), 2, dim=1)
    assert bool(found.broken.all()) and bool((wide.radius <= away)[wide.correct].all())


def test_infinite_radii_decide_every_epsilon() -> None:
    net, (x, y) = planar(nn.ReLU), blobs(9, seed=4)
    x = x.double()
    cert = inside(net, x, y, math.inf, "linear", (x - 1e-4, x + 1e-4), epsilons=[1e-5, 0.5])
    assert cert.certified_accuracy(0.5) > 0.8 and bool(cert.radius[cert.radius >= 0.5].isinf().all())


@pytest.mark.slow
def test_sides_are_numbers_or_tensors_of_an_input_or_of_all() -> None:
    net, (x, y) = planar(), blobs(10, seed=5)
    found = [
        inside(net, x, y, 2, "linear", box, batch_size=size)
        for box in (UNIT, (torch.zeros(2), torch.ones(2)), (torch.zeros(10, 2), torch.ones(10, 2)), (0, torch.ones(2)))
        for size in (None, 3)
    ]
    for cert in found[1:]:
        torch.testing.assert_close(cert.radius, found[0].radius, rtol=1e-9, atol=0)
    assert found[-4].box is not None and found[-4].box.per_sample and found[-3].box == found[-4].box
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    own = inside(net, loader, None, 2, "linear", (torch.zeros(10, 2), torch.ones(10, 2)))
    torch.testing.assert_close(own.radius, found[0].radius, rtol=1e-9, atol=0)


def test_half_open_boxes() -> None:
    net, (x, y) = planar(nn.ReLU), blobs(12, seed=6)
    cert = inside(net, x, y, 1, "linear", (0.0, math.inf))
    assert bool(cert.radius.isfinite().all()) and not falsify(net, x, y, cert, restarts=3, steps=12)
    assert_holds_on_a_grid(net, x, cert, 0.0, 2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"box": None}, "inside_box needs the box"),
        ({"box": (0.5, 1.0)}, r"The box \[0.5, 1\] does not contain x"),
        ({"box": (0.0, math.nan)}, "is NaN"),
        ({"box": (1.0, 0.0)}, "lowest <= highest"),
        ({"box": (torch.zeros(3), 1)}, "sides of a box"),
        ({"box": (torch.zeros(3, 2), 1)}, "sides of 3 samples"),
        ({"box": (torch.zeros(7, 2), 1)}, "sides of 7 samples, got 6"),
    ],
)
def test_boxes_that_make_no_sense_are_refused(options, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        inside(planar(), *blobs(6), 2, "lipschitz", **options)


def test_bytes_are_no_inside_of_the_unit_box() -> None:
    with pytest.raises(InvalidInput, match="does not contain x"):
        inside(planar(), torch.full((1, 2), 200.0), None, 2, "lipschitz")


def test_witnesses_lie_inside() -> None:
    net, (x, y) = planar(), blobs(60, seed=7)
    cert = inside(net, x, y, 2, "unrolled")
    assert len(cert.witness_index) and cert.box is not None
    assert bool(((cert.witness_points >= 0) & (cert.witness_points <= 1)).all())
    assert bool((cert.radius <= cert.attack_radius).all())


def test_a_radius_too_large_is_refuted_by_a_point_inside(tmp_path) -> None:
    net, (x, y) = planar(), blobs(24, seed=8)
    cert = inside(net, x, y, 2, "linear")
    wrong = replace(cert, radius=cert.radius * 3, pair_radius=cert.pair_radius * 3, radii={})
    found = falsify(net, x, y, wrong)
    assert found.counterexamples and found.unconfirmed == 0
    for example in found.counterexamples:
        assert bool(((example.y >= 0) & (example.y <= 1)).all())
    again = load_counterexample(save_counterexample(found.counterexamples[0], tmp_path / "example.safetensors"))
    assert again.box == cert.box and replay(again).refuted
    outside = replace(again, y=again.y - 5, claimed=100.0)
    assert not replay(outside).refuted and "outside of the box" in replay(outside).reason


def test_a_witness_outside_is_refuted() -> None:
    net, (x, y) = planar(), blobs(60, seed=7)
    cert = inside(net, x, y, 2, "unrolled")
    wrong = replace(cert, witness_points=cert.witness_points + 3, attack_radius=cert.attack_radius + 9)
    found = falsify(net, x, y, wrong)
    assert any(e.kind == "witness" and "outside" in replay(e).reason for e in found.counterexamples)


def test_points_of_a_search_outside_do_not_count() -> None:
    net, (x, y) = planar(nn.ReLU), blobs(12, seed=4)
    x = x.double()
    cert = inside(net, x, y, 2, "linear", (x - 1e-4, x + 1e-4))
    free = pgd(net, x, y, 2.0, restarts=2, steps=30)
    assert bool(free.broken.any())
    assert bool(with_search(cert, net, x, free).search_radius[cert.correct].isinf().all())
    # One inside counts, and a radius that holds it is a fault.
    from_inside = Attack(torch.ones(12, dtype=torch.bool), x)
    assert bool(with_search(cert, net, x, from_inside).search_radius[cert.correct].isinf().all())


def test_digits_gain_inside_the_unit_box() -> None:
    net, _ = digits_network()
    x, y = digits(8)
    for p in (1.0, 2.0, math.inf):
        whole = certify(net, x, y, p, "linear", progress=False)
        cut = inside(net, x, y, p, "linear")
        assert float((cut.radius / whole.radius)[cut.correct].median()) > 1.04
        assert not falsify(net, x, y, cut, restarts=2, steps=15)


class TestTheFile:
    def test_is_read_as_it_was_saved(self, tmp_path) -> None:
        files = saved(tmp_path, n=6, box=UNIT, inside_box=True, progress=False)
        loaded = load_certificate(files.certificate)
        assert loaded.inside_box and loaded.box == files.held.box and repr(loaded) == repr(files.held)

    def test_says_nothing_without_its_box(self, tmp_path) -> None:
        files = saved(tmp_path, n=3, method="lipschitz", box=UNIT, inside_box=True)

        def no_field(header, arrays) -> None:
            del header["inside_box"]

        def no_box(header, arrays) -> None:
            del arrays["box"]

        def crossed(header, arrays) -> None:
            arrays["box"] = arrays["box"][::-1].copy()

        for change in (no_field, no_box, crossed):
            path = forged(files.certificate, change)
            with pytest.raises(InvalidFile):
                load_certificate(path)
            with pytest.raises(InvalidFile):
                verdict(files, certificate=path)

    @pytest.mark.parametrize("method", ["lipschitz", "unrolled", "shell", "line"])
    def test_is_proven_again_infinite_radii_included(self, tmp_path, method: str) -> None:
        x = blobs(6)[0].double()
        for box in (UNIT, (x - 1e-5, x + 1e-5)):
            files = saved(tmp_path, n=6, method=method, box=box, inside_box=True)
            found = verdict(files)
            assert found.holds, str(found)
        assert bool(files.held.radius.isinf().any())

    def test_linear_radii_cannot_be_checked_and_wrong_ones_are_contradicted(self, tmp_path) -> None:
        files = saved(tmp_path, n=6, method="linear", box=UNIT, inside_box=True)
        assert set(verdict(files).status) <= {"cannot check", "proven"}

        def larger(header, arrays) -> None:
            for name in ("radius", "pair_radius", "radii.linear"):
                arrays[name] *= 4
            arrays["attack_radius"][:] = np.inf

        found = verdict(files, certificate=forged(files.certificate, larger))
        assert "contradicted" in found.status

    def test_is_not_about_whole_balls(self, tmp_path) -> None:
        x = blobs(6)[0].double()
        files = saved(tmp_path, n=6, method="lipschitz", box=(x - 1e-5, x + 1e-5), inside_box=True)

        def whole(header, arrays) -> None:
            header["inside_box"] = False

        assert refused(verdict(files, certificate=forged(files.certificate, whole)))

    def test_names_a_box_around_its_inputs(self, tmp_path) -> None:
        files = saved(tmp_path, n=3, method="lipschitz", box=UNIT, inside_box=True)

        def elsewhere(header, arrays) -> None:
            arrays["box"] = np.array([5.0, 6.0])

        found = verdict(files, certificate=forged(files.certificate, elsewhere))
        assert set(found.status) == {"contradicted"} and "outside of the box" in found.reasons[0]


def test_certificates_of_different_claims_are_not_joined() -> None:
    from curvcert.certificates.certificate import concatenate

    net, (x, y) = planar(), blobs(4)
    one, two = certify(net, x, y, box=UNIT, method="lipschitz"), inside(net, x, y, 2, "lipschitz")
    with pytest.raises(InvalidInput, match="inside of a box"):
        concatenate([one, two])
    with pytest.raises(InvalidInput, match="inside_box needs box"):
        replace(two, box=None)


def test_single_point_boxes_are_proven() -> None:
    net = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), torch.zeros(1, 2))
    x = torch.rand(3, 2, dtype=F64)
    assert bool(inside(net, x, None, 2, "linear", (x, x)).radius.isinf().all())
