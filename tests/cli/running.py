"""The command line as a test drives it: words in; exit status, standard output and standard error out."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from curvcert import cli

NETS = """
import torch
from torch import nn


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)).eval()


def training():
    return small().train()


def relu():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).eval()


def scalar():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)).eval()


def raising():
    raise ZeroDivisionError("no model today")


def seven():
    return 7


def double():
    return small().double()
"""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


class Runner:
    """Runs the command line in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> Ran:
        self._capsys.readouterr()
        with torch.random.fork_rng(devices=[]), pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        captured = self._capsys.readouterr()
        return Ran(caught.value.code or 0, captured.out, captured.err)


def command(*words: object) -> list[str]:
    """Return the command line as a process of its own is started: the installed command, where there is one."""
    script = Path(sys.executable).with_name("curvcert")
    start = [str(script)] if script.is_file() else [sys.executable, "-m", "curvcert"]
    return [*start, *(str(word) for word in words)]


def environment() -> dict[str, str]:
    """Return the variables of such a process: the package under test, and one thread, as the tests have."""
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_process(*words: object, folder: Path) -> Ran:
    """Run the command line as a process of its own."""
    done = subprocess.run(command(*words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    return Ran(done.returncode, done.stdout, done.stderr)


def write_npz(path: Path, x: object, y: object) -> Path:
    """Write a data file."""
    np.savez(path, x=np.asarray(x), y=np.asarray(y))
    return path
