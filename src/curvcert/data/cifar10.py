"""CIFAR-10: 60,000 colour images of 32 x 32 pixels in ten classes, in the official binary version.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).  The version for Python is a pickle,
which runs what it is told to when it is read; curvcert never reads it.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from curvcert.data.download import download_file, extract_members
from curvcert.data.labelled import LabelledImages, Split, validate_split
from curvcert.data.official import OfficialFile, data_folder, find_file, read_found
from curvcert.errors import InvalidInput

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SOURCE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

FOLDER = "cifar-10-batches-bin"
"""The folder in the official archive."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The names of the labels 0 to 9."""

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
"""A label, then the red, the green and the blue pixels, row by row."""

BATCH_SIZE = 10_000 * RECORD

FILES = {
    "train": (
        OfficialFile(
            "data_batch_1.bin", BATCH_SIZE, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        OfficialFile(
            "data_batch_2.bin", BATCH_SIZE, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        OfficialFile(
            "data_batch_3.bin", BATCH_SIZE, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        OfficialFile(
            "data_batch_4.bin", BATCH_SIZE, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        OfficialFile(
            "data_batch_5.bin", BATCH_SIZE, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
    ),
    "test": (
        OfficialFile("test_batch.bin", BATCH_SIZE, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
}


def load_cifar10(
    split: Split = "train", folder: str | os.PathLike[str] | None = None, download: bool = True
) -> LabelledImages:
    """Return 50,000 images to train on, or 10,000 to test on.

    The binary batches, plain or .gz, are looked for in `folder` and `folder/cifar-10-batches-bin`
    (default: see `data_folder`); if one is missing the official archive (170 MB) is downloaded,
    what is missing is unpacked to `folder/cifar-10-batches-bin`, and the archive is deleted.

    Raises:
        InvalidInput: if the split is unknown, or a file is truncated, altered, or missing with download=False.
        DownloadFailed: if the archive could not be downloaded.

    >>> load_cifar10("test", folder="nowhere", download=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    curvcert.errors.InvalidInput: Expected test_batch.bin or test_batch.bin.gz in nowhere, ...
    """
    validate_split(split)
    root = data_folder(folder)
    folders = (root, root / FOLDER)
    if download and any(find_file(file, folders) is None for file in FILES[split]):
        _download_missing(folders, root)
    images, labels = zip(*(parse_records(read_found(file, folders), file.name) for file in FILES[split]), strict=True)
    return LabelledImages(torch.cat(images), torch.cat(labels), max_value=255)


def _download_missing(folders: tuple[Path, ...], root: Path) -> None:
    missing = [file for files in FILES.values() for file in files if find_file(file, folders) is None]
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".cifar-10-") as temporary:
        archive = download_file(SOURCE, SOURCE_SHA256, Path(temporary) / "cifar-10-binary.tar.gz")
        extract_members(archive, FOLDER, missing, root / FOLDER)


def parse_records(content: bytes, name: str) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, " n"]]:
    """Return the images and labels in a binary batch: records of a label byte and 3,072 pixel bytes.

    Raises:
        InvalidInput: if the content is not a whole number of records with labels from 0 to 9, naming it.

    >>> images, labels = parse_records(bytes([3]) + bytes(3072), "example")
    >>> tuple(images.shape), CLASSES[int(labels[0])]
    ((1, 3, 32, 32), 'cat')
    """
    if len(content) == 0 or len(content) % RECORD != 0:
        raise InvalidInput(f"{name} is truncated or altered: expected records of {RECORD} bytes, got {len(content)}.")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    if int(labels.max()) >= len(CLASSES):
        raise InvalidInput(f"{name} is truncated or altered: expected labels from 0 to 9, got {int(labels.max())}.")
    return torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).copy()), labels
