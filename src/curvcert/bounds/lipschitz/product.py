r"""The product of the layers' constants: the simplest bound, and the yardstick of the others.

On a graph it is a sum over paths of products, taken node by node: a sum of values moves no further than its terms do
together, an activation no further than its steepest slope allows.
"""

from curvcert.bounds.lipschitz.growth import Growth, bound_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.operators.norm_rule import AbstractNorms, R


def product_bound(problem: Problem, norms: AbstractNorms[R]) -> R:
    """Bound the Lipschitz constant of a network, node by node."""
    return bound_of(Growth(problem, norms, paths=False), problem, norms, "product")
