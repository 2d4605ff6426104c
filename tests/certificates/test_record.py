"""A saved certificate: the same when loaded, whole or not written, and refused when it cannot be right."""

import hashlib
import json
import os
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvcert.certificates import certifier, certify, load_certificate
from curvcert.certificates.certificate import concatenate
from curvcert.certificates.evidence import Evidence, input_digests
from curvcert.certificates.record import SLACK
from curvcert.checker import check_certificate
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.network import trace
from curvcert.network.network_file import network_digest
from tests.bounds.curvature.cases import trained
from tests.certificates.cases import blobs, digits, planar
from tests.certificates.saved import BOX, Files, forged, saved


def same(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left.nan_to_num(nan=-7.0), right.nan_to_num(nan=-7.0))
    if isinstance(left, Evidence):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(Evidence))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return left == right


CASES = ({"box": BOX}, {"method": "lipschitz"}, {"method": "anchored"}, {"p": float("inf")}, {"p": 1.5})


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
def test_what_is_loaded_is_what_was_saved(tmp_path, options) -> None:
    files = saved(tmp_path, **options)
    loaded = load_certificate(files.certificate)
    for field in fields(files.held):
        assert same(getattr(files.held, field.name), getattr(loaded, field.name)), field.name
    again = loaded.save(tmp_path / "again.safetensors")
    assert torch.equal(again.radius, loaded.radius)
    assert (tmp_path / "again.safetensors").read_bytes() == files.certificate.read_bytes()


def test_saved_numbers_are_rounded_to_the_safe_side(tmp_path) -> None:
    network, (x, y) = planar(), blobs(8)
    made = certify(network, x, y, box=BOX)
    held = made.save(tmp_path / "certificate.safetensors")
    right = made.correct
    assert bool((held.radius[right] < made.radius[right]).all())
    assert bool((held.radius >= made.radius * (1 - 2 * SLACK)).all())
    assert bool((held.evidence.L >= made.evidence.L).all())
    assert bool((held.evidence.K_used >= made.evidence.K_used).all())
    assert bool((held.attack_radius >= made.attack_radius).all())
    assert bool((held.margin <= made.margin).all())
    assert held.evidence.slack == SLACK


def test_a_radius_that_was_decided_is_still_certified_in_the_file(tmp_path) -> None:
    network, (x, y) = trained("mlp", True), digits(40)
    radii = certify(network, x, y).radius
    epsilons = [float(radii[radii > 0].quantile(share)) for share in (0.3, 0.6, 0.9)]
    certificate = certify(network, x, y, epsilons=epsilons)
    assert "line" in certificate.method
    certificate.save(tmp_path / "certificate.safetensors")
    kept = load_certificate(tmp_path / "certificate.safetensors")
    for eps in epsilons:
        assert 0 < kept.certified_accuracy(eps) == certificate.certified_accuracy(eps)


def test_without_witnesses_there_are_no_attack_radii(tmp_path) -> None:
    made = certify(planar(), blobs(12)[0], method="unrolled", box=BOX)
    made.save(tmp_path / "full.safetensors")
    held = made.save(tmp_path / "lean.safetensors", witnesses=False)
    assert bool(made.attack_radius.isfinite().any())
    assert bool(held.attack_radius[held.correct].isinf().all())
    assert (tmp_path / "lean.safetensors").stat().st_size < (tmp_path / "full.safetensors").stat().st_size


def test_batches_have_the_evidence_of_the_whole() -> None:
    ready, (x, _) = certifier(planar(), method="unrolled"), blobs(10)
    whole, parts = ready(x), concatenate([ready(x[:3]), ready(x[3:])])
    assert torch.equal(whole.evidence.inputs, parts.evidence.inputs)
    assert torch.equal(whole.evidence.K_used, parts.evidence.K_used)
    assert whole.evidence.network == network_digest(planar())


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 2), (700, 1000), (5, 3, 300, 300), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digests_are_those_of_shape_and_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*shape, dtype=dtype).transpose(0, -1).contiguous().transpose(0, -1)
    start = f"{list(shape[1:])}".encode()
    expected = [hashlib.sha256(start + sample.astype("<f8").tobytes()).digest() for sample in x.numpy()]
    assert [bytes(row.tolist()) for row in input_digests(x)] == expected


def test_a_source_may_reuse_its_memory() -> None:
    ready, (x, _) = certifier(planar(), method="unrolled"), blobs(12)
    x, place = x.double(), torch.empty(4, 2, dtype=torch.float64)
    given = ready(place.copy_(part) for part in x.split(4)).evidence.inputs
    assert torch.equal(given, ready(x).evidence.inputs)
    assert torch.equal(given, input_digests(x))


def test_the_digest_tells_networks_apart_and_not_where_they_came_from() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    wrapped = nn.Sequential(nn.Sequential(model[0], model[1]), model[2]).eval()
    one, two = (network_digest(trace(m, torch.zeros(1, 2))) for m in (model, wrapped))
    assert one == two
    with torch.no_grad():
        model[2].bias[0] += 1e-3
    assert network_digest(trace(model, torch.zeros(1, 2))) != one


