"""Data as a person names it on the command line: a known data set, or a .npz file with x and y."""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.lib.format import read_array, read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray
from torch import Tensor

from curvcert.data import load
from curvcert.data.datasets import LOADERS
from curvcert.errors import InvalidFile, InvalidInput, meant
from curvcert.network import Network

LARGEST = 2**33
"""Bytes that the arrays of a file may take in float64, however large the file is."""

_ALWAYS = 2**28
_PACKED = 64
"""Bytes that they may always take, and by what factor a larger file may unpack: images of digits reach 30."""


@final
@dataclass(frozen=True, eq=False)
class Inputs:
    """Samples in float64 with their labels, and the name that they go by."""

    x: Tensor
    y: Tensor
    name: str

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])


def load_inputs(name: str, split: str = "test", folder: Path | None = None, samples: int | None = None) -> Inputs:
    """Return the first samples of a data set or a .npz file, all by default.

    Raises:
        InvalidInput: if there is no such data, or it is not what inputs and labels can be.

    >>> data = load_inputs("digits", samples=5)
    >>> len(data), data.shape
    (5, (1, 8, 8))
    """
    if name in LOADERS:
        if split not in ("train", "test"):
            raise InvalidInput(f"--split is train or test, got {split!r}.")
        found = load(name, "test" if split == "test" else "train", folder)
        part = slice(samples)
        return Inputs(found.as_float64()[part], found.labels[part], f"{name} ({split})")
    if not name.endswith(".npz"):
        raise InvalidInput(
            f"DATA is one of {', '.join(LOADERS)}, or a .npz file with x and y, got {name!r}.{meant(name, LOADERS)}"
        )
    x, y = _read(Path(name))
    _require_samples(name, x, y)
    part = slice(samples)
    inputs = torch.from_numpy(np.ascontiguousarray(x[part], np.float64))
    return Inputs(inputs, torch.from_numpy(np.ascontiguousarray(y[part], np.int64)), name)


def require_fit(network: Network, inputs: Inputs, labels: bool = True) -> None:
    """Raise unless the samples are inputs of the network and the labels are classes of it."""
    if inputs.shape != network.in_shape:
        raise InvalidInput(
            f"The model takes inputs of shape {network.in_shape}, {inputs.name} has samples of shape {inputs.shape}. "
            "Reshape x, or choose the data that the model was made for."
        )
    if labels and network.outputs < 2:
        raise InvalidInput("A certificate needs at least two classes, this model has one output. Try curvcert bound.")
    if labels and int(inputs.y.max()) >= network.outputs:
        raise InvalidInput(
            f"Labels lie in 0 .. {network.outputs - 1} for this model, {inputs.name} has {int(inputs.y.min())} .. "
            f"{int(inputs.y.max())}. Number the classes from 0."
        )


def _read(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file. Write one with numpy.savez({path.name!r}, x=inputs, y=labels).")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if not {"x", "y"} <= set(names):
                raise InvalidFile(
                    f"{path} has the arrays {', '.join(names)[:200] or '(none)'}, expected x and y. "
                    "Write it with numpy.savez(path, x=inputs, y=labels)."
                )
            most = min(LARGEST, max(_ALWAYS, _PACKED * path.stat().st_size))
            _require_moderate(path, [_size(archive, name) for name in ("x.npy", "y.npy")], most)
            x, y = (_array(archive, name) for name in ("x.npy", "y.npy"))
            return x, y
    except InvalidFile:
        raise
    except Exception as error:  # whatever a damaged archive makes zipfile, zlib or numpy raise
        reason = str(error).split("\n")[0][:200].rstrip(".") or type(error).__name__
        raise InvalidFile(f"{path} is not a .npz file of plain arrays: {reason}. Write it with numpy.savez.") from error


def _size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the bytes that an array takes in float64, from its header alone.

    What bzip2 and LZMA hold is unpacked in pieces of any size, whatever the archive says: five kilobytes took 6 GB.
    """
    method = archive.getinfo(name).compress_type
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed by method {method}, which numpy does not use")
    with archive.open(name) as stream:
        version = read_magic(stream)
        read_header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(version)
        if read_header is None:
            raise ValueError(f"{name} has the version {version} of its format, which holds names of fields")
        shape, _, dtype = read_header(stream)
        held = archive.getinfo(name).file_size - stream.tell()
    count = math.prod(shape)
    if dtype.hasobject or dtype.itemsize == 0 or dtype.itemsize * count != held:
        raise ValueError(f"{name} holds {held} bytes, its header promises {dtype} of shape {shape}")
    return max(8, dtype.itemsize) * count


def _require_moderate(path: Path, sizes: list[int], most: int) -> None:
    """Raise if the arrays of an archive would not fit: a few bytes can unpack to any number of them."""
    if sum(sizes) > most:
        raise InvalidFile(
            f"{path} unpacks to {sum(sizes)} bytes, over the limit of {most}. Split it into several files."
        )


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(name) as stream:
        return np.asarray(read_array(stream, allow_pickle=False))


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
