"""Keeping what was measured already, without measuring it again: records, arrays, rows and small weights."""

from pathlib import Path

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS
from benchmarks.reproduce.reproducing import keep
from curvcert.errors import InvalidInput


def keep_all(out: Path, results: Path, names: list[str]) -> None:
    """Keep the experiments of these names.

    Raises:
        InvalidInput: if one is not known, was not measured, or only by its quick version.
    """
    for name in names:
        record = read_record(name, out)
        if name not in EXPERIMENTS or record is None:
            raise InvalidInput(
                f"{out} has no record of {name!r}. Make it: python -m benchmarks reproduce NAME --out {out}."
            )
        if record.config["quick"]:
            raise InvalidInput(f"The record of {name} in {out} is of a quick run, which is not kept.")
        keep(EXPERIMENTS[name], out, results)
