"""Checkpoints: bit for bit, in small files, whole or not at all, and never believed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from curvcert.errors import InvalidInput
from curvcert.training import Checkpoint, checkpoint, checkpoints, load_checkpoint, save_checkpoint

FACTS = {"recipe": {"epochs": 3, "epsilons": [0.1]}, "torch": "2"}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(300, 500, generator=generator),
        "transposed": torch.randn(5, 7, generator=generator).T,
        "double": torch.randn(3, dtype=torch.float64, generator=generator),
        "half": torch.randn(4, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(2**60 + 1),
        "bytes": torch.randint(0, 256, (5056,), dtype=torch.uint8, generator=generator),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype, key
        assert tensor.shape == right[key].shape, key
        pairs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, right[key]))
        assert torch.equal(*pairs), key


@pytest.mark.parametrize("limit", [checkpoint.SHARD_BYTES, 100_000])
def test_round_trip_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", limit)
    path = save_checkpoint(tmp_path, Checkpoint(12, state(), FACTS))
    found = load_checkpoint(path)
    assert (found.step, found.facts) == (12, FACTS)
    assert_same_bits(state(), dict(found.tensors))
    shards = list(path.glob("shard-*.safetensors"))
    assert all(file.stat().st_size <= limit for file in shards)
    assert len(shards) == (1 if limit > 10**6 else 9)


def test_no_file_is_larger_than_15_megabytes(tmp_path: Path) -> None:
    large = {
        "a": torch.zeros(4_100_000),
        **{f"small.{k}": torch.zeros(1) for k in range(300)},
        "b": torch.ones(3_700_000),
    }
    path = save_checkpoint(tmp_path, Checkpoint(0, large, {}))
    sizes = [file.stat().st_size for file in path.iterdir()]
    assert max(sizes) <= 15_000_000
    assert sum(sizes) > 31_000_000
    assert_same_bits(large, dict(load_checkpoint(path).tensors))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, Checkpoint(step, {"w": torch.tensor(step)}, {}), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000003", "step-000000010"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_going_back_leaves_the_later_ones_behind(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, Checkpoint(step, {"w": torch.tensor(step)}, {}), keep=3)
    save_checkpoint(tmp_path, Checkpoint(15, {"w": torch.tensor(15)}, {}), keep=3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000010", "step-000000015"]


def test_a_step_is_written_again(tmp_path: Path) -> None:
    for value in (1, 2):
        path = save_checkpoint(tmp_path, Checkpoint(5, {"w": torch.tensor(value)}, {}))
    assert int(load_checkpoint(path).tensors["w"]) == 2


class Killed(BaseException):
    """What a process that dies in the middle looks like from inside: nothing after it runs."""


@pytest.mark.parametrize("writes", range(3))
def test_dying_between_two_writes_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 400_000)
    save_checkpoint(tmp_path, Checkpoint(1, state(1), FACTS))
    real, done = checkpoint.write_whole, 0

    def dying(path: Path, content: bytes) -> None:
        nonlocal done
        if done == writes:
            path.write_bytes(content[: len(content) // 2])
            raise Killed
        done += 1
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", dying)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, Checkpoint(2, state(2), FACTS))
    monkeypatch.setattr(checkpoint, "write_whole", real)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000001"]
    assert_same_bits(state(1), dict(load_checkpoint(checkpoints(tmp_path)[-1]).tensors))
    save_checkpoint(tmp_path, Checkpoint(2, state(2), FACTS))
    assert_same_bits(state(2), dict(load_checkpoint(checkpoints(tmp_path)[-1]).tensors))
    assert list(tmp_path.glob(".partial-*")) == []


def test_dying_while_an_old_one_is_removed_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, Checkpoint(step, state(step), FACTS))

    def dying(path: Path) -> None:
        next(path.iterdir()).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", dying)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, Checkpoint(3, state(3), FACTS))
    for path in checkpoints(tmp_path):
        load_checkpoint(path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000002", "step-000000003"]
    save_checkpoint(tmp_path, Checkpoint(4, state(4), FACTS))
    assert list(tmp_path.glob(".partial-*")) == []


def two(folder: Path) -> Path:
    save_checkpoint(folder, Checkpoint(1, state(), FACTS))
    return save_checkpoint(folder, Checkpoint(2, state(), FACTS))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


SHARD, INDEX = "shard-00000.safetensors", "checkpoint.json"


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (SHARD, truncate, r"shard-00000\.safetensors has \d+ bytes, expected \d+"),
        (SHARD, flip, r"shard-00000\.safetensors was altered"),
        (SHARD, Path.unlink, "No such file"),
        (INDEX, truncate, "cannot be used"),
        (INDEX, flip, "cannot be used"),
        (INDEX, Path.unlink, "No such file"),
        (INDEX, lambda file: file.write_bytes(b"\xff\xfe"), "cannot be used"),
        (INDEX, lambda file: file.write_bytes(b"[" * 100_000), "cannot be used"),
    ],
)
def test_a_damaged_one_is_refused_and_the_one_before_offered(tmp_path: Path, name: str, damage, reason: str) -> None:
    path = two(tmp_path)
    damage(path / name)
    with pytest.raises(InvalidInput, match=reason) as caught:
        load_checkpoint(path)
    assert f"The one before it, {tmp_path / 'step-000000001'}, may be whole" in str(caught.value)
    load_checkpoint(tmp_path / "step-000000001")


def test_the_first_one_has_none_before_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, Checkpoint(1, state(), FACTS))
    truncate(path / SHARD)
    with pytest.raises(InvalidInput) as caught:
        load_checkpoint(path)
    assert "before it" not in str(caught.value)


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be used: .*No such file"):
        load_checkpoint(tmp_path / "step-000000009")


def forged(path: Path, **changes: Any) -> None:
    """Rewrite the index with changes, under a digest that is right."""
    index = json.loads((path / INDEX).read_text())
    index.pop("sha256")
    index |= changes
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (path / INDEX).write_text(json.dumps({**index, "sha256": digest}))


def shard(path: Path, name: str) -> dict[str, Any]:
    content = (path / name).resolve().read_bytes()
    return {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": None},
        {"step": "7"},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"facts": []},
        {"facts": None},
        {"shards": None},
        {"shards": {}},
        {"shards": [7]},
        {"shards": [{"file": 7}]},
        {"shards": [{"file": ".."}]},
        {"shards": [{"file": "/etc/hostname", "bytes": 1, "sha256": ""}]},
        {"tensors": []},
        {"tensors": {"weight": None}},
        {"tensors": {"weight": {"shape": [300, 500], "pieces": 10**12}}},
        {"tensors": {"weight": {"shape": [10**30], "pieces": 1}}},
        {"tensors": {"weight": {"shape": [2**62, 2**62], "pieces": 1}}},
        {"tensors": {"weight": {"shape": "300", "pieces": 1}}},
        {"tensors": {"weight": {"shape": [300, 500], "pieces": "1"}}},
        {"tensors": {"weight": {"shape": [300, 500], "pieces": 0}}},
        {"tensors": {"missing": {"shape": [1], "pieces": 1}}},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_a_hostile_index_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = two(tmp_path)
    forged(path, **changes)
    with pytest.raises(InvalidInput, match="cannot be used"):
        load_checkpoint(path)


def test_a_shard_is_not_read_from_outside(tmp_path: Path) -> None:
    path = two(tmp_path / "run")
    (tmp_path / "secret.safetensors").write_bytes(save({"weight#0": torch.zeros(150_000)}))
    forged(path, shards=[shard(path, "../../secret.safetensors")])
    with pytest.raises(InvalidInput, match="No such file"):
        load_checkpoint(path)


def test_a_shard_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    path = two(tmp_path)
    (path / SHARD).write_bytes(b"not a tensor in sight")
    forged(path, shards=[shard(path, SHARD)])
    with pytest.raises(InvalidInput, match="cannot be used"):
        load_checkpoint(path)


def test_an_index_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = two(tmp_path)
    for content in ("[]", "7", "null", '"x"', "{}"):
        (path / INDEX).write_text(content)
        with pytest.raises(InvalidInput, match="cannot be used"):
            load_checkpoint(path)
