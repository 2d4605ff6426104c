"""What the pages that are written from records share: templates and parts are filled, and tables laid out, here."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

NOT_YET = "not yet measured"


def filled(template: Path, **values: object) -> str:
    """Return a page from its template; a paragraph that comes out empty leaves no gap."""
    text = template.read_text(encoding="utf-8")
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text).render(values)
    return re.sub(r"\n{3,}", "\n\n", page)


def with_parts(page: Path, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with every part written anew: each stands between a mark that names it and the mark "end"."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not mark or not end:
            raise SystemExit(f"Expected a part {name!r} in {page.name}, got none.")
        text = f"{before}{mark}\n{part()}\n\n{end}{after}"
    return text


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
