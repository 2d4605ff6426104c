r"""Jacobians pushed forward from the centre of a ball, and how far they drift over it, in l2.

Let :math:`\hat X_k` be the computed Jacobian of x -> x_k at the centre and
:math:`\|Dx_k(x') - \hat X_k\|_2 \le F_k` for all x' in the ball, :math:`F_0 = 0`.  With computed slopes
:math:`\hat S` and :math:`\hat J = W\hat X`,

.. math::
    \|J_k(x') - \hat J_k\| \le E_k = \|W_k\| F_k + \text{rounding}, \qquad
    F_{k+1} = \|Dh_k\| F_k + \|G_k\| \|\mathrm{diag}(\Delta_k) \hat J_k\| + \text{rounding},

:math:`\Delta` the largest distance of a slope over the ball from :math:`\hat S`.  A neuron moves by at most
:math:`(\|\hat J_l\| + E) r`, since a difference is the mean of Jacobians times the step; that narrows the slopes
again.  As in `lipschitz/drift.py`, what was computed needs no error analysis of its own, and difference
quotients may stand for slopes.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.drift import Reached, ball_slopes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.lipschitz.sloped import block_growth, composed, stacked_size
from curvcert.bounds.types import Ball
from curvcert.network import AbstractBlock, Affine, Block
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import image_error
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, norm_upper_bound_of_vectors

JACOBIAN_ELEMENTS = 2**20
"""Largest Jacobian of a layer, in numbers, that is formed for each sample."""

_GRAM_SIZE = 256
"""Largest layer with an eigenvalue problem for each sample and output."""

_CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class Pushed:
    """The computed Jacobian of one block's pre-activations, (batch, neurons, inputs), and its drift over the ball."""

    J: Tensor
    drift: Tensor

    @property
    def rows(self) -> Tensor:
        """Bounds on the norms of the rows, (batch, neurons)."""
        return norm_upper_bound_of_vectors(self.J, 2, 2)

    def squared_norms(self, d: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(d)^{1/2} \hat J\|_2^2` for d >= 0 of shape (batch, m, neurons): (batch, m)."""
        rows = self.rows
        by_rows = inflate((d * rows[:, None] * rows[:, None]).sum(dim=2), gamma(d.shape[2] + 8))
        if d.shape[2] > _GRAM_SIZE:
            return by_rows
        size = inflate(self.J.square().sum(dim=(1, 2)), gamma(self.J[0].numel() + 4))
        error = inflate(gamma(self.J.shape[2] + 8) * size, gamma(8))
        gram, roots = self.J @ self.J.mT, inflate(d.sqrt(), 4 * UNIT_ROUNDOFF)
        chunk = max(1, _CHUNK_ELEMENTS // (d.shape[1] * gram[0].numel()))
        pieces = [
            _congruent(gram[i : i + chunk], error[i : i + chunk], roots[i : i + chunk])
            for i in range(0, len(gram), chunk)
        ]
        return torch.minimum(by_rows, torch.cat(pieces))

    def weighted_norm(self, s: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(s) \hat J\|_2` for s >= 0 of shape (batch, neurons): (batch,)."""
        return inflate(self.squared_norms(inflate(s.square(), 0.0)[:, None])[:, 0].sqrt(), 0.0)


def _congruent(gram: Tensor, error: Tensor, roots: Tensor) -> Tensor:
    """Bound the largest eigenvalues of diag(root) gram diag(root): one for each sample and root."""
    matrices = (roots[:, :, :, None] * gram[:, None] * roots[:, :, None, :]).flatten(0, 1)
    peak, trace = roots.amax(dim=2).square(), gram.diagonal(dim1=1, dim2=2).sum(dim=1)
    # Two roundings an entry; the Frobenius norm of a semidefinite matrix is at most its trace.
    slack = peak * (error + 4 * UNIT_ROUNDOFF * (trace + error))[:, None]
    bounds = largest_eigenvalues_upper_bound(matrices, inflate(slack, gamma(len(gram[0]) + 16)).flatten())
    return bounds.reshape(roots.shape[:2])


def can_push(problem: Problem) -> bool:
    """Whether Jacobians of every value are small enough to be formed, in l2."""
    blocks = [unit.block for unit in problem.network.units]
    widest = max(block.W.out_size if isinstance(block, Block) else math.prod(block.out_shape) for block in blocks)
    return problem.p == 2 and widest * math.prod(problem.network.in_shape) <= JACOBIAN_ELEMENTS


@dataclass(frozen=True, eq=False)
class _Image:
    """The computed Jacobian of a value, as images (batch or 1, inputs, ...) of the input's basis, and its drift."""

    X: Tensor
    drift: Tensor


def push_jacobians(problem: Problem, ball: Ball, reached: list[Reached]) -> tuple[list[Reached], list[Pushed | None]]:
    """Return, for every unit, what it does over the ball with reaches narrowed, and its Jacobian (None if affine)."""
    n, batch = math.prod(problem.network.in_shape), len(ball.x)
    eye = torch.eye(n, dtype=torch.float64, device=ball.x.device).reshape(1, n, *problem.network.in_shape)
    images = {0: _Image(eye, ball.r.new_zeros(batch))}
    narrowed: list[Reached] = []
    found: list[Pushed | None] = []
    for part in reached:
        unit, last, read = part.unit, part is reached[-1], [images[source] for source in part.unit.sources]
        X, F = _stacked([image.X for image in read]), [image.drift for image in read]
        pushed, part = _narrowed(part, X, stacked_size(F, 2), ball, problem, last)
        narrowed.append(part)
        found.append(pushed)
        if not last:
            images[unit.output] = _Image(*_next(part, pushed, X, F, problem))
    return narrowed, found


def _stacked(images: list[Tensor]) -> Tensor:
    """Return the Jacobian of the values that a unit reads, as one."""
    if len(images) == 1:
        return images[0]
    batch = max(len(X) for X in images)
    return torch.cat([X.expand(batch, *X.shape[1:]).flatten(2) for X in images], dim=2)


def _narrowed(
    part: Reached, X: Tensor, F: Tensor, ball: Ball, problem: Problem, last: bool
) -> tuple[Pushed | None, Reached]:
    block = part.block
    if not isinstance(block, Block) or part.z is None or part.reach is None or part.slopes is None:
        return None, part
    image = block.W.apply(X)
    rounding = _frobenius(image_error(block.W, X))
    drift = inflate(problem.norms.norm(block.W, 2, 2) * F + rounding, gamma(8))
    pushed = Pushed(image.flatten(2).mT.expand(len(F), -1, -1), drift)
    reach = inflate((pushed.rows + drift[:, None]) * ball.r[:, None], gamma(8)).reshape(part.z.value.shape)
    reach = torch.minimum(part.reach, reach)
    slopes = ball_slopes(block, part.z, reach).intersect(part.slopes)
    constant = part.constant if last else torch.minimum(part.constant, block_growth(block, slopes, problem))
    return pushed, replace(part, reach=reach, slopes=slopes, constant=constant)


def _next(part: Reached, pushed: Pushed | None, X: Tensor, F: list[Tensor], problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the next Jacobian, as images of the input's basis, and its drift."""
    block: AbstractBlock = part.block
    grown = composed(part.unit, F, part.constant, problem, last=False)
    if isinstance(block, Affine):
        return block.H.apply(X), inflate(grown + _frobenius(image_error(block.H, X)), gamma(8))
    assert isinstance(block, Block)
    assert pushed is not None
    assert part.z is not None
    assert part.slopes is not None
    S = block.activation.derivative(part.z.value)
    gap = inflate(torch.maximum(part.slopes.upper - S, S - part.slopes.lower).clamp(min=0.0), 0.0)
    inner = S.unsqueeze(1) * pushed.J.mT.reshape(len(grown), -1, *block.W.out_shape)
    steepest = part.slopes.steepest.flatten(1).amax(dim=1)
    off = pushed.weighted_norm(gap.flatten(1)) + steepest * _frobenius(image_error(block.W, X))
    off = off + UNIT_ROUNDOFF * _frobenius(inner)
    result, rounding = _sum_with_skip(block, X, inner)
    step = problem.norms.norm(block.G, 2, 2) * inflate(off, gamma(8)) + rounding
    return result, inflate(grown + step, gamma(8))


def _sum_with_skip(block: Block, X: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return H X + G inner and a bound on its rounding, in the Frobenius norm."""
    G: AbstractLinearMap = block.G
    result, rounding = G.apply(inner), _frobenius(image_error(G, inner))
    if block.is_residual:
        result = result + block.H.apply(X)
        rounding = rounding + _frobenius(image_error(block.H, X)) + UNIT_ROUNDOFF * _frobenius(result)
    return result, rounding


def _frobenius(x: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(x.flatten(1), 2, 1)
