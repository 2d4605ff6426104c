"""A trained model as one safetensors file: its weights, and in the metadata what they are the weights of."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from curvcert.errors import InvalidInput
from curvcert.nn.architectures import INPUT_SHAPES, architecture
from curvcert.nn.ensemble import with_mirror_image
from curvcert.training.recipe import Recipe, recipe_from_dict
from curvcert.whole_files import write_whole

FORMAT = "curvcert model 1"
MODEL = "model.safetensors"
"""The file of the weights in the folder of a run."""


def save_model(path: Path, model: nn.Module, recipe: Recipe, facts: Mapping[str, Any] | None = None) -> None:
    """Write the weights and the recipe that made them; of a model with a mirror image, those of one side."""
    write_whole(path, model_content(model, recipe, facts))


def model_content(model: nn.Module, recipe: Recipe, facts: Mapping[str, Any] | None = None) -> bytes:
    """Return what `save_model` writes: the bytes depend on the weights, the recipe and the facts alone."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    about = {"format": FORMAT, "recipe": recipe.as_dict(), "facts": dict(facts or {})}
    sealed = {**about, "sha256": _seal(about, tensors)}
    return save(tensors, metadata={"curvcert": json.dumps(sealed, sort_keys=True)})


def _seal(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of what a file says and holds, so that a damaged one is known."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_model(path: str | Path, dtype: torch.dtype | None = None) -> tuple[nn.Module, Recipe]:
    """Return the model of a file that `curvcert train` wrote, in eval mode, and its recipe.

    Weights kept in float16 come back as float32, which holds them exactly, unless another dtype is given.

    Raises:
        InvalidInput: the file is missing, truncated, altered, or of another kind.
    """
    model, recipe = load_trained(path, dtype)
    return finished(model, recipe), recipe


def finished(model: nn.Sequential, recipe: Recipe) -> nn.Sequential:
    """Return what a recipe makes of the network that it trained: that network, or it beside its mirror image.

    Raises:
        InvalidInput, UnsupportedModule: if the architecture has no mirror image.
    """
    return with_mirror_image(model, INPUT_SHAPES[recipe.architecture]) if recipe.mirror else model


def load_trained(path: str | Path, dtype: torch.dtype | None = None) -> tuple[nn.Sequential, Recipe]:
    """Return the network that was trained, as `load_model` does, without its mirror image if it has one.

    Raises:
        InvalidInput: as `load_model`.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInput(f"No model file {path}. `curvcert train` writes one: DIR/model.safetensors.")
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("curvcert", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise InvalidInput(f"{path} is not a safetensors file that can be read: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("recipe"), dict):
        raise InvalidInput(
            f"{path} does not say which architecture its weights belong to. Give a file that `curvcert train` wrote, "
            "or name a factory: package.module:factory with the weights."
        )
    recipe = recipe_from_dict(about["recipe"], f"The recipe in {path.name}")
    model = _built(path, recipe, tensors, dtype or _wide(tensors))
    if about.pop("sha256", None) != _seal(about, tensors):
        raise InvalidInput(f"{path} was damaged or altered: its SHA-256 is not the one that was written. Get it anew.")
    return model, recipe


def _wide(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def _built(path: Path, recipe: Recipe, tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Sequential:
    mean = [0.0] * INPUT_SHAPES.get(recipe.architecture, (1,))[0] if recipe.mean_shift else None
    with torch.random.fork_rng(devices=[]):
        model = architecture(recipe.architecture, recipe.activation, mean)
    own = model.state_dict()
    for name in sorted(own.keys() ^ tensors.keys()):
        where = "lacks" if name in own else "has the unknown tensor"
        raise InvalidInput(f"{path} {where} {name}: it is not a {recipe.architecture}.")
    for name, tensor in tensors.items():
        wanted = own[name]
        alike = tensor.dtype == wanted.dtype or (tensor.is_floating_point() and wanted.is_floating_point())
        if tensor.shape != wanted.shape or not alike:
            raise InvalidInput(
                f"{path}: {name} needs {wanted.dtype} of shape {tuple(wanted.shape)}, got {tensor.dtype} of "
                f"{tuple(tensor.shape)}."
            )
        if not bool(torch.isfinite(tensor.to(dtype)).all()):
            raise InvalidInput(f"{path}: {name} holds NaN or infinity: its training diverged.")
    model = model.to(dtype)
    model.load_state_dict({name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()})
    return model.eval()
