r"""Jacobians pushed forward from the centre of a ball, and how far they drift over it, in l2.

Let :math:`\hat X_k` be the computed Jacobian of x -> x_k at the centre and
:math:`\|Dx_k(x') - \hat X_k\|_2 \le F_k` for all x' in the ball, :math:`F_0 = 0`.  With computed slopes
:math:`\hat S` and :math:`\hat J = W\hat X`,

.. math::
    \|J_k(x') - \hat J_k\| \le E_k = \|W_k\| F_k + \text{rounding}, \qquad
    F_{k+1} = \|Dh_k\| F_k + \|G_k\| \|\mathrm{diag}(\Delta_k) \hat J_k\| + \text{rounding},

:math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  A neuron moves by at most
:math:`(\|\hat J_l\| + E) r`, since a difference is the mean of Jacobians times the step.  As in `covectors.py`, what
was computed needs no error analysis of its own, and difference quotients may stand for slopes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network import Block
from curvcert.network.rewriting.units import AbstractUnit, ActivatedUnit
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.propagation.slopes import Slopes, moved_through, stacked_size
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, norm_upper_bound_of_vectors

GRAM_SIZE = 256
"""Largest layer with an eigenvalue problem for each sample and output."""

_CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class Jacobian:
    """The computed Jacobian of a flat value, (batch, size, inputs), and its drift over the ball, (batch,)."""

    J: Tensor
    drift: Tensor

    @property
    def rows(self) -> Tensor:
        """Bounds on the norms of the rows, (batch, size)."""
        return norm_upper_bound_of_vectors(self.J, 2, 2)

    @property
    def norm(self) -> Tensor:
        """A bound on the norm anywhere in the ball, (batch,)."""
        J = self.J if self.J.shape[1] <= self.J.shape[2] else self.J.mT
        if J.shape[1] > GRAM_SIZE:
            return (Upper(_frobenius(J)) + self.drift).bound
        error = (Upper(_frobenius(J)).square() * gamma(J.shape[2] + 2)).bound
        return (Upper(largest_eigenvalues_upper_bound(J @ J.mT, error)).root() + self.drift).bound

    def squared_norms(self, d: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(d)^{1/2} \hat J\|_2^2` for d >= 0 of shape (batch, m, size): (batch, m)."""
        rows = self.rows
        by_rows = (Upper(d) * rows[:, None] * rows[:, None]).sum(2).bound
        if d.shape[2] > GRAM_SIZE:
            return by_rows
        error = (Upper(_frobenius(self.J)).square() * gamma(self.J.shape[2] + 8)).bound
        gram, roots = self.J @ self.J.mT, Upper(d).root().bound
        chunk = max(1, _CHUNK_ELEMENTS // (d.shape[1] * gram[0].numel()))
        pieces = [
            _congruent(gram[i : i + chunk], error[i : i + chunk], roots[i : i + chunk])
            for i in range(0, len(gram), chunk)
        ]
        return torch.minimum(by_rows, torch.cat(pieces))

    def weighted_norm(self, s: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(s) \hat J\|_2` for s >= 0 of shape (batch, size): (batch,)."""
        return Upper(self.squared_norms(Upper(s).square().bound[:, None])[:, 0]).root().bound


def _congruent(gram: Tensor, error: Tensor, roots: Tensor) -> Tensor:
    """Bound the largest eigenvalues of diag(root) gram diag(root): one for each sample and root."""
    matrices = (roots[:, :, :, None] * gram[:, None] * roots[:, :, None, :]).flatten(0, 1)
    peak, trace = Upper(roots.amax(dim=2)).square(), Upper(gram.diagonal(dim1=1, dim2=2)).sum(1)
    # Two roundings per entry; the Frobenius norm of a semidefinite matrix is at most its trace.
    slack = peak * ((trace + error) * (4 * UNIT_ROUNDOFF) + error)[:, None]
    bounds = largest_eigenvalues_upper_bound(matrices, slack.bound.flatten())
    return bounds.reshape(roots.shape[:2])


@dataclass(frozen=True, eq=False)
class Images:
    """The computed Jacobian of a value, as images (batch or 1, inputs, *shape) of the input's basis, and its drift."""

    X: Tensor
    drift: Tensor

    @staticmethod
    def of_input(x: Tensor) -> "Images":
        """Return those of the input itself."""
        n = x[0].numel()
        eye = torch.eye(n, dtype=x.dtype, device=x.device).reshape(1, n, *x.shape[1:])
        return Images(eye, x.new_zeros(len(x)))

    @property
    def jacobian(self) -> Jacobian:
        """The Jacobian as a matrix."""
        return Jacobian(self.X.flatten(2).mT.expand(len(self.drift), -1, -1), self.drift)


@dataclass(frozen=True, eq=False)
class Read:
    """The Jacobians of the values that a unit reads, stacked, and how far each of them drifts."""

    X: Tensor
    drifts: Sequence[Tensor]

    @staticmethod
    def of(images: Sequence[Images]) -> "Read":
        """Stack the images of one value or several."""
        drifts, batch = [image.drift for image in images], max(len(image.X) for image in images)
        if len(images) == 1:
            return Read(images[0].X, drifts)
        return Read(torch.cat([i.X.expand(batch, *i.X.shape[1:]).flatten(2) for i in images], dim=2), drifts)

    def of_neurons(self, block: Block, norms: NormBounds) -> Jacobian:
        """Return the Jacobian of a block's pre-activation."""
        rounding = _frobenius(image_error(block.W, self.X))
        drift = Upper(stacked_size(self.drifts, 2)) * norms.norm(block.W, 2, 2) + rounding
        return Images(block.W.apply(self.X), drift.bound).jacobian

    def straight(self, unit: AbstractUnit, growth: Tensor, norms: NormBounds) -> Images:
        """Return the Jacobian behind a unit without an activation."""
        drift = Upper(self._grown(unit, growth, norms)) + _frobenius(image_error(unit.H, self.X))
        return Images(unit.H.apply(self.X), drift.bound)

    def bent(
        self, unit: ActivatedUnit, J: Jacobian, S: Tensor, slopes: Slopes, growth: Tensor, norms: NormBounds
    ) -> Images:
        """Return the Jacobian behind a block, given that of its pre-activation and computed slopes there."""
        block = unit.block
        gap = Upper(torch.maximum(slopes.upper - S, S - slopes.lower).clamp(min=0.0), 1).bound
        inner = S.unsqueeze(1) * J.J.mT.reshape(len(S), -1, *block.W.out_shape)
        steepest = slopes.steepest.flatten(1).amax(dim=1)
        off = Upper(_frobenius(image_error(block.W, self.X))) * steepest + J.weighted_norm(gap.flatten(1))
        off = off + Upper(_frobenius(inner)) * UNIT_ROUNDOFF
        result, rounding = _sum_with_skip(block, self.X, inner)
        drift = off * norms.norm(block.G, 2, 2) + rounding + self._grown(unit, growth, norms)
        return Images(result, drift.bound)

    def _grown(self, unit: AbstractUnit, growth: Tensor, norms: NormBounds) -> Tensor:
        return moved_through(unit, self.drifts, growth, 2, lambda A: norms.norm(A, 2, 2))


def _sum_with_skip(block: Block, X: Tensor, inner: Tensor) -> tuple[Tensor, Upper]:
    """Return H X + G inner and a bound on its rounding, in the Frobenius norm."""
    G: AbstractLinearMap = block.G
    result, rounding = G.apply(inner), Upper(_frobenius(image_error(G, inner)))
    if block.is_residual:
        result = result + block.H.apply(X)
        rounding = rounding + _frobenius(image_error(block.H, X)) + Upper(_frobenius(result)) * UNIT_ROUNDOFF
    return result, rounding


def _frobenius(x: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(x.flatten(1), 2, 1)
