"""Labelled images as they are published, in whole numbers: the one form in which every data set is trained on."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64, Int64, UInt8
from torch import Tensor

from curvcert.errors import InvalidInput

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images in whole numbers from 0 to `max_value`, and the class that each one shows.

    >>> data = LabelledImages(torch.tensor([[[[0, 4], [12, 16]]]], dtype=torch.uint8), torch.tensor([7]), max_value=16)
    >>> len(data), data.shape
    (1, (1, 2, 2))
    >>> data.as_float64().flatten().tolist()
    [0.0, 0.25, 0.75, 1.0]
    """

    images: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]
    max_value: int

    def __post_init__(self) -> None:
        _validate_images(self.images)
        _validate_labels(self.labels, self.images)
        if not 1 <= self.max_value <= 255:
            raise InvalidInput(f"max_value is what white is stored as, from 1 to 255, got {self.max_value}.")
        if int(self.images.max()) > self.max_value:
            raise InvalidInput(
                f"Expected pixels from 0 to max_value = {self.max_value}, got one of {int(self.images.max())}. "
                f"Pass the largest value that the format can store."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The channels, the height and the width of an image."""
        _, c, h, w = self.images.shape
        return c, h, w

    def as_float64(self) -> Float64[Tensor, "n c h w"]:
        """Return the images scaled to [0, 1]: value / max_value, rounded once."""
        return self.images.to(torch.float64) / self.max_value

    def to(self, device: torch.device | str) -> "LabelledImages":
        """Return the same images and labels on a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device), self.max_value)


def validate_split(split: str) -> None:
    """Raise unless the split is one of the two that every data set has.

    >>> validate_split("test")
    """
    if split not in ("train", "test"):
        raise InvalidInput(f'The split is "train" or "test", got {split!r}.')


def _validate_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
        raise InvalidInput(
            f"Expected uint8 images of shape (n, channels, height, width), at least one, "
            f"got {images.dtype} of shape {tuple(images.shape)}."
        )


def _validate_labels(labels: Tensor, images: Tensor) -> None:
    if labels.dtype != torch.int64 or labels.shape != (len(images),):
        raise InvalidInput(
            f"Expected int64 labels of shape ({len(images)},), one per image, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if labels.device != images.device:
        raise InvalidInput(f"The images are on {images.device}, the labels on {labels.device}. Put both on one device.")
    if int(labels.min()) < 0:
        raise InvalidInput(f"Labels count from 0, got {int(labels.min())}.")
