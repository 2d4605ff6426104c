"""The pieces of an objective, compiled, and differentiated side by side: the same numbers as one eager pass."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from curvcert.losses import (
    AbstractObjective,
    CertifiedMargin,
    CertifiedRadiusMaximisation,
    Constants,
    CurvatureRegularised,
    LipschitzMargin,
    LocallyCertifiedMargin,
    RadiusReward,
    Standard,
)
from curvcert.nn import SLLDense, UnitRowLinear

OBJECTIVES = {
    "standard": lambda c: Standard(0.5),
    "curvature": lambda c: CurvatureRegularised(c),
    "curvature with a margin": lambda c: CurvatureRegularised(c, nu=1.0),
    "lipschitz-margin": lambda c: LipschitzMargin(c),
    "radius-reward": lambda c: RadiusReward(c),
    "crm": lambda c: CertifiedRadiusMaximisation(c),
    "certified-margin": lambda c: CertifiedMargin(c, 0.1),
    "certified-margin, runner-up": lambda c: CertifiedMargin(c, 0.1, gradients="runner-up"),
}
LOCAL = {"certified-margin, quadratic": lambda c: LocallyCertifiedMargin(c, 0.1)}
"""Objectives that look inside a `Sequential`, and not inside an SLL layer."""

BATCH = torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))


def one_lipschitz() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(SLLDense(4, 6), SLLDense(4, 5), UnitRowLinear(4, 3))


def objective_of(name: str, model: nn.Module) -> AbstractObjective:
    return (OBJECTIVES | LOCAL)[name](Constants(model, torch.zeros(1, 4)))


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"), [*product(OBJECTIVES, (dense, one_lipschitz)), ("certified-margin, quadratic", dense)]
)
def test_backward_is_that_of_the_loss(name, make):
    model = make()
    objective, same = objective_of(name, model), objective_of(name, model)
    for step in (0.5, 1.0):
        model.zero_grad()
        same(model, *BATCH, step, 0.3).loss.backward()
        expected = gradients(model)
        model.zero_grad()
        objective(model, *BATCH, step, 0.3).backward()
        torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-7)


def test_backward_adds_to_gradients_that_are_there():
    model = dense()
    objective = objective_of("curvature", model)
    objective(model, *BATCH, 1.0, 0.0).backward()
    once = gradients(model)
    objective(model, *BATCH, 1.0, 0.0).backward()
    torch.testing.assert_close(gradients(model), [2 * g for g in once])


def require_the_same_steps(name: str, model: nn.Module) -> None:
    eager, compiled = objective_of(name, model), objective_of(name, model)
    compiled.compile_pieces(backend="aot_eager")
    for step in (0.5, 1.0):
        found = []
        for objective in (eager, compiled):
            model.zero_grad()
            value = objective(model, *BATCH, torch.tensor(step), torch.tensor(0.3))
            value.backward()
            found.append([value.loss.detach(), *gradients(model)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    for (key, kept), (_, wanted) in zip(compiled.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(kept, wanted, msg=key)


@pytest.mark.slow
def test_compiled_pieces_take_the_same_steps():
    # In a process without the checks of shapes that tests run under, which torch.compile cannot follow.
    finished = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split("\n")[:-1] == ["same"] * 5


if __name__ == "__main__":
    for name, make in (
        ("certified-margin", dense),
        ("curvature with a margin", dense),
        ("certified-margin, runner-up", one_lipschitz),
        ("curvature with a margin", one_lipschitz),
        ("certified-margin, quadratic", dense),
    ):
        require_the_same_steps(name, make())
        print("same")
