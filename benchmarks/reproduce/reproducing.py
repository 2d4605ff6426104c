"""Running an experiment: the record, its arrays and its picture below OUT, and a copy among the results."""

import time
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import record_path
from benchmarks.reproduce.experiment import Experiment, Options
from benchmarks.reproduce.weights import described, keep_weights
from curvcert.errors import InvalidInput
from curvcert.folder_lock import locked
from curvcert.results import Record
from curvcert.whole_files import write_whole


def reproduce(experiment: Experiment, options: Options, results: Path | None = None) -> Record:
    """Run an experiment, write OUT/NAME.json, .npz and .png, and copy the first two to `results` if it is given.

    >>> import tempfile
    >>> from benchmarks.reproduce.tanh_anchor import TANH_ANCHOR
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = reproduce(TANH_ANCHOR, Options(Path(folder), quick=True))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.curvcert-lock', 'tanh-anchor.json', 'tanh-anchor.npz', 'tanh-anchor.png']
    >>> record.figures["holds"]
    True

    Raises:
        InvalidInput: if a quick run is to be kept among the results.
    """
    if options.quick and results is not None:
        raise InvalidInput("A quick run checks the pipeline, never the figures: it is not kept among the results.")
    with locked(options.out, f"python -m benchmarks reproduce {experiment.name}"):
        begun = time.perf_counter()
        record = with_weights(experiment, experiment.run(options), options.out)
        record = replace(record, config={**record.config, "seconds": round(time.perf_counter() - begun, 1)})
        record.write(record_path(experiment.name, options.out))
        experiment.draw(record, options.out / f"{experiment.name}.png")
        if results is not None:
            keep(experiment, options.out, results)
    return record


def with_weights(experiment: Experiment, record: Record, out: Path) -> Record:
    """Return the record with the digests of the weights that it was measured on."""
    models = experiment.models(record)
    if not models or "weights" in record.config:
        return record
    return replace(record, config={**record.config, "weights": described(models, out)})


def keep(experiment: Experiment, out: Path, results: Path) -> None:
    """Copy a record, its arrays, its rows and the small weights of its models to the results."""
    for path in [record_path(experiment.name, out), *sorted((out / experiment.name).glob("*.json"))]:
        name = path.relative_to(out).with_suffix("")
        record = with_weights(experiment, Record.read(path), out)
        weights = record.config.get("weights", {})
        keep_weights(name.as_posix(), weights, experiment.models(record), out, results)
        record.write(results / name.with_suffix(".json"))
        arrays = path.with_suffix(".npz")
        if arrays.is_file():
            write_whole(results / name.with_suffix(".npz"), arrays.read_bytes())
