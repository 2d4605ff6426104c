import dataclasses

import pytest
import torch

from curvcert.data import LabelledImages, load, load_digits
from curvcert.errors import InvalidInput

IMAGES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
LABELS = torch.tensor([4, 0])


def test_scales_by_the_largest_value() -> None:
    data = LabelledImages(IMAGES, LABELS, max_value=200)
    assert len(data) == 2
    assert data.shape == (3, 2, 2)
    assert torch.equal(data.as_float64(), IMAGES.double() / 200)


def test_moves_to_a_device() -> None:
    data = LabelledImages(IMAGES, LABELS, max_value=255).to("cpu")
    assert torch.equal(data.images, IMAGES) and torch.equal(data.labels, LABELS) and data.max_value == 255


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LabelledImages(IMAGES, LABELS, 255).max_value = 1  # type: ignore[misc]


# A wrong shape or dtype is refused by the shape checker under pytest, and by curvcert itself without it.
@pytest.mark.parametrize(
    ("images", "labels", "max_value", "message"),
    [
        (IMAGES, LABELS, 22, "23"),
        (IMAGES, LABELS, 0, "max_value"),
        (IMAGES, LABELS, 256, "max_value"),
        (IMAGES, torch.tensor([0, -1]), 255, "-1"),
        (IMAGES[:0], LABELS[:0], 255, "at least one"),
        (IMAGES, LABELS[:1], 255, "labels|n"),
        (IMAGES, LABELS.int(), 255, "labels|Int64"),
        (IMAGES.float(), LABELS, 255, "images|UInt8"),
        (IMAGES[0], LABELS, 255, "images|UInt8"),
    ],
)
def test_refuses_at_birth(images, labels, max_value: int, message: str) -> None:
    with pytest.raises((InvalidInput, TypeError), match=message):
        LabelledImages(images, labels, max_value)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_digits_are_labelled_images(split) -> None:
    data, digits = load("digits", split), load_digits(split)
    assert torch.equal(data.as_float64(), digits.as_float64())
    assert torch.equal(data.labels, digits.labels)
    assert data.max_value == 16


@pytest.mark.parametrize(("name", "split", "word"), [("imagenet", "train", "cifar10"), ("digits", "val", "val")])
def test_refuses_an_unknown_name_or_split(name: str, split, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        load(name, split)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_the_official_sets_refuse_an_unknown_split_before_they_look_for_files(name: str, tmp_path) -> None:
    with pytest.raises(InvalidInput, match="validation"):
        load(name, "validation", tmp_path)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())
