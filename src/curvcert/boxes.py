"""The range of valid inputs: lowest and highest values of every coordinate, for all samples or for each its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput
from curvcert.rounding import next_down, next_up, norm_upper_bound_of_vectors

Side = float | Tensor
BoxSides = tuple[Side, Side]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Box:
    """All x with lower <= x <= upper, coordinate by coordinate; sides may be infinite.

    Attributes:
        lower: the lowest values in float64: one number, or one per coordinate, or those of each sample.
        upper: the highest values, of the same shape.
        per_sample: whether the first dimension is that of the samples.
    """

    lower: Tensor
    upper: Tensor
    per_sample: bool = False

    @staticmethod
    def of(box: "BoxSides | Box", in_shape: Sequence[int]) -> "Box":
        """Return the box with the given sides, for inputs of a shape.

        Raises:
            InvalidInput: if the sides are not two, fit no input, are NaN, or the lower one is above the upper one.

        >>> Box.of((0, 1), (2,))
        Box([0, 1])
        >>> Box.of((torch.zeros(2), torch.ones(3, 2)), (2,))
        Box(of 3 samples, within [0, 1])
        """
        if isinstance(box, Box):
            return box
        shape = tuple(in_shape)
        if not (isinstance(box, tuple | list) and len(box) == 2):
            raise InvalidInput(f"box is (lowest, highest), two numbers or tensors, got {box!r}.")
        sides = [_side(side) for side in box]
        samples = max((len(side) for side in sides if side.dim() == 1 + len(shape) and side.dim() > 0), default=0)
        whole = (samples, *shape) if samples else shape if any(side.dim() for side in sides) else ()
        try:
            lower, upper = (side.expand(whole).clone() for side in sides)
        except RuntimeError:
            got = " and ".join(str(tuple(side.shape)) for side in sides)
            raise InvalidInput(
                f"The sides of a box are numbers, or tensors of the shape {shape} of an input or a batch, got {got}."
            ) from None
        if bool((lower.isnan() | upper.isnan()).any()):
            raise InvalidInput("A side of the box is NaN. Give numbers; -inf and inf where there is no limit.")
        crossed = (lower > upper) | (lower == torch.inf) | (upper == -torch.inf)
        if bool(crossed.any()):
            low, high = float(lower[crossed][0]), float(upper[crossed][0])
            where = f" in {int(crossed.sum())} of {crossed.numel()} places" if crossed.dim() else ""
            raise InvalidInput(f"box is (lowest, highest) with lowest <= highest, got {low:g} and {high:g}{where}.")
        return Box(lower, upper, bool(samples))

    def part(self, index: slice | Tensor) -> "Box":
        """Return the box of some of the samples; that of all is theirs too."""
        if not self.per_sample:
            return self
        index = index.cpu() if isinstance(index, Tensor) else index
        return Box(self.lower[index], self.upper[index], True)

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sides beside a batch of inputs: there, and in its dtype, rounded inward."""
        if self.per_sample and len(self.lower) != len(x):
            raise InvalidInput(
                f"The box has the sides of {len(self.lower)} samples, got {len(x)}. Give one per sample."
            )
        lower, upper = self.lower.to(x), self.upper.to(x)
        if x.dtype != torch.float64:
            lower = torch.where(lower.double() < self.lower.to(x.device), next_up(lower), lower)
            upper = torch.where(upper.double() > self.upper.to(x.device), next_down(upper), upper)
        return lower, upper

    def contains(self, x: Tensor) -> Tensor:
        """Return which samples of a batch lie inside.

        >>> Box.of((0, 1), (2,)).contains(torch.tensor([[0.0, 1.0], [0.5, 1.5]]))
        tensor([ True, False])
        """
        lower, upper = self.sides(x)
        return ((x >= lower) & (x <= upper)).flatten(1).all(dim=1)

    def clamp(self, x: Tensor) -> Tensor:
        """Return the nearest points inside."""
        lower, upper = self.sides(x)
        return torch.minimum(torch.maximum(x, lower), upper)

    def farthest(self, x: Tensor, p: float) -> Tensor:
        """Bound the p-distance from each x inside to the farthest corner, rounded up: all of the box is that near.

        >>> bool(5 <= Box.of((0, 4), (2,)).farthest(torch.tensor([[1.0, 0.0]], dtype=torch.float64), 2)[0] < 5.000001)
        True
        """
        lower, upper = self.sides(x.double())
        room = torch.maximum(x - lower, upper - x).flatten(1)
        away = norm_upper_bound_of_vectors(next_up(room.nan_to_num(posinf=0.0)), p, 1)
        return torch.where(room.isinf().any(dim=1), torch.inf, away)

    def to_array(self) -> Tensor:
        """Return both sides in one tensor, the lower one first."""
        return torch.stack([self.lower, self.upper])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and torch.equal(self.to_array(), other.to_array())

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        lowest, highest = float(self.lower.min()), float(self.upper.max())
        if self.lower.dim() == 0:
            return f"[{lowest:g}, {highest:g}]"
        own = f"of {len(self.lower)} samples" if self.per_sample else f"of shape {tuple(self.lower.shape)}"
        return f"{own}, within [{lowest:g}, {highest:g}]"

    def __repr__(self) -> str:
        return f"Box({self})"


def joined_boxes(boxes: Sequence[Box | None]) -> Box | None:
    """Return the box of consecutive batches.

    Raises:
        InvalidInput: if some have one and others another, or none.
    """
    first, *rest = boxes
    if first is not None and first.per_sample and all(box is not None and box.per_sample for box in rest):
        known = [box for box in boxes if box is not None]
        return Box(torch.cat([box.lower for box in known]), torch.cat([box.upper for box in known]), True)
    if any(box != first for box in rest):
        raise InvalidInput("These batches have different boxes. Certify all of them with one.")
    return first


def _side(side: Any) -> Tensor:
    try:
        return torch.as_tensor(side, device="cpu").detach().to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"A side of the box is a number or a tensor of numbers, got {side!r}: {error}.") from None
