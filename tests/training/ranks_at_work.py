"""What one of two ranks does for test_distributed.py; it writes what it saw, and kills itself if it is rank 1."""

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvcert import cli
from curvcert.certificates import Certificate, certify
from curvcert.data import LabelledImages, load
from curvcert.errors import InvalidInput
from curvcert.training import Trainer, checkpoints, load_recipe, loop, train
from curvcert.training.distributed import Ranks, joined, place_from
from curvcert.training.recipe import Loss

TINY = replace(load_recipe("digits"), epochs=2, batch_size=41, weight_step=0.05, clip=1.0, nu=0.5, weight_average=0.9)
QUICK = replace(TINY, batch_size=256, loss="standard", evaluate_samples=10, checkpoint_every=1)
CASES = {loss: {"loss": loss} for loss in Loss.__args__} | {
    "hadamard": {"loss": "curvature", "nu": 0.0, "block_bound": "hadamard"},
    "equal shares": {"batch_size": 40},
}


def digits() -> LabelledImages:
    data = load("digits", "train")
    return LabelledImages(data.images[:123], data.labels[:123], data.max_value)


def states(trainer: Trainer) -> list[Mapping[str, Tensor]]:
    """Return the states before and after one step, and after three."""
    found = []
    for step in range(4):
        if step:
            trainer.advance()
        found.append({name: tensor.clone() for name, tensor in trainer.checkpoint().tensors.items()})
    return [found[0], found[1], found[3]]


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], of: str = "") -> float:
    """Return the largest difference of two states, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys()
    names = [key for key in one if key.startswith(of) and key != "run.random_state"]
    pairs = [(one[key].double(), other[key].double()) for key in names]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) for a, b in pairs if a.numel())


def compare(ranks: Ranks) -> dict[str, Any]:
    """Take the same steps alone and together."""
    found = {}
    for name, change in CASES.items():
        recipe = replace(TINY, **change)
        together = Trainer(recipe, digits(), ranks=ranks)
        start, one, three = states(together)
        found[name] = {
            "moved": difference(start, three, "model."),
            "digest": loop._digest(together),
            "lambda": float(together.multiplier.value),
            "tally": together.read_tally(),
        }
        if ranks.is_first:
            alone = states(Trainer(recipe, digits()))
            # Adam's moments after one step are the gradient's; later it divides small gradients by themselves.
            found[name]["gradient"] = difference(alone[1], one, "optimiser.")
            found[name]["difference"] = difference(alone[2], three)
    return found


def resumed(ranks: Ranks, folder: Path) -> None:
    """Train alone, and from the middle of that together."""
    recipe = replace(QUICK, loss="certified-margin", batch_size=250)
    told = loop.Console(file=io.StringIO())
    ranks.first(lambda: train(recipe, folder / "alone", certify_samples=2, console=told))
    half = folder / "alone" / "checkpoints" / "step-000000005"
    train(recipe, folder / "together", half, certify_samples=2, console=told, ranks=ranks)


def raised(action: Callable[[], object]) -> list[str]:
    try:
        action()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return []


def refuse(what: str) -> None:
    raise InvalidInput(what)


def agreements(ranks: Ranks) -> dict[str, Any]:
    rank = ranks.place.rank
    return {
        "own": ranks.agreed(lambda: rank),
        "first": ranks.first(lambda: "only there"),
        "from first": ranks.from_first(lambda: {"rank": rank}),
        "gathered": ranks.gathered(rank),
        "any": [ranks.any(rank == 1), ranks.any(False)],
        "rank 1 fails": raised(lambda: ranks.agreed(lambda: refuse("no data here") if rank else 7)),
        "an odd error": raised(lambda: ranks.agreed(lambda: {}["key"] if rank else 7)),
        "different": raised(lambda: ranks.require_same(rank, "the number")),
        "same": raised(lambda: ranks.require_same(7, "the number")),
    }


def full_disk(*_: object) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device", "checkpoints")


def disturbed(ranks: Ranks, folder: Path, at: int, act: Callable[[], None], **changes: Any) -> list[str]:
    """Train, and do something on rank 1 in the middle of a step."""
    real = Trainer._advance

    def advance(self: Trainer) -> None:
        if ranks.place.rank == 1 and self.step == at and int(self._count) == at:
            act()
        real(self)

    Trainer._advance = advance  # type: ignore[method-assign]
    try:
        return raised(lambda: train(replace(QUICK, **changes), folder, ranks=ranks))
    finally:
        Trainer._advance = real  # type: ignore[method-assign]


def troubles(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Let one rank be stopped, then let rank 0 find the disk full, then let all diverge."""
    found: dict[str, Any] = {}
    stop = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    found["stopped"] = disturbed(ranks, folder / "stopped", 2, stop, evaluate_every=9)
    found["kept"] = [path.name for path in checkpoints(folder / "stopped" / "checkpoints")]
    real = loop.save_checkpoint
    loop.save_checkpoint = full_disk
    found["full"] = raised(lambda: train(QUICK, folder / "full", ranks=ranks))
    loop.save_checkpoint = real
    diverging = replace(QUICK, learning_rate=1e38)
    found["diverged"] = raised(lambda: train(diverging, folder / "diverged", ranks=ranks))
    return found


def sharded(ranks: Ranks) -> list[int]:
    """Certify three samples, and one, which is less than there are ranks."""
    trainer = Trainer(TINY, digits(), ranks=ranks)
    model = trainer.trained.eval()
    data = load("digits", "test")
    counts = []
    for samples in (3, 1):
        x, y = data.as_float64()[:samples], data.labels[:samples]
        certificate: Certificate = loop._certified(trainer, model, x, y, loop.Console(quiet=True))
        counts.append(len(certificate))
    return counts


def main(folder: Path, ports: list[str]) -> None:
    torch.set_num_threads(1)
    loop.certify = partial(certify, method="product")
    place = place_from()
    report = folder / f"rank-{place.rank}.json"
    with joined(place) as ranks:
        found = {
            "cases": compare(ranks),
            "agreements": agreements(ranks),
            "certified": sharded(ranks),
            "troubles": troubles(ranks, folder),
        }
        resumed(ranks, folder)
    os.environ["MASTER_PORT"] = ports[0]
    words = ["train", "--recipe", "digits", "--set", "learning_rate=1e38", "--set", "loss=standard"]
    try:
        cli.main([*words, "--set", "epochs=2", "--out", str(folder / "command")])
    except SystemExit as error:
        found["status"] = error.code
    report.write_text(json.dumps(found))
    os.environ["MASTER_PORT"] = ports[1]

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def last() -> None:
        with joined(place) as ranks:
            error = disturbed(ranks, folder / "lost", 3, end)
            raise RuntimeError(error[1])

    found["lost"] = raised(last)
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
