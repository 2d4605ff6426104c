"""The rules of `scripts/prose.py` find what they are about, and let code and plain English alone."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("prose", Path(__file__).parents[1] / "scripts" / "prose.py")
assert spec is not None and spec.loader is not None
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


@pytest.mark.parametrize(
    "line",
    [
        "a list, one a sample",
        "grows by at most K a unit",
        '"""Tell whether it holds."""',
        "its behavior",
        "simply add it",
    ],
)
def test_a_broken_rule_is_found(line: str) -> None:
    assert [number for number, _, _ in prose.broken(f"A good line.\n{line}")] == [2]


@pytest.mark.parametrize("line", ["one per sample", "a row of the batch", "`x.neighbor`", "behaviour", "each image"])
def test_a_kept_rule_is_let_alone(line: str) -> None:
    assert prose.broken(line) == []


def test_files_and_folders_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("one a sample")
    (tmp_path / "data.svg").write_text("one a sample")
    assert prose.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    (tmp_path / "page.md").write_text("one per sample")
    assert prose.main([str(tmp_path)]) == 0
