"""`curvcert.training.train`: a run from its recipe to a certified model, that survives being killed."""

import hashlib
import io
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from curvcert._version import __version__
from curvcert.certificates import Certificate, certify
from curvcert.certificates.certificate import concatenate
from curvcert.certificates.evidence import Evidence
from curvcert.data import LabelledImages, load
from curvcert.errors import InvalidFile, InvalidInput, TrainingDiverged
from curvcert.folder_lock import locked
from curvcert.network import trace
from curvcert.progress import is_watched
from curvcert.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from curvcert.training.distributed import ALONE, Ranks, RanksApart, require_device
from curvcert.training.evaluation import evaluate
from curvcert.training.model_file import MODEL, finished, save_model
from curvcert.training.recipe import Recipe
from curvcert.training.side_by_side import SideBySide
from curvcert.training.trainer import Trainer
from curvcert.whole_files import append_text, write_whole

_LOG = logging.getLogger(__name__)

_READ_EVERY = 50
"""Steps between two looks at the loss: each waits for the device."""

_HEED_EVERY = 8
"""Steps after which several ranks tell each other of a Ctrl-C; one alone heeds it after every step."""

_Record = TypeVar("_Record", Certificate, Evidence)


@final
@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What a run ends with: the model, its sound certificate on the test set, and where they are."""

    model: nn.Module
    certificate: Certificate
    accuracy: float
    folder: Path


def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool | str | Path = False,
    device: torch.device | str = "cpu",
    data_folder: str | Path | None = None,
    certify_samples: int | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
    ranks: Ranks = ALONE,
) -> TrainingResult:
    """Train a model and certify it.

    Writes into `out`: `recipe.json`, `metrics.jsonl` (a line per evaluation), `checkpoints/`, and at the end
    `model.safetensors` and `result.json`.

    Args:
        recipe: what to train, from `load_recipe`.
        out: a folder, made if need be; one that holds another run is refused.
        resume: go on from the newest checkpoint in `out`, or from the one at this path; without one, start afresh.
        device: where to compute.
        data_folder: where the data is; downloaded if it is not there.
        certify_samples: how many test samples the last certification takes; all by default.
        tensorboard: also write TensorBoard's event files (extra `tensorboard`).
        console: where progress goes; standard error by default.
        ranks: the processes that share the work, from `joined`; each calls this with the same arguments.  The
            recipe's batch is that of all ranks together.  Rank 0 alone writes and speaks, and reads checkpoints.

    Raises:
        TrainingDiverged: the loss became NaN or infinite; the last good checkpoint is kept.
        InvalidInput: `out` holds another run, or a checkpoint cannot be used.
    """
    folder, console = Path(out), console or Console(stderr=True)
    if not ranks.is_first:
        console = Console(file=io.StringIO(), quiet=True)
    ranks.agreed(lambda: require_device(device))
    with torch.random.fork_rng(devices=[]), ExitStack() as held:
        ranks.first(lambda: held.enter_context(_held(folder, resume)))
        train_data, test_data = _data(recipe, data_folder, ranks)
        trainer = Trainer(recipe, train_data, device, ranks=ranks)
        if trainer.not_captured and trainer.device.type == "cuda":
            console.print(f"The step runs eagerly: it was not captured as a CUDA graph, since {trainer.not_captured}.")
        _restore(trainer, folder, resume, console)
        with _begun([trainer], [folder], tensorboard) as runs:
            _run(runs, trainer.advance, test_data, console)
        return _finish(runs[0], test_data, certify_samples, console)


def train_side_by_side(
    recipes: Mapping[str, Recipe],
    out: str | Path,
    resume: bool = False,
    device: torch.device | str = "cpu",
    data_folder: str | Path | None = None,
    certify_samples: int | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
) -> dict[str, TrainingResult]:
    """Train several models together, such as the seeds of one recipe, and certify each.

    On CUDA a step of all of them is one graph, which takes small networks to their ends sooner than one after another.
    Each writes into a folder of its own, `out`/NAME, what `train` writes, and is resumed from the newest step of
    which all of them have a checkpoint.  The other arguments are those of `train`.

    Raises:
        TrainingDiverged: the loss of one became NaN or infinite; the last good checkpoints are kept.
        InvalidInput: the recipes differ in how many steps they take, or as for `train`.
    """
    folders, console = [Path(out) / name for name in recipes], console or Console(stderr=True)
    require_device(device)
    chosen = list(recipes.values())
    with torch.random.fork_rng(devices=[]), ExitStack() as held:
        for folder in folders:
            held.enter_context(_held(folder, resume))
        together = SideBySide(chosen, load(chosen[0].data, "train", data_folder), device)
        test_data = load(chosen[0].data, "test", data_folder)
        if together.not_captured and together.trainers[0].device.type == "cuda":
            console.print(f"The steps run eagerly, one after another: {together.not_captured}.")
        if resume:
            _restore_all(together.trainers, folders, console)
        with _begun(together.trainers, folders, tensorboard) as runs:
            _run(runs, together.advance, test_data, console)
        found = [_finish(run, test_data, certify_samples, console) for run in runs]
    return dict(zip(recipes, found, strict=True))


@final
@dataclass(frozen=True, eq=False)
class _RunInFolder:
    """A run, where it is kept, and its journal, which rank 0 has."""

    trainer: Trainer
    folder: Path
    journal: "_Journal | None"


@contextmanager
def _begun(trainers: Sequence[Trainer], folders: Sequence[Path], tensorboard: bool) -> Iterator[list[_RunInFolder]]:
    """Write the recipes, and keep the journals open."""
    with ExitStack() as stack:
        runs = []
        for trainer, folder in zip(trainers, folders, strict=True):
            journal = trainer.ranks.first(partial(_opened, trainer, folder, tensorboard))
            if journal is not None:
                stack.callback(journal.close)
            runs.append(_RunInFolder(trainer, folder, journal))
        yield runs


@final
class _Interrupts:
    """Ctrl-C between two steps, never inside one: half a step in a checkpoint would not be the run's own state."""

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> "_Interrupts":
        # Only the main thread hears signals; elsewhere an interrupt is the caller's affair.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.wanted:  # the second time, at once
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def _held(folder: Path, resume: bool | str | Path) -> Iterator[None]:
    """Keep the folder for this run, or raise: it cannot be written to, or has another run."""
    with locked(folder, "a training"):
        _require_free(folder, resume)
        yield


