"""Norms of many intervals of a chain at once: the same numbers and gradients as one by one."""

import pytest
import torch

from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Reshape
from curvcert.operators.stacked import StackedNorms
from tests.operators.cases import F64, randn

Chain = tuple[AbstractLinearMap, ...]


def dense_line() -> Chain:
    return tuple(Dense(randn(*shape, seed=k).requires_grad_()) for k, shape in enumerate([(5, 4), (6, 5), (3, 6)]))


def conv_line() -> Chain:
    K = randn(2, 1, 3, 3, seed=3).requires_grad_()
    conv = Conv2d(K, (1, 4, 4), padding=((1, 1), (1, 1)))
    flat = Reshape((2, 4, 4), (32,), F64, K.device)
    return conv, Dense(randn(6, 32, seed=4).requires_grad_()) @ flat, Dense(randn(3, 6, seed=5).requires_grad_())


LINES = {"dense": dense_line, "conv": conv_line}


def intervals(line: Chain) -> list[Chain]:
    """Return all intervals in the order of the norms."""
    return [line[j : k + 1] for k in range(len(line)) for j in range(k + 1)]


def truth(line: Chain) -> torch.Tensor:
    return torch.stack([torch.linalg.matrix_norm(matrix(chain), 2) for chain in intervals(line)])


def matrix(chain: Chain) -> torch.Tensor:
    product = chain[0].as_matrix()
    for op in chain[1:]:
        product = op.as_matrix() @ product
    return product


def leaves(line: Chain) -> list[torch.Tensor]:
    found = []
    for op in line:
        for factor in getattr(op, "factors", (op,)):
            found += [factor.weight] if hasattr(factor, "weight") else []
    return found


def converged(line: Chain) -> StackedNorms:
    norms = StackedNorms(line)
    norms.refine(900)
    return norms


@pytest.mark.parametrize("make", LINES.values(), ids=LINES)
def test_values_and_gradients_are_those_of_each_by_itself(make) -> None:
    line = make()
    values, expected = converged(line)(), truth(line)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=0)
    weights = torch.arange(1.0, len(values) + 1, dtype=F64)
    found = torch.autograd.grad((weights * values).sum(), leaves(line))
    wanted = torch.autograd.grad((weights * expected).sum(), leaves(line))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_intervals_are_in_the_order_of_the_norms() -> None:
    assert StackedNorms(dense_line()).intervals == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]


def test_one_map_alone() -> None:
    line = dense_line()[:1]
    torch.testing.assert_close(converged(line)(), truth(line), rtol=1e-9, atol=0)


def test_estimates_come_from_below() -> None:
    line = dense_line()
    norms = StackedNorms(line)
    above = truth(line).detach() * (1 + 1e-14)
    for _ in range(5):
        assert bool((norms().detach() <= above).all())


def test_a_warm_start_goes_on() -> None:
    line = dense_line()
    norms = StackedNorms(line)
    first = norms().detach()
    for _ in range(20):
        later = norms().detach()
    assert bool((later >= first * (1 - 1e-12)).all())
    assert bool((later > first * 1.001).any())
    norms.restart()
    torch.testing.assert_close(norms().detach(), first, rtol=1e-14, atol=0)


def test_refining_is_stepping_without_a_value() -> None:
    line = dense_line()
    one, other = (StackedNorms(line) for _ in range(2))
    for _ in range(3):
        one()
    other.refine(3)
    assert torch.equal(one(), other())


def test_a_state_dict_round_trip() -> None:
    line = dense_line()
    norms, twin = (StackedNorms(line) for _ in range(2))
    norms.refine(5)
    twin.load_state_dict(norms.state_dict())
    assert torch.equal(norms(), twin())


def test_zero_maps_have_zero_norms_and_gradients() -> None:
    weights = [torch.zeros(3, 3, dtype=F64, requires_grad=True) for _ in range(2)]
    line = tuple(map(Dense, weights))
    norms = StackedNorms(line)
    for _ in range(2):
        values = norms()
        values.sum().backward()
    assert values.tolist() == [0.0, 0.0, 0.0]
    assert all(bool(torch.isfinite(weight.grad).all()) for weight in weights)
