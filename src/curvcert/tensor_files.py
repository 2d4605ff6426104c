"""Files of named arrays with a JSON header: safetensors, sealed by a digest, written whole or not at all.

Nothing in such a file is code.  A file is refused, by a named error, if it is cut short, if its header is too
large to parse with care, or if its seal, the SHA-256 of header and arrays, does not match.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from curvcert.errors import InvalidFile
from curvcert.whole_files import write_whole

LARGEST_HEADER = 2**24
LARGEST_FILE = 2**31
"""Bytes; larger ones are refused before they are read."""

_MOST_VALUES = 2**20
"""In a header: each takes some hundred bytes when it is parsed."""

Arrays = dict[str, NDArray[Any]]

_TYPES = {"<f8": "F64", "<f4": "F32", "<i8": "I64", "|b1": "BOOL", "|u1": "U8"}


def write_tensor_file(path: Path | str, kind: str, version: int, header: Mapping[str, Any], arrays: Arrays) -> Path:
    """Write a file of one kind and version, whole or not at all.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = write_tensor_file(f"{folder}/file", "example", 1, {"answer": 42}, {"zeros": np.zeros(2)})
    ...     read_tensor_file(path, "example", 1)
    ({'answer': 42}, {'zeros': array([0., 0.])})
    """
    path = Path(path)
    text = json.dumps(header, sort_keys=True, allow_nan=False)
    little = {name: np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<")) for name in sorted(arrays)}
    metadata = {"kind": kind, "version": str(version), "header": text, "seal": seal(kind, version, text, little)}
    content = safetensors_content(metadata, little)
    if len(content) > LARGEST_FILE:
        raise InvalidFile(f"{path} would take {len(content)} bytes, the limit is {LARGEST_FILE}. Save it in parts.")
    return write_whole(path, content)


def read_tensor_file(path: Path | str, kind: str, version: int) -> tuple[dict[str, Any], Arrays]:
    """Return the header and the arrays of a file of one kind and version.

    Raises:
        InvalidFile: if it is anything else, cut short or altered.
    """
    content = _content(Path(path))
    metadata = _metadata(path, content)
    if metadata.get("kind") != kind:
        raise InvalidFile(f"{path} is not a {kind} file: its kind is {str(metadata.get('kind'))[:40]!r}.")
    if metadata.get("version") != str(version):
        got = str(metadata.get("version"))[:40]
        newer = got.isdecimal() and int(got) > version
        remedy = "It is newer: update curvcert" if newer else "It is older: save it again, and certify again"
        raise InvalidFile(f"{path} has version {got!r}, this curvcert reads {version}. {remedy}.")
    try:
        arrays = load_arrays(content)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InvalidFile(f"{path} is not a whole safetensors file: {error}.") from None
    text = metadata.get("header", "")
    if metadata.get("seal") != seal(kind, version, text, arrays):
        raise InvalidFile(f"{path} was altered: its seal does not match its content. Fetch or make it again.")
    header = _parsed(path, text)
    return header, arrays


def seal(kind: str, version: int, header: str, arrays: Arrays) -> str:
    """Return the SHA-256 of a file's kind, version, header and arrays, in hexadecimal.

    >>> seal("example", 1, "{}", {})[:16]
    '08d9c77cad7ea522'
    """
    digest = hashlib.sha256(f"{kind} {version}\n{header}\n".encode())
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype.str} {list(value.shape)}\n".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def safetensors_content(metadata: dict[str, str], arrays: Arrays) -> bytes:
    """Return the bytes of a safetensors file: the same for the same content, which the library does not promise."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    reached = 0
    for name, value in arrays.items():
        stop = reached + value.nbytes
        entries[name] = {"dtype": _TYPES[value.dtype.str], "shape": list(value.shape), "data_offsets": [reached, stop]}
        reached = stop
    header = json.dumps(entries, sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *(value.tobytes() for value in arrays.values())])


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise InvalidFile(f"There is no file {path}.")
    if path.stat().st_size > LARGEST_FILE:
        raise InvalidFile(f"{path} has {path.stat().st_size} bytes, the limit is {LARGEST_FILE}.")
    return path.read_bytes()


def _metadata(path: Path | str, content: bytes) -> dict[str, str]:
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > LARGEST_HEADER or size > len(content) - 8:
        raise InvalidFile(f"{path} is cut short or its header is oversized: {size} bytes of {len(content)}.")
    metadata = _parsed(path, content[8 : 8 + size]).get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFile(f"{path} has metadata that are not strings.")
    return metadata


def _parsed(path: Path | str, text: str | bytes) -> dict[str, Any]:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise InvalidFile(f"The header of {path} holds up to {values} values, the limit is {_MOST_VALUES}.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"The header of {path} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidFile(f"The header of {path} is not a JSON object.")
    return content
