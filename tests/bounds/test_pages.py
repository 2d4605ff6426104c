"""The Python blocks of the pages run, in order, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("first-bound.md", "which-lipschitz-bound.md", "networks.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_run_and_print_what_the_page_says(page) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    names: dict[str, object] = {"__name__": page}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        if expected:
            assert printed.getvalue() == expected, f"{page}:\n{code}"
