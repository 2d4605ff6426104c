"""LipLT, in its z-form with levels: the constants of `growth.py`, of a network and of the blocks of a chain."""

import math
from dataclasses import dataclass

from torch import Tensor

from curvcert.bounds.lipschitz.block_constants import known
from curvcert.bounds.lipschitz.growth import Growth, bound_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap
from curvcert.operators.norm_rule import AbstractNorms, R


@dataclass(frozen=True, eq=False)
class LoopTransformed:
    """The linear part of a block about the middle slope, and what is left: rho, G and W."""

    linear: AbstractLinearMap
    rho: float
    G: AbstractLinearMap
    W: AbstractLinearMap


def loop_transformed(block: Block) -> LoopTransformed:
    """Split a block about the middle of its slopes; rho is rounded up so that it covers both ends."""
    alpha, beta = block.activation.slope
    mu = (alpha + beta) / 2
    rho = math.nextafter(max(beta - mu, mu - alpha), math.inf)
    return LoopTransformed(block.H + mu * (block.G @ block.W), rho, block.G, block.W)


def growth(problem: Problem, norms: AbstractNorms[R]) -> Growth:
    """Return the constants of all values; those in the problem's own norms are computed once."""
    if norms is problem.norms:
        return problem.once("growth", lambda: Growth(problem, norms))
    return Growth(problem, norms)


def liplt_prefixes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor]:
    """Return Lipschitz constants of x -> x_k for the blocks of a chain, k = 0, ..., K; the last in the final norm."""
    if norms is problem.norms:
        return problem.once("liplt", lambda: _prefixes(problem, norms))
    return _prefixes(problem, norms)


def _prefixes(problem: Problem, norms: AbstractNorms[R]) -> list[Tensor]:
    found, chain = growth(problem, norms), problem.network.chain
    return [found.of(0), *(found.of(link.output) for link in chain[:-1]), found.of_output()]


def liplt_bound(problem: Problem, norms: AbstractNorms[R]) -> R:
    """Bound the Lipschitz constant of a network by LipLT."""
    return bound_of(growth(problem, norms), problem, norms, "liplt")


def value_constants(problem: Problem) -> dict[int, Tensor]:
    """Return Lipschitz constants of x -> v for the input and for every value that a unit ends in; the last final."""

    def found() -> list[Tensor]:
        constants, units = growth(problem, problem.norms), problem.network.units
        return [constants.of(0), *(constants.of(unit.output) for unit in units[:-1]), constants.of_output()]

    values = map(known, problem.once("liplt", found))
    return dict(zip((0, *(unit.output for unit in problem.network.units)), values, strict=True))
