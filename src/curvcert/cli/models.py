"""Models as a person names them on the command line: an ONNX file, a trained model, or a factory with weights."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from curvcert.cli.options import numbers, whole_numbers
from curvcert.cli.torch_files import read_torch_file
from curvcert.errors import InvalidFile, InvalidInput, meant
from curvcert.network import Network, load_onnx, trace
from curvcert.network.network_file import KIND as NETWORK_FILE
from curvcert.nn import INPUT_SHAPES, Normalise
from curvcert.training import load_model as load_trained_model

Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class ModelChoice:
    """A model as it is named on the command line; `evaluate` puts a factory's module into eval mode."""

    name: str
    weights: Path | None = None
    normalise: tuple[str, str] | None = None
    input_shape: str | None = None
    evaluate: bool = False

    @property
    def is_factory(self) -> bool:
        """Whether it is package.module:factory."""
        return ":" in self.name and Path(self.name).suffix not in (".onnx", ".safetensors")


def load_network(choice: ModelChoice, data_shape: Shape | None = None) -> Network:
    """Return the network that a person means; `data_shape` is the shape of one sample, if there is data.

    Raises:
        InvalidInput: if there is no such model, or options were given that it does not take.

    >>> load_network(ModelChoice("curvcert.data:load_demo_network"), (1, 8, 8)).out_shape
    (10,)
    """
    suffix = Path(choice.name).suffix.lower()
    for option, used in (("--weights", choice.weights is not None), ("--eval", choice.evaluate)):
        if used and not choice.is_factory:
            raise InvalidInput(f"{option} belongs to package.module:factory, MODEL is {choice.name!r}. Leave it out.")
    given = None if choice.input_shape is None else whole_numbers(choice.input_shape, "--input-shape")
    if given is not None and min(given) < 1:
        raise InvalidInput(f"--input-shape expects positive sizes such as 1,28,28, got {choice.input_shape!r}.")
    if suffix == ".onnx":
        return _normalised(load_onnx(choice.name, given), choice)
    if suffix == ".safetensors":
        model, shape = _trained(Path(choice.name))
        return trace(_with_normalisation(model, choice, shape), torch.zeros(1, *shape))
    if choice.is_factory:
        return _traced(choice, given or data_shape)
    raise InvalidInput(
        f"MODEL is an ONNX file (.onnx), a model.safetensors by `curvcert train`, or package.module:factory, got "
        f"{choice.name!r}."
    )


def is_network_file(name: str) -> bool:
    """Whether a file is one that `save_network` wrote, by what it says of itself."""
    path = Path(name)
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="np") as file:
            return bool((file.metadata() or {}).get("kind") == NETWORK_FILE)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} is not a safetensors file that can be read: {error}.") from error


def _trained(path: Path) -> tuple[nn.Module, Shape]:
    if is_network_file(str(path)):
        raise InvalidInput(
            f"{path} is a network file: `curvcert check` reads it. To bound or certify, give the model that it was "
            "saved from."
        )
    model, recipe = load_trained_model(path)
    return model, INPUT_SHAPES[recipe.architecture]


