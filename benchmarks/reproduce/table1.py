"""Table 1: clean and certified accuracy on CIFAR-10, model by model, method by method, certificate by certificate.

Claim: for each architecture the certified-margin loss, soundly certified, is above the paper's CCRC row at all three
radii; and the paper's own rows are shown with sound norms.
Hardware: one accelerator; the record says which.
Trials: two seeds for the rows that are claims, one for the others.  All 10,000 test images, l2.

Every row is a file below OUT/table1, written as it is made: what is there is not made again, so that the work can be
split into many calls, `--rows 6F/ours` and so on.
"""

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from benchmarks.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, finish, legend_below, panels
from benchmarks.reproduce.certificates_of_the_paper import (
    ANCHORED_CHEAPLY,
    ANCHORED_SUBSET,
    paper_radii,
    plain_radii,
    widest_layer,
)
from benchmarks.reproduce.experiment import (
    RADII,
    Experiment,
    Options,
    load_arrays,
    make_record,
    percent,
    save_arrays,
)
from benchmarks.reproduce.models import Subject, experiment_recipe, model_folder, subject, with_options
from benchmarks.reproduce.paper_numbers import TABLE_1
from benchmarks.reproduce.searching import require_consistent, searched_distances
from benchmarks.reproduce.weights import are_there, described
from curvcert.certificates import certify
from curvcert.errors import InvalidInput
from curvcert.results import Record
from curvcert.training import Recipe, recipe_from_dict

NAME = "table1"
BEYOND = "ours+mirror"
"""The method that goes beyond the paper's architectures: by our best certificate alone."""

RECIPES: dict[tuple[str, str], str] = {
    ("6C2F", "Standard"): "6c2f-standard",
    ("6C2F", "CRM"): "6c2f-crm",
    ("6C2F", "CCRC"): "6c2f-ccrc",
    ("6C2F", "ours"): "6c2f-ours",
    ("6C2F", BEYOND): "6c2f-ours-mirror",
    ("Lip-3C1F", "SLL"): "lip-3c1f-sll",
    ("Lip-3C1F", "SLL+CCRC"): "lip-3c1f-sll-ccrc",
    ("Lip-3C1F", "ours"): "lip-3c1f-ours",
    ("6F", "Standard"): "6f-standard",
    ("6F", "CRM"): "6f-crm",
    ("6F", "CCRC"): "6f-ccrc",
    ("6F", "ours"): "6f-ours",
}
"""The recipe of every model and method."""

CLAIMS = ("CCRC", "SLL+CCRC", "ours", BEYOND)
"""The methods whose rows are claims: two seeds."""

CERTIFICATES = ("paper-global", "paper-anchored", "best")
"""The paper's bound with sound norms, its anchored bound likewise, and our best sound certificate."""

PLAIN = "lipschitz"
"""The certificate of a 1-Lipschitz network by that constant alone, which its rows have beside the others."""

_QUICK = ("CCRC", "ours")


@final
@dataclass(frozen=True)
class Row:
    """One row: what is trained, from which seed, and how it is certified.

    >>> Row("6F", "ours", 0, "best").name
    '6F/ours/0/best'
    """

    model: str
    method: str
    seed: int
    certificate: str

    @property
    def name(self) -> str:
        """What `--rows` calls it."""
        return f"{self.model}/{self.method}/{self.seed}/{self.certificate}"

    @property
    def file(self) -> str:
        """The name of its file, without ending."""
        return self.name.replace("/", "-")


def all_rows(quick: bool = False) -> list[Row]:
    """Return every row of the table; in a quick run those of a small network on the digits.

    >>> len(all_rows()), len(all_rows(quick=True))
    (58, 6)
    """
    if quick:
        return [Row("digits", method, 0, certificate) for method in _QUICK for certificate in CERTIFICATES]
    return [
        Row(model, method, seed, certificate)
        for model, method in RECIPES
        for seed in ((0, 1) if method in CLAIMS else (0,))
        for certificate in (("best",) if method == BEYOND else _certificates(model))
    ]


def _certificates(model: str) -> tuple[str, ...]:
    return (PLAIN, *CERTIFICATES) if model == "Lip-3C1F" else CERTIFICATES


