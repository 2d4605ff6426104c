"""A run that is really killed, again and again, and ends with the same model, bit for bit."""

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from curvcert.certificates import certify
from curvcert.training import load_recipe, loop, train

RECIPE = {
    "epochs": "20",
    "batch_size": "256",
    "loss": "certified-margin",
    "weight_average": "0.9",
    "checkpoint_every": "1",
    "evaluate_every": "10",
    "evaluate_samples": "20",
    "epsilons": "0.1",
}
PARTIAL = ".partial-step"
PATIENCE = 120.0
"""Seconds after which a process that does not do what is waited for fails the test."""


def started(folder: Path, resume: bool) -> subprocess.Popen[str]:
    changes = [word for name, value in RECIPE.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "curvcert", "train", "--recipe", "digits", "--out", str(folder), "--samples", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *changes, *(["--resume"] if resume else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return output


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def wait_for(process: subprocess.Popen[str], happened, pause: float) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(pause)


def kill_at_a_random_moment(folder: Path, resume: bool, delay: float) -> None:
    """Kill some time after the first checkpoint that this process wrote."""
    before = names(folder / "checkpoints")
    process = started(folder, resume)
    wait_for(process, lambda: any(name.startswith("step-") for name in names(folder / "checkpoints") - before), 0.005)
    time.sleep(delay)
    kill(process)


def kill_inside_a_write(folder: Path) -> bool:
    """Kill as soon as a checkpoint is being written; tell whether it was left half-written."""
    before = names(folder / "checkpoints")
    process = started(folder, resume=True)
    wait_for(process, lambda: any(name.startswith(PARTIAL) for name in names(folder / "checkpoints") - before), 0)
    kill(process)
    return any(name.startswith(PARTIAL) for name in names(folder / "checkpoints"))


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_three_times_it_ends_with_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    moments = random.Random(20)
    kill_at_a_random_moment(killed, False, moments.uniform(0.0, 0.06))
    tries = 0
    while not kill_inside_a_write(killed):
        tries += 1
        assert tries < 3, "no kill hit a write"
    kill_at_a_random_moment(killed, True, moments.uniform(0.0, 0.06))
    assert not (killed / "model.safetensors").exists()
    output = finish(started(killed, resume=True))
    assert "Resumed from" in output
    # Uninterrupted, in this process; how the model is certified has no part in this.
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))
    train(load_recipe("digits").updated(RECIPE), whole, certify_samples=2, console=Console(file=io.StringIO()))
    assert digest(killed) == digest(whole)
    assert (killed / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert not any(name.startswith(".partial-") for name in names(killed / "checkpoints"))