def _require_free(folder: Path, resume: bool | str | Path) -> None:
    if not resume and ((folder / MODEL).exists() or checkpoints(folder / "checkpoints")):
        raise InvalidInput(f"{folder} already holds a run. Go on with it by --resume, or choose another folder.")


def _data(recipe: Recipe, folder: str | Path | None, ranks: Ranks) -> tuple[LabelledImages, LabelledImages]:
    """Return the training and the test set; rank 0 goes first, so that one process downloads."""

    def loaded() -> tuple[LabelledImages, LabelledImages]:
        return load(recipe.data, "train", folder), load(recipe.data, "test", folder)

    found = ranks.first(loaded)
    return ranks.agreed(lambda: loaded() if found is None else found)


def _restore(trainer: Trainer, folder: Path, resume: bool | str | Path, console: Console) -> None:
    if not resume:
        return
    path, checkpoint = trainer.ranks.from_first(lambda: _newest(folder, resume))
    if checkpoint is None:
        console.print(f"No checkpoint in {folder}: starting afresh.")
        return
    trainer.restore(checkpoint)
    console.print(f"Resumed from {path}, step {trainer.step} of {trainer.total_steps}.")


def _restore_all(trainers: Sequence[Trainer], folders: Sequence[Path], console: Console) -> None:
    """Go on from the newest step of which every run has a checkpoint: a kill may have come between two savings."""
    kept = [{path.name: path for path in checkpoints(folder / "checkpoints")} for folder in folders]
    common = sorted(set.intersection(*(set(found) for found in kept)))
    if not common:
        console.print("No step of which all runs have a checkpoint: starting afresh.")
        return
    for trainer, found in zip(trainers, kept, strict=True):
        trainer.restore(load_checkpoint(found[common[-1]]))
    console.print(f"Resumed {len(trainers)} runs, step {trainers[0].step} of {trainers[0].total_steps}.")


def _newest(folder: Path, resume: bool | str | Path) -> tuple[Path, Checkpoint | None]:
    found = checkpoints(folder / "checkpoints") if isinstance(resume, bool) else [Path(resume)]
    return (found[-1], load_checkpoint(found[-1])) if found else (folder, None)


