"""A run from its recipe to a certified model: what it writes, what it refuses, and what a divergence leaves."""

import hashlib
import io
import json
import math
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from curvcert.certificates import certify
from curvcert.data import LabelledImages, load
from curvcert.errors import InvalidFile, InvalidInput, TrainingDiverged, UnsupportedModule
from curvcert.folder_lock import LOCK
from curvcert.training import (
    Trainer,
    TrainingResult,
    checkpoints,
    load_checkpoint,
    load_model,
    load_recipe,
    loop,
    make_model,
    recipe_from_dict,
    train,
)

pytestmark = pytest.mark.slow

TINY = replace(load_recipe("digits"), epochs=2, batch_size=256, loss="standard", checkpoint_every=1, evaluate_every=1)


def run(folder: Path, resume: bool | Path = False, **changes: Any) -> tuple[TrainingResult, str]:
    """Return the result, and what the console was told."""
    told = io.StringIO()
    console = Console(file=told, width=10_000)
    result = train(replace(TINY, **changes), folder, resume, certify_samples=3, console=console)
    return result, told.getvalue()


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def cheap_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certify by the product of norms; only `finished`, which comes first, certifies by all methods."""
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult]:
    folder = tmp_path_factory.mktemp("run") / "deep" / "folder"
    return folder, run(folder)[0]


def test_what_a_run_leaves(finished) -> None:
    folder, result = finished
    kept = {path.name for path in folder.iterdir()}
    assert kept == {LOCK, "recipe.json", "metrics.jsonl", "checkpoints", "model.safetensors", "result.json"}
    assert recipe_from_dict(json.loads((folder / "recipe.json").read_text())) == TINY
    written = json.loads((folder / "result.json").read_text())
    assert written["samples"] == 3
    assert written["accuracy"] == result.accuracy
    assert list(written["certified"]) == ["0.1", "0.2", "0.3", "0.4"]
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-000000005", "step-000000010"]


def test_the_model_is_the_one_that_was_certified(finished) -> None:
    folder, result = finished
    found, recipe = load_model(folder / "model.safetensors")
    assert recipe == TINY
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert len(result.certificate) == 3


def test_a_mirror_image_answers_too(finished, tmp_path: Path) -> None:
    result, _ = run(tmp_path, mirror=True)
    alone, x = finished[1].model, load("digits", "test").as_float64()[:20].float()
    assert torch.allclose(result.model(x), alone(x) + alone(x.flip(-1)), atol=1e-4)
    assert torch.equal(load_model(tmp_path / "model.safetensors")[0](x), result.model(x))


def test_an_architecture_without_a_mirror_image_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModule, match="PadChannels is not among the layers"):
        make_model(
            replace(TINY, architecture="Lip-3C1F", mirror=True),
            LabelledImages(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 255),
        )


def test_the_metrics_are_json_lines(finished) -> None:
    lines = metrics(finished[0])
    assert [(line["step"], line["epoch"]) for line in lines] == [(5, 1), (10, 2)]
    expected = {
        "loss",
        "accuracy",
        "curvature",
        "weight",
        "learning_rate",
        "test_accuracy",
        "test_certified_estimate_0.1",
    }
    assert all(expected <= line.keys() for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_the_same_recipe_gives_the_same_file(finished, tmp_path: Path) -> None:
    run(tmp_path)
    assert digest(tmp_path) == digest(finished[0])
    assert metrics(tmp_path) == metrics(finished[0])


def test_another_run_is_not_written_over(finished) -> None:
    with pytest.raises(InvalidInput, match=r"already holds a run\. Go on with it by --resume"):
        run(finished[0])


def test_a_finished_run_resumes_to_the_same_end(finished) -> None:
    before = digest(finished[0])
    _, told = run(finished[0], resume=True)
    assert "step 10 of 10" in told
    assert digest(finished[0]) == before


def test_resuming_without_a_checkpoint_starts_afresh_and_says_so(finished, tmp_path: Path) -> None:
    _, told = run(tmp_path / "none", resume=True)
    assert f"No checkpoint in {tmp_path / 'none'}: starting afresh." in told
    assert digest(tmp_path / "none") == digest(finished[0])


def test_resuming_from_a_named_checkpoint(finished, tmp_path: Path) -> None:
    _, told = run(tmp_path, resume=finished[0] / "checkpoints" / "step-000000005")
    assert "step 5 of 10" in told
    assert digest(tmp_path) == digest(finished[0])


def test_resuming_with_another_recipe_is_refused(finished) -> None:
    with pytest.raises(InvalidInput, match="was made with epochs = 2, this run has 3"):
        run(finished[0], resume=True, epochs=3)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(finished, tmp_path: Path) -> None:
    run(tmp_path)
    first, last = checkpoints(tmp_path / "checkpoints")
    shard = last / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match=f"has .* bytes, expected .* The one before it, {first}"):
        run(tmp_path, resume=True)
    run(tmp_path, resume=first)
    assert digest(tmp_path) == digest(finished[0])
    load_checkpoint(last)


def test_metrics_behind_the_checkpoint_are_dropped(finished, tmp_path: Path) -> None:
    run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "epoch": 3}\n{"step": 20, "ep')  # a kill in the middle of a line
    run(tmp_path, resume=checkpoints(tmp_path / "checkpoints")[0])
    assert metrics(tmp_path) == metrics(finished[0])


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 5000, "nonsense", "[]", '{"step": null}', "\udcff"])
def test_damaged_metrics_are_told_of(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(f"{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(InvalidFile, match=r"metrics\.jsonl is damaged"):
        loop._Journal(tmp_path, 5, False)


def test_global_state_is_left_as_it_was(tmp_path: Path) -> None:
    before, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    run(tmp_path, epochs=1)
    run(tmp_path, resume=True, epochs=1)
    assert torch.equal(before, torch.get_rng_state())
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("loss", ["standard", "curvature", "certified-margin"])
def test_a_divergence_is_reported(tmp_path: Path, loss: str) -> None:
    with pytest.raises(TrainingDiverged, match=r"There is no checkpoint yet\. Lower learning_rate"):
        run(tmp_path, loss=loss, learning_rate=1e38, epochs=3)
    assert not (tmp_path / "model.safetensors").exists()
    assert checkpoints(tmp_path / "checkpoints") == []


def spoilt(advance, step: int, value: float):
    """Return Trainer.advance that leaves a weight NaN or infinite after one step."""

    def spoiling(self: Trainer) -> None:
        advance(self)
        if self.step == step:
            with torch.no_grad():
                next(self.model.parameters()).fill_(value)

    return spoiling


@pytest.mark.parametrize("step", [7, 10], ids=["within an epoch", "by the last step before a checkpoint"])
def test_a_divergence_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "advance", spoilt(Trainer.advance, step, math.inf))
        with pytest.raises(TrainingDiverged, match=r"The last good checkpoint is .*step-000000005"):
            run(tmp_path, epochs=3)
    (kept,) = checkpoints(tmp_path / "checkpoints")
    assert all(bool(torch.isfinite(t).all()) for t in load_checkpoint(kept).tensors.values() if t.is_floating_point())
    assert not (tmp_path / "model.safetensors").exists()
    result, _ = run(tmp_path, resume=True, epochs=3)
    assert math.isfinite(result.accuracy)


def test_an_interrupt_stops_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    run(whole, epochs=3)
    real = Trainer._advance

    def interrupted(self: Trainer) -> None:
        if self.step == 7 and int(self._count) == 7:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        real(self)

    told = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(replace(TINY, epochs=3), tmp_path / "half", console=Console(file=told, width=10_000))
    assert "Stopped at step 8. Kept" in told.getvalue()
    run(tmp_path / "half", resume=True, epochs=3)
    assert digest(tmp_path / "half") == digest(whole)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    with pytest.raises(InvalidInput, match=f"Cannot compute on '{device}'"):
        train(TINY, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match=r"Cannot write into .*file"):
        train(TINY, tmp_path / "file" / "run")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(replace(TINY, epochs=1), tmp_path, certify_samples=1, tensorboard=True, console=Console(file=io.StringIO()))
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    told = io.StringIO()
    console = Console(file=told, width=200, force_terminal=True)
    train(replace(TINY, epochs=1), tmp_path, certify_samples=1, console=console)
    for word in ("training", "loss", "accuracy", "K", "lambda", "steps/s"):
        assert word in told.getvalue()


def test_every_step_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_READ_EVERY", 2)
    run(tmp_path, epochs=1)
    assert [line["step"] for line in metrics(tmp_path)] == [5]
