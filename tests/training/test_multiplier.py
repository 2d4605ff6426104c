"""The weight of a regulariser: moved by the accuracy, never below its least value."""

import pytest
import torch

from curvcert.errors import InvalidInput
from curvcert.training import Multiplier, Recipe
from curvcert.training.objective import make_multiplier


def test_by_hand() -> None:
    weight = Multiplier(0.5, least=0.1, step=0.2, target=0.6, average=0.25)
    weight.update(torch.tensor(1.0))  # A = 0.25, lambda = 0.5 + 0.2 (0.25 - 0.6) = 0.43
    assert float(weight.value) == pytest.approx(0.43)
    weight.update(torch.tensor(0.5))  # A = 0.3125
    assert float(weight.accuracy) == pytest.approx(0.3125)
    assert float(weight.value) == pytest.approx(0.43 + 0.2 * (0.3125 - 0.6))


def test_it_grows_without_a_ceiling_while_the_model_is_accurate() -> None:
    """With min for max, as the paper prints it, lambda could never leave its least value."""
    weight = Multiplier(0.01, least=0.01, step=0.05, target=0.6, average=1.0)
    for _ in range(100):
        weight.update(torch.tensor(0.9))
    assert float(weight.value) == pytest.approx(0.01 + 100 * 0.05 * 0.3, rel=1e-5)


def test_it_never_falls_below_its_least_value() -> None:
    weight = Multiplier(0.02, least=0.01, step=0.05, target=0.6, average=1.0)
    for _ in range(5):
        weight.update(torch.tensor(0.0))
    assert float(weight.value) == pytest.approx(0.01)


def test_its_state_is_in_buffers() -> None:
    weight, twin = (Multiplier(0.02, average=0.5) for _ in range(2))
    weight.update(torch.tensor(0.9))
    twin.load_state_dict(weight.state_dict())
    for both in (weight, twin):
        both.update(torch.tensor(0.4))
    assert torch.equal(weight.value, twin.value)
    assert torch.equal(weight.accuracy, twin.accuracy)


def test_a_recipe_without_a_step_keeps_its_weight() -> None:
    fixed = make_multiplier(Recipe(data="digits", architecture="digits", weight=0.001))
    fixed.update(torch.tensor(0.0))
    assert float(fixed.value) == pytest.approx(0.001)


@pytest.mark.parametrize("average", [-0.1, 1.1, float("nan")])
def test_the_average_is_a_share(average: float) -> None:
    with pytest.raises(InvalidInput, match=r"lies in \[0, 1\]"):
        Multiplier(0.1, average=average)
