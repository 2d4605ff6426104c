r"""Growth of distances through a block whose slopes are known at a point: shared by anchored and local.

When every quotient :math:`(\phi(z_l') - \phi(z_l)) / (z_l' - z_l)` lies in an interval of its own,
:math:`h(x') - h(x) = (H + G D W)(x' - x)` with a diagonal D in those intervals, one problem a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network import Affine, Block
from curvcert.network.rewriting.units import Unit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.rows import basis_vectors
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.rounding import gamma, inflate, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Slopes:
    """Elementwise intervals of slopes, one row a sample."""

    lower: Tensor
    upper: Tensor

    @property
    def steepest(self) -> Tensor:
        """The largest absolute slope."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def about(self, centre: float) -> Tensor:
        """Return the largest distance of a slope from the centre, rounded up."""
        return inflate(torch.maximum(self.upper - centre, centre - self.lower).clamp(min=0.0), 0.0)

    def intersect(self, other: "Slopes") -> "Slopes":
        """Return the slopes that lie in both."""
        return Slopes(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))


def stacked_size(sizes: Sequence[Tensor], p: float) -> Tensor:
    """Bound the p-norm of values that are stacked, given bounds on the p-norm of each."""
    return sizes[0] if len(sizes) == 1 else norm_upper_bound_of_vectors(torch.stack([*sizes]), p, 0)


def composed(
    unit: Unit,
    sizes: Sequence[Tensor],
    constant: Tensor,
    problem: Problem,
    last: bool,
    norms: AbstractNorms[R] | None = None,
) -> Tensor:
    """Return how far what a unit gives moves, one per sample, given how far what it reads does.

    `constant` is that of its block on what it reads, stacked; a sum of values also moves no further than its terms,
    by the problem's norms or others.
    """
    if last and problem.scalars:
        sizes = [size.unsqueeze(-1) for size in sizes]
    moved = stacked_size(sizes, problem.p) * constant
    if unit.parts and isinstance(unit.block, Affine):
        norm = problem.final_norm if last else problem.inner_norm
        terms = [size * norm(A, norms or problem.norms) for size, A in zip(sizes, unit.parts, strict=True)]
        moved = torch.minimum(moved, torch.stack(terms).sum(dim=0))
    return inflate(moved, gamma(4 + 2 * len(sizes)))


def block_growth(block: Block, slopes: Slopes, problem: Problem) -> Tensor:
    r"""Bound ||H + G D W||_p for each sample.

    The least of :math:`\|H\| + \|G\| \|DW\|` and, about the middle slope :math:`\mu`,
    :math:`\|H + \mu GW\| + \|G\| \|(D - \mu)W\|`.
    """
    p, norms = problem.p, problem.norms
    G = norms.norm(block.G, p, p)
    growth = norms.norm(block.H, p, p) + G * weighted_norm_upper_bound(block.W, slopes.steepest, p, norms)
    if block.is_residual:
        mu, linear = _centre(block)
        rest = weighted_norm_upper_bound(block.W, slopes.about(mu), p, norms)
        growth = torch.minimum(growth, norms.norm(linear, p, p) + G * rest)
    return inflate(growth, gamma(8))


def last_growth(block: Block, slopes: Slopes, problem: Problem) -> Tensor:
    """Bound the last block in the problem's final norm: (batch,), or (batch, outputs) for scalars."""
    p, norms = problem.p, problem.norms
    W = weighted_norm_upper_bound(block.W, slopes.steepest, p, norms)
    if problem.scalars:
        W = W[:, None]
    G, H = problem.final_norm(block.G, norms), problem.final_norm(block.H, norms)
    growth = H + G * W
    if problem.scalars:
        rows = _weighted_rows(block.G, slopes.steepest, conjugate(p))
        growth = torch.minimum(growth, H + rows * norms.norm(block.W, p, p))
    if block.is_residual:
        mu, linear = _centre(block)
        rest = weighted_norm_upper_bound(block.W, slopes.about(mu), p, norms)
        rest = rest[:, None] if problem.scalars else rest
        growth = torch.minimum(growth, problem.final_norm(linear, norms) + G * rest)
    return inflate(growth, gamma(8))


def _centre(block: Block) -> tuple[float, AbstractLinearMap]:
    alpha, beta = block.activation.slope
    mu = (alpha + beta) / 2
    return mu, block.H + mu * (block.G @ block.W)


def _weighted_rows(G: AbstractLinearMap, s: Tensor, r: float) -> Tensor:
    """Bound the r-norm of every row of G diag(s), one line a sample."""
    basis = basis_vectors(G.out_shape, 0, G.out_size, G)
    rows = G.adjoint(basis)
    size = inflate(rows.abs() + image_error(G.T, basis), 0.0).flatten(1)
    return norm_upper_bound_of_vectors(inflate(size * s.flatten(1)[:, None, :], 0.0), r, 2)
