"""The networks of the experiments: trained from recipes and kept, or, for quick runs, small ones on the digits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import RESULTS
from benchmarks.reproduce.experiment import Options
from curvcert.data import load
from curvcert.errors import InvalidInput
from curvcert.network import Network, trace
from curvcert.nn.architectures import dense
from curvcert.results import Record
from curvcert.training import MODEL, Recipe, load_model, load_recipe, load_trained, read_digests, save_model, train
from curvcert.training.kept import file_digest
from curvcert.whole_files import write_whole

RECIPES = Path(__file__).with_name("recipes")
_CERTIFIED_AT_ONCE = 10
"""Samples that `train` certifies at its end: the experiment certifies by its own methods."""

ROUNDED = "weights.safetensors"
"""The file of a model's weights in float16."""

_QUICK_SAMPLES = 8
_MAY_DIFFER = ("evaluate_every", "evaluate_samples", "checkpoint_every", "epsilons")


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network with the test samples that it is measured on."""

    model: nn.Module
    network: Network
    x: Tensor
    y: Tensor
    recipe: Recipe | None = None

    def model_logits(self, x: Tensor) -> Tensor:
        """Return what the model itself computes, in its own dtype."""
        logits: Tensor = self.model(x)
        return logits


def experiment_recipe(name: str) -> Recipe:
    """Return a recipe of the experiments by its name.

    >>> experiment_recipe("6f-ccrc").weight_step
    0.05

    Raises:
        InvalidInput: if there is none.
    """
    if name not in experiment_recipes():
        raise InvalidInput(f"The experiments have no recipe {name!r}. There are {', '.join(experiment_recipes())}.")
    return load_recipe(RECIPES / f"{name}.toml")


def experiment_recipes() -> list[str]:
    """Return the names of the recipes of the experiments.

    >>> "6c2f-ours" in experiment_recipes()
    True
    """
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def on_digits(recipe: Recipe) -> Recipe:
    """Return the recipe made small: the same loss, two epochs on the embedded digits.

    >>> on_digits(experiment_recipe("6f-ours")).architecture
    'digits'
    """
    small = {"data": "digits", "architecture": "digits", "epochs": "2", "batch_size": "256", "crop": "1"}
    off = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), "0")
    return recipe.updated({**small, **off, "learning_rate": "1e-2", "evaluate_samples": "20", "evaluate_every": "2"})


def trained(recipe: Recipe, options: Options) -> nn.Module:
    """Return the model of a recipe: read from OUT/models if it is there, else trained, going on where a run stopped.

    Weights that are kept among the results are taken from there, unless all is to be trained anew.  One with a mirror
    image has the weights of the same recipe without it.  Its weights are rounded to float16, small enough to be kept:
    what is measured is the model that can be handed on.

    Raises:
        InvalidInput: if the folder holds the model of another recipe.
    """
    folder = model_folder(recipe, options.out)
    path = folder / ROUNDED
    if not path.is_file() and not options.anew:
        _take_kept(path, options)
    if path.is_file():
        model, made_by = load_model(path)
        if found := recipe.difference(made_by, _MAY_DIFFER):
            name, ours, theirs = found
            raise InvalidInput(
                f"{path} was trained with {name} = {theirs!r}, the recipe has {ours!r}. "
                "Choose another --out, or move the model away."
            )
        return model.to(options.device)
    if recipe.mirror:
        alone = replace(recipe, mirror=False)
        trained(alone, options)
        source = model_folder(alone, options.out) / ROUNDED
    else:
        source = _train(recipe, folder, options)
    weights, _ = load_trained(source)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(path, weights.half(), recipe)
    model, _ = load_model(path)
    return model.to(options.device)


def _take_kept(path: Path, options: Options) -> None:
    """Copy the weights that are kept for a place below OUT, if there are any and they are those that were measured."""
    place = f"OUT/{path.relative_to(options.out).as_posix()}"
    for facts in read_digests(RESULTS).values():
        kept = RESULTS / facts["file"] if facts["file"] is not None and "mirror_of" not in facts else None
        if kept is not None and facts["place"] == place and kept.is_file() and file_digest(kept) == facts["sha256"]:
            options.say(f"kept weights: {kept.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, kept.read_bytes())


def _train(recipe: Recipe, folder: Path, options: Options) -> Path:
    """Train a model in its folder, and return the file of its weights."""
    options.say(f"training {folder.name}")
    train(
        recipe,
        folder,
        resume=True,
        device=options.device,
        data_folder=options.data_folder,
        certify_samples=2 if options.quick else _CERTIFIED_AT_ONCE,
        console=Console(stderr=True, quiet=options.quick),
    )
    return folder / MODEL


def model_folder(recipe: Recipe, out: Path) -> Path:
    """Return where the model of a recipe is kept.

    >>> model_folder(experiment_recipe("6f-ours"), Path("runs")).as_posix()
    'runs/models/6F-certified-margin-300-seed0'
    """
    mirror = "-mirror" if recipe.mirror else ""
    return out / "models" / f"{recipe.architecture}-{recipe.loss}{mirror}-{recipe.epochs}-seed{recipe.seed}"


def with_options(recipe: Recipe, options: Options, seed: int | None = None) -> Recipe:
    """Return the recipe as the options change it: epochs, seed, and the small version of a quick run."""
    recipe = on_digits(recipe) if options.quick else recipe
    changes = {"seed": str(options.seed if seed is None else seed)}
    if options.epochs is not None:
        changes["epochs"] = str(options.epochs)
    return recipe.updated(changes)


def recipe_behind(name: str, record: Record) -> Recipe:
    """Return the recipe of the experiments that a record's model was trained by: its seed, and its epochs if told.

    >>> from benchmarks.reproduce.experiment import make_record
    >>> made = make_record("crc-vs-ccrc", Options(Path("runs"), seed=1, epochs=3), {}, {})
    >>> recipe = recipe_behind("mnist-6f-ccrc", made)
    >>> recipe.seed, recipe.epochs
    (1, 3)
    """
    options = Options(Path(), seed=record.seed, epochs=record.config.get("epochs"))
    return with_options(experiment_recipe(name), options)


def subject(recipe: Recipe, options: Options) -> Subject:
    """Return the trained model of a recipe with its test set, or the first samples of it."""
    model = trained(recipe, options)
    data = load(recipe.data, "test", options.data_folder)
    count = options.samples or (_QUICK_SAMPLES if options.quick else len(data))
    x, y = data.as_float64()[:count].to(options.device), data.labels[:count].to(options.device)
    return Subject(model, trace(model, x[:1].to(next(model.parameters()).dtype)), x, y, recipe)


def small_dense(depth: int, options: Options, width: int = 16) -> Subject:
    """Return a small dense network of `depth` layers, trained on the digits for a second: for quick runs."""
    return fitted(lambda: dense(64, (width,) * (depth - 1)), options)


def fitted(make: Callable[[], nn.Module], options: Options, steps: int = 40) -> Subject:
    """Return a network for the digits after a few steps of plain training."""
    digits, test = load("digits", "train"), load("digits", "test")
    count = options.samples or _QUICK_SAMPLES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = make()
    x, y = digits.as_float64().float(), digits.labels
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    model = model.requires_grad_(False).eval().to(options.device)
    inputs, labels = test.as_float64()[:count].to(options.device), test.labels[:count].to(options.device)
    return Subject(model, trace(model, inputs[:1].float()), inputs, labels)
