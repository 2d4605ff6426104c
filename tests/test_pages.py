"""The Python blocks of the pages run, in order, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name != "installation.md"),
)
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_run_and_print_what_the_page_says(page) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    names: dict[str, object] = {"__name__": page}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        if expected:
            assert printed.getvalue() == expected, f"{page}:\n{code}"