def chosen_rows(patterns: tuple[str, ...], quick: bool = False) -> list[Row]:
    """Return the rows that a pattern names: MODEL/METHOD/SEED/CERTIFICATE, * for any, what is left out is any.

    >>> [row.name for row in chosen_rows(("6F/ours/0",))]
    ['6F/ours/0/paper-global', '6F/ours/0/paper-anchored', '6F/ours/0/best']

    Raises:
        InvalidInput: if a pattern names no row.
    """
    rows = all_rows(quick)
    if not patterns:
        return rows
    found: list[Row] = []
    for pattern in patterns:
        parts = (pattern.split("/") + ["*"] * 4)[:4]
        named = [row for row in rows if fnmatchcase(row.name, "/".join(part or "*" for part in parts))]
        if not named:
            models = ", ".join(dict.fromkeys(f"{row.model}/{row.method}" for row in rows))
            raise InvalidInput(
                f"--rows {pattern!r} names no row. Write MODEL/METHOD/SEED/CERTIFICATE, with * for any: {models}; "
                f"seeds 0 and 1; {', '.join(CERTIFICATES)}, {PLAIN}."
            )
        found += [row for row in named if row not in found]
    return found


def row_recipe(row: Row, options: Options) -> Recipe:
    """Return what the row's network is trained by."""
    model = "6F" if row.model == "digits" else row.model
    return with_options(experiment_recipe(RECIPES[model, row.method]), options, row.seed)


def run(options: Options) -> Record:
    """Make the chosen rows that are not there yet, and return the table of all that are."""
    folder = options.out / NAME
    for recipe, rows in _by_model(chosen_rows(options.rows, options.quick), options):
        todo = [row for row in rows if not _is_made(folder / f"{row.file}.json", recipe, options)]
        if not todo:
            continue
        measured = subject(recipe, options)
        distance = _searched(measured, recipe, options)
        for row in todo:
            options.say(f"certifying {row.name}")
            _write_row(row, measured, recipe, distance, options)
    return merged(options)


def merged(options: Options) -> Record:
    """Return the table of all rows that are there; what made them, and on which machine, each row says itself."""
    made = collected(options.out, options.quick)
    plain = Options(options.out, quick=options.quick)
    record = make_record(NAME, plain, {"radii": RADII, "norm": "l2"}, {"rows": made})
    settings = {name: record.config[name] for name in ("quick", "radii", "norm")}
    created = max((row["created"] for row in made), default=record.created)
    own = {"rows": "each row names its own"}
    return replace(record, created=created, versions=own, hardware=own, config=settings)


def _is_made(path: Path, recipe: Recipe, options: Options) -> bool:
    """Whether a row is there; one of another recipe or other samples is refused, not overwritten.

    Where no epochs are asked for, whatever number a row was made with is right.
    """
    if not path.is_file():
        return False
    config = Record.read(path).config
    kept = recipe_from_dict(config["recipe"], f"The recipe of {path}")
    found = recipe.difference(kept, () if options.epochs else ("epochs",))
    if config["samples"] != options.samples:
        found = "samples", options.samples, config["samples"]
    if found:
        name, ours, theirs = found
        raise InvalidInput(
            f"{path} is a row with {name} = {theirs!r}, this run has {ours!r}. Choose another --out, or move the row "
            "away."
        )
    return True


def _by_model(rows: list[Row], options: Options) -> Iterator[tuple[Recipe, list[Row]]]:
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.method, row.seed), []).append(row)
    for group in groups.values():
        yield row_recipe(group[0], options), group


def _searched(measured: Subject, recipe: Recipe, options: Options) -> Tensor:
    """Return the distances that PGD found, from the model's folder where they are known."""
    path = model_folder(recipe, options.out) / f"pgd-{len(measured.x)}.npz"
    if not path.is_file():
        options.say("searching by PGD")
        steps, restarts = (5, 1) if options.quick else (50, 2)
        distance = searched_distances(measured, list(RADII.values()), steps, restarts, options.seed)
        save_arrays(path, {"distance": distance.cpu().numpy()})
    return torch.from_numpy(load_arrays(path)["distance"]).to(measured.x.device)


