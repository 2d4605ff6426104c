"""Kept weights: a folder of models in float16, each with its digest, so that anybody can certify them again.

RESULTS/weights holds NAME.safetensors for every model that is small enough, and digests.json: for every model, the
larger ones too, the SHA-256 of its file, the records that were measured on it, and the command that certifies it.  A
network beside its mirror image has the weights of that network: `mirror_of` names it, and its file is there once.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from curvcert.errors import InvalidFile, InvalidInput
from curvcert.training.model_file import finished, load_trained, model_content
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
    facts = _facts(results, name)
    network, recipe = load_trained(_kept_file(results, facts))
    if "mirror_of" in facts:
        recipe = replace(recipe, mirror=True)
        _require_digest(_mirrored(network, recipe), facts["sha256"], name)
    return finished(network, recipe), recipe


def kept_content(results: Path | str, name: str) -> bytes:
    """Return the bytes of a kept model's file as it was measured: of a mirrored one, made from the file it shares.

    Raises:
        InvalidInput, InvalidFile: as `load_kept`.
    """
    facts = _facts(results, name)
    path = _kept_file(results, facts)
    if "mirror_of" not in facts:
        return path.read_bytes()
    network, recipe = load_trained(path)
    return _require_digest(_mirrored(network, replace(recipe, mirror=True)), facts["sha256"], name)


def _facts(results: Path | str, name: str) -> dict[str, Any]:
    """Return what is told of a model, with its file's digest as `file_sha256`."""
    digests = read_digests(results)
    if name not in digests:
        known = ", ".join(digests) or "none"
        raise InvalidInput(f"{Path(results) / FOLDER} has no model {name!r}. There are: {known}.")
    facts = digests[name]
    if facts["file"] is None:
        raise InvalidInput(f"The weights of {name} are not kept: {facts['why']}.")
    return {**facts, "file_sha256": digests[facts.get("mirror_of", name)]["sha256"]}


def _kept_file(results: Path | str, facts: Mapping[str, Any]) -> Path:
    path = Path(results) / str(facts["file"])
    if not path.is_file():
        raise InvalidFile(f"{path} is missing. Get it anew.")
    _require_digest(path.read_bytes(), facts["file_sha256"], str(path))
    return path


def _mirrored(network: nn.Sequential, recipe: Recipe) -> bytes:
    """Return the file of a network beside its mirror image: the same weights, in float16, and another recipe."""
    return model_content(copy.deepcopy(network).half(), recipe)


def _require_digest(content: bytes, sha256: str, name: str) -> bytes:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InvalidFile(f"{name} is altered: its SHA-256 is not {sha256}. Get it anew.")
    return content
