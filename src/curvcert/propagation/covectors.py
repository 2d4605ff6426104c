r"""Gradients carried back from the output, computed ones, with how far the true ones drift from them over a ball.

Computed covectors :math:`\hat g_k` are pulled back with computed slopes :math:`\hat S`.  If
:math:`\|g_k(x') - \hat g_k\|_{p^*} \le \eta_k` for all x' in the ball, then a unit adds to those of what it reads

.. math:: \|Dh_k\| \eta_k + \|W_k\| \|\Delta \circ G_k^T \hat g_k\| + \text{rounding},

:math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  Read with difference quotients for
slopes it needs no derivative.  Since :math:`\hat g` is what was computed, rounding needs no analysis of its own;
a ball of radius 0 gives the gradient at x with its error.

A part of the covector of several values, stacked, is no longer than the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.network import Block, Network
from curvcert.network.evaluation import Evaluation
from curvcert.network.rewriting.units import AbstractUnit
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error, rounding_length
from curvcert.propagation.slopes import Slopes
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, lengths, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Covectors:
    """Computed gradients with respect to a value, (batch, rows, ...), and their drift.

    The drift is in the dual norm, one per covector, (batch, rows); or one for all together, in the Frobenius norm,
    (batch, 1).
    """

    value: Tensor
    drift: Tensor

    def largest(self, p: float) -> Tensor:
        """Bound the norm of each gradient anywhere in the ball, dual to p: (batch, rows)."""
        return (Upper(norm_upper_bound_of_vectors(self.value.flatten(2), conjugate(p), 2)) + self.drift).bound

    def of_samples(self, index: Tensor) -> "Covectors":
        """Return those of some of the samples."""
        return Covectors(self.value[index], self.drift[index])

    def differences(self, label: Tensor, others: Tensor) -> "Covectors":
        """Return those of f_i - f_label for the outputs i in `others`, (batch, pairs), flat."""
        value = self.value.flatten(2)
        index = others[:, :, None].expand(-1, -1, value.shape[2])
        difference = value.gather(1, index) - value.gather(1, label[:, None, None].expand(-1, 1, value.shape[2]))
        drift = Upper(self.drift.gather(1, others)) + self.drift.gather(1, label[:, None])
        drift += Upper(norm_upper_bound_of_vectors(difference, 1, 2)) * (2 * UNIT_ROUNDOFF)
        return Covectors(difference.reshape(*others.shape, *self.value.shape[2:]), drift.bound)


@dataclass(frozen=True, eq=False)
class Backward:
    """What covectors meet on their way back: slopes of the activations, and constants of the units, over the ball.

    `growths` are the constants of all units but the last, by the values that they give;
    `slopes` those of activations by their numbers.  With `together` drifts are those of all covectors as one.
    """

    network: Network
    p: float
    norms: NormBounds
    evaluation: Evaluation
    slopes: Mapping[int, Slopes]
    growths: Mapping[int, Tensor]
    together: bool = False

    def carried(self, rows: Tensor, end: int) -> dict[int, Covectors] | None:
        """Return the covectors of every value, by its number; None if a unit has no derivative.

        They start from exact combinations of the value `end` that a unit gives, (batch, any, *shape).
        """
        found = {end: Covectors(rows, rows.new_zeros(len(rows), 1 if self.together else rows.shape[1]))}
        for unit in reversed(self.network.units):
            if unit.output not in found:
                continue
            sent = self._sent(unit, found[unit.output], exact=unit.output == end)
            if sent is None:
                return None
            for source, covectors in zip(unit.sources, sent, strict=True):
                found[source] = self._joined(found[source], covectors) if source in found else covectors
        return found

    def _sent(self, unit: AbstractUnit, behind: Covectors, exact: bool) -> list[Covectors] | None:
        """Return what a unit sends to each value that it reads, or None if it has no derivative."""
        checkpoint()
        if unit.pools:
            return None
        if unit.terms:
            sent = []
            for A in unit.terms:
                error = self._rounding(A, behind.value)
                drift = error if exact else (Upper(behind.drift) * self.norms.norm(A, self.p, self.p) + error).bound
                sent.append(Covectors(A.adjoint(behind.value), drift))
            return sent
        pulled = self._pull_back(unit, behind.value)
        grown = Upper(behind.drift) if exact else Upper(behind.drift) * self.growths[unit.output][:, None]
        drift = (grown + pulled[1]).bound
        return [Covectors(value, drift) for value in unit.split(pulled[0])]

    def _joined(self, left: Covectors, right: Covectors) -> Covectors:
        """Return the sum of what two readers of a value send back."""
        value = left.value + right.value
        rounding = Upper(self.size(value)) * (2 * UNIT_ROUNDOFF)
        return Covectors(value, (rounding + left.drift + right.drift).bound)

    def _pull_back(self, unit: AbstractUnit, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next covectors and what one block adds to their drift."""
        bent = unit.activated
        if bent is None:
            return unit.H.adjoint(g), self._rounding(unit.H, g)
        block = bent.block
        S, slopes = block.activation.derivative(self.evaluation.values[bent.z].value), self.slopes[bent.hidden]
        gap = Upper(torch.maximum(slopes.upper - S, S - slopes.lower).clamp(min=0.0), 1)[:, None]
        pulled = block.G.adjoint(g)
        inner = S.unsqueeze(1) * pulled
        # In front of W' three things are off: the slopes' change, the rounding of G'g, and that of the product.
        steepest = (gap[:, 0].flatten(1) + slopes.steepest.flatten(1)).amax(1)[:, None]
        lost = Upper(self._rounding(block.G, g)) + Upper(self.size(pulled)) * (2 * UNIT_ROUNDOFF)
        off = steepest * lost + self.size((gap * pulled.abs()).bound)
        result = block.W.adjoint(inner)
        rounding = Upper(self._rounding(block.W, inner))
        if block.is_residual:
            result = result + block.H.adjoint(g)
            rounding = rounding + self._rounding(block.H, g) + Upper(self.size(result)) * (2 * UNIT_ROUNDOFF)
        return result, (off * self.norms.norm(block.W, self.p, self.p) + rounding).bound

    def _rounding(self, A: AbstractLinearMap, g: Tensor) -> Tensor:
        r"""Bound the rounding of :math:`A^T g` in the dual norm: :math:`\gamma_K \| |A| \|_p \|g\|_{p^*}`."""
        length = rounding_length(A)
        if length == 0:
            return g.new_zeros(g.shape[0], 1 if self.together else g.shape[1])
        return (Upper(self.size(g)) * self.norms.absolute(A, self.p) * gamma(length + 1)).bound

    def size(self, g: Tensor) -> Tensor:
        """Bound the dual norm of each covector, or the Frobenius norm of all of them together."""
        if not self.together:
            return norm_upper_bound_of_vectors(g.flatten(2), conjugate(self.p), 2)
        return lengths(g.flatten(1), 1).bound[:, None]


def activation_gradients(block: Block, behind: Covectors, p: float, norms: NormBounds) -> tuple[Tensor, Tensor]:
    """Return |G' g| for the computed covectors behind a block, outward, and the drift of G' g in the dual norm."""
    size = Upper(block.G.adjoint(behind.value).abs()) + image_error(block.G.T, behind.value)
    return size.bound, (Upper(behind.drift) * norms.norm(block.G, p, p)).bound
