"""The import hook is on: a wrong shape is refused inside curvcert, a wrong type is left to curvcert."""

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from curvcert.data import Digits, load_digits
from tests.shape_checks import check_shapes


@jaxtyped(typechecker=check_shapes)
def scaled(x: Float[Tensor, "n m"], y: Float[Tensor, " m"] | None, factor: float) -> Float[Tensor, "n m"]:
    return x * factor if y is None else x * y * factor


def test_right_shapes_pass_whatever_the_other_types() -> None:
    assert scaled(torch.ones(2, 3), torch.ones(3), 2).shape == (2, 3)


@pytest.mark.parametrize("arguments", [(torch.ones(2), None), (torch.ones(2, 3), torch.ones(2))])
def test_wrong_shapes_are_refused(arguments) -> None:
    with pytest.raises(TypeCheckError):
        scaled(*arguments, 2.0)


def test_the_hook_is_on_for_the_package() -> None:
    broken = object.__new__(Digits)
    object.__setattr__(broken, "images", load_digits("test").images[:, 0])
    with pytest.raises(TypeCheckError):
        broken.as_float64()
