"""Norms of vectors: never below the exact ones, and close to them, whatever the size of the numbers."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvcert.rounding import norm_upper_bound_of_vectors, squares_in_range

F64 = torch.float64
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e150, max_value=1e150)
small = st.floats(min_value=-1e-150, max_value=1e-150)


def exact_square(row: Tensor) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in row), Fraction(0))


@given(st.lists(numbers | small, min_size=1, max_size=8), st.booleans())
def test_the_euclidean_norm_is_bounded_closely(values: list[float], looks: bool) -> None:
    x = torch.tensor([values, [0.0] * len(values), values[::-1]], dtype=F64)
    with torch.no_grad() if looks else torch.enable_grad():
        bounds = norm_upper_bound_of_vectors(x, 2, 1)
    assert float(bounds[1]) == 0.0
    for row, bound in zip(x, bounds, strict=True):
        square, above = exact_square(row), Fraction(float(bound)) ** 2
        assert above >= square
        assert above <= square * Fraction(1 + 1e-12) + Fraction(2) ** -2000


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e170])
def test_looking_at_the_numbers_changes_nothing(p: float, scale: float) -> None:
    x = scale * torch.randn(3, 4, 50, dtype=F64)
    x[0, 1] = 0.0
    with torch.no_grad():
        seen = norm_upper_bound_of_vectors(x, p, 2)
    torch.testing.assert_close(seen, norm_upper_bound_of_vectors(x, p, 2), rtol=1e-14, atol=0)
    assert bool((seen >= (1 - 1e-14) * scale * torch.linalg.vector_norm(x / scale, p, dim=2)).all())


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("looks", [True, False])
def test_the_least_floats_are_bounded_too(p: int, looks: bool) -> None:
    least = 2.0**-1074
    x = least * torch.randint(0, 9, (200, 5), generator=torch.Generator().manual_seed(p)).double()
    with torch.no_grad() if looks else torch.enable_grad():
        bounds = norm_upper_bound_of_vectors(x, p, 1)
    for row, bound in zip(x, bounds, strict=True):
        assert Fraction(float(bound)) ** p >= sum((Fraction(float(v)) ** p for v in row), Fraction(0))
        assert bound <= 2 * row.sum()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-200, 1e200])
def test_squares_out_of_range_are_not_taken(value: float) -> None:
    x = torch.ones(2, 5, dtype=F64)
    assert squares_in_range(x, 1) is not None
    x[1] = value
    assert squares_in_range(x, 1) is None
    with torch.no_grad():
        assert not bool((norm_upper_bound_of_vectors(x, 2, 1)[1] < abs(value)).any())


def test_gradients_are_finite() -> None:
    x = torch.randn(3, 5, dtype=F64, requires_grad=True)
    norm_upper_bound_of_vectors(x, 2, 1).sum().backward()
    torch.testing.assert_close(x.grad, x.detach() / x.detach().norm(dim=1, keepdim=True), rtol=1e-12, atol=1e-12)
