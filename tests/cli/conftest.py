"""A folder with a module of models in it, and the command line run from there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import NETS, Runner


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("nets", None)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)
