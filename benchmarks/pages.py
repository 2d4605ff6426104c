"""What the pages that are written from records share: their templates are filled, and their tables laid out, here."""

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

NOT_YET = "not yet measured"


def filled(template: Path, **values: object) -> str:
    """Return a page from its template; a paragraph that comes out empty leaves no gap."""
    text = template.read_text(encoding="utf-8")
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text).render(values)
    return re.sub(r"\n{3,}", "\n\n", page)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; one line that says so where nothing is measured.

    >>> print(table(("radius", "certified"), []))
    | radius | certified |
    | --- | --- |
    | not yet measured |  |
    """
    lines = lines or [[NOT_YET, *[""] * (len(columns) - 1)]]
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
