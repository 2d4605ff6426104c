"""A MkDocs hook: the notebooks become pages, with what their cells printed and showed when they were last run."""

import html
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=page_of(json.loads(path.read_text(encoding="utf-8")))))
    return files


def page_of(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown."""
    return "\n\n".join(part for cell in notebook["cells"] for part in parts_of(cell)) + "\n"


def parts_of(cell: dict[str, Any]) -> list[str]:
    """Return what a cell says, and what it printed and showed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(_shown(output) for output in cell["outputs"])]


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    if "image/png" in data:
        return f'<div class="output"><img alt="figure" src="data:image/png;base64,{data["image/png"]}"></div>'
    text = "".join(output["text"] if "text" in output else data["text/plain"])
    return f'<div class="output"><pre>{html.escape(text)}</pre></div>'
