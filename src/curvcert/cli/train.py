"""`curvcert train`: train a certifiable classifier from a recipe."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from curvcert._version import __version__
from curvcert.cli import options
from curvcert.cli.output import Output
from curvcert.data import load
from curvcert.errors import InvalidInput
from curvcert.training import (
    MODEL,
    Recipe,
    TrainingResult,
    checkpoints,
    load_recipe,
    recipe_names,
    train,
    train_side_by_side,
)
from curvcert.training.distributed import joined, place_from
from curvcert.training.side_by_side import ALIKE


def train_command(
    recipe: Annotated[
        str, typer.Option(help=f"A recipe by name ({', '.join(recipe_names())}), or the path of a TOML file.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for the run; it is made if need be.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe; may be given many times."),
    ] = None,
    each: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=A,B,C",
            help="Train one model for each value, side by side: seed=0,1,2. On a GPU their steps are one graph.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Go on from this checkpoint instead.")] = None,
    device: options.Device = "cpu",
    data_folder: options.DataFolder = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Test samples to certify at the end; all by default.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a classifier whose certificates are large, and certify it.

    Two minutes on two cores, with the embedded digits:

        curvcert train --recipe digits --out runs/digits

    Any field of the recipe can be changed, and a run that was stopped or killed goes on where it was:

        curvcert train --recipe digits --out runs/wide --set epsilon=0.3 --set epochs=400

        curvcert train --recipe digits --out runs/digits --resume

    Several seeds, or values of another field, side by side; each has a folder of its own, runs/seeds/seed-0 and so on:

        curvcert train --recipe digits --out runs/seeds --each seed=0,1

    Several processes share each batch under torchrun; on GPUs, one process per GPU:

        torchrun --standalone --nproc-per-node 2 -m curvcert train --recipe digits --out runs/shared

    The folder then holds model.safetensors, metrics.jsonl, result.json, recipe.json and checkpoints/.
    """
    changes = dict(_assignment(text) for text in change or [])
    chosen = load_recipe(recipe).updated(changes)
    output, place = Output(json, quiet), place_from()
    share = options.budget_share(output)
    if share < 1:
        chosen = chosen.updated({"epochs": str(options.share_of(chosen.epochs, share))})
        samples = options.share_of(samples or len(load(chosen.data, "test", data_folder)), share)
    if each is not None:
        if not place.alone or resume_from is not None:
            raise InvalidInput("--each trains in one process, and goes on with --resume alone. Leave out the other.")
        _train_each(each_recipe(chosen, each), out, resume, device, data_folder, samples, tensorboard, output)
        return
    if place.restarted and (resume_from is None or checkpoints(out / "checkpoints")):
        resume, resume_from = True, None
    with joined(place, device) as ranks:
        result = train(
            chosen,
            out,
            resume=resume_from or resume,
            device=ranks.device,
            data_folder=data_folder,
            certify_samples=samples,
            tensorboard=tensorboard,
            console=Console(stderr=True, quiet=quiet),
            ranks=ranks,
        )
    if not place.is_first:
        return
    path = result.folder / MODEL
    output.show(accuracy_table(result, chosen.epsilons), f"The model: {path}")
    output.answer(str(path), _facts(result, chosen.epsilons))


def each_recipe(recipe: Recipe, each: str) -> dict[str, Recipe]:
    """Return a recipe for each value of a field, by the name of its folder.

    >>> list(each_recipe(load_recipe("digits"), "seed=0,1"))
    ['seed-0', 'seed-1']

    Raises:
        InvalidInput: it is no such list, or runs side by side cannot differ in that field.
    """
    name, values = _assignment(each, "--each expects FIELD=A,B,C, such as --each seed=0,1,2")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found or len(set(found)) < len(found):
        raise InvalidInput(f"--each expects different values, as in seed=0,1,2, got {each!r}.")
    if name in (*ALIKE, "epsilons", "evaluate_samples"):
        raise InvalidInput(f"Runs side by side have the same {name}. Change it for all of them by --set {name}=VALUE.")
    return {f"{name}-{value}": recipe.updated({name: value}) for value in found}


def _train_each(
    recipes: dict[str, Recipe],
    out: Path,
    resume: bool,
    device: str,
    data_folder: Path | None,
    samples: int | None,
    tensorboard: bool,
    output: Output,
) -> None:
    console = Console(stderr=True, quiet=output.quiet)
    results = train_side_by_side(recipes, out, resume, device, data_folder, samples, tensorboard, console)
    for name, result in results.items():
        output.show(accuracy_table(result, recipes[name].epsilons, name), f"The model: {result.folder / MODEL}")
    facts = [{"name": name, **_facts(result, recipes[name].epsilons)} for name, result in results.items()]
    paths = "\n".join(str(result.folder / MODEL) for result in results.values())
    output.answer(paths, {"command": "train", "runs": facts})


def accuracy_table(result: TrainingResult, epsilons: tuple[float, ...], name: str = "") -> Table:
    """Return what is proven about a trained model: a row for each radius."""
    certificate = result.certificate
    table = Table(
        title=f"Certified accuracy{name and f' of {name}'} on {len(certificate)} test samples, l2",
        caption="proven for every point within the radius; the attacked share is what witnesses leave",
    )
    table.add_column("radius", justify="right")
    table.add_column("certified", justify="right")
    table.add_column("at most", justify="right")
    table.add_row("0", f"{result.accuracy:.2%}", f"{result.accuracy:.2%}")
    for eps in epsilons:
        proven, possible = certificate.certified_accuracy(eps), certificate.attacked_accuracy(eps)
        table.add_row(f"{eps:.4f}", f"{proven:.2%}", f"{possible:.2%}")
    return table


def _facts(result: TrainingResult, epsilons: tuple[float, ...]) -> dict[str, object]:
    """Return the same numbers for a machine."""
    certificate = result.certificate
    return {
        "command": "train",
        "curvcert": __version__,
        "model": str(result.folder / MODEL),
        "samples": len(certificate),
        "accuracy": result.accuracy,
        "at": [
            {
                "eps": eps,
                "certified": certificate.certified_accuracy(eps),
                "not_broken": certificate.attacked_accuracy(eps),
            }
            for eps in epsilons
        ],
    }


def _assignment(text: str, expected: str = "--set expects FIELD=VALUE, such as --set epochs=10") -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InvalidInput(f"{expected}, got {text!r}.")
    return name.strip(), value.strip()
