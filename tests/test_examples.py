"""The scripts in examples/ run, are short, say what they show, and print what they should."""

import ast
import importlib.util
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NUMBER = r"([0-9.]+)"

pytestmark = pytest.mark.slow


@pytest.fixture
def printed(capsys):
    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def found(pattern: str, text: str) -> list[tuple[float, ...]]:
    rows = re.findall(pattern, text)
    assert rows, f"{pattern} is not in\n{text}"
    return [tuple(float(value) for value in (row if isinstance(row, tuple) else (row,))) for row in rows]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short_explained_listed_and_tested(path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 40
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"]({path.name})" in (EXAMPLES / "README.md").read_text()
    assert f'printed("{path.name}")' in Path(__file__).read_text()


def test_certify_pytorch(printed) -> None:
    rows = found(rf"within {NUMBER}: the accuracy lies between {NUMBER}% and {NUMBER}%", printed("certify_pytorch.py"))
    assert len(rows) == 3
    assert all(proven <= at_most for _, proven, at_most in rows)
    assert rows[0][1] > 50


def test_certify_onnx(printed) -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    assert "20 of 20 correct, median radius 0.032" in printed("certify_onnx.py")


def test_train_regularised(printed) -> None:
    plain, smooth = found(
        rf"certified within 0.3: {NUMBER}%, curvature at most {NUMBER}", printed("train_regularised.py")
    )
    assert smooth[0] > plain[0]
    assert smooth[1] < plain[1] / 2


def test_local_vs_global(printed) -> None:
    text = printed("local_vs_global.py")
    anywhere, anchored, *local, limit = (value for (value,) in found(r"(?m) {3,}(\d+\.\d\d)(?:  |$)", text))
    assert len(local) == 3
    assert limit < min(anchored, *local) and max(anchored, *local) <= anywhere
    assert local == sorted(local, reverse=True)


def test_smoothness_for_control(printed) -> None:
    rows = found(rf"K <= {NUMBER}, .*: proven {NUMBER}, found {NUMBER}", printed("smoothness_for_control.py"))
    assert len(rows) == 3
    for _, proven, worst in rows:
        assert 0.3 * proven < worst <= proven


def test_save_and_check(printed) -> None:
    text = printed("save_and_check.py")
    assert "status: proven proven proven proven\nthe certificate holds: True" in text
    assert "for other inputs: contradicted - the input is another one" in text


def test_verify_property(printed) -> None:
    text = printed("verify_property.py")
    assert "within 0.01: holds, proven over 1 box" in text
    assert "within 0.2: violated" in text and "in place of a 2, proven" in text


def test_attack_our_own(printed) -> None:
    text = printed("attack_our_own.py")
    assert "20 radii attacked, 0 violations" in text
    assert "the bound, 3.00: 0 violations\n95% of it, 2.85: 1 violations" in text


def test_custom_activation(printed) -> None:
    text = printed("custom_activation.py")
    assert "it rests on: activation 'log cosh': slope in [-1, 1], curvature in [0, 1] as declared, sampled only" in text
    assert re.search(r"refused: .* outside \[0, 0.5\]", text)
