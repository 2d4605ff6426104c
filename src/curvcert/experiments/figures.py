"""The pictures of the page "Results", each drawn from its kept record alone.

python -m curvcert.experiments.figures results docs/images/results
"""

import sys
from pathlib import Path

from curvcert.errors import InvalidInput
from curvcert.experiments import EXPERIMENTS
from curvcert.experiments.reproducing import read_record


def draw_figures(results: Path | str, folder: Path | str) -> list[Path]:
    """Draw FOLDER/NAME.svg for every experiment with a record, and return the paths; the same record, the same bytes.

    >>> draw_figures("no-such-folder", "unused")
    []
    """
    drawn = []
    for name, experiment in EXPERIMENTS.items():
        record = read_record(results, name)
        if record is not None:
            drawn.append(Path(folder) / f"{name}.svg")
            experiment.draw(record, drawn[-1])
    return drawn


def main(words: list[str]) -> None:
    """Draw all, and say which."""
    if len(words) != 2:
        raise InvalidInput(f"Expected the folder of the records and that of the pictures, got {len(words)} words.")
    for path in draw_figures(*words):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
