"""The range of valid inputs: what is taken for a box, and what is refused, with a reason."""

import math

import pytest
import torch

from curvcert.boxes import Box, joined_boxes
from curvcert.errors import InvalidInput

F64 = torch.float64


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (3, "two numbers or tensors"),
        ((0, 1, 2), "two numbers or tensors"),
        (("a", 1), "a number or a tensor"),
        ((math.nan, 1), "is NaN"),
        ((torch.zeros(2), torch.tensor([1.0, math.nan])), "is NaN"),
        ((1, 0), "lowest <= highest, got 1 and 0"),
        ((torch.tensor([0.0, 2.0]), 1), "lowest <= highest, got 2 and 1 in 1 of 2 places"),
        ((math.inf, math.inf), "lowest <= highest"),
        ((torch.zeros(3), 1), "The sides of a box are numbers, or tensors of the shape"),
        ((torch.zeros(4, 2), torch.ones(3, 2)), "The sides of a box"),
        ((torch.zeros(2, 2, 2), 1), "The sides of a box"),
    ],
)
def test_what_is_no_box_is_refused(box, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Box.of(box, (2,))


def test_sides_of_every_shape() -> None:
    assert str(Box.of((0, 1), (2,))) == "[0, 1]"
    assert str(Box.of((0, torch.ones(2)), (2,))) == "of shape (2,), within [0, 1]"
    per_channel = Box.of((0, torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)), (3, 4, 4))
    assert per_channel.upper.shape == (3, 4, 4) and not per_channel.per_sample
    own = Box.of((torch.zeros(5, 2), 1), (2,))
    assert own.per_sample and own.part(slice(1, 3)).lower.shape == (2, 2)
    with pytest.raises(InvalidInput, match="sides of 5 samples, got 3"):
        own.contains(torch.zeros(3, 2))


def test_half_open_boxes_hold_what_they_hold() -> None:
    box = Box.of((0, math.inf), (2,))
    assert box.contains(torch.tensor([[0.0, 1e300], [-1e-30, 0.0]], dtype=F64)).tolist() == [True, False]
    assert float(box.farthest(torch.ones(1, 2, dtype=F64), 2)) == math.inf


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_no_corner_is_farther_than_the_farthest(p: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(50, 3, dtype=F64, generator=g)
    box = Box.of((x - torch.rand(50, 3, dtype=F64, generator=g), x + torch.rand(50, 3, dtype=F64, generator=g)), (3,))
    corners = torch.cartesian_prod(*([torch.tensor([0.0, 1.0], dtype=F64)] * 3))
    points = box.lower[:, None] + corners * (box.upper - box.lower)[:, None]
    length = torch.linalg.vector_norm(points - x[:, None], p, dim=2).amax(dim=1)
    away = box.farthest(x, p)
    assert bool((away >= length * (1 - 1e-14)).all()) and bool((away <= length * (1 + 1e-12)).all())


def test_what_is_clamped_lies_inside_in_any_dtype() -> None:
    box = Box.of((0.1, 0.7), (2,))
    for dtype in (torch.float32, F64):
        clamped = box.clamp(torch.tensor([[-1.0, 2.0]], dtype=dtype))
        assert clamped.dtype == dtype and bool(((clamped.double() >= 0.1) & (clamped.double() <= 0.7)).all())


def test_boxes_of_batches_are_joined_if_they_are_one() -> None:
    own = Box.of((torch.zeros(5, 2), torch.rand(5, 2) + 1), (2,))
    assert joined_boxes([own.part(slice(2)), own.part(slice(2, 5))]) == own
    assert joined_boxes([None, None]) is None
    for boxes in ([Box.of((0, 1), (2,)), None], [None, Box.of((0, 1), (2,))], [Box.of((0, 1), (2,)), own]):
        with pytest.raises(InvalidInput, match="different boxes"):
            joined_boxes(boxes)
