"""What a report shows are the certificate's own numbers."""

import json
import math
from dataclasses import replace
from statistics import median_low

import pytest
import torch
from torch import nn

from curvcert.certificates import Certificate, certify
from curvcert.errors import InvalidInput
from curvcert.network import trace
from curvcert.reporting import ReportData, report_data
from curvcert.reporting.looseness import deciding_pair
from tests.reporting.cases import Case, made_up


@pytest.fixture(scope="module")
def data(case: Case) -> ReportData:
    return report_data(
        case.certificate,
        case.network,
        case.x,
        case.y,
        epsilons=[0.2, 0.05, 0.1],
        searches=case.searches,
        seeds={"pgd": 0},
    )


def test_every_count_is_the_certificates_own(case: Case, data: ReportData) -> None:
    cert, n = case.certificate, len(case.certificate)
    for curves in (data.at_epsilons, *data.ranges):
        for k, eps in enumerate(curves.epsilons):
            assert curves.certified.counts[k] / n == cert.certified_accuracy(eps)
            assert curves.curve("attack").counts[k] / n == cert.attacked_accuracy(eps)
            assert curves.falsified.counts[k] / n == cert.searched_accuracy(eps)
    assert data.epsilons == (0.05, 0.1, 0.2)
    assert data.correct == int(cert.correct.sum())


def test_a_count_includes_a_radius_that_equals_the_perturbation() -> None:
    cert = made_up(10, radius=0.25)
    at = report_data(cert, epsilons=[0.25, math.nextafter(0.25, 1)]).at_epsilons
    assert at.certified.counts == (10, 0)
    assert report_data(cert, epsilons=[0.5, math.nextafter(0.5, 0)]).at_epsilons.falsified.counts == (10, 5)


def test_methods_that_did_not_run_have_no_curve(case: Case, data: ReportData) -> None:
    methods = ("lipschitz_radius", "curvature_radius", "local_radius")
    ran = [
        name for name in methods if not bool(getattr(case.certificate, name)[case.certificate.correct].isnan().all())
    ]
    assert [c.name for c in data.ranges[0].curves] == ["radius", *ran, "attack", "search"]
    assert [c.name for c in report_data(made_up(4, local=True)).ranges[0].curves] == [
        "radius",
        "lipschitz_radius",
        "local_radius",
        "attack",
    ]


def test_each_method_is_counted_by_itself(case: Case, data: ReportData) -> None:
    cert = case.certificate
    for name in ("lipschitz_radius", "curvature_radius"):
        expected = tuple(int(((getattr(cert, name) >= eps) & cert.correct).sum()) for eps in data.epsilons)
        assert data.at_epsilons.curve(name).counts == expected


def test_classes_add_up_to_the_whole(case: Case, data: ReportData) -> None:
    assert sum(row.samples for row in data.per_class) == len(case.certificate)
    assert sum(row.correct for row in data.per_class) == data.correct
    for k in range(len(data.epsilons)):
        assert sum(row.certified[k] for row in data.per_class) == data.at_epsilons.certified.counts[k]
        assert sum(row.standing[k] for row in data.per_class) == data.at_epsilons.falsified.counts[k]
    row = data.per_class[0]
    own = (case.certificate.label == row.label) & case.certificate.correct
    assert row.median_radius == median_low(case.certificate.radius[own].tolist())


def test_histograms_hold_every_correct_sample(case: Case, data: ReportData) -> None:
    assert [h.name for h in data.histograms] == ["radius", "attack", "search"]
    for histogram, radii in zip(
        data.histograms,
        (case.certificate.radius, case.certificate.attack_radius, case.certificate.search_radius),
        strict=True,
    ):
        assert sum(histogram.counts) + histogram.infinite == data.correct
        finite = radii[case.certificate.correct & radii.isfinite()]
        low, high = histogram.edges[3], histogram.edges[4]
        assert histogram.counts[3] == int(((finite >= low) & (finite < high)).sum())


def test_the_breakdown_is_of_the_pair_that_decides_most(case: Case, data: ReportData) -> None:
    loose = data.looseness
    pair, count = deciding_pair(case.certificate)
    assert loose.pair == pair and loose.decides == count > 0
    assert {b.method for b in loose.of("K")} >= {"compositional", "unrolled"}
    assert {b.method for b in loose.of("L")} >= {"product", "liplt"}
    assert 0 < loose.hessian_found <= loose.of("K")[0].value
    assert 0 < loose.slope_found <= loose.of("L")[0].value
    unrolled = next(b for b in loose.of("K") if b.method == "unrolled")
    assert math.isclose(sum(row.share for row in unrolled.layers), 1.0)


