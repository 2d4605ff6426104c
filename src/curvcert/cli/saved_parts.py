"""A certification in parts, each saved whole as soon as it is computed: stopped at any moment, it can go on.

Several processes may share one: each computes its parts, and a part that two of them compute is written twice under
one name, whole each time.  So none is lost, and none is counted twice.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from curvcert.attacks import Attack
from curvcert.certificates import Certificate, load_certificate
from curvcert.certificates.evidence import input_digests
from curvcert.cli.inputs import Inputs
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from curvcert.whole_files import make_folder, require_no_link, write_whole

SEARCH, SEARCH_VERSION = "curvcert-search", 1


@final
@dataclass(frozen=True)
class Plan:
    """Everything that decides what the parts of a certification hold; two of them agree, or are not mixed."""

    curvcert: str
    network: str
    inputs: str
    labels: str
    samples: int
    part_size: int
    options: dict[str, Any]

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """Name the first field in which a saved plan is another one, or None."""
        mine = json.loads(json.dumps(asdict(self)))
        for field in fields(self):
            if field.name != "options" and mine[field.name] != other.get(field.name):
                return f"{field.name} (now {_short(mine[field.name])}, then {_short(other.get(field.name))})"
        theirs = other.get("options")
        then = theirs if isinstance(theirs, dict) else {}
        names = sorted(mine["options"].keys() | then.keys())
        changed = (name for name in names if mine["options"].get(name) != then.get(name))
        name = next(changed, None)
        return name and f"{name} (now {_short(mine['options'].get(name))}, then {_short(then.get(name))})"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def digest_of(values: Tensor) -> str:
    """Return the SHA-256 of a tensor's shape and bytes.

    >>> digest_of(torch.zeros(2))[:8]
    '0642023a'
    """
    array = np.ascontiguousarray(values.cpu().numpy())
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(f"{list(array.shape)}".encode() + little.tobytes()).hexdigest()


@final
@dataclass(frozen=True, eq=False)
class SavedParts:
    """The folder of a certification in parts."""

    folder: Path
    plan: Plan
    inputs: Inputs

    def open(self, resume: bool) -> None:
        """Make the folder ready, or raise: it cannot be written, or holds another run, or one to be resumed.

        A plan of which no part was computed may be replaced.
        """
        path = self.folder / "plan.json"
        make_folder(self.folder.parent)
        make_folder(self.folder)
        require_no_link(self.folder)
        if not any(self.folder.glob("part-*.safetensors")):
            write_whole(path, json.dumps(asdict(self.plan), indent=1))
            return
        saved = path.read_bytes() if path.exists() else b""
        if not resume:
            raise InvalidInput(
                f"{self.folder.parent} already holds a certification. Go on with it by --resume, or choose another "
                "folder."
            )
        self._require_same(path, saved)

    def opened(self) -> bool:
        """Whether the folder is open for this plan; raise if it holds parts of another one."""
        path = self.folder / "plan.json"
        try:
            saved = path.read_bytes()
        except OSError:
            return False
        try:
            self._require_same(path, saved)
        except InvalidInput:
            if any(self.folder.glob("part-*.safetensors")):
                raise
            return False  # it may still be replaced
        return True

    def _require_same(self, path: Path, saved: bytes) -> None:
        try:
            content = json.loads(saved)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise InvalidFile(f"{path} is damaged. Remove {self.folder} to start afresh.")
        difference = self.plan.difference(content)
        if difference is not None:
            raise InvalidInput(
                f"{self.folder.parent} holds another certification, which differs in {difference}. Choose another "
                "folder, or repeat the options of that run."
            )

    def owner(self, part: slice, ranks: int) -> int:
        """Return which of so many ranks computes a part."""
        return int(part.start // self.plan.part_size) % ranks

    def __iter__(self) -> Iterator[slice]:
        size = self.plan.part_size
        return (slice(start, min(start + size, len(self.inputs))) for start in range(0, len(self.inputs), size))

    def certificate_path(self, part: slice) -> Path:
        """The file of one part's certificate; its name tells the range and the plan."""
        return self.folder / f"part-{self._name(part)}.safetensors"

    def search_path(self, part: slice) -> Path:
        """The file of the points that a search found for one part."""
        return self.folder / f"search-{self._name(part)}.safetensors"

    def _name(self, part: slice) -> str:
        return f"{part.start:07d}-{part.stop:07d}-{self.plan.digest[:16]}"

    def save(self, part: slice, certificate: Certificate, attack: Attack | None) -> tuple[Certificate, Attack | None]:
        """Write a part, its certificate last, so that where that is all of it is; return what the files hold."""
        if attack is not None:
            arrays = {"points": attack.points.cpu().numpy().astype("<f8")}
            write_tensor_file(self.search_path(part), SEARCH, SEARCH_VERSION, {"samples": len(attack.points)}, arrays)
        return certificate.save(self.certificate_path(part)), attack

    def load(self, part: slice) -> tuple[Certificate, Attack | None] | None:
        """Return a part that was computed before, or None if there is none.

        Raises:
            InvalidFile: if it is damaged, or not of this network, these inputs and these labels.
        """
        path = self.certificate_path(part)
        if not path.exists():
            return None
        certificate = load_certificate(path)
        x, y = self.inputs.x[part], self.inputs.y[part]
        evidence = certificate.evidence
        same = (
            evidence is not None
            and evidence.network == self.plan.network
            and torch.equal(certificate.label, y)
            and torch.equal(evidence.inputs, input_digests(x))
            and certificate.p == float(self.plan.options["p"])
        )
        if not same:
            raise InvalidFile(f"{path} is about another network, other inputs or other labels.")
        return certificate, self._load_search(part, x) if self.plan.options["search"] else None

    def _load_search(self, part: slice, x: Tensor) -> Attack:
        path = self.search_path(part)
        _, arrays = read_tensor_file(path, SEARCH, SEARCH_VERSION)
        points = arrays.get("points")
        if points is None or points.shape != tuple(x.shape) or points.dtype != np.float64:
            raise InvalidFile(f"{path} does not hold one point per sample.")
        tensor = torch.from_numpy(np.array(points))
        return Attack(tensor.flatten(1).isfinite().all(dim=1), tensor)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}..."
