"""Data as a person names it on the command line: a known data set, a file of arrays, or a folder of images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvcert.cli.data_files import KINDS, is_data_file, read_data, read_labels
from curvcert.data import load
from curvcert.data.datasets import LOADERS
from curvcert.errors import InvalidInput, meant
from curvcert.network import Network


@final
@dataclass(frozen=True, eq=False)
class Inputs:
    """Samples in float64 with their labels, the name that they go by, and those of their classes, where known."""

    x: Tensor
    y: Tensor
    name: str
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])


def load_inputs(
    name: str,
    split: str = "test",
    folder: Path | None = None,
    samples: int | None = None,
    labels: Path | None = None,
    labelled: bool = True,
) -> Inputs:
    """Return the first samples of a data set, a file or a folder, all by default.

    Where a file has no labels they are in one of their own; what is not to be `labelled` goes without, as zeros.

    Raises:
        InvalidInput: if there is no such data, or it is not what inputs and labels can be.

    >>> data = load_inputs("digits", samples=5)
    >>> len(data), data.shape
    (5, (1, 8, 8))
    """
    part = slice(samples)
    if name in LOADERS:
        if split not in ("train", "test"):
            raise InvalidInput(f"--split is train or test, got {split!r}.")
        if labels is not None:
            raise InvalidInput(f"--labels belongs to a file without labels, {name} has its own. Leave it out.")
        found = load(name, "test" if split == "test" else "train", folder)
        return Inputs(found.as_float64()[part], found.labels[part], f"{name} ({split})")
    if not is_data_file(name):
        raise InvalidInput(
            f"DATA is one of {', '.join(LOADERS)}, a file ({', '.join(KINDS[:-1])}) or {KINDS[-1]}, got {name!r}."
            f"{meant(name, LOADERS)}"
        )
    content = read_data(Path(name), samples)
    y = content.y
    if labels is not None:
        if y is not None:
            raise InvalidInput(f"--labels belongs to a file without labels, {name} has its own. Leave it out.")
        y = read_labels(labels)
    if y is None and labelled:
        raise InvalidInput(f"{name} has no labels. Add --labels FILE: .npy, .pt, or a text with one per line.")
    _require_samples(name, content.x, np.zeros(len(content.x), np.int64) if y is None else y)
    inputs = torch.from_numpy(np.ascontiguousarray(content.x[part], np.float64))
    classes = np.zeros(len(inputs), np.int64) if y is None else y[part]
    return Inputs(inputs, torch.from_numpy(np.ascontiguousarray(classes, np.int64)), name, content.class_names)


def require_fit(network: Network, inputs: Inputs, labels: bool = True) -> None:
    """Raise unless the samples are inputs of the network and the labels are classes of it."""
    if inputs.shape != network.in_shape:
        raise InvalidInput(
            f"The model takes inputs of shape {network.in_shape}, {inputs.name} has samples of shape {inputs.shape}. "
            "Reshape x, or choose the data that the model was made for."
        )
    if labels and network.outputs < 2:
        raise InvalidInput(
            "A certificate needs at least two classes, this model has one output. Say where it decides, such as "
            "--threshold 0, for the labels 0 (below) and 1 (above); or try curvcert bound."
        )
    if labels and int(inputs.y.max()) >= network.outputs:
        raise InvalidInput(
            f"Labels lie in 0 .. {network.outputs - 1} for this model, {inputs.name} has {int(inputs.y.min())} .. "
            f"{int(inputs.y.max())}. Number the classes from 0."
        )


def _require_samples(name: str, x: NDArray[Any], y: NDArray[Any]) -> None:
    if x.dtype.kind != "f" or x.dtype.itemsize > 8:
        raise InvalidInput(
            f"{name}: x holds {x.dtype}, expected float64 or less, in the units of the model's inputs. "
            "Convert and scale them, such as x / 255."
        )
    if x.ndim < 2 or x.size == 0:
        raise InvalidInput(
            f"{name}: expected x of shape (samples, ...), at least one sample, got {x.shape}: nothing to do."
        )
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        raise InvalidInput(
            f"{name}: expected y as {len(x)} whole numbers, one per sample, got {y.dtype} of shape {y.shape}."
        )
    if not bool(np.isfinite(x).all()):
        raise InvalidInput(f"{name}: x holds NaN or infinity. Remove those samples.")
    if y.min() < 0 or y.max() >= 2**31:
        raise InvalidInput(f"{name}: labels count from 0, got {y.min()} .. {y.max()}.")
