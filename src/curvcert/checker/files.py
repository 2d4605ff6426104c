"""The checker's own reader of safetensors files: a length, a JSON header, and bytes.  Nothing is executed.

Sizes are checked before anything is parsed or allocated; whatever is wrong raises `InvalidFile` with the reason.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from curvcert.errors import InvalidFile

LARGEST_HEADER = 2**24
LARGEST_FILE = 2**31
_MOST_VALUES = 2**20
_DEEPEST = 200
"""Bounds on the values in a header, each of which takes some hundred bytes when it is parsed, and on nesting."""

_TYPES = {"F64": "<f8", "I64": "<i8", "BOOL": "|b1", "U8": "|u1"}


@dataclass(frozen=True, eq=False)
class Content:
    """What a file holds: its own header and named arrays, the seal checked."""

    path: str
    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that names the file."""
        raise InvalidFile(f"{self.path}: {why}.")

    def array(self, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Return an array of that type and shape, or refuse the file."""
        value = self.arrays.get(name)
        if value is None:
            self.refuse(f"the array {name!r} is missing")
        if value.dtype.str != dtype or (shape is not None and value.shape != shape):
            self.refuse(f"the array {name!r} is {value.dtype.str} of shape {value.shape}, not {dtype} of {shape}")
        return value

    def field(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return a header field of that type, or refuse the file."""
        value = self.header.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(f"the header field {name!r} is missing or of the wrong type")
        return value


def read(path: Path | str, kind: str, version: int) -> Content:
    """Read a file of one kind and version.

    Raises:
        InvalidFile: if it is anything else, cut short or altered.
    """
    place = Path(path)
    if not place.is_file():
        raise InvalidFile(f"There is no file {path}.")
    if place.stat().st_size > LARGEST_FILE:
        raise InvalidFile(f"{path} has more than {LARGEST_FILE} bytes.")
    raw = place.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > LARGEST_HEADER or 8 + size > len(raw):
        raise InvalidFile(f"{path} is cut short, or its header of {size} bytes is oversized.")
    entries = parsed(path, raw[8 : 8 + size])
    metadata = entries.pop("__metadata__", None)
    keys = {"kind", "version", "header", "seal"}
    if not isinstance(metadata, dict) or set(metadata) != keys or not all(map(_is_text, metadata.values())):
        raise InvalidFile(f"{path} is not a file of curvcert: its metadata are not {sorted(keys)}.")
    if metadata["kind"] != kind or metadata["version"] != str(version):
        got = f"{metadata['kind'][:40]} {metadata['version'][:20]}"
        newer = metadata["version"][:20].isdecimal() and int(metadata["version"][:20]) > version
        remedy = "It is newer: update curvcert" if newer else "It is older: save it again, and certify again"
        raise InvalidFile(f"{path} is a {got}, expected was {kind} {version}. {remedy}.")
    arrays = _arrays(path, entries, memoryview(raw)[8 + size :])
    if metadata["seal"] != _seal(kind, version, metadata["header"], arrays):
        raise InvalidFile(f"{path} was altered: its seal does not match its content.")
    return Content(str(path), parsed(path, metadata["header"]), arrays)


def parsed(path: Path | str, text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object: no NaN, no infinity, no name twice, neither too deep nor too long."""
    _require_modest(path, text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"A header of {path} is not proper JSON: {str(error)[:200]}.") from None
    if not isinstance(content, dict):
        raise InvalidFile(f"A header of {path} is not a JSON object.")
    return content


def _require_modest(path: Path | str, text: bytes) -> None:
    """Refuse what would take much memory, or much of the stack, before any of it is parsed."""
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise InvalidFile(f"A header of {path} holds up to {values} values, the limit is {_MOST_VALUES}.")
    plain = re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", text)
    marks = np.frombuffer(re.sub(rb"[^][{}]", b"", plain), np.uint8)
    opened = (marks == ord("[")) | (marks == ord("{"))
    deepest = int(np.cumsum(np.where(opened, 1, -1)).max(initial=0))
    if deepest > _DEEPEST:
        raise InvalidFile(f"A header of {path} is nested {deepest} deep, the limit is {_DEEPEST}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _arrays(path: Path | str, entries: dict[str, Any], body: memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays, which must fill the body without a gap or an overlap."""
    found: dict[str, NDArray[Any]] = {}
    spans = []
    for name, entry in entries.items():
        dtype, shape, (start, stop) = _entry(path, name, entry)
        if stop > len(body) or math.prod(shape) * np.dtype(dtype).itemsize != stop - start:
            raise InvalidFile(f"{path}: the array {name[:40]!r} does not fit its place in the file.")
        spans.append((start, stop))
        found[name] = np.frombuffer(body[start:stop], dtype).reshape(shape)
    reached = 0
    for start, stop in sorted(spans):
        if start != reached:
            raise InvalidFile(f"{path}: its arrays overlap or leave gaps.")
        reached = stop
    if reached != len(body):
        raise InvalidFile(f"{path}: {len(body) - reached} bytes belong to no array.")
    return found


def _entry(path: Path | str, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}:
        shape, offsets = entry["shape"], entry["data_offsets"]
        dtype = _TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        counted = _counts(shape, 8) and _counts(offsets, 2) and len(offsets) == 2
        if dtype is not None and counted and offsets[0] <= offsets[1]:
            return dtype, tuple(shape), (offsets[0], offsets[1])
    raise InvalidFile(f"{path}: the entry of {name[:40]!r} is not that of an array that a file of curvcert holds.")


def _counts(value: Any, most: int) -> bool:
    whole = isinstance(value, list) and len(value) <= most
    return whole and all(type(item) is int and 0 <= item <= LARGEST_FILE for item in value)


def _seal(kind: str, version: int, header: str, arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(f"{kind} {version}\n{header}\n".encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype.str} {list(value.shape)}\n".encode("utf-8", "surrogatepass"))
        digest.update(value.data)
    return digest.hexdigest()