def _traced(choice: ModelChoice, shape: Shape | None) -> Network:
    model = _from_factory(choice)
    if shape is None:
        raise InvalidInput(
            f"The shape of one input of {choice.name} is not known. Add it, as in --input-shape 1,28,28."
        )
    if choice.evaluate:
        model.eval()
    training = next((path for path, part in model.named_modules() if part.training), None)
    if training is not None:
        part = f" (its part {training} is)" if training else ""
        raise InvalidInput(
            f"{choice.name} returned a module in train mode{part}, where dropout and batch statistics make "
            "the output random. Return model.eval(), or add --eval."
        )
    dtype = next((t.dtype for t in model.parameters() if t.dtype.is_floating_point), torch.float32)
    return trace(_with_normalisation(model, choice, shape), torch.zeros(1, *shape, dtype=dtype))


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _from_factory(choice: ModelChoice) -> nn.Module:
    where, _, name = choice.name.partition(":")
    with _current_folder_importable():
        try:
            module = importlib.import_module(where) if where and name else None
            factory = getattr(module, name, None)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and where.startswith(str(error.name))
            reason = "there is no such module" if missing else _told(error)
            raise InvalidInput(
                f"Cannot import {where!r} for MODEL {choice.name}: {reason}. It is looked for in the current folder "
                "and among the installed packages."
            ) from error
        if not callable(factory):
            raise InvalidInput(
                f"MODEL {choice.name}: {where!r} has no function {name!r}. Write package.module:factory."
                f"{meant(name, dir(module))}"
            )
        try:
            model = factory()
        except Exception as error:
            raise InvalidInput(
                f"{choice.name}, called without arguments, raised {_told(error)}. Run with --debug to see where."
            ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{choice.name} must return an nn.Module, got {type(model).__name__}.")
    if choice.weights is not None:
        _load_weights(model, choice.weights)
    return model


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10))[0].rstrip('.')}"


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load weights by name, all of them, without rounding any."""
    if not path.is_file():
        raise InvalidInput(f"--weights {path}: no such file. Write one with safetensors.torch.save_model(model, path).")
    pickled = path.suffix.lower() in (".pt", ".pth")
    found = _state_dict(path) if pickled else _tensors(path)
    own = model.state_dict()
    for name in sorted(found.keys() & own.keys()):
        if found[name].shape != own[name].shape:
            raise InvalidInput(
                f"--weights {path}: {name} has shape {tuple(found[name].shape)}, the module needs "
                f"{tuple(own[name].shape)}."
            )
        if not _holds(own[name].dtype, found[name].dtype):
            raise InvalidInput(
                f"--weights {path}: {name} is {found[name].dtype}, which {own[name].dtype} would round. Return a "
                "module of the file's dtype, such as model.double()."
            )
    # A tensor that several names share stands in a safetensors file under one of them.
    read = model.load_state_dict(found, strict=False) if pickled else load_model(model, path, strict=False)
    missing, unexpected = read
    for names, what in ((missing, "lacks"), (unexpected, "has, and the module has not,")):
        if names:
            raise InvalidInput(f"--weights {path} {what} {', '.join(sorted(names)[:4])}: it is of another module.")


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    try:
        return torch.promote_types(narrow, wide) == wide
    except RuntimeError:  # torch promotes no floats of 8 bits
        return False


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(
            f"--weights {path} is not a safetensors file that can be read: {error}. A PyTorch file ends in .pt."
        ) from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, or of the one that a checkpoint holds under a name of its own."""
    held = read_torch_file(path)
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(held, dict) and isinstance(held.get(name), dict):
            held = held[name]
    if not isinstance(held, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()
    ):
        raise InvalidFile(f"--weights {path} holds no state dict: write torch.save(model.state_dict(), path).")
    return {name.removeprefix("module."): value for name, value in held.items()}


def _normalisation(choice: ModelChoice, shape: Shape, dtype: torch.dtype) -> Normalise | None:
    if choice.normalise is None:
        return None
    mean, std = (numbers(text, "--normalise") for text in choice.normalise)
    channels = shape[0]
    for values in (mean, std):
        if len(values) not in (1, channels):
            raise InvalidInput(
                f"--normalise expects one number, or one for each of the {channels} channels, got {len(values)}."
            )
    layer = Normalise(*(values * channels if len(values) == 1 else values for values in (mean, std))).to(dtype)
    for buffer, values in ((layer.mean, mean), (layer.std, std)):
        buffer.copy_(torch.tensor(values, dtype=dtype).expand(channels))
    return layer.eval()


def _with_normalisation(model: nn.Module, choice: ModelChoice, shape: Shape) -> nn.Module:
    dtype = next((t.dtype for t in model.parameters() if t.dtype.is_floating_point), torch.float32)
    layer = _normalisation(choice, shape, dtype)
    return model if layer is None else nn.Sequential(layer, model).eval()


def _normalised(network: Network, choice: ModelChoice) -> Network:
    """Put a normalisation in front of a network."""
    layer = _normalisation(choice, network.in_shape, network.source_dtype)
    if layer is None:
        return network
    return network.behind(trace(layer, torch.zeros(1, *network.in_shape, dtype=network.source_dtype)))
