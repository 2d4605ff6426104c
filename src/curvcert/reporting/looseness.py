"""Where the looseness is: bounds on one pair of classes by every method, layer by layer, beside what a search finds."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from curvcert.bounds.curvature.portfolio import CURVATURE_METHODS, curvature_of
from curvcert.bounds.lipschitz.method import M
from curvcert.bounds.lipschitz.portfolio import AUTO_METHODS, lipschitz_of
from curvcert.bounds.lipschitz.problem import Problem, make_problem
from curvcert.bounds.types import Bound
from curvcert.certificates import Certificate
from curvcert.errors import UnsupportedActivation, UnsupportedBlock, UnsupportedModule, UnsupportedNorm
from curvcert.falsifier import largest_hessian_lower_bound, largest_slope_lower_bound
from curvcert.network import Network
from curvcert.norms import vector_norm
from curvcert.reporting.data import Breakdown, LayerShare, Looseness

POINTS = 16
STEPS = 50

_ADDS_UP = 1e-6
"""How near to the bound the terms must add up, relatively, to be called shares of it."""


def deciding_pair(certificate: Certificate) -> tuple[tuple[int, int], int]:
    """Return the pair (label, runner-up) that limits the radius of most correct samples, and of how many.

    (0, 1) and 0 where no sample is correct.
    """
    correct = certificate.correct
    if not bool(correct.any()):
        return (0, 1), 0
    rivals = certificate.pair_radius[correct].argmin(dim=1).tolist()
    labels = certificate.label[correct].tolist()
    found = Counter(pair for pair in zip(labels, rivals, strict=True) if pair[0] != pair[1])
    if not found:
        return (0, 1), 0
    pair = min(found, key=lambda key: (-found[key], key))
    return pair, found[pair]


def measure_looseness(network: Network, certificate: Certificate, x: Tensor | None = None) -> Looseness:
    """Bound L and K of the deciding pair by the methods of "auto", and search for large slopes and Hessians.

    The search starts at up to 16 inputs and takes 50 steps; it is a search in l2, so other norms go without.
    """
    pair, decides = deciding_pair(certificate)
    missing: list[str] = []
    # One problem, so that the methods share their norms.
    problem = make_problem(network, certificate.p, None, None, None, pair, None)
    breakdowns = [_breakdown("L", lipschitz_of(problem, method)) for method in _applying(AUTO_METHODS, problem)]
    kink = _reason_against_curvature(network)
    if kink is None:
        breakdowns += [_breakdown("K", curvature_of(problem, one)) for one in _applying(CURVATURE_METHODS, problem)]
    else:
        missing.append(f"K: {kink}")
    slope = hessian = None
    points = 0 if x is None else min(POINTS, len(x))
    if x is None:
        missing.append("search: needs the inputs. Pass x to report.")
    elif certificate.p != 2:
        missing.append(f"search: covers l2 only, these bounds are in l{certificate.p:g}.")
    else:
        scalar, start = network.difference(*pair), _spread(x.to(network.device), POINTS)
        if kink is None:
            slope = largest_slope_lower_bound(scalar, start, steps=STEPS)
            hessian = largest_hessian_lower_bound(scalar, start, steps=STEPS)
        else:
            # The slope of a piecewise linear function does not ascend: take the largest at the inputs.
            slope = float(vector_norm(scalar.jacobian(start).flatten(1), 2, dim=1).max())
            missing.append("slope: the largest at these inputs, since the derivative jumps.")
    return Looseness(pair, decides, tuple(breakdowns), slope, hessian, points, STEPS, tuple(missing))


def looseness_on_record(certificate: Certificate) -> Looseness | None:
    """Return the deciding pair's constants as the certificate carries them, without layers; None where it has none."""
    if certificate.evidence is None:
        return None
    pair, decides = deciding_pair(certificate)
    evidence = certificate.evidence
    known = (
        *_on_record("L", evidence.L[pair], evidence.names[0]),
        *_on_record("K", evidence.K[pair], evidence.names[1]),
    )
    missing = ("layers and search: need the network. Pass network and x to report.",)
    return Looseness(pair, decides, known, None, None, 0, 0, missing)


def _on_record(constant: Literal["L", "K"], value: Tensor, method: str) -> list[Breakdown]:
    return [] if value.isnan() else [Breakdown(constant, method, float(value), ())]


def _spread(x: Tensor, most: int) -> Tensor:
    """Return up to so many inputs, evenly spread over the batch."""
    if len(x) <= most:
        return x
    return x[torch.linspace(0, len(x) - 1, most).long()]


def _applying(methods: Mapping[str, M], problem: Problem) -> list[M]:
    """Return what "auto" tries of the methods."""
    return [method for method in methods.values() if method.reason_to_skip(problem) is None]


def _reason_against_curvature(network: Network) -> str | None:
    try:
        network.require_smooth()
    except (UnsupportedActivation, UnsupportedModule, UnsupportedBlock, UnsupportedNorm) as error:
        return str(error)
    return None


def _breakdown(constant: Literal["L", "K"], bound: Bound) -> Breakdown:
    terms = [(term, float(term.value.max())) for term in bound.per_layer]
    whole = sum(value for term, value in terms if term.quantity == "term")
    value = float(bound)
    adds_up = whole > 0 and abs(whole - value) <= _ADDS_UP * value
    layers = tuple(
        LayerShare(
            term.layer or "output",
            term.quantity,
            size,
            term.method,
            size / whole if adds_up and term.quantity == "term" else None,
        )
        for term, size in terms
    )
    return Breakdown(constant, bound.method, value, layers)