def _opened(trainer: Trainer, folder: Path, tensorboard: bool) -> "_Journal":
    """Write the recipe, and return the journal."""
    write_whole(folder / "recipe.json", json.dumps(trainer.recipe.as_dict(), indent=1).encode())
    return _Journal(folder, trainer.step, tensorboard)


def _run(runs: Sequence[_RunInFolder], advance: Callable[[], None], test: LabelledImages, console: Console) -> None:
    """Take the runs, all at the same step, to their end."""
    lead = runs[0].trainer
    recipe, spe, ranks = lead.recipe, lead.steps_per_epoch, lead.ranks
    started, first = time.monotonic(), lead.step
    with _Interrupts() as interrupts, _progress(console) as bar:
        task = bar.add_task("training", total=lead.total_steps, completed=lead.step, shown="")
        latest: list[dict[str, float]] = [{} for _ in runs]
        while lead.step < lead.total_steps:
            advance()
            step, ends_epoch = lead.step, lead.step % spe == 0
            epoch, done = step // spe, step == lead.total_steps
            if step % _READ_EVERY == 0 or ends_epoch:
                latest = [ranks.agreed(partial(_checked, run.trainer, run.folder)) for run in runs]
                rate = (step - first) / max(time.monotonic() - started, 1e-9)
                bar.update(task, completed=step, shown=_shown(latest, rate))
            if ends_epoch and (epoch % recipe.evaluate_every == 0 or done):
                for run, values in zip(runs, latest, strict=True):
                    _evaluate(run, test, values)
            heeded = ranks.place.alone or ends_epoch or step % _HEED_EVERY == 0
            stop = heeded and ranks.any(interrupts.wanted)
            if (ends_epoch and (epoch % recipe.checkpoint_every == 0 or done)) or stop:
                kept = [_keep(run.trainer, run.folder) for run in runs]
                if stop:
                    places = ", ".join(str(path) for path in kept)
                    console.print(f"Stopped at step {step}. Kept {places}. Go on with --resume.")
                    raise KeyboardInterrupt


