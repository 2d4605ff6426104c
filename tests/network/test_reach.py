"""What values can be at any input: no end that is there may be lost to the rounding of a sum."""

import pytest
import torch

from curvcert.network.rewriting import products
from curvcert.network.rewriting.products import _image
from curvcert.operators import Dense

INF = torch.inf


def image(rows: list[list[float]], low: list[float], high: list[float]) -> tuple[list[float], list[float]]:
    ends = (torch.tensor([end], dtype=torch.float64) for end in (low, high))
    reached = _image(Dense(torch.tensor(rows, dtype=torch.float64)), *ends)
    return reached[0][0].tolist(), reached[1][0].tolist()


def test_a_small_coefficient_of_an_infinite_end_counts() -> None:
    """In floats 1e20 + 1 - 1e20 + 1 is 0: sums over columns would call this image bounded from below."""
    low, high = image([[1.0, -1e20]], [-INF, -INF], [0.0, 0.0])
    assert low == [-INF]
    assert high == [INF]


def test_ends_that_do_not_count_stay_away() -> None:
    low, high = image([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], [0.0, 1.0], [INF, 3.0])
    assert low[0] <= 0.0 and low[0] > -1e-9 and high[0] == INF
    assert 2.0 - 1e-9 < low[1] <= 2.0 and 6.0 <= high[1] < 6.0 + 1e-9
    assert low[2] == -INF and 3.0 <= high[2] < 3.0 + 1e-9


def test_too_many_ends_make_all_that_they_touch_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MOST_COLUMNS", 0)
    low, high = image([[1.0, 0.0], [0.0, 2.0]], [0.0, 1.0], [INF, 3.0])
    assert (low[0], high[0]) == (-INF, INF)
    assert low[1] > 1.9
