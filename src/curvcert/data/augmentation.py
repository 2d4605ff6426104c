r"""Random crops, flips and colour jitter, batched, on the device that holds the images.

The random numbers come in as tensors, one row per sample; what is done with them is deterministic, draws nothing,
waits for nothing and has shapes that do not depend on the data, so that it can be captured in a CUDA graph.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from curvcert.errors import InvalidInput

LUMA = (0.299, 0.587, 0.114)
"""The grey of a colour, by ITU-R BT.601: the Y of YIQ.  The weights sum to 1, so that a grey stays what it is."""

CHROMA = ((0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
"""The I and Q of YIQ (NTSC), which vanish on greys."""


def _quarter_turn() -> tuple[tuple[float, ...], ...]:
    """Return, on RGB, the map (Y, I, Q) -> (0, -Q, I): a quarter turn of the colour, without the grey."""
    yiq = np.array([LUMA, *CHROMA])
    turn = np.linalg.solve(yiq, np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0]]) @ yiq)
    return tuple(tuple(map(float, row)) for row in turn)


QUARTER_TURN = _quarter_turn()


@dataclass(frozen=True)
class ColourJitter:
    r"""How strongly the colours vary; every strength is 0, off, by default.

    A sample draws three factors and an angle, uniformly: :math:`f` from :math:`[\max(0, 1 - s), 1 + s]`
    for each of the strengths s of brightness, contrast and saturation, and :math:`t` from :math:`[-s, s]`,
    in whole turns, for the hue (s at most 1/2).
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"The strength of {name} is finite and at least 0, got {value}.")
        if self.hue > 0.5:
            raise InvalidInput(f"The strength of hue is in whole turns, at most 0.5, got {self.hue}.")

    @property
    def ranges(self) -> tuple[tuple[float, float], ...]:
        """The interval that each of the four numbers of a sample is drawn from.

        >>> ColourJitter(brightness=0.25, contrast=2, hue=0.125).ranges
        ((0.75, 1.25), (0.0, 3.0), (1.0, 1.0), (-0.125, 0.125))
        """
        strengths = (self.brightness, self.contrast, self.saturation)
        return (*((max(0.0, 1.0 - s), 1.0 + s) for s in strengths), (-float(self.hue), float(self.hue)))


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images of a batch, all off by default.

    Attributes:
        crop: pad each image by so many pixels on every side, and crop it back at a random place.
        crop_mode: what the padding holds: "reflect", the image mirrored at its border pixels, or "zeros".
        flip: mirror half of the images, left to right.
        jitter: vary the colours.
    """

    crop: int = 0
    crop_mode: Literal["reflect", "zeros"] = "reflect"
    flip: bool = False
    jitter: ColourJitter = field(default_factory=ColourJitter)

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise InvalidInput(f"The crop is a number of pixels, at least 0, got {self.crop}.")
        if self.crop_mode not in ("reflect", "zeros"):
            raise InvalidInput(f'The crop mode is "reflect" or "zeros", got {self.crop_mode!r}.')

    def validate_for(self, shape: tuple[int, int, int]) -> None:
        """Raise if images of this shape (channels, height, width) cannot be augmented so.

        >>> Augmentation(crop=4, flip=True).validate_for((3, 32, 32))
        """
        channels, height, width = shape
        if self.crop >= min(height, width):
            raise InvalidInput(f"The crop is smaller than the images, {height} x {width} pixels, got {self.crop}.")
        if self.jitter != ColourJitter() and channels not in (1, 3):
            raise InvalidInput(f"Colour jitter needs grey or colour images, 1 or 3 channels, got {channels}.")
        if (self.jitter.saturation or self.jitter.hue) and channels != 3:
            raise InvalidInput(f"Saturation and hue need colour images, 3 channels, got {channels}. Leave them at 0.")


def cropped(
    images: UInt8[Tensor, "n c h w"],
    index: Int64[Tensor, " b"],
    offsets: Int64[Tensor, "b 2"],
    flips: Bool[Tensor, " b"],
    augmentation: Augmentation,
) -> UInt8[Tensor, "b c h w"]:
    r"""Return images[index], cropped at the offsets and mirrored where flips says so, by one gather of pixels.

    With a crop of k pixels, pixel (i, j) of a result is pixel :math:`(i + o_1 - k, j' + o_2 - k)` of its source,
    where :math:`j' = w - 1 - j` if it is mirrored, else j, and the offsets o are from 0 to 2k.
    Equal to padding, slicing and flipping each image.

    >>> images = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> first, corner = torch.tensor([0]), torch.tensor([[0, 1]])
    >>> cropped(images, first, corner, torch.tensor([True]), Augmentation(crop=1, flip=True)).squeeze()
    tensor([[5, 4, 3],
            [2, 1, 0],
            [5, 4, 3]], dtype=torch.uint8)
    """
    if augmentation.crop == 0 and not augmentation.flip:
        return images.index_select(0, index)
    _, c, h, w = images.shape
    across = torch.arange(w, device=images.device)
    mirrored = torch.where(flips[:, None], w - 1 - across, across)
    rows = torch.arange(h, device=images.device) + offsets[:, :1] - augmentation.crop
    columns = mirrored + offsets[:, 1:] - augmentation.crop
    source = reflected(rows, h)[:, :, None] * w + reflected(columns, w)[:, None]
    pixels = images.index_select(0, index).flatten(2)
    taken = pixels.gather(2, source.flatten(1)[:, None].expand(-1, c, -1)).reshape(-1, c, h, w)
    if augmentation.crop_mode == "reflect":
        return taken
    return taken * (_inside(rows, h)[:, None, :, None] & _inside(columns, w)[:, None, None])


def reflected(index: Int64[Tensor, "..."], size: int) -> Int64[Tensor, "..."]:
    """Return the index mirrored at 0 and at size - 1, once: from -(size - 1) to 2 (size - 1).

    >>> reflected(torch.arange(-3, 7), 4).tolist()
    [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    """
    return size - 1 - (size - 1 - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def jittered(
    x: Float[Tensor, "b c h w"], numbers: Float[Tensor, "b 4"], jitter: ColourJitter
) -> Float[Tensor, "b c h w"]:
    r"""Return the images with brightness, contrast, saturation and hue changed, in this order, by one row each.

    With :math:`g(x) = 0.299 x_r + 0.587 x_g + 0.114 x_b` the grey image, each step is followed by a clamp to [0, 1]:
    brightness :math:`f x`; contrast :math:`f x + (1 - f) \operatorname{mean} g(x)`; saturation
    :math:`f x + (1 - f) g(x)`; hue, a rotation by t turns of the plane (I, Q) of YIQ, which keeps the grey Y:
    :math:`g(x) + \cos(2 \pi t) (x - g(x)) + \sin(2 \pi t) T x`, T a quarter turn.  (A rotation is smooth everywhere,
    where the hue of HSV jumps at greys.)  Strengths of 0 are not computed.

    >>> grey = torch.full((1, 3, 1, 1), 0.5)
    >>> jittered(grey, torch.tensor([[1.5, 1.0, 0.3, 0.25]]), ColourJitter(0.5, 0.0, 1.0, 0.5)).flatten()
    tensor([0.7500, 0.7500, 0.7500])
    """
    brightness, contrast, saturation, turns = (column[:, None, None, None] for column in numbers.unbind(1))
    if jitter.brightness:
        x = (brightness * x).clamp(0, 1)
    if jitter.contrast:
        x = _blended(x, _grey(x).mean(dim=(2, 3), keepdim=True), contrast)
    if jitter.saturation:
        x = _blended(x, _grey(x), saturation)
    if jitter.hue:
        x = _rotated(x, 2 * math.pi * turns)
    return x


def _blended(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    grey = _grey(x)
    turned = torch.cat([_weighted(x, row) for row in QUARTER_TURN], dim=1)
    return (grey + angle.cos() * (x - grey) + angle.sin() * turned).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    return _weighted(x, LUMA) if x.shape[1] == 3 else x


def _weighted(x: Tensor, weights: tuple[float, ...]) -> Tensor:
    # Written out: a matrix product would round to TF32 where that is allowed, and a tensor of weights would be
    # copied to the device, which a capture forbids.
    return weights[0] * x[:, 0:1] + weights[1] * x[:, 1:2] + weights[2] * x[:, 2:3]