def _write_row(row: Row, measured: Subject, recipe: Recipe, distance: Tensor, options: Options) -> None:
    folder, begun = options.out / NAME, time.perf_counter()
    named = {"model": row.model, "method": row.method, "certificate": row.certificate, "seed": row.seed}
    named |= {"epochs": recipe.epochs, "as_stated": True}
    weights = described({_weights_name(row.model, row.method, row.seed): recipe}, options.out)
    config = {"recipe": recipe.as_dict(), "norm": "l2", "weights": weights}
    measured, subset = _subset(row, measured)
    distance = distance[: len(measured.x)]
    arrays = _certified(row, measured)
    radius, correct = (torch.from_numpy(arrays[key]).to(distance.device) for key in ("radius", "correct"))
    require_consistent(radius, correct, distance)
    broken = torch.minimum(distance, torch.from_numpy(arrays["witness_distance"]).to(distance.device))
    save_arrays(folder / f"{row.file}.npz", {**arrays, "pgd_distance": distance.cpu().numpy()})
    figures: dict[str, Any] = {
        **named,
        "samples": len(radius),
        "clean": percent(float(correct.double().mean())),
        "certified": {name: percent(float((correct & (radius >= r)).double().mean())) for name, r in RADII.items()},
        "attacked": {name: percent(float((correct & (broken > r)).double().mean())) for name, r in RADII.items()},
        "median_radius": float(radius.median()),
        "seconds": round(time.perf_counter() - begun, 2),
        "arrays": f"{NAME}/{row.file}.npz",
        **subset,
    }
    _row_record(row, options, config, figures).write(folder / f"{row.file}.json")


def _row_record(row: Row, options: Options, config: Mapping[str, Any], figures: Mapping[str, Any]) -> Record:
    """Return the record of one row; its seed is the row's."""
    return replace(make_record(NAME, options, config, figures, f"--rows {shlex.quote(row.name)}"), seed=row.seed)


def _subset(row: Row, measured: Subject) -> tuple[Subject, dict[str, str]]:
    """Return the samples that a row is measured on, and what the record says where these are not all."""
    widest, fast = widest_layer(measured.network), measured.x.device.type != "cpu"
    if row.certificate != "paper-anchored" or fast or widest <= ANCHORED_CHEAPLY or len(measured.x) <= ANCHORED_SUBSET:
        return measured, {}
    first = replace(measured, x=measured.x[:ANCHORED_SUBSET], y=measured.y[:ANCHORED_SUBSET])
    reason = f"a layer of {widest} neurons, on a CPU: an eigenvalue problem per sample and layer"
    return first, {"subset": f"the first {ANCHORED_SUBSET} test samples, and percent of these: {reason}"}


def _certified(row: Row, measured: Subject) -> dict[str, Any]:
    """Return the radii of the row's certificate, which samples are correct, and how far its witnesses are."""
    if row.certificate == "best":
        epsilons = tuple(RADII.values())
        certificate = certify(measured.network, measured.x, measured.y, epsilons=epsilons, progress=False)
        found = (certificate.radius, certificate.correct, certificate.attack_radius)
    else:
        make = (
            plain_radii
            if row.certificate == PLAIN
            else partial(paper_radii, anchored=row.certificate != "paper-global")
        )
        radius, correct = make(measured)
        found = (radius, correct, torch.where(correct, torch.inf, 0.0).to(radius))
    return {
        name: value.cpu().numpy() for name, value in zip(("radius", "correct", "witness_distance"), found, strict=True)
    }


def models(record: Record) -> dict[str, Recipe]:
    """Return the network that a row's record was measured on; the whole table has none of its own."""
    if "recipe" not in record.config:
        return {}
    name = _weights_name(*(record.figures[key] for key in ("model", "method", "seed")))
    return {name: recipe_from_dict(record.config["recipe"], f"The recipe of {name}")}


