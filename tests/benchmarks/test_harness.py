import pytest

from benchmarks import harness
from benchmarks.harness import Timing, ratios, time_interleaved, write_record
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
