"""The record of a measurement: what ran, where, with which versions and seed, and what it gave.

Free of torch, so that a record can be read anywhere.  A record is one JSON file under `results/`.
"""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from curvcert.errors import InvalidInput
from curvcert.whole_files import write_whole

SCHEMA = 1
MEASURED_PACKAGES = ("curvcert", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class Record:
    """One measurement: `figures` are its numbers, everything else is what it takes to run it again.

    `created` is a date (ISO 8601), `hardware` describes the machine and never names it.

    >>> record = Record("norms", "make bench", "2024-07-21", {"torch": "2.13.0"}, {"cores": 2}, 0)
    >>> Record.from_json(record.to_json()) == record
    True
    """

    name: str
    command: str
    created: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in fields(self):
            _validate(part.name, getattr(self, part.name))

    def to_json(self) -> str:
        """Return the record as JSON text, with the number of its schema."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> "Record":
        """Return the record that the JSON text holds; `source` is what errors call it.

        Raises:
            InvalidInput: if the text is not a record of this schema.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"A record is JSON, {source} is not: {error}.") from None
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise InvalidInput(f"Expected a record of schema {SCHEMA}, {source} is not one.")
        expected = {part.name for part in fields(cls)}
        if set(content) != expected:
            wrong = ", ".join(sorted(set(content) ^ expected))
            raise InvalidInput(f"The record in {source} has missing or unknown fields: {wrong}.")
        return cls(**content)

    def write(self, path: Path | str) -> Path:
        """Write the record as JSON, making the folder if need be, and return the path."""
        return write_whole(path, self.to_json())

    @classmethod
    def read(cls, path: Path | str) -> "Record":
        """Return the record in a file, validated.

        Raises:
            InvalidInput: if the file is not a record of this schema.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"), str(path))


def record_of_this_run(
    name: str, command: str, seed: int, config: Mapping[str, Any], figures: Mapping[str, Any]
) -> Record:
    """Return a record with today's date and the versions and the hardware of this process.

    >>> sorted(record_of_this_run("norms", "make bench", 0, {}, {"ratio": 1.5}).hardware)
    ['cores', 'cpu', 'machine']
    """
    today = datetime.now(UTC).date().isoformat()
    return Record(name, command, today, versions(), hardware(), seed, dict(config), dict(figures))


def versions(packages: tuple[str, ...] = MEASURED_PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed.

    >>> versions(("torch", "no-such-package")).keys() == {"python", "torch"}
    True
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return the processor's model, its architecture and the number of cores; no host name.

    >>> sorted(hardware())
    ['cores', 'cpu', 'machine']
    """
    return {"cpu": _cpu_model(), "machine": platform.machine(), "cores": os.cpu_count() or 1}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


_TYPES: dict[str, type] = {
    "name": str,
    "command": str,
    "created": str,
    "versions": dict,
    "hardware": dict,
    "seed": int,
    "config": dict,
    "figures": dict,
}


def _validate(name: str, value: object) -> None:
    if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
        raise InvalidInput(f"A record's {name} is of type {_TYPES[name].__name__}, got {type(value).__name__}.")
    if name in ("name", "command") and not value:
        raise InvalidInput(f"A record's {name} must not be empty: it says how to run it again.")
    if name == "created":
        _validate_date(str(value))
    _validate_json(name, value)


def _validate_date(value: str) -> None:
    try:
        date.fromisoformat(value)
    except ValueError:
        raise InvalidInput(f"A record's date is written YYYY-MM-DD, got {value!r}.") from None


def _validate_json(where: str, value: object) -> None:
    match value:
        case str() | bool() | int() | None:
            return
        case float():
            if not math.isfinite(value):
                raise InvalidInput(f"{where} is {value}: a record holds finite numbers. Leave it out or use null.")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidInput(f"{where} has the key {key!r}: keys of a record are strings.")
                _validate_json(f"{where}.{key}", item)
        case list():
            for index, item in enumerate(value):
                _validate_json(f"{where}[{index}]", item)
        case _:
            raise InvalidInput(
                f"{where} is of type {type(value).__name__}: a record holds what JSON can: "
                "strings, numbers, lists, dictionaries."
            )
