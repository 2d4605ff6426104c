"""Anchored and local bounds in pieces of the batch, so that memory does not grow with the number of samples."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from curvcert.bounds.lipschitz.analyses import unit_facts
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Anchor, Ball, Bound, Global, LayerTerm
from curvcert.memory import spare_elements
from curvcert.propagation.analysis import JACOBIAN_ROWS

_ELEMENTS = 2**24
"""Numbers that the widest intermediate result of a piece may hold; more on an accelerator, as its memory allows."""

_COPIES = 16
"""Intermediate results held at a time."""


def in_pieces(bound: Callable[[Problem], Bound], problem: Problem) -> Bound:
    """Apply a bound with one value per sample to pieces of the batch, and join the results."""
    if isinstance(problem.scope, Global):
        return bound(problem)
    spare = spare_elements(problem.network.device, _COPIES * _ELEMENTS) // _COPIES
    size = max(1, spare // elements_per_sample(problem))
    pieces = [bound(part) for part in _split(problem, size)]
    if len(pieces) == 1:
        return pieces[0]
    terms = zip(*(piece.per_layer for piece in pieces), strict=True)
    return replace(
        pieces[0],
        value=torch.cat([piece.value for piece in pieces]),
        scope=problem.scope,
        per_layer=tuple(_joined(term) for term in terms),
    )


def elements_per_sample(problem: Problem) -> int:
    """Return how many numbers the widest batch of covectors of one sample holds."""
    hidden = [unit.widest for unit in problem.network.activated]
    states = [math.prod(unit.block.out_shape) for unit in problem.network.units]
    rows = [n for n in states[:-1] if n <= JACOBIAN_ROWS]
    inputs = math.prod(problem.network.in_shape)
    widest = max(inputs, *hidden, *states)
    formed = inputs if unit_facts(problem).jacobians_fit else 1
    return widest * max(problem.network.outputs, formed, *rows, 1)


def _split(problem: Problem, size: int) -> list[Problem]:
    scope, known = problem.scope, problem.evaluated
    if isinstance(scope, Global) or len(scope.x) <= size:
        return [problem]
    pieces = []
    for part in torch.arange(len(scope.x), device=scope.x.device).split(size):
        x = scope.x[part]
        evaluated = None if known is None else known.of_samples(part)
        pieces.append(problem.over(Anchor(x) if isinstance(scope, Anchor) else Ball(x, scope.r[part]), evaluated))
    return pieces


def _joined(terms: tuple[LayerTerm, ...]) -> LayerTerm:
    return replace(terms[0], value=torch.cat([term.value for term in terms]))
