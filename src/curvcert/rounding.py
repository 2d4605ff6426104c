r"""Directed rounding: how a float64 computation becomes an upper bound on a real number.

Every rigorous bound in curvcert follows one recipe: compute in float64, add a proven bound on
the rounding error, and round the sum outward.  With the unit roundoff :math:`u = 2^{-53}`, an
inner product of length n in any order of summation has a relative error (against the inner
product of absolute values) of at most :math:`\gamma_n = nu / (1 - nu)` (Higham 2002, section 3.1).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput

UNIT_ROUNDOFF = 2.0**-53
TINY = 2.0**-1000
"""An absolute term that dwarfs anything lost to gradual underflow in the sizes we meet."""

_LEAST = 2.0**-1074
"""The least positive float."""

_LARGE = 2**22
"""Numbers that an accelerator reads in about the time that it takes to answer."""

RECURSION_SLACK = 2.0**-40
"""Relative slack for sums and products of at most 2**12 nonnegative factors."""


def gamma(n: int) -> float:
    r"""Return :math:`\gamma_n = nu/(1 - nu)`, rounded up.

    >>> 10 * 2.0**-53 < gamma(10) < 10.001 * 2.0**-53
    True
    """
    if n < 0 or n * UNIT_ROUNDOFF >= 0.5:
        raise InvalidInput(f"gamma(n) needs 0 <= n < 2**52, got {n}.")
    return n * UNIT_ROUNDOFF / (1 - n * UNIT_ROUNDOFF) * (1 + 4 * UNIT_ROUNDOFF)


def next_up(x: Tensor) -> Tensor:
    """Return the next larger float, elementwise.

    >>> next_up(torch.tensor(1.0, dtype=torch.float64)).item() - 1.0 == 2.0**-52
    True
    """
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def next_down(x: Tensor) -> Tensor:
    """Return the next smaller float, elementwise.

    >>> 1.0 - next_down(torch.tensor(1.0, dtype=torch.float64)).item() == 2.0**-53
    True
    """
    return torch.nextafter(x, torch.full_like(x, -torch.inf))


def inflate(x: Tensor, relative: float) -> Tensor:
    """Return an upper bound on x (1 + relative), for x >= 0 and relative >= 0.

    Differentiable; the two roundings of the product are covered by four unit roundoffs.

    >>> float(inflate(torch.tensor(1.0, dtype=torch.float64), 0.0)) > 1.0
    True
    """
    return x * (1 + (relative + 4 * UNIT_ROUNDOFF) * (1 + 4 * UNIT_ROUNDOFF))


@final
@dataclass(frozen=True, eq=False)
class Upper:
    r"""Nonnegative numbers on the way to an upper bound: as they were computed, and how many roundings lie behind them.

    The real numbers are at most :math:`v (1 - u)^{-n} \le v (1 + \gamma_n)` for values v and n roundings, since an
    operation that is rounded to the nearest loses at most a factor of 1 - u.  So a formula reads as on paper:

    | operation | roundings of the result |
    | --- | --- |
    | a + b | the more of the two, and 1 |
    | a b, and a / c for an exact c | those of both together, and 1 |
    | the root of a | half of them, rounded up, and 1 |
    | a sum of m | the most of them, and m - 1, in any order |
    | a product of matrices | those of both together, and the inner dimension |
    | the largest, the least | the most of them |

    Tensors and numbers beside an `Upper` are proven bounds, or exact: without a rounding.  Nothing is subtracted.
    The count is relative: what a product may lose to underflow is refused before (`bounds/lipschitz/underflow.py`), or
    added by whoever meets it.

    >>> three, four = (torch.tensor(x, dtype=torch.float64) for x in (3.0, 4.0))
    >>> length = (Upper(three) * three + four * Upper(four)).root()
    >>> length.roundings, 5.0 <= float(length.bound) < 5.000001
    (2, True)
    """

    value: Tensor
    roundings: int = 0

    @property
    def bound(self) -> Tensor:
        """The numbers as proven upper bounds."""
        return inflate(self.value, gamma(self.roundings)) if self.roundings else self.value

    def __add__(self, other: "Upper | Tensor | float") -> "Upper":
        value, roundings = _counted(other)
        return Upper(self.value + value, max(self.roundings, roundings) + 1)

    def __mul__(self, other: "Upper | Tensor | float") -> "Upper":
        value, roundings = _counted(other)
        return Upper(self.value * value, self.roundings + roundings + 1)

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: "Upper | Tensor") -> "Upper":
        value, roundings = (other.value, other.roundings) if isinstance(other, Upper) else (other, 0)
        return Upper(self.value @ value, self.roundings + roundings + self.value.shape[-1])

    def __truediv__(self, exact: Tensor | float) -> "Upper":
        """Divide by positive numbers that are exact, or at most what they stand for."""
        return Upper(self.value / exact, self.roundings + 1)

    def __getitem__(self, index: object) -> "Upper":
        return Upper(self.value[index], self.roundings)  # type: ignore[index]  # whatever a tensor takes

    def root(self) -> "Upper":
        """Return the square roots."""
        return Upper(self.value.sqrt(), (self.roundings + 1) // 2 + 1)

    def square(self) -> "Upper":
        """Return the squares."""
        return self * self

    def sum(self, *dims: int) -> "Upper":
        """Return the sums along dimensions, along all of them without any."""
        summed = self.value.sum(dim=dims) if dims else self.value.sum()
        count = self.value.numel() // max(summed.numel(), 1)
        return Upper(summed, self.roundings + max(count - 1, 0))

    def flatten(self, start: int) -> "Upper":
        """Return the same in fewer dimensions."""
        return Upper(self.value.flatten(start), self.roundings)

    def amax(self, *dims: int) -> "Upper":
        """Return the largest along dimensions, along all of them without any."""
        return Upper(self.value.amax(dim=dims), self.roundings)


def _counted(x: Upper | Tensor | float) -> tuple[Tensor | float, int]:
    return (x.value, x.roundings) if isinstance(x, Upper) else (x, 0)


def lengths(x: Upper | Tensor, *dims: int) -> Upper:
    """Return the 2-norms along dimensions, of all entries without any, as they are computed without a scale.

    >>> lengths(torch.tensor([3.0, 4.0], dtype=torch.float64))
    Upper(value=tensor(5., dtype=torch.float64), roundings=3)
    """
    value, roundings = (x.value, x.roundings) if isinstance(x, Upper) else (x, 0)
    found: Tensor = torch.linalg.vector_norm(value, dim=dims or None)
    count = value.numel() // max(found.numel(), 1)
    return Upper(found, roundings + (count + 1) // 2 + 2)


def root_below(n: float) -> float:
    """Return a number at most the root of n, and next to it.

    >>> 1.0 - root_below(1.0) == 2.0**-53
    True
    """
    return math.nextafter(math.sqrt(n), 0.0)


def root_above(n: float) -> float:
    """Return a number at least the root of n, and next to it.

    >>> root_above(1.0) - 1.0 == 2.0**-52
    True
    """
    return math.nextafter(math.sqrt(n), math.inf)


def least(first: Upper | Tensor, *others: Upper | Tensor) -> Upper:
    """Return the least of several bounds on the same numbers, elementwise.

    >>> one, two = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 2.0))
    >>> least(two, Upper(one) + 0.0, two)
    Upper(value=tensor(1., dtype=torch.float64), roundings=1)
    """
    value, roundings = (first.value, first.roundings) if isinstance(first, Upper) else (first, 0)
    for other in others:
        more = other if isinstance(other, Upper) else Upper(other)
        value, roundings = torch.minimum(value, more.value), max(roundings, more.roundings)
    return Upper(value, roundings)


def total(terms: Iterable[Upper | Tensor]) -> Upper:
    """Return the sum of one or more terms of one shape, or of shapes that broadcast.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> total([one, Upper(one) * one, one])
    Upper(value=tensor(3., dtype=torch.float64), roundings=3)
    """
    counted = [term if isinstance(term, Upper) else Upper(term) for term in terms]
    values = torch.broadcast_tensors(*(term.value for term in counted))
    return Upper(torch.stack(values).sum(dim=0), max(term.roundings for term in counted) + len(counted) - 1)


def power_of_two(x: Tensor) -> Tensor:
    """Return a power of two of the size of x >= 0, elementwise, so that dividing by it is exact; 1 for 0.

    >>> power_of_two(torch.tensor([0.0, 3.0, 0.25], dtype=torch.float64)).tolist()
    [1.0, 4.0, 0.5]
    """
    x = x.detach()
    _, exponent = torch.frexp(x)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent.clamp(-1020, 1020)), torch.ones_like(x))


def bits_below_one(size: float) -> float:
    """Return by how many powers of two a size is below 1; none for larger ones, inf for 0.

    >>> bits_below_one(0.125), bits_below_one(8.0), bits_below_one(0.0)
    (3.0, 0.0, inf)
    """
    return max(0.0, -math.log2(size)) if size > 0 else math.inf


def most_bits(bits: Iterable[float]) -> float:
    """Return the most bits that something other than 0 is below 1, as `bits_below_one` counts; inf if all are 0.

    >>> most_bits([3.0, 5.0, math.inf]), most_bits([math.inf])
    (5.0, inf)
    """
    return max((each for each in bits if math.isfinite(each)), default=math.inf)


def norm_upper_bound_of_vectors(x: Tensor, p: float, dim: int) -> Tensor:
    """Bound the p-norms of float64 vectors along one dimension, rounding included.

    >>> 5.0 <= float(norm_upper_bound_of_vectors(torch.tensor([3.0, 4.0], dtype=torch.float64), 2, 0)) < 5.000001
    True
    """
    if x.shape[dim] == 0:
        return x.abs().sum(dim)
    relative = gamma(x.shape[dim] + 64)
    if p == 2 and _may_look(x):
        plain = squares_in_range(x, dim)
        if plain is not None:
            return inflate(plain, relative)
    size = x.abs()
    peak = size.amax(dim=dim, keepdim=True)
    if p == torch.inf:
        return peak.squeeze(dim)
    # Entries below the underflow threshold, relative to the largest, are far below one unit roundoff.
    scaled = size / torch.where(peak > 0, peak, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=dim) if p == 2 else scaled.pow(p).sum(dim=dim).pow(1.0 / p)
    # Among the least floats nothing is relative: two roundings to the nearest lose no more than one of them.
    return inflate(length * peak.squeeze(dim), relative) + (peak > 0).squeeze(dim).to(x.dtype) * _LEAST


def _may_look(x: Tensor) -> bool:
    """Whether the numbers may decide what is computed: not in a gradient, nor where it costs more to wait."""
    waits = x.device.type == "cuda" and x.numel() >= _LARGE
    return x.dtype == torch.float64 and not torch.is_grad_enabled() and (waits or x.device.type == "cpu")


def squares_in_range(x: Tensor, dim: int) -> Tensor | None:
    """Return the 2-norms as computed without scaling, or None where squares may have left the range of floats.

    A norm between 2**-400 and 2**400 has lost no more than a part in 2**200 to underflow; one of 0 is that of zeros.

    >>> squares_in_range(torch.tensor([3.0, 4.0], dtype=torch.float64), 0)
    tensor(5., dtype=torch.float64)
    >>> squares_in_range(torch.tensor([3e-200, 4e-200], dtype=torch.float64), 0) is None
    True
    """
    norms: Tensor = torch.linalg.vector_norm(x, dim=dim)
    ordinary = (norms > 2.0**-400) & (norms < 2.0**400)
    if bool(ordinary.all()):
        return norms
    peaks = torch.linalg.vector_norm(x, torch.inf, dim=dim)
    return norms if bool((ordinary | (peaks == 0)).all()) else None
