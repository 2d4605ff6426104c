r"""The largest value of a quadratic function over a ball, bounded from above with a proof.

For any :math:`\Lambda \ge 0` with :math:`A = \Lambda I - H \succ 0`, any vector y and any :math:`0 < \mu` with
:math:`A \succeq \mu I`,

.. math:: \max_{|d| \le t} g \cdot d + \tfrac12 d^T H d \le \tfrac12 \Lambda t^2 + \tfrac12 g^T A^{-1} g
          \le \tfrac12 \Lambda t^2 + \tfrac12 \Big( y \cdot (2 g - A y) + \frac{|g - A y|^2}{\mu} \Big),

and for the best :math:`\Lambda` and y that is the maximum.  Lanczos iteration from g guesses both, for many g at once;
one Cholesky factorisation proves that no eigenvalue of H is above :math:`\Lambda_0`, and serves every
:math:`\Lambda > \Lambda_0`.
"""

import torch
from torch import Tensor

from curvcert.operators.verified import eigenvalue_upper_bound_near
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, lengths

_STEPS = 40
"""Lanczos steps."""

_BISECTIONS = 60

_BREAKDOWN = 1e-12
"""Of what a step gives: a direction that is left with less is rounding alone."""

_ABOVE = 1e-4
"""How far above the largest eigenvalue, relatively, the one that is proven is asked to be; and Lambda above that."""


class QuadraticForm:
    """A symmetric matrix known to within `error` in the 2-norm, (n, n), and one Krylov space for each vector g.

    >>> H = QuadraticForm(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)), torch.tensor(0.0).double())
    >>> g = torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    >>> [[f"{float(v):.4f}" for v in row] for row in H.largest(g, torch.tensor([1.0, 2.0], dtype=torch.float64))]
    [['3.5000', '8.0000'], ['2.5000', '4.2502']]
    """

    def __init__(self, H: Tensor, error: Tensor) -> None:
        """Take a symmetric matrix."""
        self.H, self.error = H, error
        self._size = lengths(H)
        self._top: Tensor | None = None

    def largest(self, g: Tensor, t: Tensor, least: Tensor | float = 0.0) -> Tensor:
        r"""Bound the maxima over balls of radii t with linear parts g, (rows, n): (rows, radii).

        No :math:`\Lambda` is below `least`, (rows, 1): then the bound less what any other constraint's multiplier,
        up to that, takes off H is one as well.
        """
        basis, values, first, highest = _krylov(self.H, g)
        top = self._proven(highest)
        shift = torch.maximum(_best_shift(values, first, t, top * (1 + _ABOVE) + TINY), torch.as_tensor(least).to(g))
        shares = first.unsqueeze(1) / (shift.unsqueeze(2) - values.unsqueeze(1))
        y = shares @ basis.mT
        # What A y leaves of g, A = shift I - H, as computed, and how far that may be off.
        n, length, steep = g.shape[1], lengths(y, -1), lengths(g, -1)[:, None]
        left = g.unsqueeze(1) - shift.unsqueeze(2) * y + y @ self.H
        off = ((self._size + shift) * length + steep) * gamma(n + 8) + length * self.error + TINY
        rest = lengths(left, -1) + off
        value = ((g.unsqueeze(1) + left) * y).sum(dim=2)
        slack = length * ((steep + rest) * gamma(2 * n + 16) + off) + 4 * UNIT_ROUNDOFF * value.abs()
        gap = (shift - top) * (1 - 4 * UNIT_ROUNDOFF)
        half = (value + (slack + rest.square() / gap).bound) / 2
        found: Tensor = half + (Upper(t).square() * shift / 2.0).bound + 8 * UNIT_ROUNDOFF * half.abs()
        return found

    def _proven(self, guess: float) -> Tensor:
        """Return a proven bound on the largest eigenvalue, 0 at least."""
        if self._top is None:
            bound = eigenvalue_upper_bound_near(self.H, guess, _ABOVE)
            self._top = inflate(bound + self.error, 0.0)
        return self._top


def _krylov(H: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return Ritz vectors, (rows, n, steps), Ritz values, the shares of g in them, and the largest value of all.

    One more start that is no row's looks for the largest eigenvalue.
    """
    n = g.shape[1]
    chirp = torch.arange(n, dtype=g.dtype, device=g.device)
    start = torch.cat([g, (0.25 + torch.cos(0.61803398875 * chirp.square()))[None]])
    steps, length = min(_STEPS, n), torch.linalg.vector_norm(start, dim=1)
    v = start / length.clamp(min=1e-300)[:, None]
    V, T = g.new_zeros(len(v), steps, n), g.new_zeros(len(v), steps, steps)
    for j in range(steps):
        V[:, j] = v
        w = v @ H
        for _ in range(2):
            share = (V @ w.unsqueeze(2)).squeeze(2)
            T[:, :, j] += share
            w = w - (V.mT @ share.unsqueeze(2)).squeeze(2)
        beside = torch.linalg.vector_norm(w, dim=1)
        # At the end of the space only zeros follow.
        least = _BREAKDOWN * torch.linalg.vector_norm(T[:, :, j], dim=1)
        v = w / torch.where(beside > least, beside, torch.inf)[:, None]
    T = (T.triu() + T.triu(1).mT).nan_to_num(0.0, 0.0, 0.0).cpu()
    values, turns = torch.linalg.eigh(T)
    highest = float(values.max())
    values, turns = values.to(g.device), turns.to(g.device)
    first = turns[:-1, 0] * length[:-1, None]
    basis: Tensor = V[:-1].mT @ turns[:-1]
    return basis, values[:-1], first, highest


def _best_shift(values: Tensor, first: Tensor, t: Tensor, least: Tensor) -> Tensor:
    """Return about the shifts, (rows, radii), at which y has the length t, or the least one."""
    low = least.expand(len(values), len(t)).clone()
    high: Tensor = low + torch.linalg.vector_norm(first, dim=1)[:, None] / t
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        lengths = (first.unsqueeze(1) / (middle.unsqueeze(2) - values.unsqueeze(1))).square().sum(dim=2)
        longer = lengths > t.square()
        low, high = torch.where(longer, middle, low), torch.where(longer, high, middle)
    return high
