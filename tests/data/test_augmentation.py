"""Crops and flips against padding and slicing, colours against the formulas, pixel by pixel."""

import colorsys
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from curvcert.data import Augmentation, ColourJitter
from curvcert.data.augmentation import CHROMA, LUMA, cropped, jittered
from curvcert.errors import InvalidInput
from tests.data.official_sets import random_bytes

YIQ = torch.tensor([LUMA, *CHROMA], dtype=torch.float64)


def _padded(image: Tensor, augmentation: Augmentation) -> Tensor:
    mode = {"reflect": "reflect", "zeros": "constant"}[augmentation.crop_mode]
    return functional.pad(image[None].float(), [augmentation.crop] * 4, mode=mode)[0].to(torch.uint8)


@pytest.mark.parametrize("shape", [(3, 6, 9), (1, 8, 5)])
@pytest.mark.parametrize("crop", [0, 1, 4])
@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize("flip", [False, True])
def test_every_crop_is_that_of_padding_and_slicing(shape, crop: int, mode, flip: bool) -> None:
    augmentation = Augmentation(crop=crop, crop_mode=mode, flip=True)
    images = random_bytes(4, *shape)
    _, h, w = shape
    places = torch.cartesian_prod(torch.arange(2 * crop + 1), torch.arange(2 * crop + 1))
    index = torch.arange(len(places)) % len(images)
    results = cropped(images, index, places, torch.full((len(places),), flip), augmentation)
    assert results.dtype == torch.uint8
    for result, k, (down, across) in zip(results, index, places.tolist(), strict=True):
        expected = _padded(images[k], augmentation)[:, down : down + h, across : across + w]
        assert torch.equal(result, expected.flip(-1) if flip else expected)


def test_the_largest_crop_reflects_the_whole_image() -> None:
    augmentation = Augmentation(crop=4)
    images = random_bytes(1, 1, 5, 5)
    corner = torch.tensor([[8, 0]])
    result = cropped(images, torch.tensor([0]), corner, torch.tensor([False]), augmentation)
    assert torch.equal(result[0], _padded(images[0], augmentation)[:, 8:13, :5])


def test_without_crop_and_flip_the_images_are_taken_as_they_are() -> None:
    images, index = random_bytes(5, 3, 4, 4), torch.tensor([4, 0, 4])
    nothing = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(cropped(images, index, *nothing, Augmentation()), images[index])


def _colours(n: int = 4) -> Tensor:
    return torch.rand(n, 3, 5, 6, dtype=torch.float64)


def _numbers(n: int, **values: float) -> Tensor:
    row = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0} | values
    return torch.tensor([list(row.values())] * n, dtype=torch.float64)


def _all_on() -> ColourJitter:
    return ColourJitter(1.0, 1.0, 1.0, 0.5)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.7])
def test_brightness_contrast_and_saturation_are_their_formulas(factor: float) -> None:
    x = _colours()
    grey = torch.einsum("k,nkhw->nhw", YIQ[0], x)[:, None]
    mean = grey.flatten(1).mean(dim=1)[:, None, None, None]
    expected = {
        "brightness": factor * x,
        "contrast": mean + factor * (x - mean),
        "saturation": grey + factor * (x - grey),
    }
    for name, value in expected.items():
        result = jittered(x, _numbers(len(x), **{name: factor}), ColourJitter(**{name: 1.0}))
        torch.testing.assert_close(result, value.clamp(0, 1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("turns", [-0.5, -0.1, 0.25, 0.4])
def test_hue_rotates_the_colour_and_keeps_the_grey(turns: float) -> None:
    x = 0.45 + 0.1 * _colours()  # no colour reaches the clamp
    c, s = math.cos(2 * math.pi * turns), math.sin(2 * math.pi * turns)
    rotation = torch.tensor([[1, 0, 0], [0, c, -s], [0, s, c]], dtype=torch.float64)
    expected = torch.einsum("ij,njhw->nihw", torch.linalg.inv(YIQ) @ rotation @ YIQ, x)
    result = jittered(x, _numbers(len(x), hue=turns), ColourJitter(hue=0.5))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.einsum("k,nkhw->nhw", YIQ[0], result), torch.einsum("k,nkhw->nhw", YIQ[0], x))


def test_hue_turns_red_towards_another_hue() -> None:
    red = torch.tensor([0.6, 0.4, 0.4], dtype=torch.float64).reshape(1, 3, 1, 1)
    for turns, low, high in [(0.0, 0.0, 1e-9), (0.25, 0.1, 0.9), (0.5, 0.4, 0.6)]:
        result = jittered(red, _numbers(1, hue=turns), ColourJitter(hue=0.5)).flatten().tolist()
        assert low <= colorsys.rgb_to_hsv(*result)[0] <= high


def test_factors_of_one_and_no_turn_change_nothing() -> None:
    x = _colours()
    torch.testing.assert_close(jittered(x, _numbers(len(x)), _all_on()), x, rtol=0, atol=1e-14)
    assert jittered(x, torch.full((len(x), 4), 0.3, dtype=torch.float64), ColourJitter()) is x


def test_each_sample_has_its_own_numbers_and_stays_in_range() -> None:
    x, numbers = _colours(64), torch.rand(64, 4, dtype=torch.float64) * 2
    results = jittered(x, numbers, _all_on())
    assert float(results.min()) >= 0 and float(results.max()) <= 1
    for k in (0, 17, 63):
        alone = jittered(x[k : k + 1], numbers[k : k + 1], _all_on())
        torch.testing.assert_close(results[k : k + 1], alone, rtol=0, atol=1e-14)


def test_greys_stay_grey() -> None:
    grey = torch.rand(8, 1, 4, 4, dtype=torch.float64)
    numbers = torch.rand(8, 4, dtype=torch.float64)
    results = jittered(grey.expand(8, 3, 4, 4), numbers, _all_on())
    torch.testing.assert_close(results, results[:, :1].expand(8, 3, 4, 4), rtol=0, atol=1e-14)
    one_channel = jittered(grey, numbers, ColourJitter(1.0, 1.0))
    torch.testing.assert_close(results[:, :1], one_channel, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "strengths", [{"brightness": -0.1}, {"contrast": math.nan}, {"saturation": math.inf}, {"hue": 0.6}]
)
def test_strengths_out_of_range_are_refused_by_name(strengths: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(strengths))):
        ColourJitter(**strengths)


@pytest.mark.parametrize(
    ("augmentation", "shape", "word"),
    [
        (Augmentation(crop=8), (1, 8, 9), "smaller"),
        (Augmentation(jitter=ColourJitter(brightness=0.1)), (2, 8, 8), "channels"),
        (Augmentation(jitter=ColourJitter(hue=0.1)), (1, 8, 8), "hue"),
        (Augmentation(jitter=ColourJitter(saturation=0.1)), (1, 8, 8), "Saturation"),
    ],
)
def test_images_that_it_does_not_suit_are_refused(augmentation: Augmentation, shape, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        augmentation.validate_for(shape)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match="-1"):
        Augmentation(crop=-1)
    with pytest.raises(InvalidInput, match="circular"):
        Augmentation(crop_mode="circular")  # type: ignore[arg-type]
