"""The weights behind the records: in float16, named, with their digests, so that anybody can certify them again.

RESULTS/weights holds NAME.safetensors for every model below 5 MB, and digests.json: for every model, the larger ones
too, the SHA-256 of its file, the records that were measured on it, and the command that certifies it again.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from curvcert.errors import InvalidFile, InvalidInput
from curvcert.experiments.experiment import RADII
from curvcert.experiments.models import ROUNDED, model_folder
from curvcert.training import Recipe, load_model
from curvcert.whole_files import write_whole

FOLDER, DIGESTS = "weights", "digests.json"
KEPT_BELOW = 5_000_000
"""Bytes; larger files are told by their digest alone."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "empty"
    ...     _ = path.write_bytes(b"")
    ...     digest(path)[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def described(models: Mapping[str, Recipe], out: Path) -> dict[str, dict[str, Any]]:
    """Return what a record says of its models' weights: their digests, and where the files are kept, or why not.

    Raises:
        InvalidInput: if OUT/models does not have them.
    """
    return {name: _described(name, model_folder(recipe, out) / ROUNDED) for name, recipe in models.items()}


def are_there(models: Mapping[str, Recipe], out: Path) -> bool:
    """Tell whether OUT/models has the weights of all these models."""
    return all((model_folder(recipe, out) / ROUNDED).is_file() for recipe in models.values())


def _described(name: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidInput(f"The weights that were measured are not in {path}. Put the file there, or measure again.")
    size = path.stat().st_size
    facts = {"sha256": digest(path), "bytes": size}
    if size < KEPT_BELOW:
        return {**facts, "file": f"{FOLDER}/{name}.safetensors"}
    why = f"{size / 1e6:.1f} MB, and {KEPT_BELOW / 1e6:g} MB is the most that is kept: its command trains it again"
    return {**facts, "file": None, "why": why}


def keep_weights(
    record: str, weights: Mapping[str, Mapping[str, Any]], models: Mapping[str, Recipe], out: Path, results: Path
) -> None:
    """Copy the small weights of a record to RESULTS/weights, and write what is told of all of them.

    Raises:
        InvalidInput: if another record was measured on other weights of the same name, or the file is not in OUT.
    """
    digests = read_digests(results)
    for name, facts in weights.items():
        known = digests.get(name, {"sha256": facts["sha256"], "records": []})
        others = [other for other in known["records"] if other != record]
        if known["sha256"] != facts["sha256"] and others:
            raise InvalidInput(
                f"{results} has records of other weights {name}: {', '.join(others)}. Make them again, or remove them "
                f"and their weights from {results}."
            )
        if facts["file"] is not None:
            _copy(model_folder(models[name], out) / ROUNDED, results / facts["file"], facts["sha256"])
        told = {"records": sorted({*others, record}), "certify": _certify_command(name, facts, models[name])}
        digests[name] = {**facts, **told, "place": f"OUT/{(model_folder(models[name], Path()) / ROUNDED).as_posix()}"}
    if weights:
        text = json.dumps(dict(sorted(digests.items())), indent=2) + "\n"
        write_whole(results / FOLDER / DIGESTS, text)


def _copy(path: Path, to: Path, sha256: str) -> None:
    if to.is_file() and digest(to) == sha256:
        return
    if not path.is_file() or digest(path) != sha256:
        raise InvalidInput(f"{path} is missing, or is not the file that was measured, SHA-256 {sha256}. Put it there.")
    write_whole(to, path.read_bytes())


def _certify_command(name: str, facts: Mapping[str, Any], recipe: Recipe) -> str | None:
    if facts["file"] is None:
        return None
    radii = ",".join(RADII)
    return f"curvcert certify results/{facts['file']} {recipe.data} --eps {radii} --out runs/{name}"


def read_digests(results: Path) -> dict[str, dict[str, Any]]:
    """Return what RESULTS/weights/digests.json tells of every model; nothing where there is none.

    >>> read_digests(Path("no-such-folder"))
    {}
    """
    path = results / FOLDER / DIGESTS
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
    if not path.is_file() or digest(path) != facts["sha256"]:
        raise InvalidFile(f"{path} is missing or altered: its SHA-256 is not {facts['sha256']}. Get it anew.")
    return load_model(path)
