r"""Gradients carried back as intervals, coordinate by coordinate, that hold at every input.

For scalar outputs f and a value v let :math:`u_v = \partial f / \partial v`.  An affine node sends :math:`A^T u` to
what it reads: of an interval with centre c and radius r that is :math:`A^T c \pm |A|^T r`.  An activation sends
:math:`\phi' \circ u`, within the hull of the corners of :math:`[\alpha, \beta] \times [u]`.  What the readers of a
value send adds up.

Where the dual norm of a gradient is known to be at most s, no entry exceeds s, and none of :math:`A^T u` exceeds
:math:`\|A_{:l}\|_p s`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.bounds.types import Side
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.network.sweeps import AbstractBackward
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import absolute_image, image_error
from curvcert.rounding import Upper, inflate

ColumnNorms = Callable[[AbstractLinearMap], Tensor]


@dataclass(frozen=True, eq=False)
class Interval:
    """Bounds on gradients with respect to one value, (outputs, *shape)."""

    lower: Tensor
    upper: Tensor

    @property
    def largest(self) -> Tensor:
        """The largest absolute value of each entry."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def weights(self, activation: Activation, side: Side) -> Tensor:
        r"""Bound :math:`\max(u \phi'', 0) / c` over the interval and all :math:`\phi''`, c the largest of these.

        From below that is :math:`\max(-u \phi'', 0) / c`; for both sides :math:`|u|`, which neither exceeds.
        """
        c = activation.curvature_c
        if side == "both" or c == 0:
            return self.largest
        low, high = (torch.full_like(self.lower[:1], q / c) for q in activation.curvature or (-c, c))
        return torch.minimum(self.bent(low, high, side), self.largest)

    def bent(self, low: Tensor, high: Tensor, side: Side) -> Tensor:
        """Bound max(u q, 0) over the interval and all q between low and high; from below max(-u q, 0), or |u q|."""
        corners = torch.stack([q * end for q in (low, high) for end in (self.lower, self.upper)])
        above, below = corners.amax(dim=0), -corners.amin(dim=0)
        top = torch.maximum(above, below) if side == "both" else above if side == "above" else below
        return inflate(top.clamp(min=0.0), 4 * torch.finfo(torch.float64).eps)

    def within(self, cap: Tensor) -> "Interval":
        """Return the part where no entry exceeds the cap."""
        return Interval(torch.maximum(self.lower, -cap), torch.minimum(self.upper, cap))

    def plus(self, other: "Interval") -> "Interval":
        """Enclose the sums."""
        return Interval(_down(self.lower + other.lower), _up(self.upper + other.upper))

    def pulled(self, A: AbstractLinearMap) -> "Interval":
        """Enclose A' g for every g inside."""
        centre = (self.lower + self.upper) / 2
        radius = inflate(torch.maximum(self.upper - centre, centre - self.lower), 0.0)
        width = (absolute_image(A.T, Upper(radius, 1)) + image_error(A.T, centre)).bound
        middle = A.adjoint(centre)
        return Interval(_down(middle - width), _up(middle + width))

    def times(self, slope: tuple[float, float]) -> "Interval":
        """Enclose the products with numbers between both slopes."""
        corners = torch.stack([s * end for s in slope for end in (self.lower, self.upper)])
        slack = 4 * torch.finfo(torch.float64).eps * corners.abs().amax(dim=0)
        return Interval(corners.amin(dim=0) - slack, corners.amax(dim=0) + slack)


class GradientIntervals(AbstractBackward[Interval]):
    """Intervals of gradients.

    `sizes` bounds their dual norm, (outputs,), for the values where that is known; what `capped` affine nodes send back
    is bounded by it too, with the norms of the columns of their maps, each in the shape of its input.

    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> W = Dense(torch.full((1, 1), 3.0, dtype=torch.float64))
    >>> nodes = start((1,), torch.device("cpu")).linear(W).activate(TANH, "tanh").linear(W).builder.nodes
    >>> end = Interval(*2 * [torch.ones(1, 1, dtype=torch.float64)])
    >>> [round(float(found.largest), 9) for found in GradientIntervals({}, (), lambda op: op).sweep(nodes, end)]
    [9.0, 3.0, 3.0, 1.0]
    """

    def __init__(self, sizes: Mapping[int, Tensor], capped: Collection[int | None], column_norms: ColumnNorms) -> None:
        """Take what is known of sizes, and how to bound the norms of a map's columns."""
        self._sizes, self._capped, self._column_norms = sizes, capped, column_norms

    def joined(self, k: int, arriving: Sequence[Interval]) -> Interval:
        """Add up what arrives, as far as the size allows."""
        total = reduce(Interval.plus, arriving)
        return total.within(_per_output(self._sizes[k], total.lower.dim())) if k in self._sizes else total

    def affine(self, k: int, node: AffineNode, value: Interval) -> Sequence[Interval]:
        """Pull the interval back through each term."""
        sent = [value.pulled(term.map) for term in node.terms]
        if k not in self._sizes or k not in self._capped:
            return sent
        caps = [
            Upper(_per_output(self._sizes[k], interval.lower.dim())) * self._column_norms(term.map)
            for term, interval in zip(node.terms, sent, strict=True)
        ]
        return [interval.within(cap.bound) for interval, cap in zip(sent, caps, strict=True)]

    def elementwise(self, k: int, node: ElementwiseNode, value: Interval) -> Interval:
        """Multiply with the slopes."""
        return value.times(node.activation.slope)


def _per_output(size: Tensor, dim: int) -> Tensor:
    return size.reshape(-1, *(1,) * (dim - 1))


def _up(x: Tensor) -> Tensor:
    return x + 2 * torch.finfo(torch.float64).eps * x.abs()


def _down(x: Tensor) -> Tensor:
    return x - 2 * torch.finfo(torch.float64).eps * x.abs()
