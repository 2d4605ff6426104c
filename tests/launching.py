"""Ranks as a test starts them: by torchrun, or as processes with its variables; none of them outlives the test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cli.running import environment

PATIENCE = 120.0
"""Seconds after which processes that do not get on fail the test."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def variables(rank: int, size: int, port: int | None = None) -> dict[str, str]:
    """Return what torchrun would tell a process; without a port, not where the ranks meet."""
    found = {**environment(), "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    return found if port is None else found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def started(folder: Path, *commands: tuple[list[str], dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes in a folder; at the end kill what is left of them and of their children."""
    running = [
        subprocess.Popen(words, cwd=folder, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words, told in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            for pid in (*children(process.pid), process.pid):
                if process.poll() is None or pid != process.pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; return the exit status, standard output and standard error."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the processes do not get on"
        time.sleep(0.005)
