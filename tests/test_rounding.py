"""Norms of vectors and formulas of nonnegative numbers: never below the exact ones, and close to them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvcert.rounding import UNIT_ROUNDOFF, Upper, least, norm_upper_bound_of_vectors, squares_in_range, total

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


@dataclass(frozen=True)
class Tracked:
    """A formula in floats, and at most what it is in real numbers (rational, but for what roots leave out)."""

    upper: Upper
    exact: Fraction


def leaf(x: float) -> Tracked:
    return Tracked(Upper(torch.tensor(x, dtype=F64)), Fraction(x))


def root(x: Fraction) -> Fraction:
    """Return the square root, less at most 2**-500."""
    return Fraction(math.isqrt((x.numerator << 1000) // x.denominator), 1 << 500)


TWO: dict[str, Callable[[Tracked, Tracked], Tracked]] = {
    "a + b": lambda a, b: Tracked(a.upper + b.upper, a.exact + b.exact),
    "a + b, a tensor": lambda a, b: Tracked(a.upper.bound + b.upper, Fraction(float(a.upper.bound)) + b.exact),
    "ab": lambda a, b: Tracked(a.upper * b.upper, a.exact * b.exact),
    "ab, a number": lambda a, b: Tracked(float(a.upper.bound) * b.upper, Fraction(float(a.upper.bound)) * b.exact),
    "a / c": lambda a, b: Tracked(a.upper / b.upper.value, a.exact / Fraction(float(b.upper.value))),
    "least": lambda a, b: Tracked(least(a.upper, b.upper), min(a.exact, b.exact)),
    "total": lambda a, b: Tracked(total([a.upper, b.upper, a.upper]), 2 * a.exact + b.exact),
    "root": lambda a, b: Tracked((a.upper + b.upper).root(), root(a.exact + b.exact)),
    "square": lambda a, b: Tracked((a.upper + b.upper).square(), (a.exact + b.exact) ** 2),
    "sum": lambda a, b: Tracked(
        Upper(
            torch.stack([a.upper.value, b.upper.value, b.upper.value]), max(a.upper.roundings, b.upper.roundings)
        ).sum(),
        a.exact + 2 * b.exact,
    ),
}
formulas = st.recursive(
    st.floats(min_value=0.5, max_value=2.0).map(leaf),
    lambda inner: st.builds(lambda name, a, b: TWO[name](a, b), st.sampled_from(sorted(TWO)), inner, inner),
    max_leaves=12,
)


def holds(formula: Tracked) -> bool:
    """Whether what was lost is at most what the count allows, without what reading adds on top."""
    value = Fraction(float(formula.upper.value))
    return formula.exact * (1 - Fraction(UNIT_ROUNDOFF)) ** formula.upper.roundings <= value


@given(formulas)
def test_a_formula_knows_how_many_roundings_it_bears(formula: Tracked) -> None:
    if formula.exact > 2**900:  # squares of squares leave the range of floats
        return
    bound = Fraction(float(formula.upper.bound))
    assert holds(formula)
    assert formula.exact <= bound <= formula.exact * Fraction(1 + 1e-12) + Fraction(2) ** -400


@pytest.mark.parametrize("name", sorted(set(TWO) - {"least", "a + b, a tensor", "ab, a number"}))
def test_no_operation_counts_too_little(name: str) -> None:
    """With one rounding less some formula would be below the real number: every count is needed."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(400, 2, dtype=F64, generator=generator) + 0.5
    found = [TWO[name](leaf(float(a)), leaf(float(b))) for a, b in numbers]
    assert all(map(holds, found))
    assert any(f.exact > Fraction(float(f.upper.value)) for f in found)


def test_sums_that_lose_at_every_step_stay_within_their_count() -> None:
    terms = torch.full((1000,), UNIT_ROUNDOFF, dtype=F64)
    terms[0] = 1.0
    for found in (Upper(terms).sum(), total(terms.unbind()), sum((Upper(t) for t in terms[1:]), start=Upper(terms[0]))):
        assert found.roundings == 999
        assert Fraction(float(found.bound)) >= sum(map(Fraction, terms.tolist()))


def test_sums_along_dimensions_count_what_they_add() -> None:
    x = Upper(torch.rand(3, 4, 5, dtype=F64), 7)
    assert (x.sum().roundings, x.sum(1).roundings, x.sum(1, 2).roundings, x.amax(0).roundings) == (66, 10, 26, 7)
    assert x[0, 1].roundings == 7
    assert Upper(torch.zeros(2, 0, dtype=F64)).sum(1).roundings == 0


def test_what_bears_no_rounding_is_read_as_it_is() -> None:
    x = torch.rand(5, dtype=F64)
    assert Upper(x).bound is x
