"""Muon: its steps are orthogonal, a run with it goes on from a checkpoint bit for bit, and learns."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curvcert.data import load
from curvcert.errors import InvalidInput
from curvcert.training import Recipe, Trainer
from curvcert.training.muon import MOMENTUM, Muon, matrices, orthogonalised

RECIPE = Recipe(
    data="digits", architecture="digits", optimiser="muon", learning_rate=0.02, epochs=2, batch_size=128, epsilon=0.1
)


@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (40, 5), (1, 7), (7, 1)])
def test_orthogonalised_keeps_the_singular_vectors_and_levels_the_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, _, V = torch.linalg.svd(matrix, full_matrices=False)
    found = U.mT @ orthogonalised(matrix) @ V.mT
    torch.testing.assert_close(found - torch.diag(found.diagonal()), torch.zeros_like(found), atol=1e-8, rtol=0)
    assert ((found.diagonal() > 0.6) & (found.diagonal() < 1.25)).all()


def test_orthogonalised_of_nothing_is_nothing() -> None:
    assert not orthogonalised(torch.zeros(3, 4)).any()


def test_a_step_is_that_of_the_dense_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    kernel = nn.Parameter(torch.randn(6, 2, 3, 3, generator=generator))
    rate = torch.tensor(0.1)
    muon = Muon([kernel], rate, weight_decay=0.5)
    momentum, expected = torch.zeros(6, 18), kernel.detach().flatten(1).clone()
    for k in range(3):
        gradient = torch.randn(6, 2, 3, 3, generator=generator)
        kernel.grad = gradient.clone()
        rate.fill_(0.1 / (k + 1))
        muon.step()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.flatten(1)
        nesterov = (1 - MOMENTUM) * gradient.flatten(1) + MOMENTUM * momentum
        expected = expected * (1 - 0.5 * 0.1 / (k + 1)) - 0.1 / (k + 1) * orthogonalised(nesterov)
    torch.testing.assert_close(kernel.detach().flatten(1), expected)


def test_a_tall_matrix_moves_farther_and_one_without_a_gradient_stays() -> None:
    tall, still = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.ones(2, 2))
    tall.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    Muon([tall, still], torch.tensor(1.0)).step()
    assert torch.linalg.svdvals(tall.detach()).max() > 1.3
    assert torch.equal(still.detach(), torch.ones(2, 2))


def test_a_closure_is_refused() -> None:
    with pytest.raises(InvalidInput, match="takes no closure"):
        Muon([nn.Parameter(torch.zeros(2, 2))], torch.tensor(0.1)).step(lambda: 0.0)


def test_biases_and_the_last_matrix_are_left_to_adam() -> None:
    trainer = Trainer(RECIPE, load("digits", "train"))
    moved = {name.rsplit(".", 1)[0] for name in trainer.checkpoint().tensors if name.endswith(".momentum")}
    by_adam = {name.rsplit(".", 1)[0] for name in trainer.checkpoint().tensors if name.endswith(".exp_avg")}
    shapes = [tuple(p.shape) for p in trainer.model.parameters()]
    assert [shapes[int(name.split(".")[1])] for name in sorted(moved)] == [(8, 1, 3, 3), (16, 8, 4, 4), (32, 256)]
    assert not moved & by_adam
    assert len(moved | by_adam) == len(shapes)
    assert len(matrices(trainer.model.parameters())) == 3


def test_a_run_goes_on_bit_for_bit() -> None:
    data = load("digits", "train")
    whole, first = Trainer(RECIPE, data), Trainer(RECIPE, data)
    for _ in range(7):
        whole.advance()
    for _ in range(3):
        first.advance()
    second = Trainer(RECIPE, data)
    second.restore(first.checkpoint())
    for _ in range(4):
        second.advance()
    expected, found = whole.checkpoint().tensors, second.checkpoint().tensors
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected if key != "run.random_state")


def test_a_run_learns() -> None:
    trainer = Trainer(replace(RECIPE, epochs=4), load("digits", "train"))
    first = None
    while trainer.step < trainer.total_steps:
        trainer.advance()
        if trainer.step % trainer.steps_per_epoch == 0:
            tally = trainer.read_tally()
            first = first or tally
    assert tally["accuracy"] > max(0.7, first["accuracy"])


def test_of_a_stack_every_matrix_has_a_step_of_its_own() -> None:
    generator = torch.Generator().manual_seed(2)
    start, gradient = (torch.randn(3, 4, 5, generator=generator) for _ in range(2))
    gradient[1] *= 1e4
    stack, rate = nn.Parameter(start.clone()), torch.tensor(0.1)
    stack.grad = gradient
    Muon([stack], rate).step()
    for k in range(3):
        alone = nn.Parameter(start[k].clone())
        alone.grad = gradient[k].clone()
        Muon([alone], rate).step()
        torch.testing.assert_close(stack[k], alone)
