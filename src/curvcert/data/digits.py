"""The embedded digits: 1,797 images of 8 x 8 pixels, for the demo and for tests that need real data.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), CC BY 4.0; see NOTICE.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64, Int64, UInt8
from safetensors.torch import load
from torch import Tensor

from curvcert.data.embedded import read_embedded
from curvcert.errors import InvalidInput

TRAIN_SIZE = 1437
"""The split is fixed: the first 1,437 images train, the last 360 test."""

MAX_VALUE = 16


@dataclass(frozen=True, eq=False)
class Digits:
    """Images as they are published, whole numbers from 0 to 16, and the digit that each one shows."""

    images: UInt8[Tensor, "n 1 8 8"]
    labels: Int64[Tensor, " n"]

    def __post_init__(self) -> None:
        n = len(self.labels)
        if self.images.shape != (n, 1, 8, 8) or self.images.dtype != torch.uint8:
            raise InvalidInput(
                f"Expected uint8 images of shape ({n}, 1, 8, 8), one per label, "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}."
            )
        if self.labels.shape != (n,) or self.labels.dtype != torch.int64:
            raise InvalidInput(
                f"Expected int64 labels in one dimension, got {self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def as_float64(self) -> Float64[Tensor, "n 1 8 8"]:
        """Return the images scaled to [0, 1]: value / 16, which is exact."""
        return self.images.to(torch.float64) / MAX_VALUE


def load_digits(split: Literal["train", "test"] = "train") -> Digits:
    """Return one half of the fixed split: 1,437 images to train on, or 360 to test on.

    Raises:
        InvalidInput: if the split is unknown, or the embedded file is not the one that was shipped.

    >>> digits = load_digits("test")
    >>> len(digits), tuple(digits.images.shape), float(digits.as_float64().max())
    (360, (360, 1, 8, 8), 1.0)
    """
    parts = {"train": slice(None, TRAIN_SIZE), "test": slice(TRAIN_SIZE, None)}
    if split not in parts:
        raise InvalidInput(f'The split is "train" or "test", got {split!r}.')
    tensors = load(read_embedded("digits.safetensors"))
    return Digits(tensors["images"][parts[split]], tensors["labels"][parts[split]].to(torch.int64))
