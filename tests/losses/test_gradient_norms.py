"""Norms of the gradients of pairs: against the dense Jacobian, and their own gradients against differences."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.utils.stateless import _reparametrize_module

from curvcert.losses import logits_and_pair_norms, logits_and_runner_up_norm
from curvcert.losses.gradient_norms import safe_sqrt
from tests.losses.cases import F64, MODELS

Y = torch.tensor([0, 2, 1, 1])


def inputs(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(4, *shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def all_pairs(model: nn.Module, x: Tensor) -> Tensor:
    return logits_and_pair_norms(model, x, Y)[1]


def runner_up(model: nn.Module, x: Tensor) -> Tensor:
    return logits_and_runner_up_norm(model, x, Y)[1]


def dense_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    rows = [torch.autograd.functional.jacobian(lambda z: model(z[None])[0], sample).flatten(1) for sample in x]
    return torch.stack(rows)


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_they_are_those_of_the_dense_jacobian(make, shape) -> None:
    model, x = make(), inputs(shape)
    logits, norms = logits_and_pair_norms(model, x, Y)
    dense = dense_jacobian(model, x)
    torch.testing.assert_close(logits, model(x), rtol=1e-14, atol=1e-14)
    expected = torch.linalg.vector_norm(dense - dense[torch.arange(4), Y][:, None], dim=2)
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
    best_other = logits.detach().scatter(1, Y[:, None], -torch.inf).argmax(dim=1, keepdim=True)
    found = logits_and_runner_up_norm(model, x, Y)
    torch.testing.assert_close(found[0], logits, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found[1], expected.gather(1, best_other), rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", [all_pairs, runner_up])
def test_gradients_in_the_weights(norm) -> None:
    model, x = MODELS["dense"][0](), inputs((4,))
    names = [name for name, _ in model.named_parameters()]

    def of_weights(*weights: Tensor) -> Tensor:
        with _reparametrize_module(model, dict(zip(names, weights, strict=True))):
            return norm(model, x)

    assert gradcheck(of_weights, tuple(p.detach().clone().requires_grad_() for p in model.parameters()))


def test_the_label_s_own_norm_is_exactly_zero() -> None:
    found = all_pairs(MODELS["dense"][0](), inputs((4,)))
    assert bool((found.gather(1, Y[:, None]) == 0).all())


@pytest.mark.parametrize("norm", [all_pairs, runner_up])
def test_classes_that_never_differ_have_a_zero_gradient(norm) -> None:
    model, x = MODELS["dense"][0](), inputs((4,))
    model[4].weight.data.copy_(model[4].weight.data[:1].expand(3, -1))
    norm(model, x).sum().backward()
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters() if p.grad is not None)


def test_the_safe_root() -> None:
    x = torch.tensor([0.0, 4.0, -1e-9], dtype=F64, requires_grad=True)
    safe_sqrt(x).sum().backward()
    assert safe_sqrt(x).tolist() == [0.0, 2.0, 0.0]
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.25, 0.0]
