r"""Parabolas over a ball: the largest value of :math:`\gamma \cdot y + y^T M y/2`, in few coordinates.

All rows on the input are combinations of those of the maps that read it, so r numbers :math:`y = E^T d` tell all that a
network is told; over the unit ball :math:`\|y\|_2` is at most `size`.  Rows J on the input become :math:`C = J F` with
:math:`C E^T \approx J`, and what is left of J is a row of its own, of the size of a rounding.

With :math:`E = S^{1/2} Q`, Q orthonormal but for rounding and S a positive diagonal, :math:`\|y\|_2` is at most
:math:`\|Q\|_2` times :math:`\max_d (\sum S_i d_i^2)^{1/2}`: in l2 S is 1; in linf, where it is
:math:`(\mathrm{tr}\, S)^{1/2}`, coordinates that matter more get more of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.network import Network
from curvcert.network.nodes import AffineNode
from curvcert.norms import conjugate
from curvcert.operators.verified import (
    extreme_eigenvalues_upper_bounds,
    spectral_norm_of_matrix_upper_bound,
    top_eigenvalues_upper_bounds,
)
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, lengths, norm_upper_bound_of_vectors, total

MOST_COORDINATES = 512
"""Coordinates beyond which eigenvalues cost more than they tell."""

_MOST_NUMBERS = 2**24
"""Numbers that the matrix of all maps of the input may take."""

_EXACT_ROWS = 256
"""Inputs up to which the rows of :math:`|E M E^T|` are summed as they are, not with absolute values inside."""

_FEW_COLUMNS = 8
"""Columns of matrices that are made at once: few enough for a cache to hold what they are made of."""

_FLOOR = 1e-3
"""The least of S, of its largest."""

_BISECTIONS = 40


@dataclass(frozen=True, eq=False)
class Seen:
    """The activations of one node as a parabola sees them: rows of J in coordinates, and bounds on |J d| over the ball.

    `squares` are those of J on the inputs, in l1 alone.
    """

    rows: Tensor
    steepest: Tensor
    squares: Tensor | None

    def of_samples(self, part: slice) -> "Seen":
        """Return those of some samples."""
        return Seen(self.rows[part], self.steepest[part], None if self.squares is None else self.squares[part])

    def repeated(self, times: int) -> "Seen":
        """Return the same rows so many times, one copy behind the other."""
        squares = None if self.squares is None else self.squares.repeat(1, times, 1)
        return Seen(self.rows.repeat(1, times, 1), self.steepest.repeat(1, times), squares)


@final
@dataclass(frozen=True, eq=False)
class Matrices:
    """Symmetric matrices, (batch, rows, r, r), of which the lower triangles are known; and how far each may be off.

    An error bounds the Frobenius norm of that, and is above ten roundings of the numbers that were added up.
    """

    lower: Tensor
    error: Tensor

    @property
    def full(self) -> Tensor:
        """The same with both triangles."""
        below = self.lower.tril(-1)
        return below + self.lower.diagonal(dim1=-2, dim2=-1).diag_embed() + below.mT

    def plus(self, others: "Matrices", factors: Sequence[float]) -> "Matrices":
        """Return these plus each factor times the others, one after the other: a few roundings more."""
        lower = torch.cat([self.lower + factor * others.lower for factor in factors], dim=1)
        error = torch.cat([2 * (self.error + factor * others.error) for factor in factors], dim=1)
        return Matrices(lower, error)


@final
@dataclass(frozen=True, eq=False)
class Coordinates:
    """What a network sees of its input: y = expand' d, and rows J on the input as J reduce.

    >>> from curvcert.network import trace
    >>> net = trace(torch.nn.Linear(3, 2).eval(), torch.zeros(1, 3))
    >>> found = Coordinates.of(net, 2.0)
    >>> found.expand.shape, f"{float(found.size):.6f}"
    (torch.Size([3, 2]), '1.000000')
    """

    p: float
    expand: Tensor
    reduce: Tensor
    size: Tensor

    @staticmethod
    def reason_to_skip(network: Network) -> str | None:
        """Say why there are too many, or None."""
        inputs, rows = math.prod(network.in_shape), _rows_read(network)
        if coordinates(network) > MOST_COORDINATES:
            return f"needs at most {MOST_COORDINATES} inputs, or neurons that read them, got {coordinates(network)}"
        if rows * inputs > _MOST_NUMBERS and inputs > MOST_COORDINATES:
            return "the maps of the input are too large"
        return None

    @staticmethod
    def of(network: Network, p: float) -> "Coordinates":
        """Return those of a network."""
        inputs, device = math.prod(network.in_shape), network.device
        rows = _rows_read(network)
        A = None if rows * inputs > _MOST_NUMBERS else _maps_of_input(network)
        S = torch.ones(inputs, dtype=torch.float64, device=device)
        if A is not None and p > 2:
            S = A.abs().sum(dim=0)
            S = torch.maximum(S, _FLOOR * S.amax()) if bool(S.any()) else torch.ones_like(S)
        Q = torch.eye(inputs, dtype=torch.float64, device=device)
        if A is not None and rows < inputs:
            Q = torch.linalg.qr((A / S.sqrt()).T).Q
        root = S.sqrt()[:, None]
        expand = root * Q
        # Rounding the entries of E moves no norm by more than theirs in Q times a few units.
        norm = spectral_norm_of_matrix_upper_bound(Q) + 8 * UNIT_ROUNDOFF * torch.linalg.matrix_norm(Q)
        return Coordinates(p, expand, Q / root, inflate(norm * _longest(S, p), 0.0))

    @property
    def columns(self) -> Tensor:
        """The dual norms of the columns of E: how far each coordinate moves over the unit ball."""
        return norm_upper_bound_of_vectors(self.expand, conjugate(self.p), 0)

    def seen(self, J: Tensor) -> tuple[Seen, Tensor]:
        """Return rows on the input, (batch, rows, inputs), in coordinates; and bounds on what is left, (J - C E') d."""
        q = conjugate(self.p)
        C = J @ self.reduce
        rest, length = J - C @ self.expand.T, norm_upper_bound_of_vectors(J, q, 2)
        rounded = Upper(C.abs()) @ self.columns * gamma(len(self.columns) + 4) + 2 * UNIT_ROUNDOFF * length
        left = (rounded + norm_upper_bound_of_vectors(rest, q, 2) + TINY).bound
        squares = J.abs().add(left.unsqueeze(2)).square() if self.p == 1 else None
        return Seen(C, (Upper(length) + left).bound, squares), left

    def matrices(self, weights: Sequence[Tensor], seen: Sequence[Seen]) -> "Matrices":
        """Return M = sum J' diag(w) J in coordinates for weights (batch, rows, neurons)."""
        w, C = torch.cat(list(weights), dim=2), torch.cat([part.rows for part in seen], dim=1)
        (batch, rows, length), r = w.shape, C.shape[2]
        M, step = w.new_zeros(batch, rows, r, r), max(_FEW_COLUMNS, r // 8)
        for start in range(0, r, step):
            part = slice(start, min(start + step, r))
            products = C[:, :, part, None] * C[:, :, None, : part.stop]
            M[:, :, part, : part.stop] = (w @ products.flatten(2)).unflatten(2, products.shape[2:])
        size = (Upper(w.abs()) @ Upper(C).square().sum(2)[:, :, None])[:, :, 0]
        return Matrices(M, (size * gamma(length + len(weights) + 8) + TINY).bound)

    def peaks(self, weights: Sequence[Tensor], seen: Sequence[Seen]) -> tuple[Tensor, Tensor]:
        """Bound d'Md/2 over the unit ball, and -d'Md/2, for each row."""
        M = self.matrices(weights, seen)
        sides = extreme_eigenvalues_upper_bounds(M.lower.flatten(0, 1), M.error.flatten())
        signs = ([w.clamp(min=0) for w in weights], [(-w).clamp(min=0) for w in weights])
        above, below = (self._over_ball(top, M) for top in sides)
        return (
            torch.minimum(above, self.by_neurons(signs[0], seen)),
            torch.minimum(below, self.by_neurons(signs[1], seen)),
        )

    def peak(self, M: "Matrices", weights: Sequence[Tensor], seen: Sequence[Seen]) -> Tensor:
        """Bound d'Md/2 over the unit ball alone, for matrices that are made already."""
        top = top_eigenvalues_upper_bounds(M.lower.flatten(0, 1), M.error.flatten())
        return torch.minimum(self._over_ball(top, M), self.by_neurons([w.clamp(min=0) for w in weights], seen))

    def _over_ball(self, eigenvalues: Tensor, M: "Matrices") -> Tensor:
        return (Upper(self.size).square() * eigenvalues.reshape(M.error.shape) / 2.0).bound

    def by_neurons(self, weights: Sequence[Tensor], seen: Sequence[Seen]) -> Tensor:
        """Bound the same for weights that are not negative, every neuron at its own largest; in l1 at one corner."""
        if self.p == 1:
            # What is squared is a sum: one rounding, twice, and that of the square.
            squares = [Upper(part.squares, 3) for part in seen if part.squares is not None]
        else:
            squares = [Upper(part.steepest).square()[:, :, None] for part in seen]
        peaks = total(Upper(w) @ square for w, square in zip(weights, squares, strict=True))
        return (peaks.amax(2) / 2.0).bound

    def parabolas(
        self, outer: Seen, M: "Matrices", weights: Sequence[Tensor], seen: Sequence[Seen]
    ) -> "AbstractParabolas":
        """Return what bounds the rows of `outer` with d'Md/2 for each, over balls of any radius."""
        if self.p == 2:
            return InnerBalls.of(outer.rows, M, self.size)
        above = self.peak(M, weights, seen)
        if self.p > 2:
            above = torch.minimum(above, self._by_rows(M.full, M.error, weights, seen))
        return Separate(outer.steepest, above)

    def farthest(self, linear: Tensor, M: "Matrices", t: Tensor) -> Tensor:
        """Return about where in the ball parabolas are largest, (batch, rows, r): a guess.

        Beside l2 that is where d'Md alone is.
        """
        e, V = torch.linalg.eigh(M.lower)
        rho = (self.size * t)[:, None]
        if self.p != 2:
            top: Tensor = V[..., -1]
            return rho.unsqueeze(2) * top
        rotated = (V.mT @ linear.unsqueeze(3)).squeeze(3)
        return InnerBalls(linear, M.lower, M.error, self.size, torch.zeros_like(M.error), e, V, rotated).point(rho)[1]

    def _by_rows(self, M: Tensor, error: Tensor, weights: Sequence[Tensor], seen: Sequence[Seen]) -> Tensor:
        r"""Bound d'Md/2 over the unit ball with an S of each M's own, its rows' sums: where they matter, S is large.

        With :math:`G = E^T S^{-1} E \preceq R R^T` and :math:`y = E^T d = R w`, :math:`\|w\|^2 \le \sum S_i d_i^2`.
        """
        E, r = self.expand, self.expand.shape[1]
        S = self._row_sums(M, weights, seen)
        G = torch.einsum("nr,bkn,ns->bkrs", E, 1 / S, E)
        trace = G.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        G = (G + G.mT) / 2
        G.diagonal(dim1=-2, dim2=-1).add_((8 * gamma(len(E) + r + 16) * trace)[..., None])
        R, info = torch.linalg.cholesky_ex(G)
        small = R.mT @ M @ R
        frobenius = Upper(R).square().sum(-2, -1)
        off = frobenius * lengths(M, -2, -1) * gamma(2 * r + 8) + frobenius * error
        good = (info == 0) & torch.isfinite(small).all(dim=-1).all(dim=-1)
        small = torch.where(good[..., None, None], (small + small.mT) / 2, 0.0)
        top = top_eigenvalues_upper_bounds(small.flatten(0, 1), off.bound.flatten())
        peak = Upper(_longest(S, self.p)).square() * top.reshape(good.shape) / 2.0
        return torch.where(good, peak.bound, torch.inf)

    def _row_sums(self, M: Tensor, weights: Sequence[Tensor], seen: Sequence[Seen]) -> Tensor:
        E = self.expand
        if len(E) <= _EXACT_ROWS:
            S = (E @ M @ E.T).abs().sum(dim=-1)
        else:
            rows = [part.rows @ E.T for part in seen]
            S = sum((w.abs() * J.abs().sum(dim=2).unsqueeze(1)) @ J.abs() for w, J in zip(weights, rows, strict=True))  # type: ignore[assignment]
        return torch.maximum(S, _FLOOR * S.amax(dim=-1, keepdim=True)).clamp(min=1e-100)


class AbstractParabolas(ABC):
    """Bounds on parabolas over balls of any radius."""

    @abstractmethod
    def largest(self, t: Tensor) -> Tensor:
        """Bound them over the balls of radius t, (batch,): (batch, rows)."""


@final
@dataclass(frozen=True, eq=False)
class Separate(AbstractParabolas):
    """The linear part and the rest each at its largest."""

    steepest: Tensor
    above: Tensor

    def largest(self, t: Tensor) -> Tensor:
        """Return steepest t + above t^2."""
        t = t[:, None]
        return (Upper(self.steepest) * t + Upper(self.above) * t * t).bound


@final
@dataclass(frozen=True, eq=False)
class InnerBalls(AbstractParabolas):
    r"""The same in l2 together, by duality: for any v, and any
    :math:`\Lambda \ge 0` with :math:`A = \Lambda I - M \succeq 0`,

    .. math:: \gamma \cdot y + \tfrac12 y^T M y \le \tfrac12 v^T A v + \|\gamma - A v\| \rho + \tfrac12 \Lambda \rho^2
              \quad\text{over } \|y\| \le \rho,

    as the difference of both sides is at least :math:`(y - v)^T A (y - v)/2`; exact at the best.
    """

    linear: Tensor
    M: Tensor
    error: Tensor
    size: Tensor
    least: Tensor
    eigenvalues: Tensor
    vectors: Tensor
    rotated: Tensor

    @staticmethod
    def of(linear: Tensor, M: "Matrices", size: Tensor) -> "InnerBalls":
        """Prepare: eigenvalues as a guess, and a proven bound on the largest."""
        least = top_eigenvalues_upper_bounds(M.lower.flatten(0, 1), torch.zeros_like(M.error).flatten())
        e, V = torch.linalg.eigh(M.lower)
        rotated = (V.mT @ linear.unsqueeze(3)).squeeze(3)
        return InnerBalls(linear, M.full, M.error, size, least.reshape(M.error.shape), e, V, rotated)

    def largest(self, t: Tensor) -> Tensor:
        """Return the dual at nearly its best multiplier."""
        rho = (Upper(self.size) * t).bound[:, None]
        multiplier, v = self.point(rho)
        Av = multiplier.unsqueeze(2) * v - (self.M @ v.unsqueeze(3)).squeeze(3)
        r, length = v.shape[2], Upper(norm_upper_bound_of_vectors(v, 2, 2))
        off = (lengths(self.M, -2, -1) + multiplier) * length * gamma(2 * r + 8)
        slack = length * (off + Upper(norm_upper_bound_of_vectors(Av, 2, 2)) * gamma(r + 4))
        curved = ((v * Av).sum(dim=2) + slack.bound).clamp(min=0.0) / 2
        missed = Upper(norm_upper_bound_of_vectors(self.linear - Av, 2, 2), 1) + off
        rest = missed * rho + (Upper(multiplier) + self.error) * rho * rho / 2.0
        return (rest + Upper(curved, 1)).bound

    def point(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Return a multiplier that is large enough, and v: about where the maximum is, (batch, rows, r)."""
        multiplier = torch.maximum(self._multiplier(rho), self.least)
        gap = multiplier.unsqueeze(2) - self.eigenvalues
        v = (self.vectors @ (self.rotated / gap.clamp(min=TINY)).unsqueeze(3)).squeeze(3)
        return multiplier, torch.where(v.isfinite(), v, 0.0)

    def _multiplier(self, rho: Tensor) -> Tensor:
        """Guess the multiplier at which the maximum is on the sphere, in the coordinates of the eigenvectors."""
        low: Tensor = self.eigenvalues[..., -1].clamp(min=0.0)
        high: Tensor = low + torch.linalg.vector_norm(self.linear, dim=2) / rho.clamp(min=TINY)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            length = torch.linalg.vector_norm(self.rotated / (middle.unsqueeze(2) - self.eigenvalues), dim=2)
            low, high = torch.where(length > rho, middle, low), torch.where(length > rho, high, middle)
        return high


def coordinates(network: Network) -> int:
    """Return how many numbers tell all that a network is told of its input."""
    return min(math.prod(network.in_shape), _rows_read(network))


def _rows_read(network: Network) -> int:
    """Return how many numbers the maps of the input make of it; an activation of the input makes all of them."""
    rows = 0
    for node in network.nodes[1:]:
        if isinstance(node, AffineNode):
            rows += sum(term.map.out_size for term in node.terms if term.source == 0)
        elif 0 in node.sources:
            rows += math.prod(network.in_shape)
    return rows


def _maps_of_input(network: Network) -> Tensor | None:
    """Return the matrices of all maps that read the input, one above the other; None where something else does."""
    if any(0 in node.sources for node in network.nodes if not isinstance(node, AffineNode)):
        return None
    affine = [node for node in network.nodes if isinstance(node, AffineNode)]
    maps = [term.map for node in affine for term in node.terms if term.source == 0]
    return torch.cat([op.as_matrix() for op in maps])


def _longest(S: Tensor, p: float) -> Tensor:
    r"""Bound :math:`\max_{\|d\|_p \le 1} (\sum S_i d_i^2)^{1/2}` along the last dimension."""
    if p <= 2:
        squared = Upper(S.amax(dim=-1))
    elif math.isinf(p):
        squared = Upper(S).sum(-1)
    else:
        squared = Upper(norm_upper_bound_of_vectors(S, p / (p - 2), S.dim() - 1))
    return squared.root().bound
