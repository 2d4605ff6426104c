"""The constants that certificates rest on, for all pairs of classes at once."""

import math
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from curvcert.bounds.curvature.gradients import gradient_sizes
from curvcert.bounds.curvature.portfolio import curvature_of
from curvcert.bounds.lipschitz.portfolio import LIPSCHITZ_METHODS, lipschitz_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network import Affine, Block, Network
from curvcert.rounding import gamma, inflate

GLOBAL_LIPSCHITZ = ("product", "liplt", "lipsdp-recursion")
GLOBAL_CURVATURE = ("compositional", "unrolled", "crc")
METHODS = ("auto", "lipschitz", "anchored", "local", "line", *GLOBAL_LIPSCHITZ, *GLOBAL_CURVATURE)
"""What `certify` can be asked for."""


@dataclass(frozen=True, eq=False)
class PairConstants:
    """Global constants of f_i - f_j, as (classes, classes) tables; NaN where that order was not asked for."""

    L: Tensor
    K: Tensor
    names: tuple[str, str]
    notes: tuple[str, ...]


def global_constants(network: Network, pairs: Problem, method: str) -> PairConstants:
    """Compute the tables that a method of `certify` needs; `pairs` are all pairs of the network's classes."""
    L = K = pair_table(torch.full((_pairs(network),), torch.nan, dtype=torch.float64, device=network.device), network)
    L_name = K_name = ""
    notes: list[str] = []
    if method in ("auto", "lipschitz", *GLOBAL_LIPSCHITZ):
        bound = lipschitz_of(pairs, method if method in LIPSCHITZ_METHODS else "auto")
        L, L_name = pair_table(bound.value, network), bound.method
    if method in ("auto", "anchored", *GLOBAL_CURVATURE):
        try:
            bound = curvature_of(pairs, method if method in GLOBAL_CURVATURE else "auto")
            K, K_name = pair_table(bound.value, network), bound.method
        except (UnsupportedActivation, UnsupportedModule) as error:
            if method != "auto":
                raise
            notes.append(f"curvature skipped: {error}")
    return PairConstants(L, K, (L_name, K_name), tuple(notes))


def pair_deviations(pairs: Problem) -> Tensor:
    r"""Bound, for every pair of classes, how far the module's real function may be from the network's.

    torch's Softplus turns linear beyond a threshold, where it jumps by about 2e-9: every neuron of layer k may be off
    by d_k, which moves f_i - f_j by at most :math:`\sum_k \gamma_k \sqrt{n_k} d_k`, :math:`\gamma_k` a bound
    on its gradient
    with respect to those neurons.  Certificates take this off the margin.
    """
    network = pairs.network
    total = torch.zeros(network.outputs, dtype=torch.float64, device=network.device)
    deviations = [block.activation.deviation if isinstance(block, Block) else 0.0 for block in network.blocks]
    if not any(deviations):
        return total
    if not all(isinstance(block, Block | Affine) for block in network.blocks):
        raise UnsupportedModule(
            "A Softplus with torch's threshold beside max-pooling is not covered. Use curvcert.nn.CentredSoftplus, "
            "which has no threshold, or average pooling."
        )
    sizes = gradient_sizes(replace(pairs, p=2.0, q=2.0), pairs.norms)
    for block, size, deviation in zip(network.blocks, sizes, deviations, strict=True):
        if isinstance(block, Block) and size is not None:
            total = total + size * math.sqrt(block.W.out_size) * deviation
    return inflate(total, gamma(8 * len(deviations) + 8))


def require_method(method: str) -> None:
    """Raise unless the method is one that `certify` knows."""
    if method not in METHODS:
        raise InvalidInput(f"Unknown method {method!r}. Choose one of: {', '.join(METHODS)}.")


def _pairs(network: Network) -> int:
    return network.outputs * (network.outputs - 1) // 2


def pair_table(values: Tensor, network: Network) -> Tensor:
    """Return one value a pair as a symmetric table with zeros on its diagonal."""
    n = network.outputs
    table = torch.zeros(n, n, dtype=torch.float64, device=values.device)
    i, j = (torch.tensor(side, device=values.device) for side in zip(*combinations(range(n), 2), strict=True))
    table[i, j] = table[j, i] = values
    return table
