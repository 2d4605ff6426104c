"""The pictures of the page "Results", each drawn from its kept record alone."""

from pathlib import Path

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS


def draw_figures(results: Path | str, folder: Path | str) -> list[Path]:
    """Draw FOLDER/NAME.svg for every experiment with a record, and return the paths; the same record, the same bytes.

    >>> draw_figures("no-such-folder", "unused")
    []
    """
    drawn = []
    for name, experiment in EXPERIMENTS.items():
        record = read_record(name, results)
        if record is not None:
            drawn.append(Path(folder) / f"{name}.svg")
            experiment.draw(record, drawn[-1])
    return drawn
