"""What every ascent shares: where it may go, what it keeps, and the small steps in between."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network import Network
from curvcert.norms import steepest_direction, vector_norm

TINY = 1e-300
INSIDE = 1 - 1e-12
"""Points of a ball are kept this far inside it, relatively, so that rounding cannot carry them out."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Many ascents in one batch, one per row.

    Attributes:
        network: whose outputs the covectors weigh.
        p: the norm of the inputs.
        q: that of the outputs.
        start: where each ascent begins.
        centre: the centre of the ball that it keeps to, or the anchor that it measures from.
        radius: the ball's radius; inf for none.
        covector: which functional u . f of the outputs is climbed.
        free: whether u may be any of the dual q-ball, and is chosen on the way, or is the one given.
        seed: of the random directions.
    """

    network: Network
    p: float
    q: float
    start: Tensor
    centre: Tensor
    radius: Tensor
    covector: Tensor
    free: bool
    seed: int

    def project(self, x: Tensor) -> Tensor:
        """Bring points back into their balls along the line to the centre; those without a ball stay."""
        return within(x, self.centre, self.radius, self.p)

    def directions(self, salt: int) -> Tensor:
        """Return one random unit direction a row, flattened."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * salt)
        noise = torch.randn(self.start.shape, dtype=torch.float64, generator=generator)
        return steepest_direction(noise.flatten(1).to(self.start.device), self.p)


@dataclass(frozen=True, eq=False)
class Ascended:
    """The largest value that every row met, and where: at x, along a direction, for a covector.

    `quotient` tells whether the value is that of two points, x and x + direction, or of the derivative at x.
    """

    value: Tensor
    x: Tensor
    direction: Tensor
    covector: Tensor
    quotient: bool

    @staticmethod
    def nothing(rows: Rows, quotient: bool) -> "Ascended":
        """Return the state before the first step."""
        zero = rows.start.new_zeros(len(rows.start))
        return Ascended(zero, rows.start, rows.directions(9).reshape(rows.start.shape), rows.covector, quotient)

    def improved(self, value: Tensor, x: Tensor, direction: Tensor, covector: Tensor) -> "Ascended":
        """Return the better of this and that, row by row; what is not finite never counts."""
        better = value.isfinite() & (value > self.value)
        wide = column(better, x)
        return Ascended(
            torch.where(better, value, self.value),
            torch.where(wide, x, self.x),
            torch.where(wide, direction.reshape(x.shape), self.direction),
            torch.where(better[:, None], covector, self.covector),
            self.quotient,
        )


def within(x: Tensor, centre: Tensor, radius: Tensor, p: float) -> Tensor:
    """Return the points scaled into the p-balls about their centres.

    >>> within(torch.tensor([[3.0]]), torch.zeros(1, 1), torch.tensor([1.0]), 2).round(decimals=6)
    tensor([[1.]])
    """
    step = x - centre
    length = vector_norm(step.flatten(1), p, dim=1)
    factor = (INSIDE * radius / length.clamp(min=TINY)).clamp(max=1.0)
    return torch.where(column(factor < 1.0, x), centre + step * column(factor, x), x)


def unblocked(gradient: Tensor, point: Tensor, sides: tuple[Tensor, Tensor]) -> Tensor:
    """Return gradients, flattened, without the coordinates that would lead out of a box at once.

    >>> ends = torch.zeros(1, 2), torch.ones(1, 2)
    >>> unblocked(torch.tensor([[5.0, -2.0]]), torch.tensor([[1.0, 0.5]]), ends)
    tensor([[ 0., -2.]])
    """
    lower, upper = (side.expand_as(point).flatten(1) for side in sides)
    at = point.flatten(1)
    return torch.where(((at >= upper) & (gradient > 0)) | ((at <= lower) & (gradient < 0)), 0.0, gradient)


def column(per_row: Tensor, like: Tensor) -> Tensor:
    """Return one number per row, shaped to multiply the rows of `like`."""
    return per_row.reshape(-1, *(1,) * (like.dim() - 1))


def stepped(gradient: Tensor | None, otherwise: Tensor, length: Tensor) -> Tensor:
    """Return steps with the given largest entries, along gradients, or along `otherwise` where they vanish."""
    flat = torch.zeros_like(otherwise) if gradient is None else gradient.detach().flatten(1).nan_to_num(0.0)
    flat = known(flat, otherwise)
    peak = flat.abs().amax(dim=1).clamp(min=TINY)
    return flat * (length / peak)[:, None]


def known(found: Tensor, otherwise: Tensor) -> Tensor:
    """Return the rows found, or the other ones where those vanish or are not finite."""
    good = found.isfinite().all(dim=1, keepdim=True) & (found.abs().amax(dim=1, keepdim=True) > TINY)
    return torch.where(good, found, otherwise)


def derivative(value: Tensor, by: Tensor) -> Tensor:
    """Return the gradient with respect to a batch, flattened and detached; zeros where it does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(by).detach().flatten(1)
    (found,) = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return torch.zeros_like(by).detach().flatten(1) if found is None else found.detach().flatten(1)