def test_a_file_is_written_whole_or_not_at_all(tmp_path) -> None:
    files = saved(tmp_path, method="lipschitz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.safetensors", "network.safetensors"]
    with pytest.raises(InvalidInput, match=r"network\.safetensors"):  # a file, where a folder is needed
        files.held.save(tmp_path / "network.safetensors" / "certificate.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(OSError, match="no space"):
            files.held.save(tmp_path / "new" / "certificate.safetensors")
    assert list((tmp_path / "new").iterdir()) == []
    files.held.save(tmp_path / "new" / "certificate.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["certificate.safetensors"]


def _full(_: int) -> None:
    raise OSError("no space is left")


def test_a_certificate_without_evidence_is_not_saved(tmp_path) -> None:
    made = certify(planar(), blobs(2)[0], method="lipschitz")
    object.__setattr__(made, "evidence", None)
    with pytest.raises(InvalidInput, match="names no network"):
        made.save(tmp_path / "certificate.safetensors")


def _set(name: str, value: object, where: object = 0):
    def change(header, arrays) -> None:
        arrays[name][where] = value

    return change


def _witnesses(step: int):
    def change(header, arrays) -> None:
        for name in ("witness_index", "witness_points"):
            arrays[name] = arrays[name][::step] if step else arrays[name][:0]

    return change


FORGERIES = {
    "negative radius": (_set("radius", -1.0), "negative"),
    "NaN radius": (_set("pair_radius", np.nan), "negative entry or NaN"),
    "NaN margin": (_set("margin", np.nan), "margin"),
    "radius apart from its pairs": (_set("radius", 1e-9), "least of its pairs"),
    "negative constant": (_set("L", -1.0, (0, 1)), "L has a negative"),
    "unknown class": (_set("label", 3), "not a class"),
    "unknown method": (_set("method", 99), "has no name"),
    "radius beyond a search": (_set("search_radius", 0.0), "beyond a misclassified point"),
    "attack without a witness": (_witnesses(0), "no witness"),
    "a witness that is no point": (_set("witness_points", np.nan), "not finite"),
    "witnesses out of order": (_witnesses(-1), "in order"),
    "a bad name": (
        lambda header, arrays: arrays.update({"radii.A": np.zeros(12)}),
        "missing or unknown arrays",
    ),
    "a negative radius by name": (_set("radii.curvature", -1.0), "negative entry"),
    "missing array": (lambda header, arrays: arrays.pop("K"), "missing or unknown arrays"),
    "extra array": (lambda header, arrays: arrays.update(more=np.zeros(1)), "missing or unknown arrays"),
    "wrong type": (lambda header, arrays: arrays.update(radius=arrays["radius"].astype("<f4")), "radius is <f4"),
    "wrong shape": (lambda header, arrays: arrays.update(L=arrays["L"][:2]), "L is <f8"),
    "other sizes": (lambda header, arrays: header.update(samples=7), "shape"),
    "no sizes": (lambda header, arrays: header.update(samples="12"), "whole numbers"),
    "no norm": (lambda header, arrays: header.update(p=0.5), "norm"),
    "no digest": (lambda header, arrays: header.update(network="abc"), "SHA-256"),
    "extra field": (lambda header, arrays: header.update(more=1), "header fields"),
    "missing field": (lambda header, arrays: header.pop("names"), "header fields"),
    "names": (lambda header, arrays: header.update(names=["a"], made_by=[["a"]]), "two tables"),
    "made by": (lambda header, arrays: header.update(made_by=["a", "b"]), "list of lists"),
    "made by too few": (lambda header, arrays: header["made_by"].pop(), "not of one length"),
    "proven by": (lambda header, arrays: header["proven_by"].append(["liplt"]), "not of one length"),
    "notes": (lambda header, arrays: header.update(notes=[1]), "list of strings"),
}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Files:
    return saved(tmp_path_factory.mktemp("genuine"), n=12, method="unrolled", box=BOX)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_file_that_contradicts_itself_is_refused(genuine, name) -> None:
    change, reason = FORGERIES[name]
    with pytest.raises(InvalidFile, match=reason):
        load_certificate(forged(genuine.certificate, change))


def test_other_versions_and_kinds_are_refused(tmp_path) -> None:
    files = saved(tmp_path, method="lipschitz")
    for version, remedy in ((1, "certify again"), (3, "newer: update curvcert")):
        forgery = forged(files.certificate, lambda header, arrays: None, version=version)
        with pytest.raises(InvalidFile, match=f"version '{version}', this curvcert reads 2.*{remedy}"):
            load_certificate(forgery)
        with pytest.raises(InvalidFile, match=f"certificate {version}, expected was.*{remedy}"):
            check_certificate(forgery, files.network, files.x)
    with pytest.raises(InvalidFile, match="not a curvcert-certificate"):
        load_certificate(files.network)
    with pytest.raises(InvalidFile, match="no file"):
        load_certificate(tmp_path / "nothing")


def test_the_header_is_plain_json(tmp_path) -> None:
    content = saved(tmp_path, method="lipschitz").certificate.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["header"])
    assert header["samples"] == 8
    assert header["p"] == 2
