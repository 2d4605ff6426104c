"""Kept weights: a folder of models in float16, each with its digest, so that anybody can certify them again.

RESULTS/weights holds NAME.safetensors for every model that is small enough, and digests.json: for every model, the
larger ones too, the SHA-256 of its file, the records that were measured on it, and the command that certifies it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from curvcert.errors import InvalidFile, InvalidInput
from curvcert.training.model_file import load_model
from curvcert.training.recipe import Recipe

FOLDER, DIGESTS = "weights", "digests.json"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "empty"
    ...     _ = path.write_bytes(b"")
    ...     file_digest(path)[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_digests(results: Path | str) -> dict[str, dict[str, Any]]:
    """Return what RESULTS/weights/digests.json tells of every model; nothing where there is none.

    >>> read_digests("no-such-folder")
    {}

    Raises:
        InvalidFile: if the file is damaged.
    """
    path = Path(results) / FOLDER / DIGESTS
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidFile(f"{path} is not JSON: {error}. Get it anew.") from None
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise InvalidFile(f"{path} holds no models with their digests. Get it anew.")
    return content


def load_kept(results: Path | str, name: str) -> tuple[nn.Module, Recipe]:
    """Return a model of RESULTS/weights in eval mode, and its recipe, once its file has the digest that was recorded.

    Raises:
        InvalidInput: if there is no such model, or its weights are not kept.
        InvalidFile: if the file is not the one that was measured.
    """
    results = Path(results)
    digests = read_digests(results)
    if name not in digests:
        raise InvalidInput(f"{results / FOLDER} has no model {name!r}. There are: {', '.join(digests) or 'none'}.")
    facts = digests[name]
    if facts["file"] is None:
        raise InvalidInput(f"The weights of {name} are not kept: {facts['why']}.")
    path = results / facts["file"]
    if not path.is_file() or file_digest(path) != facts["sha256"]:
        raise InvalidFile(f"{path} is missing or altered: its SHA-256 is not {facts['sha256']}. Get it anew.")
    return load_model(path)
