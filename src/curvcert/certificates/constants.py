"""The constants that certificates rest on, for all pairs of classes at once."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from curvcert.bounds.curvature.gradients import gradient_sizes
from curvcert.bounds.curvature.portfolio import curvature_of
from curvcert.bounds.curvature.unrolled import bends_unevenly, unrolled_terms
from curvcert.bounds.lipschitz.method import without_constants
from curvcert.bounds.lipschitz.portfolio import LIPSCHITZ_METHODS, lipschitz_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound
from curvcert.budget import Budget, OutOfTime
from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.network import Network
from curvcert.network.nodes import ElementwiseNode
from curvcert.rounding import UNIT_ROUNDOFF, Upper, total

_RECHECKABLE = [method for method in LIPSCHITZ_METHODS.values() if method.checkable]
"""The methods that "auto" takes for a certificate: those that the checker has too."""


@dataclass(frozen=True, eq=False)
class PairConstants:
    """Global constants of f_i - f_j, as (classes, classes) tables; NaN where that order was not asked for.

    K bounds the whole second derivative; `above[y, i]` its largest eigenvalue for f_i - f_y, which is all that radii
    ask for, and `above[i, y]` minus the least, all that an attack does.  They differ where activations bend unevenly.

    `names` say in words how each table was made, `made_by` names the methods.  `terms` returns what each activation, by
    its number, adds to K at most, where that is known; see `unrolled_terms`.
    """

    L: Tensor
    K: Tensor
    above: Tensor
    names: tuple[str, str]
    made_by: tuple[tuple[str, ...], tuple[str, ...]]
    notes: tuple[str, ...]
    terms: Callable[[], Mapping[int, Tensor]]


@dataclass(frozen=True)
class Tables:
    """Which bounds make the tables: a method of `lipschitz` or `curvature` by name, "auto", or None for no table.

    Without `required`, a network that has no curvature constant goes without that table, with a note.
    """

    L: str | None = None
    K: str | None = None
    required: bool = True


def global_constants(network: Network, pairs: Problem, tables: Tables, budget: Budget | None = None) -> PairConstants:
    """Compute tables of constants; `pairs` are all pairs of the network's classes.

    A budget leaves those of the cheapest methods, and a note.
    """
    L = K = pair_table(torch.full((_pairs(network),), torch.nan, dtype=torch.float64, device=network.device), network)
    above, L_name, K_name = K, "", ""
    L_methods: tuple[str, ...] = ()
    K_methods: tuple[str, ...] = ()
    notes: list[str] = []
    terms: Callable[[], Mapping[int, Tensor]] = dict
    if not network.has_constants and (tables.L or tables.K):
        if tables.required:
            raise without_constants(network)
        notes.append(f"global constants skipped: {without_constants(network)}")
        tables = Tables()
    if tables.L is not None:
        bound = lipschitz_of(pairs, tables.L, _RECHECKABLE, budget)
        notes += _cut(bound, budget)
        L, L_name, L_methods = pair_table(bound.value, network), bound.method, bound.methods
    if tables.K is not None:
        try:
            bound = curvature_of(pairs, tables.K, budget)
            notes += _cut(bound, budget)
            K, K_name, K_methods = pair_table(bound.value, network), bound.method, bound.methods
            try:
                with nullcontext() if budget is None else budget.limits():
                    above = _above(network, pairs, tables.K, K)
            except OutOfTime:
                if budget is None:
                    raise  # that of a budget around this one
                notes.append(f"curvature from one side skipped: the budget of {budget.seconds:g} s was spent")
            if tables.K == "auto":
                terms = cache(lambda: {a: pair_table(one.value, network) for a, one in unrolled_terms(pairs).items()})
        except (UnsupportedActivation, UnsupportedModule) as error:
            if tables.required:
                raise
            notes.append(f"curvature skipped: {error}")
    return PairConstants(L, K, above, (L_name, K_name), (L_methods, K_methods), tuple(notes), terms)


def _cut(bound: Bound, budget: Budget | None) -> list[str]:
    """Return a note for every method that a budget left out."""
    return [] if budget is None else [f"constants by {reason}" for reason in bound.skipped if "budget" in reason]


def _above(network: Network, pairs: Problem, method: str, K: Tensor) -> Tensor:
    """Return the table of curvatures of f_i - f_y from above, a row for each y; never above K itself."""
    if not bends_unevenly(pairs):
        return K
    i, j = (torch.tensor(side, device=K.device) for side in zip(*combinations(range(network.outputs), 2), strict=True))
    above = K.clone()
    above[j, i] = curvature_of(pairs.seen_from("above"), method).value
    above[i, j] = curvature_of(pairs.seen_from("below"), method).value
    return torch.minimum(above, K)


def pair_deviations(pairs: Problem) -> Tensor:
    r"""Bound, for every pair of classes, how far the module's real function may be from the network's.

    torch's Softplus turns linear beyond a threshold, where it jumps by about 2e-9: every neuron of layer k may be off
    by d_k, which moves f_i - f_j by at most :math:`\sum_k \gamma_k \sqrt{n_k} d_k`, :math:`\gamma_k` a bound
    on its gradient
    with respect to those neurons.  Certificates take this off the margin.
    """
    network = pairs.network
    nothing = torch.zeros(network.outputs, dtype=torch.float64, device=network.device)
    if not any(isinstance(node, ElementwiseNode) and node.activation.deviation for node in network.nodes):
        return nothing
    if network.pools:
        raise UnsupportedModule(
            "A Softplus with torch's threshold beside max-pooling is not covered. Use curvcert.nn.CentredSoftplus, "
            "which has no threshold, or average pooling."
        )
    if not network.has_constants:
        raise UnsupportedModule(
            "A Softplus with torch's threshold beside a function without a largest slope is not covered. Use "
            "curvcert.nn.CentredSoftplus, which has no threshold."
        )
    sizes = gradient_sizes(replace(pairs, p=2.0, q=2.0), pairs.norms)
    lost = [
        Upper(sizes[unit.hidden]) * math.sqrt(unit.widest) * (1 + 2 * UNIT_ROUNDOFF) * unit.block.activation.deviation
        for unit in network.activated
    ]
    return total([nothing, *lost]).bound


def _pairs(network: Network) -> int:
    return network.outputs * (network.outputs - 1) // 2


def pair_table(values: Tensor, network: Network) -> Tensor:
    """Return one value per pair as a symmetric table with zeros on its diagonal."""
    n = network.outputs
    table = torch.zeros(n, n, dtype=torch.float64, device=values.device)
    i, j = (torch.tensor(side, device=values.device) for side in zip(*combinations(range(n), 2), strict=True))
    table[i, j] = table[j, i] = values
    return table
