"""Checkpoints: the whole state of a run, in safetensors shards and JSON, written so that a crash loses nothing.

A checkpoint is a folder `step-000000123`.  It is written under another name, every file flushed to the disk, and only
then renamed: a folder of that name is whole, or it was damaged later, which its digests tell.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.whole_files import flush_folder, make_folder, refusals, require_no_link, write_whole

FORMAT = 1
SHARD_BYTES = 15_000_000
"""The most that the tensors of one shard take; a larger tensor is cut into pieces."""

_HEADER_ROOM = 64_000
_INDEX = "checkpoint.json"
_PARTIAL = ".partial-"
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    SafetensorError,
)
"""What reading a damaged or hostile checkpoint may raise."""


@final
@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named tensors, and what else a run is to be resumed from."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint below the folder, atomically; keep it and the ones before it, `keep` in all.

    Later ones are removed: a run that went back to an earlier step has left them behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     path = save_checkpoint(Path(root), Checkpoint(7, {"w": torch.ones(2)}, {"seed": 0}))
    ...     path.name, load_checkpoint(path).tensors["w"]
    ('step-000000007', tensor([1., 1.]))
    """
    make_folder(folder)
    require_no_link(folder)
    with refusals(folder):
        return _saved(folder, checkpoint, keep)


def _saved(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    for left_over in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left_over)
    name = f"step-{checkpoint.step:09d}"
    partial, final_path = folder / f"{_PARTIAL}{name}", folder / name
    partial.mkdir()
    shards = []
    for number, content in enumerate(_shards(checkpoint.tensors)):
        shard = f"shard-{number:05d}.safetensors"
        write_whole(partial / shard, content)
        shards.append({"file": shard, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    tensors = {key: _description(value) for key, value in checkpoint.tensors.items()}
    index = {"format": FORMAT, "step": checkpoint.step, "shards": shards, "tensors": tensors}
    body = {**index, "facts": dict(checkpoint.facts)}
    write_whole(partial / _INDEX, json.dumps({**body, "sha256": _digest(body)}, indent=1).encode())
    if final_path.exists():
        _remove(final_path)
    partial.rename(final_path)
    flush_folder(folder)
    found = checkpoints(folder)
    place = found.index(final_path)
    for other in (*found[: max(0, place + 1 - keep)], *found[place + 1 :]):
        _remove(other)
    return final_path


def _remove(path: Path) -> None:
    """Remove a checkpoint, first its name: a kill in between leaves no half of one under it."""
    hidden = path.with_name(f"{_PARTIAL}removed-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below a folder, oldest first.

    >>> checkpoints(Path("no-such-folder"))
    []
    """
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint back, every byte checked.

    Raises:
        InvalidInput: a file is missing, truncated or altered; the reason, and the checkpoint before it if there is one.
    """
    try:
        return _loaded(path)
    except _UNREADABLE as error:
        before = [other for other in checkpoints(path.parent) if other.name < path.name]
        offer = f" The one before it, {before[-1]}, may be whole: resume from that." if before else ""
        reason = f"{error!r} in it" if isinstance(error, LookupError) else str(error).rstrip(".")
        raise InvalidInput(f"The checkpoint {path} cannot be used: {reason}.{offer}") from error


def _loaded(path: Path) -> Checkpoint:
    content = json.loads((path / _INDEX).read_bytes())
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{_INDEX} was altered")
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']}, this version of curvcert reads {FORMAT}")
    step, facts = content["step"], content["facts"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 0 or not isinstance(facts, dict):
        raise ValueError(f"{_INDEX} needs a step, a whole number, and facts, a table; got {step!r:.40}, {facts!r:.40}")
    pieces: dict[str, Tensor] = {}
    for shard in content["shards"]:
        file = path / Path(shard["file"]).name
        found = file.stat().st_size
        if found != shard["bytes"]:
            raise ValueError(f"{file.name} has {found} bytes, expected {shard['bytes']}")
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != shard["sha256"]:
            raise ValueError(f"{file.name} was altered, its SHA-256 is not the one that was written")
        pieces |= load(data)
    tensors = {key: _joined(key, about, pieces) for key, about in content["tensors"].items()}
    return Checkpoint(step, tensors, facts)


def _description(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "pieces": len(list(_pieces(tensor)))}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into flat pieces that fit into a shard."""
    flat = tensor.detach().to("cpu").reshape(-1)
    size = max(1, (SHARD_BYTES - _HEADER_ROOM) // max(1, flat.element_size()))
    yield from flat.split(size) if flat.numel() else (flat,)


def _joined(key: str, about: Mapping[str, Any], pieces: Mapping[str, Tensor]) -> Tensor:
    parts = [pieces[f"{key}#{number}"] for number in range(about["pieces"])]
    return torch.cat(parts).reshape(about["shape"])


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Yield safetensors files of at most SHARD_BYTES each."""
    held: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors.items():
        for number, piece in enumerate(_pieces(tensor)):
            taken = piece.numel() * piece.element_size() + len(key) + 128
            if held and size + taken > SHARD_BYTES:
                yield save(held)
                held, size = {}, 0
            held[f"{key}#{number}"] = piece.clone()
            size += taken
    yield save(held)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
