r"""Slopes of activations, neuron by neuron, and how far a block with such slopes moves what it gives.

When every quotient :math:`(\phi(z_l') - \phi(z_l)) / (z_l' - z_l)` lies in an interval of its own,
:math:`h(x') - h(x) = (H + G D W)(x' - x)` with a diagonal D in those intervals, one problem per sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import Activation, anchored_slope_range, derivative_range, second_derivative_range
from curvcert.network import Block
from curvcert.network.evaluation import Computed
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.propagation.relaxation import Reach
from curvcert.rounding import Upper, least, norm_upper_bound_of_vectors, total


@dataclass(frozen=True, eq=False)
class Slopes:
    """Elementwise intervals of slopes, one row per sample."""

    lower: Tensor
    upper: Tensor

    @property
    def steepest(self) -> Tensor:
        """The largest absolute slope."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def about(self, centre: float) -> Tensor:
        """Return the largest distance of a slope from the centre, rounded up."""
        return Upper(torch.maximum(self.upper - centre, centre - self.lower).clamp(min=0.0), 1).bound

    def intersect(self, other: "Slopes") -> "Slopes":
        """Return the slopes that lie in both."""
        return Slopes(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    @property
    def flat(self) -> "Slopes":
        """The same, (batch, neurons)."""
        return Slopes(self.lower.flatten(1), self.upper.flatten(1))

    def of_samples(self, index: Tensor) -> "Slopes":
        """Return those of some of the samples."""
        return Slopes(self.lower[index], self.upper[index])


def slopes_within(activation: Activation, z: Reach) -> Slopes:
    """Enclose phi' wherever a pre-activation may lie."""
    return Slopes(*derivative_range(activation, *z.ends))


def curvatures_within(activation: Activation, z: Reach) -> Tensor:
    """Bound |phi''|, or the slopes of phi', wherever a pre-activation may lie."""
    lower, upper = curvature_range_within(activation, z)
    return torch.maximum(lower.abs(), upper.abs())


def curvature_range_within(activation: Activation, z: Reach) -> tuple[Tensor, Tensor]:
    """Enclose phi'', or the slopes of phi', wherever a pre-activation may lie."""
    return second_derivative_range(activation, *z.ends)


def anchored_slopes(activation: Activation, z: Computed) -> Slopes:
    r"""Enclose the slopes seen from z, for every z that the computed one may stand for.

    A quotient moves by at most c/2 for a unit of z, since it is a mean of :math:`\phi'` with weight 1 - t;
    without a Lipschitz derivative the global slopes are used.
    """
    alpha, beta = activation.slope
    if activation.curvature is None or not activation.is_bounded:
        return Slopes(torch.full_like(z.value, alpha), torch.full_like(z.value, beta))
    lower, upper = anchored_slope_range(activation, z.value)
    drift = (Upper(z.error) * (0.5 * activation.curvature_c)).bound
    return Slopes((lower - drift).clamp(min=alpha), (upper + drift).clamp(max=beta))


def stacked_size(sizes: Sequence[Tensor], p: float) -> Tensor:
    """Bound the p-norm of values that are stacked, given bounds on the p-norm of each."""
    return sizes[0] if len(sizes) == 1 else norm_upper_bound_of_vectors(torch.stack([*sizes]), p, 0)


def moved_through(
    unit: AbstractUnit, sizes: Sequence[Tensor], constant: Tensor, p: float, norm: Callable[[AbstractLinearMap], Tensor]
) -> Tensor:
    """Return how far what a unit gives moves, one per sample, given how far what it reads does.

    `constant` is that of its block on what it reads, stacked; a sum of values also moves no further than its terms.
    """
    moved = Upper(stacked_size(sizes, p)) * constant
    if unit.terms:
        moved = least(moved, total(Upper(size) * norm(A) for size, A in zip(sizes, unit.terms, strict=True)))
    return moved.bound


def block_growth(block: Block, slopes: Slopes, p: float, norms: NormBounds) -> Tensor:
    r"""Bound ||H + G D W||_p for each sample.

    The least of :math:`\|H\| + \|G\| \|DW\|` and, about the middle slope :math:`\mu`,
    :math:`\|H + \mu GW\| + \|G\| \|(D - \mu)W\|`.
    """
    G = norms.norm(block.G, p, p)
    growth = Upper(weighted_norm_upper_bound(block.W, slopes.steepest, p, norms)) * G + norms.norm(block.H, p, p)
    if block.is_residual:
        mu, linear = about_middle(block)
        rest = weighted_norm_upper_bound(block.W, slopes.about(mu), p, norms)
        growth = least(growth, Upper(rest) * G + norms.norm(linear, p, p))
    return growth.bound


def about_middle(block: Block) -> tuple[float, AbstractLinearMap]:
    """Return the middle slope mu, and H + mu G W."""
    alpha, beta = block.activation.slope
    mu = (alpha + beta) / 2 if block.activation.is_bounded else 0.0
    return mu, block.H + mu * (block.G @ block.W)
