"""Faults injected one at a time into a copy of the repository: the tests named for each must find it.

Claim: every fault of `benchmarks.faults` makes one of its tests fail, and the unpatched copy passes them all.  With
`--audit`: of those that `AUDITED` names, `curvcert audit` finds every one within two minutes of processor time (without
a fault it finds nothing: results/audit.json).  `--check` shows how many of these the independent checker refuses in the
certificates of two samples of both embedded networks: it need not find any, and the record tells which it does.
Hardware: whatever it runs on; the record says which.  One process at a time, one thread.
Trials: for each set of test files, once what its faults name without a fault, then each fault until the first failure.

A fault counts as found when a test fails after the patched line ran, so a statement in front of it leaves a mark.  The
command fails if a fault is not found, if its line did not run, if the unpatched copy reports anything, or if the
tests named for the faults of a set take more than a minute of processor time.

    python -m benchmarks.teeth [--fault NAME ...] [--audit | --check] [--list]

Each run is appended to the record, and `python -m benchmarks pages` writes who finds what on the page on the audit.
"""

import argparse
import ast
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults import AUDITED, FAULTS, Fault
from benchmarks.harness import read_record, write_record
from curvcert.checker.verdict import CONTRADICTED, NOT_REACHED
from curvcert.errors import InvalidInput
from curvcert.falsifier import load_counterexample

ROOT = Path(__file__).parents[1]
LIMIT = 60.0
"""Seconds of processor time that the tests named for a set of faults may take."""

AUDIT_LIMIT = 120.0
"""Seconds of processor time within which an audit finds a fault."""

_PATIENCE = 1200.0
"""Seconds after which a run is given up: a fault may also make a loop endless."""

_COPIED = ("src", "tests", "benchmarks", "examples", "conftest.py", "pyproject.toml")
"""What may be changed, or is compiled beside its source; the rest of the copy is links."""

_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


class Toothless(Exception):
    """A fault that was not found, or a run that shows nothing."""


@dataclass(frozen=True)
class Outcome:
    """What pytest reported: its exit status, its output, and the processor time that it took."""

    status: int
    output: str
    seconds: float


