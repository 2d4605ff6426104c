"""Networks as people write them: taken, but for those that are named with the reason; what is taken is what runs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.errors import CurvcertError
from curvcert.network.network_file import save_network
from curvcert.network.network_reading import load_network
from tests.network.people import REFUSED, ROWS, Row

SAMPLE = 6
"""One row in so many runs each time."""


def _marked(rows: list[Row]) -> list[object]:
    marks = ((), pytest.mark.full)
    return [pytest.param(row, marks=marks[k % SAMPLE > 0], id=row.name) for k, row in enumerate(rows)]


def test_the_table_is_as_long_as_it_says_and_95_in_100_are_taken() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) >= 200
    assert set(REFUSED) <= set(names)
    assert len(REFUSED) <= 0.05 * len(names)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("row", _marked([row for row in ROWS if row.name not in REFUSED]))
def test_it_is_taken_and_has_the_values_of_the_module(row: Row, tmp_path: Path) -> None:
    model, example = row.model(), row.example()
    before = copy.deepcopy(model.state_dict())
    net = curvcert.trace(model, example, **dict(row.options))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    batch = example if isinstance(example, tuple) else (example,)
    free = [x for k, x in enumerate(batch) if k not in dict(row.options).get("fixed", ())]
    joined = free[0] if len(free) == 1 else torch.cat([x.flatten(1) for x in free], 1)
    fixed = [x[:1].expand_as(x) if k in dict(row.options).get("fixed", ()) else x for k, x in enumerate(batch)]
    expected = _named(model(*(x.clone() for x in fixed)), dict(row.options).get("output"))
    torch.testing.assert_close(net(joined.double()).float(), expected.detach(), rtol=2e-4, atol=2e-4)
    save_network(net, tmp_path / "network.safetensors")
    assert torch.equal(load_network(tmp_path / "network.safetensors")(joined.double()), net(joined.double()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    with pytest.raises(CurvcertError):
        curvcert.trace(row.model(), row.example(), **dict(row.options))


def _named(found: object, path: object) -> Tensor:
    """Return the output that a row asks for; the only tensor if it asks for none."""
    if path is not None:
        for key in path if isinstance(path, tuple) else (path,):
            found = (
                found[key] if isinstance(found, dict | tuple) and not hasattr(found, str(key)) else getattr(found, key)
            )
        return found  # type: ignore[return-value]
    if isinstance(found, Tensor):
        return found
    parts = found.values() if isinstance(found, dict) else found
    (tensor,) = (part for part in parts if isinstance(part, Tensor))  # type: ignore[union-attr]
    return tensor