def _evaluate(run: _RunInFolder, test: LabelledImages, latest: dict[str, float]) -> None:
    trainer, journal = run.trainer, run.journal

    def written() -> None:
        if journal is not None:
            found = evaluate(trainer.trained, test, trainer.recipe.epsilons, trainer.recipe.evaluate_samples)
            values = {**latest, **{f"test_{key}": value for key, value in found.items()}}
            _LOG.info("step %d: %s", trainer.step, ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
            journal.write(trainer.step, trainer.step // trainer.steps_per_epoch, values)

    trainer.ranks.first(written)


def _keep(trainer: Trainer, folder: Path) -> Path | None:
    """Save a checkpoint and return its path, on rank 0; raise on all ranks if the state is not a good one."""
    ranks = trainer.ranks
    ranks.agreed(lambda: _require_finite_weights(trainer, folder))
    if not ranks.place.alone:
        ranks.require_same(_digest(trainer), "the state")
    return ranks.first(lambda: save_checkpoint(folder / "checkpoints", trainer.checkpoint()))


def _digest(trainer: Trainer) -> str:
    """Return the SHA-256 of the weights, the singular vectors, lambda and the optimiser's moments."""
    found = hashlib.sha256()
    for name, tensor in trainer.checkpoint().tensors.items():
        if name != "run.random_state":
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _checked(trainer: Trainer, folder: Path) -> dict[str, float]:
    """Return the means since the last look, or raise if the run has diverged."""
    latest = trainer.read_tally()
    if math.isfinite(latest["loss"]):
        return latest
    raise _diverged(trainer, folder, f"The loss became {latest['loss']} within {_READ_EVERY} steps")


def _require_finite_weights(trainer: Trainer, folder: Path) -> None:
    """Raise if the last step, whose loss was still finite, has spoilt the weights: no checkpoint may hold them."""
    for name, weight in trainer.model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise _diverged(trainer, folder, f"{name} became NaN or infinite")


def _diverged(trainer: Trainer, folder: Path, what: str) -> TrainingDiverged:
    kept = checkpoints(folder / "checkpoints")
    remedy = f"The last good checkpoint is {kept[-1]}." if kept else "There is no checkpoint yet."
    rate = trainer.recipe.learning_rate
    return TrainingDiverged(
        f"{what} before step {trainer.step}. {remedy} Lower learning_rate, {rate:.3g} in this recipe, or set clip=1."
    )


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not is_watched(console))


def _shown(latest: Sequence[dict[str, float]], rate: float) -> str:
    """Return what a person wants to see: of several runs, their means."""
    mean = {key: sum(values[key] for values in latest) / len(latest) for key in latest[0]}
    runs = "" if len(latest) == 1 else f" of {len(latest)} runs"
    return (
        f"loss {mean['loss']:.4g}, accuracy {100 * mean['accuracy']:.1f}%, K {mean['curvature']:.3g}, "
        f"lambda {mean['weight']:.3g}, {rate:.3g} steps/s{runs}"
    )


@final
class _Journal:
    """The metrics of a run, a JSON line each; on resuming, lines after the checkpoint are dropped."""

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        self._path = folder / "metrics.jsonl"
        try:
            kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InvalidFile(f"{self._path} is damaged: {error}. Remove it; the checkpoint needs none.") from None
        write_whole(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._writer = _summary_writer(folder / "tensorboard") if tensorboard else None

    def _lines(self) -> list[str]:
        """Return the whole lines; a process that was killed may have left half a line at the end."""
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        return text.split("\n")[:-1]

    def write(self, step: int, epoch: int, values: dict[str, float]) -> None:
        append_text(self._path, json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput("TensorBoard is not installed: pip install 'curvcert[tensorboard]'.") from error
    return SummaryWriter(str(folder))


def _finish(run: _RunInFolder, test: LabelledImages, samples: int | None, console: Console) -> TrainingResult:
    """Write the model, certify it soundly, and write what came out."""
    trainer, folder = run.trainer, run.folder
    recipe, trained, ranks = trainer.recipe, trainer.trained.eval(), trainer.ranks
    ranks.first(lambda: save_model(folder / MODEL, trained, recipe))
    model = finished(trained, recipe)
    x, y = test.as_float64()[:samples].to(trainer.device), test.labels[:samples].to(trainer.device)
    certificate = _certified(trainer, model, x, y, console)
    accuracy = float(certificate.correct.double().mean())
    result = {
        "curvcert": __version__,
        "torch": torch.__version__,
        "recipe": recipe.as_dict(),
        "samples": len(x),
        "accuracy": accuracy,
        "certified": {f"{eps:.6g}": certificate.certified_accuracy(eps) for eps in recipe.epsilons},
    }
    ranks.first(lambda: write_whole(folder / "result.json", json.dumps(result, indent=1).encode()))
    return TrainingResult(model, certificate, accuracy, folder)


def _certified(trainer: Trainer, model: nn.Module, x: Tensor, y: Tensor, console: Console) -> Certificate:
    """Certify samples, each rank its share of them, and return the certificate of all."""
    ranks, epsilons = trainer.ranks, trainer.recipe.epsilons
    network = trace(model, x[:1].to(next(model.parameters()).dtype))
    share = ranks.place.share(len(x))
    if ranks.place.alone:
        return certify(network, x, y, epsilons=epsilons, progress=console.is_terminal)

    def part() -> Certificate | None:
        if share.start == share.stop:
            return None
        shown = console.is_terminal and ranks.is_first
        return _on_host(certify(network, x[share], y[share], epsilons=epsilons, progress=shown))

    parts = ranks.gathered(ranks.agreed(part))
    certificate = concatenate([found for found in parts if found is not None])
    if not torch.equal(certificate.label, y.cpu()):
        raise RanksApart(f"Expected {len(y)} certified samples in order, got {len(certificate)} from the ranks.")
    return certificate


def _on_host(record: _Record) -> _Record:
    """Return a certificate, its evidence included, with its tensors in the memory of the host."""
    held = {field.name: getattr(record, field.name) for field in fields(record)}
    moved: dict[str, Any] = {name: value.cpu() for name, value in held.items() if isinstance(value, Tensor)}
    moved |= {name: _on_host(value) for name, value in held.items() if isinstance(value, Evidence)}
    return replace(record, **moved)