def copied(root: Path, target: Path) -> Path:
    """Copy a repository's code and tests to a folder, with links to everything else that is not hidden."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.name not in _COPIED:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, target / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(entry, target / entry.name)
    return target


def patched(source: str, fault: Fault, mark: Path) -> str:
    """Return a file's text with the fault in it, and in front of its statement one that creates the file `mark`.

    Raises:
        InvalidInput: if the old text does not stand there exactly once, or no statement can stand in front of it.
    """
    if source.count(fault.old) != 1:
        raise InvalidInput(
            f"{fault.name}: the old text must stand in {fault.file} once, it stands there {source.count(fault.old)} "
            f"times: {fault.old!r}. Carry the fault over to where that code is now."
        )
    # What old and new text share in front may be of other lines.
    shared = next((k for k, pair in enumerate(zip(fault.old, fault.new, strict=False)) if len(set(pair)) > 1), 0)
    changed = source.count("\n", 0, source.index(fault.old) + shared) + 1
    text = source.replace(fault.old, fault.new)
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= changed <= (node.end_lineno or node.lineno)
    ]
    if not around:
        raise InvalidInput(f"{fault.name}: line {changed} of {fault.file} is in no statement.")
    statement = max(around, key=lambda node: (node.lineno, node.col_offset))
    lines = text.splitlines(keepends=True)
    indent = lines[statement.lineno - 1][: statement.col_offset]
    if indent.strip() or lines[statement.lineno - 1].lstrip().startswith("elif "):
        raise InvalidInput(f"{fault.name}: nothing can stand in front of line {statement.lineno} of {fault.file}.")
    lines.insert(statement.lineno - 1, f"{indent}open({str(mark)!r}, 'w').close()\n")
    return "".join(lines)


@contextmanager
def applied(fault: Fault, copy: Path, mark: Path) -> Iterator[None]:
    """Put a fault into the copy, and take it out again."""
    path = copy / fault.file
    source = path.read_text(encoding="utf-8")
    mark.unlink(missing_ok=True)
    _write(path, patched(source, fault, mark))
    try:
        yield
    finally:
        _write(path, source)


def _write(path: Path, text: str) -> None:
    """Write a source file; what was compiled from the last one is known by its time and size only, so it goes."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def run_tests(copy: Path, tests: Sequence[str], keyword: str) -> Outcome:
    """Run tests in the copy up to the first failure, with the same random examples each time."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    return _run(copy, ["pytest", *options, *tests, "-k", keyword], named(tests, keyword))


def run_audit(copy: Path, found: Path) -> Outcome:
    """Run an audit in the copy up to the first violation."""
    command = ["curvcert", "audit", "--first", "--quiet", "--json", "--out", str(found)]
    return _run(copy, command, "curvcert audit")


def _run(copy: Path, module: Sequence[str], name: str) -> Outcome:
    command = [sys.executable, "-m", *module]
    path = os.pathsep.join([str(copy / "src"), str(copy)])
    environment = {**os.environ, "PYTHONPATH": path, "CI": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # to compile the package anew each time takes as long as the tests
    before = _processor_seconds()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise Toothless(f"{name} did not end within {_PATIENCE:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(process.returncode, output, _processor_seconds() - before)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def named(tests: Sequence[str], keyword: str) -> str:
    """Return tests as they are given to pytest."""
    return " ".join([*tests, *(["-k", repr(keyword)] if keyword else [])])


def require_clean(copy: Path, tests: Sequence[str], keywords: Iterable[str]) -> float:
    """Return how long all these tests take on the unpatched copy, which must pass them within the limit."""
    each = sorted(set(keywords))
    keyword = " or ".join(f"({one})" for one in each) if all(each) else ""
    outcome, name = run_tests(copy, tests, keyword), named(tests, keyword)
    if outcome.status != 0 or " passed" not in outcome.output:
        raise Toothless(f"without a fault {name} reported (status {outcome.status}):\n{outcome.output[-2000:]}")
    if outcome.seconds > LIMIT:
        raise Toothless(f"{name} took {outcome.seconds:.0f} s of processor time, at most {LIMIT:.0f} are allowed")
    return outcome.seconds


def require_found(fault: Fault, copy: Path) -> dict[str, Any]:
    """Return which test finds a fault, and how long that takes."""
    mark = copy / "the-faulty-line-ran"
    with applied(fault, copy, mark):
        outcome = run_tests(copy, fault.tests, fault.keyword)
    if not mark.exists():
        raise Toothless(f"its line did not run (status {outcome.status}):\n{outcome.output[-2000:]}")
    if outcome.status == 0:
        raise Toothless(f"not found by {named(fault.tests, fault.keyword)}")
    failed = _FAILED.search(outcome.output)
    if outcome.status != 1 or failed is None:
        raise Toothless(f"the tests could not be run (status {outcome.status}):\n{outcome.output[-2000:]}")
    return {"found": True, "test": failed.group(1), "seconds": round(outcome.seconds, 1)}


def require_audited(fault: Fault, copy: Path) -> dict[str, Any]:
    """Return what an audit finds of a fault, and how long that takes."""
    with applied(fault, copy, copy / "the-faulty-line-ran"), tempfile.TemporaryDirectory() as folder:
        outcome = run_audit(copy, Path(folder) / "found")
        examples = [load_counterexample(path) for path in sorted((Path(folder) / "found").glob("*.safetensors"))]
    if outcome.status != 1 or not examples:
        raise Toothless(f"an audit ended with {outcome.status} and {len(examples)} counterexamples")
    if outcome.seconds > AUDIT_LIMIT:
        raise Toothless(f"an audit took {outcome.seconds:.0f} s, at most {AUDIT_LIMIT:.0f} are allowed")
    return {"found": True, "claim": examples[0].source, "seconds": round(outcome.seconds, 1)}


def require_checked(fault: Fault, copy: Path) -> dict[str, Any]:
    """Return that the checker refuses certificates that a fault made, and how long that takes."""
    mark = copy / "the-faulty-line-ran"
    with applied(fault, copy, mark):
        outcome = _run(copy, ["benchmarks.checks", "--quick"], "certifying and checking")
    if not mark.exists():
        raise Toothless(f"its line did not run (status {outcome.status}):\n{outcome.output[-2000:]}")
    refused = [status for status in (CONTRADICTED, NOT_REACHED) if f"'{status}':" in outcome.output]
    if outcome.status != 1 or not refused:
        raise Toothless(f"certifying and checking ended with {outcome.status}")
    return {"found": True, "status": refused[0], "seconds": round(outcome.seconds, 1)}


def bite_by(
    require: Callable[[Fault, Path], dict[str, Any]], faults: Sequence[Fault], root: Path, console: Console
) -> tuple[dict[str, Any], dict[str, float]]:
    """Apply faults one by one to a copy, and have an audit or the checker find them; return what `bite` does."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(root, Path(folder))
        for fault in faults:
            try:
                found[fault.name] = require(fault, copy)
                console.print(f"  found {fault.name}: {found[fault.name]}", markup=False)
            except Toothless as why:
                found[fault.name] = _missed(why)
                console.print(f"  FAILED {fault.name}: {why}", markup=False)
    return found, {}


