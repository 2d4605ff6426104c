"""Files of torch.save, by torch's weights-only reader: tensors in plain containers, and never code."""

import zipfile
from pathlib import Path
from typing import Any

import torch

from curvcert.errors import InvalidFile

LARGEST = 2**33


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
        if max(path.stat().st_size, sum(part.file_size for part in parts)) > LARGEST:
            raise InvalidFile(f"{path} is larger than {LARGEST} bytes. Split it into several files.")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except InvalidFile:
        raise
    except Exception as error:  # whatever a damaged archive makes zipfile, pickle or torch raise
        reason = str(error).split("\n")[0][:200].rstrip(".") or type(error).__name__
        raise InvalidFile(
            f"{path} is not a file of tensors by torch.save: {reason}. Only tensors in lists, tuples and dicts are "
            "read, and no code."
        ) from error
