"""Time things side by side: the candidates take turns within one run, so that drift hits all alike.

A record names the commit whose code it measured.
"""

import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from curvcert.errors import InvalidInput
from curvcert.results import Record, record_of_this_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
COMMIT_VARIABLE = "CURVCERT_COMMIT"
"""The environment variable that names the commit where there is no .git: what `DESCRIBE` prints where there is one."""
DESCRIBE = "git describe --always --abbrev=40 --dirty --exclude '*'"
CODE = ("benchmarks", "src", "tests", "constraints.txt", "pyproject.toml")
"""What a measurement depends on.  The records themselves change from one benchmark to the next."""

Candidates = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """The wall-clock seconds of each repetition, in the order in which they ran.

    >>> timing = Timing((3.0, 1.0, 2.0))
    >>> timing.median, timing.minimum
    (2.0, 1.0)
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) < 0:
            raise InvalidInput(f"A timing is one or more nonnegative durations, got {self.seconds}.")

    @property
    def median(self) -> float:
        """The usual duration: the figure to report."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """The duration with the least disturbance."""
        return min(self.seconds)

    def as_figures(self) -> dict[str, float | int]:
        """Return what a record keeps."""
        return {"median_s": self.median, "min_s": self.minimum, "repeats": len(self.seconds)}


def nothing() -> None:
    """Wait for nothing: the processor's work is done when a call returns."""


def time_interleaved(
    candidates: Candidates,
    repeats: int = 5,
    warmup: int = 1,
    synchronise: Callable[[], None] = nothing,
) -> dict[str, Timing]:
    """Time the candidates in turn, `repeats` rounds after `warmup` rounds that do not count.

    `synchronise` waits for a device to finish (torch.cuda.synchronize), before and after each call.

    >>> timings = time_interleaved({"a": lambda: None, "b": lambda: None}, repeats=3)
    >>> {name: len(timing.seconds) for name, timing in timings.items()}
    {'a': 3, 'b': 3}
    """
    if repeats < 1 or warmup < 0 or not candidates:
        raise InvalidInput(
            f"Expected candidates, repeats >= 1 and warmup >= 0, "
            f"got {len(candidates)} candidates, repeats = {repeats}, warmup = {warmup}."
        )
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-warmup, repeats):
        for name, call in candidates.items():
            synchronise()
            start = time.perf_counter()
            call()
            synchronise()
            duration = time.perf_counter() - start
            if repetition >= 0:
                seconds[name].append(duration)
    return {name: Timing(tuple(durations)) for name, durations in seconds.items()}


def ratios(timings: Mapping[str, Timing], against: str) -> dict[str, float]:
    """Return how many times the median of `against` each candidate's median is.

    >>> ratios({"slow": Timing((2.0,)), "fast": Timing((0.5,))}, against="fast")
    {'slow': 4.0, 'fast': 1.0}
    """
    if against not in timings:
        raise InvalidInput(f"No timing is called {against!r}. There are {', '.join(timings)}.")
    return {name: timing.median / timings[against].median for name, timing in timings.items()}


def new_record(name: str, command: str, seed: int, config: Mapping[str, Any], figures: Mapping[str, Any]) -> Record:
    """Return the record of what was measured, and of the code that was.

    Raises:
        InvalidInput: the record is of another device than the CPU, and the commit is not known.
    """
    if config.get("device", "cpu") != "cpu":
        require_known_code()
    return record_of_this_run(name, command, seed, {**config, "code": measured_code()}, figures)


def write_record(name: str, command: str, seed: int, config: Mapping[str, Any], figures: Mapping[str, Any]) -> Path:
    """Write what was measured, and the code that was, to results/NAME.json and return the path.

    Raises:
        InvalidInput: as `new_record`.
    """
    return new_record(name, command, seed, config, figures).write(record_path(name))


def record_path(name: str, folder: Path | str | None = None) -> Path:
    """Return where the record of this name is kept: among the results, or in another folder.

    >>> record_path("table1", "runs").as_posix()
    'runs/table1.json'
    """
    return (RESULTS if folder is None else Path(folder)) / f"{name}.json"


def read_record(name: str, folder: Path | str | None = None) -> Record | None:
    """Return a record, or None where it has not been measured.

    >>> read_record("table1", "no-such-folder") is None
    True
    """
    path = record_path(name, folder)
    return Record.read(path) if path.is_file() else None


def figures_of(name: str, folder: Path | str | None = None) -> dict[str, Any]:
    """Return the figures of a record.

    Raises:
        InvalidInput: if it has not been measured.
    """
    record = read_record(name, folder)
    if record is None:
        raise InvalidInput(
            f"There is no {record_path(name, folder)}. `python -m benchmarks --help` tells what makes it."
        )
    return record.figures


def require_known_code() -> None:
    """Raise if the commit is not known: asked before a measurement on a GPU, which is not easily repeated.

    Raises:
        InvalidInput: there is no .git, and the environment variable does not name the commit.
    """
    if measured_code() is None:
        raise InvalidInput(
            f"A record of a GPU names the commit that it measured, and there is no .git here. Set {COMMIT_VARIABLE} to "
            f"what this prints in the checkout that the code is from: {DESCRIBE}"
        )


@cache
def measured_code() -> Mapping[str, str | bool] | None:
    """Return the commit of this code, and whether the code was changed since; None where that is not known."""
    return code_in(ROOT, os.environ.get(COMMIT_VARIABLE))


def code_in(folder: Path, told: str | None = None) -> Mapping[str, str | bool] | None:
    """Return the commit that is checked out in a folder, and whether its code was changed; else what one was told.

    >>> code_in(Path("no-such-folder"), 40 * "a" + "-dirty") == {"commit": 40 * "a", "changed": True}
    True

    Raises:
        InvalidInput: if one was told something else than a commit.
    """
    if (folder / ".git").exists():
        changes = _git(folder, "status", "--porcelain", "--", *CODE)
        return {"commit": _git(folder, "rev-parse", "HEAD"), "changed": bool(changes)}
    if told is None:
        return None
    if not re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told):
        raise InvalidInput(f"{COMMIT_VARIABLE} is what `{DESCRIBE}` prints, got {told!r}.")
    return {"commit": told.removesuffix("-dirty"), "changed": told.endswith("-dirty")}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()
