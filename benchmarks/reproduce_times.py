"""How long the quick version of every experiment takes, in seconds of the processor.

Claim: each checks its pipeline in seconds.
Hardware: whatever it runs on; the record says which.  One thread.
Trials: one quick run of each, one after another, in one process that has loaded everything before.

    python -m benchmarks.reproduce_times
"""

import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.harness import write_record
from benchmarks.reproduce import EXPERIMENTS, Options, reproduce


def quick_seconds(name: str) -> float:
    """Run an experiment's quick version, and return the processor's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        reproduce(EXPERIMENTS[name], Options(Path(folder), quick=True))
        return time.process_time() - begun


def main() -> None:
    """Measure every experiment, and write the record."""
    torch.set_num_threads(1)
    quick_seconds("tanh-anchor")
    seconds = {}
    for name in EXPERIMENTS:
        seconds[name] = quick_seconds(name)
        Console().print(f"{name}: {seconds[name]:.1f} s")
    write_record("reproduce_times", "python -m benchmarks.reproduce_times", 0, {"threads": 1}, {"quick": seconds})


if __name__ == "__main__":
    main()
