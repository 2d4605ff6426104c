"""Keeping what was measured already, without measuring it again: records, arrays, rows and small weights.

python -m curvcert.experiments.keeping runs/reproduce results anchored-depth crc-vs-ccrc
"""

import sys
from pathlib import Path

from curvcert.errors import InvalidInput
from curvcert.experiments import EXPERIMENTS
from curvcert.experiments.reproducing import keep, read_record


def keep_all(out: Path, results: Path, names: list[str]) -> None:
    """Keep the experiments of these names.

    Raises:
        InvalidInput: if one is not known, was not measured, or only by its quick version.
    """
    for name in names:
        record = read_record(out, name)
        if name not in EXPERIMENTS or record is None:
            raise InvalidInput(f"{out} has no record of {name!r}. Make it: curvcert reproduce NAME --out {out}.")
        if record.config["quick"]:
            raise InvalidInput(f"The record of {name} in {out} is of a quick run, which is not kept.")
        keep(EXPERIMENTS[name], out, results)


def main(words: list[str]) -> None:
    """Keep the experiments that are named."""
    if len(words) < 3:
        raise InvalidInput(f"Expected OUT, RESULTS and the names of experiments, got {len(words)} words.")
    keep_all(Path(words[0]), Path(words[1]), words[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
