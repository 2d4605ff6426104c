"""A fixed sample of the fuzz campaign, and that its watch sees what it is there for."""

import json
import pickle
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import forgeries, fuzz
from benchmarks.fuzz import FAULT, KINDS, Specimen, Watch, judged, read_apart
from benchmarks.harness import ROOT
from curvcert.errors import InvalidFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(fuzz._PEAK).exists(), reason="the system does not tell the peak of memory"),
]


def test_a_fixed_sample_of_files_of_every_kind() -> None:
    found = read_apart(KINDS, range(20))
    assert [(outcome.kind, outcome.case) for outcome in found] == [(kind, k) for kind in KINDS for k in range(20)]
    assert [outcome for outcome in found if outcome.broken] == []
    assert sum(outcome.ended == "read" for outcome in found) > 20
    assert {outcome.ended for outcome in found} >= {"InvalidFile", "InvalidInput", "UnsupportedModule"}


def test_the_security_page_tells_the_record() -> None:
    figures = json.loads((ROOT / "results" / "fuzz.json").read_text())["figures"]
    kinds = figures["kinds"]
    assert list(kinds) == KINDS and figures["broken"] == []
    memory, seconds = (max(kind[name] for kind in kinds.values()) for name in ("most_mebibytes", "most_seconds"))
    page = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert f"{figures['files']:,} files of {len(kinds)} kinds, 0 broken promises, at most {memory} MiB" in page
    assert f"and {seconds} seconds." in page


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    return Watch(tmp_path_factory.mktemp("watched"))


def refuse(_: Path) -> None:
    raise InvalidFile("no")


def fault(_: Path) -> None:
    raise KeyError("odd")


def greedy(_: Path) -> None:
    np.ones(2**25).sum()


def busy(_: Path) -> None:
    start = time.process_time()
    while time.process_time() < start + 0.2:
        pass


READERS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "a refusal": (refuse, None),
    "a fault": (fault, "ended by a fault: KeyError"),
    "a shell": (lambda _: subprocess.run(["true"], check=True), "ran code: subprocess.Popen"),
    "a pickle": (lambda file: pickle.loads(file.read_bytes()), "ran code: "),
    "a file elsewhere": (lambda _: open("/dev/full", "a").close(), "ran code: opened '/dev/full' to write"),
    "much memory": (greedy, r"took \d+ MiB"),
    "much time": (busy, r"took 0\.\d s"),
}


@pytest.mark.parametrize("name", READERS)
def test_the_watch_sees(name: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, words = READERS[name]
    monkeypatch.chdir(tmp_path)
    if name == "much time":
        monkeypatch.setattr(fuzz, "MOST_SECONDS", 0.1)
    if name == "much memory":
        Path(fuzz._PEAK).write_text("5")
        monkeypatch.setattr(fuzz, "MOST_BYTES", fuzz._peak() + 2**26)
    file = tmp_path / "file"
    file.write_bytes(pickle.dumps(forgeries.Bomb()))
    outcome = judged(Specimen(file, forgeries.sealed, read), name, 0, watch)
    assert (outcome.status == FAULT) == (name == "a fault")
    assert re.match(words or "$", outcome.broken or ""), outcome


def test_a_case_is_the_same_file_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specimens = fuzz.specimens(tmp_path)
    assert list(specimens) == KINDS
    for kind, specimen in specimens.items():
        content = specimen.file.read_bytes()
        cases = [fuzz.made(specimen, content, kind, case) for case in range(20)]
        assert cases == [fuzz.made(specimen, content, kind, case) for case in range(20)]
        assert sum(case != content for case in cases) > 15
