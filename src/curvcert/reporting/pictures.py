"""Pictures of inputs as PNG data URIs: grey and colour images, and strips for anything else."""

import base64
import io

import numpy as np
import torch
from matplotlib.image import imsave
from numpy.typing import NDArray
from torch import Tensor

MOST_PIXELS = 96
"""The longer side of a picture; a larger image is averaged down."""

_STRIP = 256

# Okabe and Ito's blue and vermilion, apart for every kind of colour vision.
_NEGATIVE = np.array([0, 114, 178], dtype=np.float64)
_POSITIVE = np.array([213, 94, 0], dtype=np.float64)


def form_of(shape: tuple[int, ...]) -> str:
    """Return how one input of this shape is drawn: "grey image", "colour image" or "strip".

    >>> form_of((1, 8, 8)), form_of((3, 32, 32)), form_of((20,))
    ('grey image', 'colour image', 'strip')
    """
    if len(shape) == 3 and shape[0] == 3:
        return "colour image"
    if (len(shape) == 3 and shape[0] == 1) or (len(shape) == 2 and min(shape) > 1):
        return "grey image"
    return "strip"


def draw_input(x: Tensor, low: float, high: float) -> str:
    """Return one input as a data URI, low drawn black and high white."""
    pixels = ((_grid(x) - low) / max(high - low, 1e-300)).clamp(0, 1).numpy()
    rgb = np.broadcast_to(pixels, (3, *pixels.shape[1:])) if len(pixels) == 1 else pixels
    return _data_uri(255 * rgb.transpose(1, 2, 0))


def draw_step(step: Tensor, amplification: float, span: float) -> str:
    """Return a step as a data URI, amplified: blue below zero, white at zero, vermilion above.

    A colour image's step is drawn about mid-grey, channel by channel.
    """
    scaled = (_grid(step) * (amplification / span)).clamp(-1, 1).numpy()
    if len(scaled) == 3:
        return _data_uri(127.5 * (1 + scaled.transpose(1, 2, 0)))
    size = np.abs(scaled[0])[..., None]
    colour = np.where(scaled[0][..., None] < 0, _NEGATIVE, _POSITIVE)
    return _data_uri(255 * (1 - size) + colour * size)


def amplification_of(step: Tensor, span: float) -> float:
    """Return the factor that makes the largest change of the drawn step as large as the span of the inputs.

    >>> amplification_of(torch.tensor([0.0, -0.25]), 1.0)
    4.0
    """
    largest = float(_grid(step).abs().max())
    return span / largest if largest > 0 else 1.0


def _grid(x: Tensor) -> Tensor:
    """Return one input as (channels, height, width), small enough to embed."""
    x = x.detach().cpu().to(torch.float64)
    form = form_of(tuple(x.shape))
    if form == "strip":
        flat = x.flatten()[None, None]
        return (
            torch.nn.functional.adaptive_avg_pool1d(flat, _STRIP)[0, :, None]
            if flat.numel() > _STRIP
            else flat[0, :, None]
        )
    image = x if x.dim() == 3 else x[None]
    longest = max(image.shape[1:])
    if longest <= MOST_PIXELS:
        return image
    height, width = (max(1, round(side * MOST_PIXELS / longest)) for side in image.shape[1:])
    return torch.nn.functional.adaptive_avg_pool2d(image, (height, width))


def _data_uri(rgb: NDArray[np.float64]) -> str:
    buffer = io.BytesIO()
    imsave(buffer, np.ascontiguousarray(np.rint(rgb).astype(np.uint8)), format="png", metadata={"Software": ""})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