def _weights_name(model: str, method: str, seed: int) -> str:
    """Return what the weights of a row are called.

    >>> _weights_name("Lip-3C1F", "SLL+CCRC", 1)
    'Lip-3C1F-sll-ccrc-seed1'
    """
    return f"{model}-{method.lower().replace('+', '-')}-seed{seed}"


def collected(out: Path, quick: bool = False) -> list[dict[str, Any]]:
    """Return the rows that were made, in the table's order.

    Each has its figures, its command, date, versions and hardware, and the digest of the weights it was measured on.
    """
    paths = (out / NAME / f"{row.file}.json" for row in all_rows(quick))
    return [_with_its_origin(Record.read(path), out) for path in paths if path.is_file()]


def _with_its_origin(record: Record, out: Path) -> dict[str, Any]:
    measured = models(record)
    weights = record.config.get("weights") or (described(measured, out) if are_there(measured, out) else {})
    origin = {"command": record.command, "created": record.created, "versions": record.versions}
    digests = {name: facts["sha256"] for name, facts in weights.items()}
    return {**record.figures, **origin, "hardware": record.hardware, "weights": digests}


def of_seeds(rows: list[dict[str, Any]], model: str, method: str) -> list[dict[str, Any]]:
    """Return a method's rows by our best certificate, one for each seed."""
    named = {"model": model, "method": method, "certificate": "best"}
    return [row for row in rows if all(row[key] == value for key, value in named.items())]


def mean_of_seeds(rows: list[dict[str, Any]], model: str, method: str) -> dict[str, Any] | None:
    """Return the means of a method's rows by our best certificate over its seeds, as the paper reports means of two.

    >>> one = {"model": "6F", "method": "ours", "certificate": "best", "clean": 60.0, "certified": {"36/255": 50.0}}
    >>> mean = mean_of_seeds([one, {**one, "clean": 61.0}], "6F", "ours")
    >>> mean["clean"], mean["certified"], mean["seeds"]
    (60.5, {'36/255': 50.0}, 2)
    """
    found = of_seeds(rows, model, method)
    if not found:
        return None
    certified = {name: fmean(row["certified"][name] for row in found) for name in found[0]["certified"]}
    clean = fmean(row["clean"] for row in found)
    return {"model": model, "method": method, "clean": clean, "certified": certified, "seeds": len(found)}


def draw(record: Record, path: Path) -> None:
    """Draw certified accuracy against the radius: our best certificate of every method, and the paper's numbers.

    Of several seeds it is the mean, as in the table of the claim.
    """
    measured = record.figures["rows"]
    found = [
        mean_of_seeds(measured, *named) for named in dict.fromkeys((row["model"], row["method"]) for row in measured)
    ]
    rows = [row for row in found if row is not None]
    models = list(dict.fromkeys(row["model"] for row in rows)) or ["6F"]
    colours = {
        "Standard": GREY,
        "CRM": PURPLE,
        "SLL": GREEN,
        "CCRC": ORANGE,
        "SLL+CCRC": ORANGE,
        "ours": BLUE,
        BEYOND: BLACK,
    }
    at = [0.0, *RADII.values()]
    figure, axes = panels(len(models), height=3.8)
    for axis, model in zip(axes, models, strict=True):
        for row in rows:
            if row["model"] == model:
                axis.plot(at, _line(row), "o-", color=colours[row["method"]], ms=4, label=f"{row['method']}, measured")
        for (of, method), values in TABLE_1.items():
            if of == model:
                axis.plot(at, values, "x:", color=colours[method], ms=5, label=f"{method}, as reported")
        axis.set_title(model, fontsize=10)
        axis.set_xticks(at, ["0 (clean)", *RADII])
        axis.set_xlabel("radius (l2)")
        axis.set_ylim(-2, 100 if model == "digits" else 85)
    axes[0].set_ylabel("certified accuracy, %")
    legend_below(figure, axes)
    finish(figure, axes, path)


def _line(row: Mapping[str, Any]) -> list[float]:
    return [row["clean"], *(row["certified"][name] for name in RADII)]


TABLE1 = Experiment(
    NAME,
    "For each architecture the certified-margin loss certifies more than the paper's CCRC at all three radii, soundly.",
    ("table:main_results",),
    run,
    draw,
    models,
)
