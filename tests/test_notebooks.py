"""The notebooks run as they are, print what they show, and become pages."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs.notebooks import page_of
from scripts.run_notebooks import NOTEBOOKS, run_cell, run_notebook

QUICK = "check"
"""The one that runs each time; the others train or certify for longer."""
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def shown(notebook: dict[str, Any]) -> list[list[str]]:
    return [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]]


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=() if p.stem == QUICK else pytest.mark.full) for p in PATHS]
)
def test_a_notebook_runs(path: Path) -> None:
    kept, again = read(path), read(path)
    run_notebook(again)
    assert shown(again) == shown(kept)
    assert any(shown(kept))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_becomes_a_page(path: Path) -> None:
    notebook = read(path)
    page = page_of(notebook)
    assert page.startswith("# ")
    assert page.count('<div class="output">') == sum(map(len, shown(notebook)))


def test_a_cell_shows_its_last_line_and_what_it_prints() -> None:
    printed, value = run_cell("print('<b>')\n1 + 1", {}, 1)
    assert printed["text"] == ["<b>\n"]
    assert value["data"] == {"text/plain": ["2"]}


def test_an_error_in_a_cell_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", {}, 1)