def bite(faults: Sequence[Fault], root: Path, console: Console) -> tuple[dict[str, Any], dict[str, float]]:
    """Apply faults one by one to a copy; return what became of each, and how long the sets of tests take without."""
    found: dict[str, Any] = {}
    clean: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(root, Path(folder))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            group = [fault for fault in faults if fault.tests == tests]
            try:
                seconds = require_clean(copy, tests, (fault.keyword for fault in group))
            except Toothless as why:
                console.print(f"FAILED: {why}", markup=False)
                found |= {fault.name: _missed(why) for fault in group}
                continue
            clean[" ".join(tests)] = round(seconds, 1)
            console.print(f"{' '.join(tests)}: nothing without a fault, in {seconds:.0f} s", markup=False)
            for fault in group:
                try:
                    found[fault.name] = require_found(fault, copy)
                    console.print(f"  found {fault.name}, by {found[fault.name]['test']}", markup=False)
                except Toothless as why:
                    found[fault.name] = _missed(why)
                    console.print(f"  FAILED {fault.name}: {why}", markup=False)
    return found, clean


def _missed(why: Toothless) -> dict[str, Any]:
    return {"found": False, "why": str(why).partition("\n")[0]}


def commit_of(root: Path) -> str:
    """Return the commit that is checked out, marked where what is copied differs from it."""
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    status = [*git, "status", "--porcelain", "--", *_COPIED]
    changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    return f"{commit}-dirty" if changed else commit


def append_to_record(
    command: str, commit: str, found: dict[str, Any], clean: dict[str, float], by: str = "tests"
) -> Path:
    """Append a run to the record; the earlier ones stay."""
    known = read_record("teeth")
    runs = known.figures["runs"] if known else []
    today = datetime.now(UTC).date().isoformat()
    run = {"created": today, "commit": commit, "by": by, "faults": found, "seconds_without_fault": clean}
    return write_record("teeth", command, 0, {"limit_s": LIMIT, "threads": 1}, {"runs": [*runs, run]})


def chosen(names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names, all without any."""
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidInput(f"There is no fault called {', '.join(unknown)}. See --list.")
    return [known[name] for name in names] or list(FAULTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Inject and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", default=[], help="a fault's name, any number of times; default all")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--audit", action="store_true", help="have an audit find them, not the tests")
    others.add_argument("--check", action="store_true", help="have the independent checker find them")
    parser.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if options.list:
        for fault in FAULTS:
            console.print(f"{fault.name}: {fault.claim}", markup=False)
        return
    try:
        faults = chosen(options.fault)
        if options.audit or options.check:
            faults = [fault for fault in faults if options.fault or fault.name in AUDITED]
    except InvalidInput as error:
        parser.error(str(error))
    commit = commit_of(ROOT)
    by = "audit" if options.audit else "check" if options.check else "tests"
    if by == "tests":
        found, clean = bite(faults, ROOT, console)
    else:
        found, clean = bite_by(require_audited if options.audit else require_checked, faults, ROOT, console)
    command = " ".join(
        [
            "python -m benchmarks.teeth",
            *([] if by == "tests" else [f"--{by}"]),
            *(f"--fault {name}" for name in options.fault),
        ]
    )
    path = append_to_record(command, commit, found, clean, by)
    console.print(f"recorded in {path}", markup=False)
    missed = [name for name, outcome in found.items() if not outcome["found"]]
    console.print(f"{len(found) - len(missed)} of {len(found)} faults found", markup=False)
    raise SystemExit(1 if missed and by != "check" else 0)


if __name__ == "__main__":
    main()
