"""Run notebooks and store what their cells print and show: python scripts/run_notebooks.py [NAME.ipynb ...].

Cells of Python alone, in one namespace: no kernel, so nothing has to be installed beside curvcert.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

Output = dict[str, Any]


def run_notebook(notebook: dict[str, Any]) -> None:
    """Run every cell of code, and replace its outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"], cell["outputs"] = count, run_cell("".join(cell["source"]), names, count)


def run_cell(code: str, names: dict[str, Any], count: int) -> list[Output]:
    """Return what a cell prints, the value of its last line if that is an expression, and the figures it leaves."""
    body, last = ast.parse(code).body, None
    if body and isinstance(line := body[-1], ast.Expr):
        body, last = body[:-1], ast.Expression(line.value)
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"<cell {count}>", "exec"), names)
        if last is not None:
            shown = eval(compile(last, f"<cell {count}>", "eval"), names)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if shown is not None and not pyplot.get_fignums():
        data = {"text/plain": repr(shown).splitlines(True)}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = [shown._repr_html_()]
        outputs.append({"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}})
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=72, metadata={"Software": None})
        drawn: dict[str, Any] = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": drawn, "metadata": {}})
        pyplot.close(number)
    return outputs


def main(paths: list[Path]) -> None:
    """Run the notebooks in place."""
    for path in paths or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run_notebook(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
