"""Files of torch.save, by torch's weights-only reader: tensors in plain containers, and never code."""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from curvcert.errors import InvalidFile

LARGEST = 2**33
_ALWAYS, _UNFOLDED = 2**16, 16
"""Entries that the values of a file may have, each counted as often as it is held: always, and for each operation."""

_PLAIN = re.compile(
    r"collections (OrderedDict|Counter)|(builtins|__builtin__) set|torch\._utils _rebuild_(parameter|tensor_v2)"
    r"|torch (\w+Storage|Size|device|b?float\w+|u?int\d+|complex\d+|bool)"
)
"""What files of tensors name.  torch's reader calls more: a bytearray or a storage of any size, and encoders."""

_CALLS = {"REDUCE", "NEWOBJ"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}


def read_torch_file(path: Path) -> Any:
    """Return what a file holds, on the processor.

    Tensors are mapped from the file, not copied: a record that promises more than it holds can then reach no memory
    but the file's own, and nothing is unpacked before its size is known.

    Raises:
        InvalidFile: if it is no archive of torch.save, holds packed records or more than tensors in containers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise InvalidFile(f"{path} has packed records, which torch.save never writes.")
        size = path.stat().st_size
        if size > LARGEST:
            raise InvalidFile(f"{path} is larger than {LARGEST} bytes. Split it into several files.")
        if sum(part.file_size for part in parts) > size:
            raise InvalidFile(f"{path} promises more bytes than it holds.")
        # By torch's own reader of archives: of a forged one another reader may see another record.
        _require_plain(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except InvalidFile:
        raise
    except Exception as error:  # whatever a damaged archive makes zipfile, pickle or torch raise
        reason = str(error).split("\n")[0][:200].rstrip(".") or type(error).__name__
        raise InvalidFile(
            f"{path} is not a file of tensors by torch.save: {reason}. Only tensors in lists, tuples and dicts are "
            "read, and no code."
        ) from error


def _require_plain(pickled: bytes) -> None:
    """Raise if a pickle names more than tensors need, or holds what is large by holding others many times.

    A key is hashed and a faulty part is shown entry by entry, and all that is in it again each time: a few hundred
    bytes, in which each tuple or list holds the one before twice, would take for ever.
    """
    named: list[Any] = []
    stack: list[Any] = []  # each value is the list of those that it holds; None is a mark
    memo: dict[Any, Any] = {}
    operations = 0
    for code, argument, _ in pickletools.genops(pickled):
        operations += 1
        if code.name == "GLOBAL" and not _PLAIN.fullmatch(str(argument)):
            raise ValueError(f"it names {argument!r:.80}")
        if code.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code.name in ("BINGET", "LONG_BINGET", "GLOBAL"):
            stack.append(named if code.name == "GLOBAL" else memo[argument])
        elif code.name != "STOP":
            held = _popped(stack, code.stack_before)
            if code.name in _CALLS and held[0] is not named:
                raise ValueError("it calls what has no name")
            if code.name in _FILLS:
                held[0].extend(held[1:])
                held = held[0]
            stack.extend(None if kind is pickletools.markobject else held for kind in code.stack_after)
    _require_moderate([*stack, *memo.values()], _ALWAYS + _UNFOLDED * operations)


def _popped(stack: list[Any], taken: list[Any]) -> list[Any]:
    """Take from the stack what an operation takes, and return it in order, without the mark."""
    marked = pickletools.markobject in taken
    place = len(stack) - 1 - stack[::-1].index(None) if marked else len(stack)
    first = place - (taken.index(pickletools.markobject) if marked else len(taken))
    held = stack[first:place] + stack[place + 1 :]
    if first < 0 or None in held:
        raise ValueError("it takes what is not there")
    del stack[first:]
    return held


def _require_moderate(values: list[Any], most: int) -> None:
    """Raise if values that hold each other have too many entries, each counted as often as it is held."""
    while values:
        most -= 1 + len(values[-1] or ())
        if most < 0:
            raise ValueError("it holds the same values too many times")
        values.extend(values.pop() or ())
