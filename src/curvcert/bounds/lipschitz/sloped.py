r"""Blocks whose slopes are known at a point, as a problem asks for them: the last one in its final norm."""

from collections.abc import Sequence

from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network import Block
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error
from curvcert.operators.norm_rule import AbstractNorms, R
from curvcert.operators.rows import basis_vectors
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.propagation.slopes import Slopes, about_middle, block_growth, moved_through
from curvcert.rounding import Upper, least, norm_upper_bound_of_vectors


def composed(
    unit: AbstractUnit,
    sizes: Sequence[Tensor],
    constant: Tensor,
    problem: Problem,
    last: bool,
    norms: AbstractNorms[R] | None = None,
) -> Tensor:
    """Return how far what a unit gives moves, one per sample, by the problem's norms or others."""
    if last and problem.scalars:
        sizes = [size.unsqueeze(-1) for size in sizes]
    norm = problem.final_norm if last else problem.inner_norm
    return moved_through(unit, sizes, constant, problem.p, lambda A: norm(A, norms or problem.norms))


def sloped_growth(block: Block, slopes: Slopes, problem: Problem, last: bool) -> Tensor:
    """Bound ||H + G D W|| for each sample; for the last block in the final norm, (batch, outputs) of scalars."""
    return _last_growth(block, slopes, problem) if last else block_growth(block, slopes, problem.p, problem.norms)


def _last_growth(block: Block, slopes: Slopes, problem: Problem) -> Tensor:
    p, norms = problem.p, problem.norms
    W = weighted_norm_upper_bound(block.W, slopes.steepest, p, norms)
    if problem.scalars:
        W = W[:, None]
    G, H = problem.final_norm(block.G, norms), problem.final_norm(block.H, norms)
    growth = Upper(G) * W + H
    if problem.scalars:
        rows = _weighted_rows(block.G, slopes.steepest, conjugate(p))
        growth = least(growth, Upper(rows) * norms.norm(block.W, p, p) + H)
    if block.is_residual:
        mu, linear = about_middle(block)
        rest = weighted_norm_upper_bound(block.W, slopes.about(mu), p, norms)
        rest = rest[:, None] if problem.scalars else rest
        growth = least(growth, Upper(G) * rest + problem.final_norm(linear, norms))
    return growth.bound


def _weighted_rows(G: AbstractLinearMap, s: Tensor, r: float) -> Tensor:
    """Bound the r-norm of every row of G diag(s), one line per sample."""
    basis = basis_vectors(G.out_shape, 0, G.out_size, G)
    rows = G.adjoint(basis)
    size = (Upper(rows.abs().flatten(1)) + image_error(G.T, basis).flatten(1)) * s.flatten(1)[:, None, :]
    return norm_upper_bound_of_vectors(size.bound, r, 2)
