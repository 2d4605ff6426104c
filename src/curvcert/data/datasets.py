"""Every data set by its name, in the one form that training takes."""

import os
from collections.abc import Callable

from curvcert.data.cifar10 import load_cifar10
from curvcert.data.digits import MAX_VALUE, load_digits
from curvcert.data.labelled import LabelledImages, Split
from curvcert.data.mnist import load_mnist
from curvcert.errors import InvalidInput

Folder = str | os.PathLike[str] | None


def load(name: str, split: Split = "train", folder: Folder = None, download: bool = True) -> LabelledImages:
    """Return one half of "digits" (embedded), "mnist" or "cifar10" (read from `folder`, else downloaded).

    Raises:
        InvalidInput: if the name or the split is unknown, or a file is truncated, altered or missing.
        DownloadFailed: if a file could not be downloaded.

    >>> data = load("digits", "test")
    >>> len(data), data.shape, data.max_value
    (360, (1, 8, 8), 16)
    """
    if name not in LOADERS:
        raise InvalidInput(f"No data set is called {name!r}. There are {', '.join(LOADERS)}.")
    return LOADERS[name](split, folder, download)


def _embedded_digits(split: Split, folder: Folder, download: bool) -> LabelledImages:
    digits = load_digits(split)
    return LabelledImages(digits.images, digits.labels, MAX_VALUE)


LOADERS: dict[str, Callable[[Split, Folder, bool], LabelledImages]] = {
    "digits": _embedded_digits,
    "mnist": load_mnist,
    "cifar10": load_cifar10,
}
"""One row a data set."""
