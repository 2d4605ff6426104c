"""Several ranks: the same result as one process, the same values on each, and one end for all, whatever happens."""

import json
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from curvcert.certificates import certify
from curvcert.errors import InvalidInput
from curvcert.training import load_checkpoint, load_model, load_recipe, loop, train
from curvcert.training.distributed import Place, joined, place_from
from tests.cli.running import environment
from tests.launching import TORCHRUN, ended, free_port, started, variables

pytestmark = pytest.mark.slow
posix = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Run two ranks by torchrun's variables; return what each of them saw."""
    folder = tmp_path_factory.mktemp("ranks")
    port, *more = (free_port() for _ in range(3))
    words = [sys.executable, "-m", "tests.training.ranks_at_work", str(folder), *map(str, more)]
    root = Path(__file__).parents[2]
    with started(root, *((words, variables(rank, 2, port)) for rank in range(2))) as processes:
        (status, _, error), (killed, _, other) = (ended(process) for process in processes)
    assert (status, killed) == (0, -9), error + other
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@posix
def test_every_objective_takes_the_same_steps_as_in_one_process(seen) -> None:
    cases = seen[1][0]["cases"]
    assert len(cases) == 8
    for name, case in cases.items():
        assert case["gradient"] < 1e-5, (name, case)
        assert case["difference"] < 1e-3, (name, case)
        assert case["moved"] > 1e-2, (name, case)


@posix
def test_the_state_and_lambda_are_identical_on_every_rank(seen) -> None:
    first, second = (found["cases"] for found in seen[1])
    for name in first:
        for what in ("digest", "lambda", "tally"):
            assert first[name][what] == second[name][what], (name, what)


@posix
def test_a_run_of_one_process_goes_on_in_two(seen) -> None:
    folder, _ = seen
    metrics = [json.loads(line) for line in (folder / "together" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [10]
    require_same_end(folder / "alone", folder / "together")


@posix
def test_the_samples_of_the_last_certification_are_all_there(seen) -> None:
    assert [found["certified"] for found in seen[1]] == [[3, 1], [3, 1]]


@posix
def test_what_ranks_agree_on(seen) -> None:
    for rank, found in enumerate(seen[1]):
        about = found["agreements"]
        assert about["own"] == rank
        assert about["first"] == ("only there" if rank == 0 else None)
        assert about["from first"] == {"rank": 0}
        assert about["gathered"] == [0, 1]
        assert about["any"] == [True, False]
        assert about["rank 1 fails"] == ["InvalidInput", "no data here"]
        assert about["an odd error"] == (["RuntimeError", "KeyError: 'key'"] if rank == 0 else ["KeyError", "'key'"])
        assert about["different"][0] == "RanksApart"
        assert about["same"] == []


@posix
def test_all_ranks_end_together(seen) -> None:
    for found in seen[1]:
        troubles = found["troubles"]
        assert troubles["stopped"][0] == "KeyboardInterrupt"
        assert troubles["kept"] == ["step-000000005"]  # where the ranks tell each other next
        assert troubles["full"][0] == "OSError"
        assert "No space left" in troubles["full"][1]
        assert troubles["diverged"][0] == "TrainingDiverged"
        assert "There is no checkpoint yet. Lower learning_rate" in troubles["diverged"][1]
        assert found["status"] == 2


@posix
def test_a_rank_that_is_killed_is_told_of(seen) -> None:
    folder, (first, second) = seen
    assert "lost" not in second
    assert first["lost"][0] == "RanksApart"
    assert "Go on from the last checkpoint with --resume" in first["lost"][1]
    assert not (folder / "lost" / "model.safetensors").exists()


SETTINGS = (
    "epochs=2",
    "batch_size=256",
    "evaluate_samples=50",
    "checkpoint_every=1",
    "evaluate_every=1",
    "epsilons=0.1",
)
RECIPE = load_recipe("digits").updated(dict(setting.split("=") for setting in SETTINGS))


def by_torchrun(folder: Path, count: int, *words: object) -> str:
    changes = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [*TORCHRUN, "--nproc-per-node", str(count), "-m", "curvcert", "train", "--recipe", "digits"]
    with started(folder, ([*command, "--samples", "3", *changes, *map(str, words)], environment())) as (process,):
        status, out, error = ended(process)
    assert status == 0, error
    assert out.count("The model: ") == 1
    return error


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "certify", partial(certify, method="product"))
        train(RECIPE, folder, certify_samples=3, console=Console(file=StringIO()))
    return folder


def require_alike(left: Path, right: Path) -> None:
    one, other = (load_model(folder / "model.safetensors")[0].state_dict() for folder in (left, right))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (left, right)]
    for mine, theirs in zip(*lines, strict=True):
        assert json.loads(mine) == pytest.approx(json.loads(theirs), rel=1e-4)


def require_same_end(left: Path, right: Path) -> None:
    one, other = (load_checkpoint(folder / "checkpoints" / "step-000000010").tensors for folder in (left, right))
    assert one.keys() == other.keys()
    for name in one.keys() - {"run.random_state"}:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-6)


@posix
def test_two_ranks_end_with_the_model_of_one(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torchrun(tmp_path, 2, "--out", "two")
    require_alike(alone, tmp_path / "two")
    assert json.loads((tmp_path / "two" / "result.json").read_text())["samples"] == 3
    # Half of it on two ranks, the other half on one.
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))
    half = tmp_path / "two" / "checkpoints" / "step-000000005"
    train(RECIPE, tmp_path / "one", half, certify_samples=3, console=Console(file=StringIO()))
    require_same_end(alone, tmp_path / "one")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"RANK": "0"}, r"got RANK=0 without WORLD_SIZE\. Start the command with torchrun"),
        ({"WORLD_SIZE": "2"}, "got WORLD_SIZE=2 without RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is a whole number, at least 0, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is a whole number, at least 1, got '0'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "Expected a rank from 0 to 1, of 2, got 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK is a whole number"),
    ],
)
def test_variables_that_make_no_sense(told: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        place_from(told)


def test_a_place_from_the_variables_of_torchrun() -> None:
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert place_from(told) == Place(3, 4, 1, restarts=1)
    assert place_from(told).restarted
    assert not place_from({**told, "TORCHELASTIC_RESTART_COUNT": "0"}).restarted


def test_a_meeting_place_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InvalidInput, match="Expected MASTER_ADDR and MASTER_PORT"), joined(Place(0, 2)):
        raise AssertionError("not reached")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Place(3, 4, local=1).device("cuda") == torch.device("cuda:1")
    assert Place(3, 4, local=1).device("cuda:0") == torch.device("cuda:0")
    assert Place().device("cuda") == torch.device("cuda")
    with pytest.raises(InvalidInput, match=r"got 2 for LOCAL_RANK 2\. Start no more ranks than GPUs"):
        Place(2, 4, local=2).device("cuda")
    with pytest.raises(InvalidInput, match="Expected LOCAL_RANK"):
        Place(2, 4).device("cuda")


@pytest.mark.parametrize("total", [0, 1, 7, 10, 64])
def test_shares_follow_one_another(total: int) -> None:
    shares = [Place(rank, 5).share(total) for rank in range(5)]
    assert [k for share in shares for k in range(share.start, share.stop)] == list(range(total))
