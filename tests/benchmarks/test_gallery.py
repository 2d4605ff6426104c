"""The gallery: each network gets bounds and radii that no search contradicts; the record holds what it claims."""

import pytest
import torch

import curvcert
from benchmarks.gallery import NAME, NETWORKS, is_told, is_within, measured
from benchmarks.harness import read_record
from tests.network.people import Row
from tests.network.test_people import _named

EVERY = 40
"""One network in so many runs each time."""
SINGLE = {"Elman network by hand", "written into zeros", "float()"}
"""Networks that ask for float32 themselves."""
RECORD = read_record(NAME)


def _sample(every: int) -> list[object]:
    rows = enumerate(NETWORKS.values())
    return [pytest.param(row, marks=() if k % every == 7 else pytest.mark.full, id=row.name) for k, row in rows]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("row", _sample(5))
def test_in_float64_values_are_the_modules(row: Row) -> None:
    if row.name in SINGLE:
        pytest.skip("asks for float32")
    given = row.example()
    batch = tuple(x.double() for x in (given if isinstance(given, tuple) else (given,)))
    model, fixed = row.model().double(), dict(row.options).get("fixed", ())
    net = curvcert.trace(model, batch if len(batch) > 1 else batch[0], **dict(row.options))
    free = [x for k, x in enumerate(batch) if k not in fixed]
    joined = free[0] if len(free) == 1 else torch.cat([x.flatten(1) for x in free], 1)
    held = [x[:1].expand_as(x) if k in fixed else x for k, x in enumerate(batch)]
    expected = _named(model(*(x.clone() for x in held)), dict(row.options).get("output")).detach()
    torch.testing.assert_close(net(joined).reshape(expected.shape), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("row", _sample(EVERY))
def test_nothing_contradicts_what_it_gets(row: Row) -> None:
    found = measured(row, ascents=6, steps=5)
    assert found["contradicted"] == 0
    assert all(radius == "infinite" or radius > 0 for radius in (found["radius l2"], found["radius linf"]))


def test_the_record_holds_what_the_gallery_claims() -> None:
    assert RECORD is not None
    figures = RECORD.figures
    assert len(figures) >= 150 and set(figures) <= set(NETWORKS)
    for name, found in figures.items():
        assert found["contradicted"] == 0, name
        assert all(radius == "infinite" or radius > 0 for radius in (found["radius l2"], found["radius linf"])), name
        assert is_within(found) or is_told(name), name
