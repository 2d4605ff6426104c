import subprocess
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import CODE, Timing, code_in, ratios, time_interleaved, write_record
from curvcert.errors import InvalidInput
from curvcert.results import Record


def test_candidates_take_turns_after_the_warm_up() -> None:
    calls: list[str] = []
    timings = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert all(len(timing.seconds) == 2 and timing.minimum >= 0 for timing in timings.values())


def test_synchronises_around_every_call() -> None:
    events: list[str] = []
    time_interleaved({"a": lambda: events.append("call")}, 2, 0, synchronise=lambda: events.append("wait"))
    assert events == ["wait", "call", "wait"] * 2


@pytest.mark.parametrize("arguments", [({}, 1, 0), ({"a": int}, 0, 0), ({"a": int}, 1, -1)])
def test_refuses_to_time_nothing(arguments) -> None:
    with pytest.raises(InvalidInput, match="repeats >= 1"):
        time_interleaved(*arguments)


@pytest.mark.parametrize("seconds", [(), (-1.0,)])
def test_refuses_a_timing_without_durations(seconds) -> None:
    with pytest.raises(InvalidInput, match="durations"):
        Timing(seconds)


def test_ratios_name_what_is_missing() -> None:
    with pytest.raises(InvalidInput, match="'c'"):
        ratios({"a": Timing((1.0,))}, against="c")


def test_writes_a_valid_record(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    path = write_record("norms", "make bench", 0, {"repeats": 3}, {"ratio": 2.0})
    assert Record.read(path).figures == {"ratio": 2.0}


COMMIT = "0123456789" * 4


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with code and a record, both committed."""
    (tmp_path / "src").mkdir()
    (tmp_path / "results").mkdir()
    for name in ("src/code.py", "results/old.json"):
        (tmp_path / name).write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_checkout_tells_its_commit_whatever_one_is_told(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert code_in(checkout, COMMIT) == {"commit": head, "changed": False}


@pytest.mark.parametrize(
    ("name", "changed"), [("src/code.py", True), ("src/new.py", True), ("results/old.json", False)]
)
def test_a_change_of_the_code_is_told_and_one_of_a_record_is_not(checkout: Path, name: str, changed: bool) -> None:
    (checkout / name).write_text("changed")
    found = code_in(checkout)
    assert found is not None and found["changed"] is changed


def test_what_counts_as_code_is_there() -> None:
    assert all((harness.ROOT / name).exists() for name in CODE)


@pytest.mark.parametrize("told", ["", "main", COMMIT[:7], f"{COMMIT}-changed", COMMIT.replace("0", "g")])
def test_a_commit_that_is_none_is_refused(tmp_path: Path, told: str) -> None:
    with pytest.raises(InvalidInput, match="git describe"):
        code_in(tmp_path, told)


@pytest.mark.parametrize("told", [None, COMMIT])
def test_a_record_of_a_gpu_names_its_commit_or_is_refused(tmp_path: Path, monkeypatch, told: str | None) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "measured_code", lambda: code_in(tmp_path, told))
    if told is None:
        with pytest.raises(InvalidInput, match=harness.COMMIT_VARIABLE):
            write_record("speed", "make bench-gpu", 0, {"device": "NVIDIA H200"}, {})
        assert not list(tmp_path.iterdir())
    else:
        path = write_record("speed", "make bench-gpu", 0, {"device": "NVIDIA H200"}, {})
        assert Record.read(path).config == {"device": "NVIDIA H200", "code": {"commit": COMMIT, "changed": False}}
    assert Record.read(write_record("cpu", "make bench", 0, {"device": "cpu"}, {})).config["device"] == "cpu"
