"""MNIST: 70,000 grey images of 28 x 28 pixels of handwritten digits, in the official idx files.

Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits" (1998).
"""

import math
import os
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from curvcert.data.download import download_file
from curvcert.data.labelled import LabelledImages, Split, validate_split
from curvcert.data.official import OfficialFile, data_folder, find_file, read_found
from curvcert.errors import InvalidInput

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
"""The mirror that is kept of the official files, byte for byte."""

FILES = {
    "train": (
        OfficialFile(
            "train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        OfficialFile(
            "train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
    ),
    "test": (
        OfficialFile(
            "t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        OfficialFile(
            "t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
    ),
}
"""For each split the file of the images and the file of the labels."""

COMPRESSED_SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
"""The digests of the .gz files as they are served."""

UNSIGNED_BYTES = 0x08
"""The idx code of the only type of number that MNIST uses."""


def load_mnist(
    split: Split = "train", folder: str | os.PathLike[str] | None = None, download: bool = True
) -> LabelledImages:
    """Return 60,000 images to train on, or 10,000 to test on.

    The four idx files, plain or .gz, are looked for in `folder`, `folder/MNIST/raw` and `folder/mnist`
    (default: see `data_folder`); those that are missing are downloaded to `folder/MNIST/raw`.

    Raises:
        InvalidInput: if the split is unknown, or a file is truncated, altered, or missing with download=False.
        DownloadFailed: if a file could not be downloaded.

    >>> load_mnist("test", folder="nowhere", download=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    curvcert.errors.InvalidInput: Expected t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz in nowhere, ...
    """
    validate_split(split)
    root = data_folder(folder)
    folders = (root, root / "MNIST" / "raw", root / "mnist")
    if download:
        _download_missing(FILES[split], folders, root / "MNIST" / "raw")
    images, labels = (parse_idx(read_found(file, folders), file.name) for file in FILES[split])
    return LabelledImages(images.unsqueeze(1), labels.to(torch.int64), max_value=255)


def _download_missing(files: tuple[OfficialFile, ...], folders: tuple[Path, ...], into: Path) -> None:
    for file in files:
        if find_file(file, folders) is None:
            name = f"{file.name}.gz"
            download_file(SOURCE + name, COMPRESSED_SHA256[file.name], into / name)


def parse_idx(content: bytes, name: str) -> UInt8[Tensor, "..."]:
    """Return the array in an idx file of unsigned bytes.

    The file is 0, 0, 8 (the type), the number of dimensions, each dimension in four bytes, largest first,
    and the entries, the last dimension fastest.

    Raises:
        InvalidInput: if the content is not such a file, naming it.

    >>> header = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])
    >>> parse_idx(header + bytes([1, 2, 3, 4, 5, 6]), "example").tolist()
    [[1, 2, 3], [4, 5, 6]]
    """
    if len(content) < 4 or content[:3] != bytes([0, 0, UNSIGNED_BYTES]):
        raise InvalidInput(f"{name} is not an idx file of unsigned bytes: expected it to open with 0, 0, 8.")
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise InvalidInput(
            f"{name} is truncated or altered: expected {start + math.prod(shape)} bytes for shape {shape}, "
            f"got {len(content)}."
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy())
