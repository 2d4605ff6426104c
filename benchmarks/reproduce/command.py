"""`python -m benchmarks reproduce`: make a table or a figure of the paper again, and its record."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS, Experiment, Options, reproduce
from benchmarks.reproduce.table1 import TABLE1, chosen_rows
from curvcert.cli import options as shared
from curvcert.cli.output import Output
from curvcert.errors import InvalidInput
from curvcert.training.distributed import require_device


def reproduce_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(EXPERIMENTS)}.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="The folder for the record, its arrays, its picture and the models.")
    ] = Path("runs/reproduce"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version on embedded data: it checks the pipeline, not the figures.")
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL/METHOD/SEED/CERTIFICATE",
            help="Only these rows of table1; * for any, what is left out is any; may be given many times.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of every training, instead of its recipe's.")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Train every network, those with kept weights too.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Test samples to measure on; all by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of trainings and searches; table1's rows name their own.")] = 0,
    results: Annotated[
        Path | None, typer.Option(help="Also keep the record and its arrays in this folder; not with --quick.")
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only draw the picture again, from the record in --results or --out.")
    ] = False,
    device: shared.Device = "cpu",
    data_folder: shared.DataFolder = None,
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Make a table or a figure of the paper again.

    A second, without data or training:

        python -m benchmarks reproduce tanh-anchor

    Table 1 in parts, on an accelerator; what is made already is not made again:

        python -m benchmarks reproduce table1 --rows 6F/ours --device cuda --data-folder data

        python -m benchmarks reproduce table1 --device cuda --data-folder data --results results

    OUT then holds NAME.json (the record), NAME.npz (radii, one per sample), NAME.png and models/.
    """
    output = Output(json, quiet)
    experiment = chosen_experiment(name, tuple(rows or ()), quick)
    picture = out / f"{name}.png"
    if redraw:
        _redraw(experiment, results or out, picture)
    else:
        chosen = Options(
            out=out,
            data_folder=data_folder,
            device=require_device(device),
            quick=quick,
            seed=seed,
            epochs=epochs,
            samples=samples,
            rows=tuple(rows or ()),
            anew=anew,
            say=output.notice,
        )
        reproduce(experiment, chosen, results)
    record = out / f"{name}.json"
    told = f"{experiment.where}. The claim: {experiment.claim}"
    if quick:
        told += " A quick run checks the pipeline, and its figures say nothing about that."
    output.show(told, f"The picture: {picture}", f"The record, with what was measured: {record}")
    output.answer(str(record), {"command": "reproduce", "name": name, "record": record, "picture": picture})


def chosen_experiment(name: str, rows: tuple[str, ...] = (), quick: bool = False) -> Experiment:
    """Return an experiment by its name, once it has the rows that are asked for.

    >>> chosen_experiment("table1", ("6F/ours",)).where
    'Table 1'

    Raises:
        InvalidInput: if there is no such experiment, or it has no such rows.
    """
    if name not in EXPERIMENTS:
        raise InvalidInput(f"No experiment is called {name!r}. There are {', '.join(EXPERIMENTS)}.")
    if rows and name != TABLE1.name:
        raise InvalidInput(f"--rows chooses rows of {TABLE1.name}, {name} has none. Leave it out.")
    chosen_rows(rows, quick)
    return EXPERIMENTS[name]


def _redraw(experiment: Experiment, folder: Path, picture: Path) -> None:
    record = read_record(experiment.name, folder)
    if record is None:
        raise InvalidInput(
            f"{folder} has no record of {experiment.name}. Make it: python -m benchmarks reproduce {experiment.name}."
        )
    experiment.draw(record, picture)
