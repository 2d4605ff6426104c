"""A certificate in a person's hands: some of its samples, its summary and columns, and what `certify` takes."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvcert
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from tests.bounds.curvature.cases import trained
from tests.certificates.cases import digits


@pytest.fixture(scope="module")
def cert() -> Certificate:
    (x, y) = digits(12)
    found = curvcert.certify(trained("mlp", True), x, y, method="unrolled", box=(0.0, 1.0))
    assert 0 < len(found.witness_index) < len(found)
    return found


@pytest.mark.parametrize("index", [3, -1, slice(2, 9, 3), [5, 0, 5], torch.arange(12) % 2 == 0])
def test_samples_by_number_slice_or_mask(cert: Certificate, index: object, tmp_path: Path) -> None:
    numbers = torch.arange(12)[index].reshape(-1)  # type: ignore[index]
    part = cert[index]  # type: ignore[index]
    assert len(part) == len(numbers) and part.method == tuple(cert.method[k] for k in numbers)
    for name in ("radius", "attack_radius", "margin", "pair_radius", "label", "correct"):
        assert torch.equal(getattr(part, name), getattr(cert, name)[numbers])
    assert torch.equal(part.witness.nan_to_num(nan=-1.0), cert.witness[numbers].nan_to_num(nan=-1.0))
    assert all(torch.equal(part.radii[k].nan_to_num(), cert.radii[k][numbers].nan_to_num()) for k in cert.radii)
    network, x = trained("mlp", True), digits(12)[0][numbers]
    part.save(tmp_path / "certificate.safetensors")
    curvcert.save_network(network, tmp_path / "network.safetensors")
    held = curvcert.check_certificate(tmp_path / "certificate.safetensors", tmp_path / "network.safetensors", x)
    assert held.holds, str(held)


def test_one_after_the_other(cert: Certificate) -> None:
    assert [float(one.radius) for one in cert] == cert.radius.tolist()
    with pytest.raises(IndexError, match="has 12 samples, counted from 0; got 12"):
        cert[12]
    with pytest.raises(IndexError, match="12 samples"):
        cert["first"]  # type: ignore[index]


def test_the_summary_and_the_columns(cert: Certificate) -> None:
    eps = float(cert.radius.median())
    first, within = cert.summary([eps]).splitlines()
    assert first.startswith("12 samples in l2, ") and f"median certified radius {eps:.4g}" in first
    assert f"{100 * cert.certified_accuracy(eps):.1f}% certified" in within
    assert cert.summary(eps) == cert.summary([eps]) and len(cert.curve(eps)[0]) == 1
    columns = cert.to_dict()
    assert {len(column) for column in columns.values()} == {12}
    assert columns["radius"] == cert.radius.tolist() and "radius by curvature" in columns


def test_certify_takes_modules_arrays_and_data_sets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    expected = curvcert.certify(curvcert.trace(model, x), x, y, method="lipschitz")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:2], y[:2]
        yield x[2:], y[2:]

    pairs = TensorDataset(x, y)
    for given in ((x, y), (x.numpy(), y.numpy()), (x.numpy(), y), (pairs,), (DataLoader(pairs, 2),), (batches(),)):
        found = curvcert.certify(model, *given, method="lipschitz")
        torch.testing.assert_close(found.radius, expected.radius, rtol=1e-12, atol=0)
        assert torch.equal(found.label, expected.label)
    with pytest.raises(InvalidInput, match="nothing to certify"):
        curvcert.certify(model, iter(()), method="lipschitz")
    eps = float(expected.radius.max()) / 2
    decided = (curvcert.certify(model, x, y, epsilons=wanted) for wanted in (eps, [eps], np.array([eps])))
    assert len({float(one.certified_accuracy(eps)) for one in decided}) == 1
    with pytest.raises(InvalidInput, match="epsilons are positive"):
        curvcert.certify(model, x, y, epsilons=0.0)
    with pytest.raises(InvalidInput, match="epsilons are positive"):
        curvcert.certify(model, x, y, epsilons=[0.1, math.inf])


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 4))])
def test_a_sample_without_its_batch_is_noticed(layer: nn.Module) -> None:
    x = torch.rand(8) if isinstance(layer, nn.Linear) else torch.rand(3, 8, 8)
    for given in (x, x.numpy()):
        with pytest.raises(InvalidInput, match=r"x\[None\]"):
            curvcert.certify(layer.eval(), given)
    with pytest.raises(InvalidInput, match=r"np\.stack"):
        curvcert.certify(layer, list(x.numpy()), np.zeros(len(x), int))  # type: ignore[arg-type]


def test_what_certify_does_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="curvcert"):
        curvcert.certify(nn.Linear(2, 2).eval(), np.zeros((3, 2)), method="lipschitz")
    told = caplog.text
    assert "bounded the network in" in told and "certified 3 samples" in told and "product: Bound(" in told


def test_columns_become_a_data_frame_where_there_is_pandas(cert: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = ModuleType("pandas")
    pandas.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert cert.to_dataframe() == cert.to_dict()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInput, match="pip install pandas"):
        cert.to_dataframe()


def test_the_namespace_shows_the_api_alone() -> None:
    assert dir(curvcert) == sorted(curvcert.__all__)


def test_a_bound_compares_with_numbers_and_bounds_and_has_no_arithmetic() -> None:
    one = curvcert.Bound(torch.tensor(1.0, dtype=torch.float64), 2, 2)
    two = curvcert.Bound(torch.tensor(2.0, dtype=torch.float64), 2, 2)
    assert one < two and one <= 1 and two > 1.5 and two >= one
    assert np.asarray(two) == 2.0 and np.asarray(two).dtype == np.float64
    array = np.ones(2)
    computed = (lambda: np.float64(2) * one, lambda: array + one, lambda: one // 2, lambda: abs(one))
    for compute in (lambda: one + 1, lambda: 2 * one, lambda: one / two, lambda: -one, *computed):
        with pytest.raises(TypeError, match=r"Use float\(bound\)"):
            compute()
    several = curvcert.Bound(torch.ones(2, dtype=torch.float64), 2, 2)
    with pytest.raises(InvalidInput, match="single value"):
        _ = several < 3
    with pytest.raises(TypeError, match="unknown side"):
        _ = one < curvcert.Estimate(torch.tensor(1.0), 2, 2)
