import dataclasses

import pytest
import torch

from curvcert.data import Digits, load_digits
from curvcert.errors import InvalidInput


@pytest.mark.parametrize(("split", "size"), [("train", 1437), ("test", 360)])
def test_sizes_types_and_values(split, size: int) -> None:
    digits = load_digits(split)
    assert len(digits) == size
    assert digits.images.shape == (size, 1, 8, 8)
    assert digits.images.dtype == torch.uint8
    assert digits.labels.dtype == torch.int64
    assert (int(digits.images.min()), int(digits.images.max())) == (0, 16)
    assert digits.labels.unique().tolist() == list(range(10))


def test_the_default_is_the_training_half() -> None:
    assert torch.equal(load_digits().images, load_digits("train").images)


def test_first_image_is_the_published_one() -> None:
    digits = load_digits("train")
    assert digits.images[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert digits.labels[:10].tolist() == list(range(10))


def test_as_float64_is_exact() -> None:
    digits = load_digits("test")
    images = digits.as_float64()
    assert images.dtype == torch.float64
    assert torch.equal(images * 16, digits.images.double())
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_refuses_an_unknown_split() -> None:
    with pytest.raises(InvalidInput, match="validation"):
        load_digits("validation")  # type: ignore[arg-type]


def test_is_frozen() -> None:
    digits = load_digits("test")
    with pytest.raises(dataclasses.FrozenInstanceError):
        digits.labels = digits.labels + 1  # type: ignore[misc]


def test_refuses_images_without_labels() -> None:
    digits = load_digits("test")
    with pytest.raises((InvalidInput, TypeError), match="n"):
        Digits(digits.images, digits.labels[:-1])
