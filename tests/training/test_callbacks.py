"""Certificates on the way: their numbers are `certify`'s, and training goes on as if nothing had been asked."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from curvcert.certificates import certify
from curvcert.errors import InvalidInput
from curvcert.network import trace
from curvcert.training import CertifiedLog


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    made[2].eval()  # part of it: modes differ
    return made


X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 2, 0])


def test_its_numbers_are_those_of_certify(model: nn.Module) -> None:
    writer = Writer()
    found = CertifiedLog(X.numpy(), Y.numpy(), [0.05, 0.2], writer)(model, step=3)
    model.eval()
    certificate = certify(trace(model, X[:1]), X, Y, epsilons=[0.05, 0.2])
    assert certificate.evidence is not None
    assert found == {
        "accuracy": float(certificate.correct.double().mean()),
        "median_radius": float(certificate.radius.median()),
        "certified_accuracy_0.05": certificate.certified_accuracy(0.05),
        "certified_accuracy_0.2": certificate.certified_accuracy(0.2),
        "lipschitz": float(certificate.evidence.L.amax()),
        "curvature": float(certificate.evidence.K.amax()),
    }
    assert writer.written == [(f"certified/{name}", value, 3) for name, value in found.items()]


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    modes, weights = [part.training for part in model.modules()], [w.clone() for w in model.parameters()]
    state = torch.random.get_rng_state()
    CertifiedLog(X, Y, 0.1)(model, 0)
    assert [part.training for part in model.modules()] == modes and len(set(modes)) == 2
    assert all(map(torch.equal, model.parameters(), weights))
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_modes_come_back_after_an_error() -> None:
    refused = nn.Sequential(nn.Linear(3, 3), nn.FractionalMaxPool2d(2, 1))
    with pytest.raises(Exception, match=r"."):
        CertifiedLog(X, Y, 0.1)(refused, 0)
    assert refused.training


def test_steps_between_are_left_out(model: nn.Module) -> None:
    writer = Writer()
    log = CertifiedLog(X, Y, 0.1, writer, every=2)
    assert log(model, 1) == {} and writer.written == []
    assert log(model, 2)
    with pytest.raises(InvalidInput, match="every"):
        CertifiedLog(X, Y, 0.1, every=0)


def test_a_network_without_curvature_has_no_such_number() -> None:
    kinked = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    found = CertifiedLog(X, Y, 0.1)(kinked, 0)
    assert "lipschitz" in found and "curvature" not in found


def test_lightning_logs_it_once_the_sanity_check_is_over(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning, pytorch = ModuleType("lightning"), ModuleType("lightning.pytorch")
    pytorch.Callback = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    monkeypatch.delitem(sys.modules, "curvcert.training.lightning", raising=False)
    module = importlib.import_module("curvcert.training.lightning")
    logged: list[dict[str, float]] = []
    whole = SimpleNamespace(classifier=model, log_dict=lambda named, rank_zero_only: logged.append(named))
    callback = module.CertifiedCallback(CertifiedLog(X, Y, 0.1), lambda whole: whole.classifier)
    for sanity, first in ((True, True), (False, False), (False, True)):
        trainer = SimpleNamespace(sanity_checking=sanity, is_global_zero=first, current_epoch=0)
        callback.on_validation_epoch_end(trainer, whole)
    (named,) = logged
    assert named["certified/certified_accuracy_0.1"] == CertifiedLog(X, Y, 0.1)(model, 0)["certified_accuracy_0.1"]
    monkeypatch.delitem(sys.modules, "curvcert.training.lightning")
