r"""Operator norms between the exponents that have closed forms, by Riesz-Thorin interpolation.

In the coordinates (1/p, 1/q) the logarithm of :math:`\|A\|_{p \to q}` over the *complex* numbers is
convex along every line, and the real norm never exceeds the complex one.  So any two bounds that
hold over the complex numbers give one at every point between them.  (Real norms at the end points
would not do: from inf -> 1 of [[1, 1], [1, -1]] they give 1.68179 for 4 -> 4/3, and the truth is
at least 1.73205.)
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvcert.norms import conjugate
from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.rows import column_norms_upper_bound, row_norms_upper_bound
from curvcert.rounding import Upper, gamma, inflate, norm_upper_bound_of_vectors

Point = tuple[float, float]

_DIRECTIONS: tuple[Point, ...] = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (1.0, 2.0), (2.0, 1.0))
_SUM_OF_GRAM_SIZE = 4096
_SLACK = 1e-12
"""Relative slack for the powers and logarithms of an interpolation, each good to a few roundoffs."""


def interpolated_norm_upper_bound(
    op: AbstractLinearMap, p: float, q: float, spectral: Callable[[], Tensor]
) -> tuple[Tensor, str]:
    """Return the least of several proven bounds on the p -> q norm, and its name.

    Every one holds over the complex numbers: mixed norms of rows and columns, the spectral norm
    with the factors that equivalent norms cost, and interpolations between those.
    """
    sigma = spectral()
    target = (_inverse(p), _inverse(q))
    known: dict[Point, Tensor] = {}

    def mixed(point: Point) -> Tensor:
        if point not in known:
            known[point] = mixed_norm_upper_bound(op, _exponent(point[0]), _exponent(point[1]))
        return known[point]

    found = {"mixed norms": mixed(target), "spectral norm": _from_spectral(op, sigma, target)}
    if math.isinf(p) and q == 2 and op.in_size <= _SUM_OF_GRAM_SIZE:
        found["sum of the Gram matrix"] = _root_of_gram_sum(op)
    if p == 2 and q == 1 and op.out_size <= _SUM_OF_GRAM_SIZE:
        found["sum of the Gram matrix"] = _root_of_gram_sum(op.T)
    lines = [(_to_edge(target, d), _to_edge(target, (-d[0], -d[1]))) for d in _DIRECTIONS]
    candidates = [_between(mixed(a), mixed(b), _share(target, a, b)) for a, b in lines if a != b]
    away = (target[0] - 0.5, target[1] - 0.5)
    if away != (0.0, 0.0):
        edge = _to_edge(target, away)
        candidates.append(_between(sigma, mixed(edge), _share(target, (0.5, 0.5), edge)))
    found["Riesz-Thorin"] = torch.stack(candidates).amin()
    name = min(found, key=lambda key: float(found[key]))
    return found[name], name


def mixed_norm_upper_bound(op: AbstractLinearMap, p: float, q: float) -> Tensor:
    r"""Bound the p -> q norm by the q-norm of the rows' p*-norms, or the p*-norm of the columns' q-norms.

    Exact at p = 1 (columns) and at q = inf (rows).
    """
    dual = conjugate(p)
    by_rows = norm_upper_bound_of_vectors(row_norms_upper_bound(op, dual).flatten(), q, 0)
    by_columns = norm_upper_bound_of_vectors(column_norms_upper_bound(op, q).flatten(), dual, 0)
    return torch.minimum(by_rows, by_columns)


def _inverse(p: float) -> float:
    return 0.0 if math.isinf(p) else 1.0 / p


def _exponent(inverse: float) -> float:
    return math.inf if inverse <= 0.0 else max(1.0, 1.0 / inverse)


def _to_edge(start: Point, direction: Point) -> Point:
    """Return where the ray from start leaves the unit square."""
    steps = [((1.0 if d > 0 else 0.0) - s) / d for s, d in zip(start, direction, strict=True) if d]
    step = max(0.0, min(steps))
    x, y = (s + step * d for s, d in zip(start, direction, strict=True))
    return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0)


def _share(point: Point, a: Point, b: Point) -> float:
    """Return t with point = (1 - t) a + t b."""
    return math.dist(point, a) / math.dist(a, b)


def _between(at_a: Tensor, at_b: Tensor, share: float) -> Tensor:
    return inflate(at_a ** (1.0 - share) * at_b**share, _SLACK)


def _from_spectral(op: AbstractLinearMap, sigma: Tensor, target: Point) -> Tensor:
    r"""Bound by :math:`n^{(1/2 - 1/p)_+} \sigma m^{(1/q - 1/2)_+}`: norms on finite spaces are equivalent."""
    factor = op.in_size ** max(0.0, 0.5 - target[0]) * op.out_size ** max(0.0, target[1] - 0.5)
    return inflate(sigma * factor, _SLACK)


def _root_of_gram_sum(op: AbstractLinearMap) -> Tensor:
    r"""Bound :math:`\|A\|_{\infty \to 2} \le \sqrt{\sum |A^T A|}`."""
    matrix = op.as_matrix()
    rounding = Upper(matrix.abs()).sum(1).square().sum() * gamma(matrix.shape[0])
    return (Upper((matrix.T @ matrix).abs()).sum() + rounding).root().bound
