"""Keeping the weights behind the records, for `curvcert.training.kept` to read: those of models below 5 MB."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reproduce.experiment import RADII
from benchmarks.reproduce.models import ROUNDED, model_folder
from curvcert.errors import InvalidInput
from curvcert.training import Recipe, read_digests
from curvcert.training.kept import DIGESTS, FOLDER, file_digest
from curvcert.whole_files import write_whole

KEPT_BELOW = 5_000_000
"""Bytes; larger files are told by their digest alone."""


def described(models: Mapping[str, Recipe], out: Path) -> dict[str, dict[str, Any]]:
    """Return what a record says of its models' weights: their digests, and where the files are kept, or why not.

    Raises:
        InvalidInput: if OUT/models does not have them.
    """
    return {name: _described(name, recipe, model_folder(recipe, out) / ROUNDED) for name, recipe in models.items()}


def are_there(models: Mapping[str, Recipe], out: Path) -> bool:
    """Whether OUT/models has the weights of all these models."""
    return all((model_folder(recipe, out) / ROUNDED).is_file() for recipe in models.values())


def _described(name: str, recipe: Recipe, path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidInput(f"The weights that were measured are not in {path}. Put the file there, or measure again.")
    size = path.stat().st_size
    facts = {"sha256": file_digest(path), "bytes": size}
    if recipe.mirror and size < KEPT_BELOW:  # the weights are those of the network alone
        alone = name.replace("-mirror", "")
        return {**facts, "file": f"{FOLDER}/{alone}.safetensors", "mirror_of": alone}
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
        if facts.get("mirror_of", name) not in {name, *digests}:
            raise InvalidInput(f"{name} has the weights of {facts['mirror_of']}. Keep a record of that network first.")
        if facts["file"] is not None and "mirror_of" not in facts:
            _copy(model_folder(models[name], out) / ROUNDED, results / facts["file"], facts["sha256"])
        told = {"records": sorted({*others, record}), **_commands(name, facts, models[name])}
        digests[name] = {**facts, **told, "place": f"OUT/{(model_folder(models[name], Path()) / ROUNDED).as_posix()}"}
    if weights:
        text = json.dumps(dict(sorted(digests.items())), indent=2) + "\n"
        write_whole(results / FOLDER / DIGESTS, text)


def _copy(path: Path, to: Path, sha256: str) -> None:
    if to.is_file() and file_digest(to) == sha256:
        return
    if not path.is_file() or file_digest(path) != sha256:
        raise InvalidInput(f"{path} is missing, or is not the file that was measured, SHA-256 {sha256}. Put it there.")
    write_whole(to, path.read_bytes())


def _commands(name: str, facts: Mapping[str, Any], recipe: Recipe) -> dict[str, str | None]:
    """Return the command that certifies a network again, and the one that makes its file where that is shared."""
    if facts["file"] is None:
        return {"certify": None}
    shared, own = "mirror_of" in facts, f"runs/{name}.safetensors"
    file, radii = own if shared else f"results/{facts['file']}", ",".join(RADII)
    certify = {"certify": f"curvcert certify {file} {recipe.data} --eps {radii} --out runs/{name}"}
    return {"make": f"python -m benchmarks weights {name} {own}", **certify} if shared else {**certify}
