"""Certificates of networks of one output: a threshold decides, and stands in the file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import curvcert
from curvcert.attacks import pgd
from curvcert.certificates import load_certificate, with_search
from curvcert.checker import check_certificate
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.network.network_file import save_network
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.certificates.saved import forged


def score() -> curvcert.Network:
    torch.manual_seed(0)
    return curvcert.trace(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).eval(), torch.zeros(1, 3))


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_line_has_its_distance() -> None:
    model = nn.Linear(2, 1).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
        model.bias.copy_(torch.tensor([1.0]))
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.25], [-1.0, 0.0]], dtype=torch.float64)
    for p, dual in ((2, 5.0), (math.inf, 7.0), (1, 4.0)):
        cert = curvcert.certify(model, x, threshold=2.0, p=p)
        assert cert.label.tolist() == [0, 1, 0, 0]
        expected = (3 * x[:, 0] + 4 * x[:, 1] - 1).abs() / dual
        # On the threshold nothing is proven.
        assert float(cert.radius[2]) == 0.0 and bool((cert.radius <= expected).all())
        torch.testing.assert_close(cert.radius, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("threshold", [0.0, -0.4])
def test_it_is_saved_checked_and_searched(p: float, threshold: float, tmp_path: Path) -> None:
    net = score()
    cert = curvcert.certify(net, X, p=p, threshold=threshold, method="checkable")
    assert cert.threshold == threshold and any(f"threshold {threshold!r}" in note for note in cert.notes)
    assert torch.equal(cert.label, (net(X)[:, 0] > threshold).long())
    assert bool((cert.radius > 0).all())
    found = pgd(net.with_threshold(threshold), X, cert.label, 1.0, p=p, restarts=1)
    searched = with_search(cert, net, X, found)
    assert bool((searched.radius <= searched.falsified_radius).all())
    path = tmp_path / "certificate.safetensors"
    saved = searched.save(path)
    assert load_certificate(path).threshold == threshold == saved[:2].threshold
    model = save_network(net.with_threshold(threshold), tmp_path / "network.safetensors")
    verdict = check_certificate(path, model, X.numpy())
    assert verdict.holds and not verdict.refused and verdict.radii_proven == (len(X), len(X))
    other = save_network(net.with_threshold(threshold + 0.1), tmp_path / "other.safetensors")
    assert not check_certificate(path, other, X.numpy()).holds
    # Another threshold than the network's, in the file alone.
    header, arrays = read_tensor_file(path, "curvcert-certificate", 2)
    for wrong in (threshold + 0.1, math.nextafter(threshold, 1.0), "0", True):
        plain = {key: value for key, value in header.items() if key not in ("kind", "version", "sha256", "seal")}
        write_tensor_file(path, "curvcert-certificate", 2, {**plain, "threshold": wrong}, arrays)
        if type(wrong) is float:
            assert check_certificate(path, model, X.numpy()).refused
        else:
            with pytest.raises(InvalidFile):
                load_certificate(path)
            with pytest.raises(InvalidFile):
                check_certificate(path, model, X.numpy())


@pytest.mark.parametrize(
    "last",
    [nn.Sequential(nn.Conv2d(2, 1, 4), nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Linear(32, 1), nn.Sigmoid())],
)
def test_only_a_constant_output_is_a_threshold(last: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), last).eval(), torch.rand(1, 1, 6, 6, dtype=torch.float64)
    net = curvcert.trace(model, x[:1].float()).with_threshold(0.3)
    path, file = tmp_path / "certificate.safetensors", save_network(net, tmp_path / "network.safetensors")
    curvcert.certify(net, x, method="checkable").save(path)
    assert check_certificate(path, file, x.numpy()).holds
    # Two classes, of which the first is at this sample what the threshold is claimed to be.
    net = curvcert.trace(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)).eval(), x[:1].float())
    file = save_network(net, tmp_path / "network.safetensors")
    curvcert.certify(net, x, method="checkable").save(path)
    assert check_certificate(path, file, x.numpy()).holds
    value = float(net(x)[0, 0])
    forgery = forged(path, lambda header, arrays: header.__setitem__("threshold", value))
    assert check_certificate(forgery, file, x.numpy()).refused


def test_labels_and_report(tmp_path: Path) -> None:
    net = score()
    y = torch.tensor([0, 1] * 6)
    cert = curvcert.certify(net, X, y, threshold=0.0)
    assert torch.equal(cert.correct, (net(X)[:, 0] > 0).long() == y)
    page = curvcert.report(cert, tmp_path / "report.html", network=net, x=X, y=y)
    assert "threshold 0.0" in Path(page).read_text()
    with pytest.raises(InvalidInput, match="Labels lie in 0"):
        curvcert.certify(net, X, y + 1, threshold=0.0)


def test_what_is_wrong_is_said() -> None:
    net = score()
    with pytest.raises(InvalidInput, match=r"threshold=0\.0"):
        curvcert.certify(net, X)
    for wrong in (math.nan, math.inf, True, "0", np.float32(0)):
        with pytest.raises(InvalidInput, match="finite number"):
            curvcert.certify(net, X, threshold=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="one output"):
        curvcert.certify(nn.Linear(3, 2).eval(), X, threshold=0.0)
    with pytest.raises(InvalidInput, match="one output"):
        net.with_threshold(0.0).with_threshold(1.0)


def test_a_sigmoid_at_the_end_and_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 1, 4), nn.Sigmoid()).eval()
    x = torch.rand(3, 1, 6, 6)
    cert = curvcert.certify(model, x, threshold=0.5)
    assert torch.equal(cert.label, (model(x).flatten() > 0.5).long()) and bool((cert.radius > 0).all())
