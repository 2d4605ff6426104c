"""What an experiment is: a name, the claim it tests, a run that gives a record, and a picture drawn from the record.

A run keeps everything below its folder OUT: `OUT/NAME.json` is the record, `OUT/NAME.npz` its per-sample arrays,
`OUT/models` the trained networks.  What is there already is not made again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import new_record
from benchmarks.reproduce.paper_numbers import FLOATS
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.results import Record
from curvcert.training import Recipe
from curvcert.whole_files import write_whole

Arrays = Mapping[str, NDArray[Any]]
RADII = {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255}
"""The radii of the paper's tables, as they are written and as numbers."""


def silent(text: str) -> None:
    """Say nothing."""


def no_models(record: Record) -> dict[str, Recipe]:
    """Return the models of a record that was measured on none that is kept."""
    return {}


@final
@dataclass(frozen=True)
class Options:
    """How an experiment is run.

    Attributes:
        out: the folder for the record, its arrays, its picture and the models.
        data_folder: where MNIST and CIFAR-10 are, or are downloaded to.
        device: where to compute.
        quick: a small version on embedded data, that checks the pipeline and never the figures.
        seed: of trainings and searches.
        epochs: of every training, instead of those of its recipe.
        samples: how many test samples are used; all by default.
        rows: which rows of a table are made; all by default.
        anew: train every network, those with kept weights too.
        say: where progress goes.
    """

    out: Path
    data_folder: Path | None = None
    device: str = "cpu"
    quick: bool = False
    seed: int = 0
    epochs: int | None = None
    samples: int | None = None
    rows: tuple[str, ...] = ()
    anew: bool = False
    say: Callable[[str], None] = silent

    def __post_init__(self) -> None:
        for name in ("epochs", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} is a whole number from 1, got {value}.")


@final
@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Attributes:
        name: what `python -m benchmarks reproduce` calls it.
        claim: what it tests, in a sentence.
        labels: the paper's labels of the figures and tables that it makes again; none for what has no label there.
        run: makes the record, and writes the arrays below `out`.
        draw: draws the picture of a record into a file; the ending chooses the format.
        models: the trained models that a record was measured on: the names of their weights, and their recipes.
    """

    name: str
    claim: str
    labels: tuple[str, ...]
    run: Callable[[Options], Record]
    draw: Callable[[Record, Path], None]
    models: Callable[[Record], dict[str, Recipe]] = no_models

    @property
    def where(self) -> str:
        """The figures and tables of the paper by their numbers."""
        return " and ".join(FLOATS[label] for label in self.labels) or "Appendix, time complexity"


def make_record(
    name: str, options: Options, config: Mapping[str, Any], figures: Mapping[str, Any], more: str = ""
) -> Record:
    """Return the record of a run, with the command that makes it again, and the accelerator's name if there is one.

    >>> made = make_record("tanh-anchor", Options(Path("runs"), quick=True), {}, {"slope": 0.5})
    >>> made.command, made.config["quick"]
    ('python -m benchmarks reproduce tanh-anchor --quick', True)
    """
    words = ["python -m benchmarks reproduce", name, more, "--quick" if options.quick else ""]
    words += [f"--seed {options.seed}" if options.seed else "", f"--epochs {options.epochs}" if options.epochs else ""]
    words += [f"--samples {options.samples}" if options.samples else "", "--anew" if options.anew else ""]
    words += [f"--device {options.device}" if options.device != "cpu" else ""]
    settings = {"quick": options.quick, "device": options.device, "samples": options.samples, "epochs": options.epochs}
    settings |= config
    record = new_record(name, " ".join(w for w in words if w), options.seed, settings, figures)
    if torch.device(options.device).type != "cuda":
        return record
    return replace(record, hardware={**record.hardware, "gpu": torch.cuda.get_device_name(options.device)})


def save_arrays(path: Path, arrays: Arrays) -> Path:
    """Write arrays, compressed, so that the name always holds a whole file."""
    content = BytesIO()
    np.savez_compressed(content, allow_pickle=False, **dict(arrays))
    return write_whole(path, content.getvalue())


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; nothing in it is run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_arrays(save_arrays(Path(folder) / "radii.npz", {"radius": np.array([0.5])}))["radius"]
    array([0.5])

    Raises:
        InvalidFile: if it is cut short, or holds objects rather than numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive raises whatever its zip reader meets
        raise InvalidFile(f"{path} holds no arrays that can be read: {error}. Make it again.") from error


def percent(share: float) -> float:
    """Return a share in percent, with two decimals, as tables show it.

    >>> percent(0.12345)
    12.35
    """
    return round(100 * share, 2)


def common_span(*groups: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the largest finite value of several groups, so that their histograms share their bins.

    >>> common_span(np.array([0.5, np.inf]), np.array([2.0]))
    (0.5, 2.0)
    """
    values = np.concatenate(groups)
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)


def histogram(values: NDArray[Any], bins: int = 40, span: tuple[float, float] | None = None) -> dict[str, list[float]]:
    """Return the edges and the counts of a histogram, as a record holds them.

    >>> histogram(np.array([0.0, 1.0, 1.0]), bins=2)
    {'edges': [0.0, 0.5, 1.0], 'counts': [1, 2]}
    """
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins, span if len(finite) or span else (0.0, 1.0))
    return {"edges": edges.tolist(), "counts": counts.tolist()}