def test_without_a_network_or_inputs_it_says_what_is_missing(case: Case) -> None:
    bare = report_data(case.certificate)
    assert [b.constant for b in bare.looseness.breakdowns] == ["L", "K"]
    assert all(b.layers == () for b in bare.looseness.breakdowns)
    assert "Pass network" in bare.looseness.missing[0]
    assert report_data(made_up(3)).looseness is None
    assert "Pass x" in bare.gallery.missing
    assert not bare.labelled
    without_inputs = report_data(case.certificate, case.network)
    assert without_inputs.looseness.hessian_found is None
    assert any("Pass x" in line for line in without_inputs.looseness.missing)


def test_a_kink_has_no_curvature_and_other_norms_no_search() -> None:
    net = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.zeros(1, 4))
    x = torch.rand(5, 4, dtype=torch.float64)
    loose = report_data(certify(net, x, progress=False), net, x).looseness
    assert loose.of("K") == () and loose.hessian_found is None and loose.slope_found > 0
    assert any(line.startswith("K: ") for line in loose.missing)
    smooth = trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval(), torch.zeros(1, 4))
    loose = report_data(certify(smooth, x, p=math.inf, progress=False), smooth, x).looseness
    assert loose.of("K") and loose.slope_found is None
    assert any("l2 only" in line for line in loose.missing)


def test_the_gallery_holds_the_extremes_and_points_that_break(case: Case, data: ReportData) -> None:
    cert = case.certificate
    radii = sorted(cert.radius[cert.correct].tolist())
    assert [item.radius for item in data.gallery.weakest] == radii[:8]
    assert [item.radius for item in data.gallery.strongest] == radii[::-1][:8]
    shown = [item for item in (*data.gallery.weakest, *data.gallery.strongest) if item.distance is not None]
    assert shown
    for item in shown:
        assert item.broken_class != item.label
        assert item.distance >= item.radius
        assert item.distance <= float(cert.falsified_radius[item.index]) * (1 + 1e-12)
        assert item.picture.startswith("data:image/png;base64,")


def test_a_point_that_a_search_wrongly_calls_broken_is_not_shown(case: Case) -> None:
    honest = case.searches[0]
    false = replace(honest, broken=torch.ones_like(honest.broken), points=case.x.clone())
    nothing = replace(
        case.certificate,
        attack_radius=torch.where(case.certificate.correct, math.inf, 0.0).to(torch.float64),
    )
    gallery = report_data(nothing, case.network, case.x, searches=[false]).gallery
    assert all(item.distance is None for item in gallery.weakest)


def test_json_holds_everything_and_no_bare_infinity(case: Case, data: ReportData) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    content = json.loads(data.to_json(), parse_constant=refuse)
    assert content["samples"]["radius"] == case.certificate.radius.tolist()
    assert content["provenance"]["seeds"] == {"pgd": 0}
    assert "inf" in json.loads(report_data(made_up(3)).to_json())["samples"]["attack_radius"]


def test_digests_follow_the_values_and_need_no_network(case: Case, data: ReportData) -> None:
    assert set(data.provenance.digests) == {"certificate", "network", "inputs", "labels"}
    assert report_data(case.certificate, y=case.y).provenance.digests == data.provenance.digests
    moved = replace(case.certificate, radius=case.certificate.radius / 2)
    digests = report_data(moved, y=case.y).provenance.digests
    assert {name for name in digests if digests[name] != data.provenance.digests[name]} == {"certificate"}


def test_another_network_or_other_inputs_are_refused(case: Case) -> None:
    torch.manual_seed(1)
    other = trace(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3)).eval(), case.x[:1])
    with pytest.raises(InvalidInput, match="not the one that was certified"):
        report_data(case.certificate, other)
    moved = case.x.clone()
    moved[3, 0, 0, 0] += 1e-9
    with pytest.raises(InvalidInput, match="1 of 40 samples differ"):
        report_data(case.certificate, case.network, moved)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"y": torch.zeros(39, dtype=torch.int64)}, "one label per sample"),
        ({"y": torch.full((40,), 2)}, "differs from the classes"),
        ({"x": torch.zeros(40, 64)}, "must be the inputs"),
        ({"class_names": ["a", "b"]}, "one per class"),
        ({"epsilons": []}, "at least one"),
        ({"epsilons": [-0.1]}, "at least 0"),
        ({"epsilons": [math.inf]}, "finite"),
    ],
)
def test_wrong_arguments_are_refused(case: Case, wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        report_data(case.certificate, **wrong)


def test_a_search_without_the_network_is_refused(case: Case) -> None:
    with pytest.raises(InvalidInput, match="Pass network"):
        report_data(case.certificate, x=case.x, searches=case.searches)


def test_an_empty_certificate_is_refused() -> None:
    whole = made_up(3)
    tensors = {name: value[:0] for name, value in vars(whole).items() if isinstance(value, torch.Tensor)}
    empty: Certificate = replace(whole, **tensors, method=())
    with pytest.raises(InvalidInput, match="nothing to report"):
        report_data(empty)
