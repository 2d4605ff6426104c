"""Training steps on a GPU by this code and by an older one, which take turns within one run: the ratio of their speeds.

Claim: this code takes at least 0.95 of the steps per second of the code before networks were graphs, and captures and
compiles whatever that code did.
Hardware: one CUDA device; the record says which. With `--device cpu` a rehearsal that writes no record.
Trials: for each network and loss, a process of either code; the processes take turns, 5 runs of 300 steps each, timed
by CUDA events; the ratio of the medians counts.

    git archive COMMIT src | tar x -C build-old
    python -m benchmarks.gpu_old_and_new --old build-old/src --commit COMMIT
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu_training import BATCH, LOSSES, SEED, random_images, recipe
from benchmarks.harness import ROOT, require_known_code, write_record
from curvcert.training import Trainer
from curvcert.training.recipe import Loss

MODELS = ("6F", "6C2F")
LEAST = 0.95


@dataclass(frozen=True)
class Worker:
    """A process that trains one model by one version of the code, and says how fast."""

    process: subprocess.Popen[str]

    @classmethod
    def started(cls, source: Path, model: str, loss: str, device: str) -> "Worker":
        """Return a process that uses the code in this folder; it compiles while others do."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(ROOT), *_carried()))}
        command = [sys.executable, "-m", "benchmarks.gpu_old_and_new", "--worker", model, loss, "--device", device]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, env=environment, cwd=source, stdin=pipe, stdout=pipe, text=True))

    def answer(self) -> Any:
        """Return what it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"A process that should train ended with status {self.process.wait()}.")
        return json.loads(line)

    def speed(self, steps: int) -> float:
        """Return how many steps a second it takes now."""
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return float(self.answer())

    def end(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _carried() -> list[str]:
    """Return the folders that this process was told to search after its own."""
    return [str(Path(folder).resolve()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def work(model: str, loss: Loss, device: str) -> None:
    """Train, and answer each number on stdin with the speed of as many steps."""
    compiled = device == "cuda"
    trainer = Trainer(recipe(model, loss, augmented=False), random_images(), device, compiled=compiled)
    for _ in range(3):
        trainer.advance()
    state = {"not captured": trainer.not_captured, "not compiled": trainer.not_compiled}
    print(json.dumps({**state, "code": sys.modules["curvcert"].__file__}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        _wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            trainer.advance()
        _wait(device)
        print(json.dumps(steps / (time.perf_counter() - start)), flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the folder src of the older code")
    parser.add_argument("--commit", help="the commit that the older code is from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        model, loss = options.worker
        work(model, loss, options.device)
        return
    if options.old is None or options.commit is None:
        parser.error("what this code is compared with: --old FOLDER --commit COMMIT")
    if options.device == "cuda":
        require_known_code()
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Let old and new code take turns, print the ratios, and record them if they are of a GPU."""
    sources = {"old": options.old.resolve(), "new": ROOT / "src"}
    cells = [(model, loss) for model in options.models for loss in LOSSES]
    console, started = Console(width=160), time.perf_counter()
    workers = {
        (cell, age): Worker.started(source, *cell, options.device) for cell in cells for age, source in sources.items()
    }
    states = {key: worker.answer() for key, worker in workers.items()}
    for (cell, age), state in states.items():
        if not Path(state["code"]).is_relative_to(sources[age]):
            raise SystemExit(f"{cell}, {age}: it ran {state['code']} in place of what is in {sources[age]}.")
    console.print(f"all are ready after {time.perf_counter() - started:.0f} s")
    figures: dict[str, dict[str, Any]] = {}
    for cell in cells:
        runs: dict[str, list[float]] = {age: [] for age in sources}
        for _ in range(options.runs):
            for age, speeds in runs.items():
                speeds.append(workers[cell, age].speed(options.steps))
        medians = {age: statistics.median(speeds) for age, speeds in runs.items()}
        ratio, name = medians["new"] / medians["old"], ", ".join(cell)
        reasons = {
            age: [states[cell, age][key] for key in ("not captured", "not compiled") if states[cell, age][key]]
            for age in sources
        }
        figures[name] = {"new / old": ratio, "medians": medians, "runs": runs, "not captured or compiled": reasons}
        verdict = "" if ratio >= LEAST else f", below {LEAST}"
        console.print(f"{name:26s} {medians['old']:8.1f} {medians['new']:8.1f} steps/s, {ratio:.3f}{verdict} {reasons}")
    for worker in workers.values():
        worker.end()
    if options.device == "cuda":
        versions = {"old": options.commit, "batch": BATCH, "steps": options.steps}
        config = {**versions, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        command = f"python -m benchmarks.gpu_old_and_new --old build-old/src --commit {options.commit}"
        write_record("gpu_old_and_new", command, SEED, config, {"steps per second": figures})


if __name__ == "__main__":
    main()
