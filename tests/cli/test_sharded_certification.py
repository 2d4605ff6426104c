"""`curvcert certify` by several processes: killed, taken over, resumed, it ends as one process does, to the byte."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from curvcert.attacks import Attack
from curvcert.certificates import certify, load_certificate
from curvcert.cli.heartbeats import Heart, Watch, forget
from curvcert.cli.inputs import Inputs
from curvcert.cli.output import Output
from curvcert.cli.saved_parts import Plan, SavedParts, digest_of
from curvcert.cli.shared_certification import Found, SharedCertification
from curvcert.data import load_demo_network, load_digits
from curvcert.errors import InvalidInput, SoundnessError
from curvcert.network import trace
from curvcert.network.network_file import network_digest
from curvcert.training.distributed import Place
from tests.cli.running import Runner, command, environment
from tests.launching import TORCHRUN, children, ended, started, variables, wait_for

PARTS = 240
"""Many small parts, so that a kill after the first ones meets ranks that are far from their ends."""
WORDS = ("certify", "curvcert.data:load_demo_network", "digits", "--samples", PARTS, "--part-size", 1)
WORDS += ("--method", "product", "--no-search", "--no-report")


def saved(folder: Path, rank: int | None = None) -> list[int]:
    """Return the samples whose parts are there: all, or those of one of two ranks."""
    found = sorted(int(path.name[5:12]) for path in (folder / "out" / "parts").glob("part-*"))
    return [start for start in found if rank is None or start % 2 == rank]


def starts_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "out" / "parts").glob("part-*")}


def worker_of(folder: Path, rank: int, agent: int) -> int:
    """Return the process of a rank that torchrun started."""
    for pid in children(agent):
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in told:
            return pid
    raise AssertionError(f"torchrun has no rank {rank}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds torchrun's processes by /proc")
def test_a_rank_is_killed_twice_and_nothing_is_lost_or_counted_twice(folder: Path, run: Runner) -> None:
    shared = [*TORCHRUN, "--nproc-per-node", "2", "-m", "curvcert", *map(str, WORDS), "--out", "out"]
    with started(folder, (shared, environment())) as (agent,):
        wait_for(agent, lambda: bool(saved(folder, 0)) and len(saved(folder, 1)) >= 2)
        os.kill(worker_of(folder, 1, agent.pid), signal.SIGKILL)
        status, _, error = ended(agent)
    assert (status, "SIGKILL" in error) == (1, True)
    before, first_half = starts_of(folder), saved(folder)
    assert 3 <= len(first_half) < PARTS - 20
    assert not (folder / "out" / "certificate.safetensors").exists()

    # Without torchrun nobody ends the others: rank 0 takes over.
    words = command(*WORDS, "--out", "out", "--resume", "--lost-after", 2)
    with started(folder, *((words, variables(rank, 2)) for rank in range(2))) as (first, second):
        wait_for(second, lambda: len(saved(folder, 1)) > len([k for k in first_half if k % 2]))
        second.kill()
        status, out, error = ended(first)
    assert status == 0, error
    taken_over = [int(k) for k in re.findall(r"Samples (\d+) \.\. \d+ are computed here: rank 1 is gone", error)]
    assert taken_over and all(k % 2 == 1 for k in taken_over)
    assert len(taken_over) == len(set(taken_over))
    assert not set(taken_over) & set(first_half)
    assert f"{PARTS} samples in l2" in out
    assert saved(folder) == list(range(PARTS))
    after = starts_of(folder)
    assert {name: after[name] for name in before} == before, "a part that was saved was computed again"
    assert not list((folder / "out" / "parts").glob("*.alive"))

    assert run(*WORDS, "--out", "whole", "--quiet").status == 0
    for name in ("samples.csv", "certificate.safetensors", "network.safetensors"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    assert len(load_certificate(folder / "out" / "certificate.safetensors")) == PARTS


@pytest.fixture(scope="module")
def example() -> tuple[Plan, Inputs, list[Found]]:
    """A plan of seven parts, and what they hold."""
    data = load_digits("test")
    inputs = Inputs(data.as_float64()[:7], data.labels[:7], "digits")
    network = trace(load_demo_network(), inputs.x[:1].float())
    digests = (network_digest(network), digest_of(inputs.x), digest_of(inputs.y))
    plan = Plan("test", *digests, 7, 1, {"p": 2.0, "search": None})
    found = [(certify(network, inputs.x[k : k + 1], inputs.y[k : k + 1], method="product"), None) for k in range(7)]
    return plan, inputs, found


def shares(folder: Path, example, rank: int, size: int, lost_after: float = 30.0) -> SharedCertification:
    plan, inputs, _ = example
    return SharedCertification(
        SavedParts(folder / "parts", plan, inputs), Place(rank, size), Output(quiet=True), lost_after
    )


class Computing:
    """Computes parts, and notes which."""

    def __init__(self, found: list[Found], pause: float = 0.0) -> None:
        self.found, self.pause, self.starts = found, pause, []

    def __call__(self, part: slice) -> tuple[object, Attack | None]:
        time.sleep(self.pause)
        self.starts.append(part.start)
        return self.found[part.start]


def work(mine: SharedCertification, compute: Computing, resume: bool = False) -> Found | None:
    with mine.opened(resume):
        return mine.certify(compute)


def test_ranks_in_any_order_each_compute_their_own(tmp_path: Path, example) -> None:
    computing = [Computing(example[2], pause=0.02) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(shares(tmp_path, example, rank, 3), computing[rank])) for rank in (2, 1)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not list(tmp_path.glob("parts/part-*")), "a rank began before rank 0 opened the folder"
    found = work(shares(tmp_path, example, 0, 3), computing[0])
    for thread in threads:
        thread.join(timeout=20)
    assert [one.starts for one in computing] == [[0, 3, 6], [1, 4], [2, 5]]
    assert found is not None
    alone = work(shares(tmp_path / "alone", example, 0, 1), Computing(example[2]))
    assert alone is not None
    assert torch.equal(found[0].radius, alone[0].radius)
    assert torch.equal(found[0].evidence.inputs, alone[0].evidence.inputs)


def test_a_rank_that_never_comes_and_one_that_ends_early(tmp_path: Path, example) -> None:
    mine, computing = shares(tmp_path, example, 0, 3, lost_after=0.3), Computing(example[2])
    with mine.opened(resume=False):
        with Heart(tmp_path / "parts", 2):  # it lives, and brings nothing
            pass
        found = mine.certify(computing)
    assert found is not None and len(found[0]) == 7
    assert sorted(computing.starts) == list(range(7))


def test_a_rank_that_comes_late_finds_nothing_to_do(tmp_path: Path, example) -> None:
    assert work(shares(tmp_path, example, 0, 2, lost_after=0.2), Computing(example[2])) is not None
    late = Computing(example[2])
    assert work(shares(tmp_path, example, 1, 2), late) is None
    assert late.starts == []


def test_a_rank_without_rank_0_gives_up(tmp_path: Path, example) -> None:
    with pytest.raises(InvalidInput, match=r"Expected rank 0 at work in .* got no sign of life for 0\.5 s"):
        work(shares(tmp_path, example, 1, 2, lost_after=0.05), Computing(example[2]))


def test_a_rank_with_other_options_is_refused(tmp_path: Path, example) -> None:
    plan, inputs, found = example
    assert work(shares(tmp_path, example, 0, 1), Computing(found)) is not None
    other = Plan("test", plan.network, plan.inputs, plan.labels, 7, 1, {"p": 2.0, "search": None, "seed": 1})
    with pytest.raises(InvalidInput, match="holds another certification, which differs in seed"):
        work(shares(tmp_path, (other, inputs, found), 1, 2), Computing(found))


def test_a_part_that_another_plan_left_is_not_taken(tmp_path: Path, example) -> None:
    plan, inputs, found = example
    other = Plan("test", plan.network, plan.inputs, plan.labels, 7, 1, {"p": 2.0, "search": None, "seed": 1})
    first = shares(tmp_path, example, 0, 1)
    first.parts.open(resume=False)
    late = SavedParts(tmp_path / "parts", other, inputs)
    late.save(slice(3, 4), *found[3])  # a process of an earlier run that lived on
    computing = Computing(found)
    assert first.certify(computing) is not None
    assert computing.starts == list(range(7))


def test_parts_that_are_not_about_every_sample_once_are_not_merged(tmp_path: Path, example) -> None:
    mine = shares(tmp_path, example, 0, 1)
    for wrong in (example[2][:6], [*example[2], example[2][0]], [example[2][1], example[2][0], *example[2][2:]]):
        with pytest.raises(SoundnessError, match="Expected parts about 7 samples, each once"):
            mine._merged(wrong)


def test_signs_of_life_are_changes(tmp_path: Path) -> None:
    with Heart(tmp_path, 0):
        watch = Watch(tmp_path, 0, lost_after=5.0)
        assert not watch.alive()  # what is there may be from an earlier run
        deadline = time.monotonic() + 10
        while not watch.alive():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert watch.gone()
    forget(tmp_path)
    silent = Watch(tmp_path, 0, lost_after=0.05)
    assert not silent.gone()
    time.sleep(0.1)
    assert silent.gone()


def test_a_gpu_for_each_rank(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ran = run(*WORDS, "--out", "out", "--device", "cuda")
    assert ran.status == 2
    assert "Expected a GPU for each rank of this machine, got 1 for LOCAL_RANK 1" in ran.err


def test_half_of_the_variables(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ran = run(*WORDS, "--out", "out")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "got RANK=1 without WORLD_SIZE" in ran.err


def test_torchrun_is_in_the_help(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("train", "certify"):
        assert f"torchrun --standalone --nproc-per-node 2 -m curvcert {name}" in run(name, "--help").out
