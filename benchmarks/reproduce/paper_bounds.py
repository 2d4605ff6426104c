r"""The paper's own bounds in l2, exactly as it states them: nothing of ours in them but norms that are upper bounds.

For blocks :math:`h^k(x) = H^k x + G^k \Phi(W^k x)` with slopes in [alpha, beta] and :math:`|\phi''| \le c`:

- `eq:LipLT single layer` and `eq:lipLtRecursive` bound each block and each prefix;
- a block's Jacobian has `prop:analyticalSdp`, :math:`c \|G\| \|TW\|`, a linear map G behind it as a layer of its own; a
  residual block, for which that is not stated, `prop:vectorizedLipschitzIsBetter`, and beyond 4,096 neurons, where its
  matrix is too large, `prop:naiveJacLip`;
- `prop:networkHessianCalculationAlgorithm` puts them together: :math:`K_{k+1} = \omega_k L_k^2 + L_{h^k} K_k`;
- anchored at x, "Calculation of Anchored Lipschitz" has :math:`L_h(x) = \|H\| + \|G\| \|\mathrm{diag}(L_\Phi(z)) W\|`,
  whose products bound the prefixes, and `prop:anchoredIterativeJacobian`
  :math:`K_{k+1}(x) = L_{h^k} K_k(x) + \|Dx^k(x)\| \omega_k(x) L_k(x)`, with a constant of each neuron in the corollary
  of `prop:analyticalSdp`, or for a residual block in the proof of `prop:naiveJacLip`.

A block that is 1-Lipschitz by construction has that constant, as in the paper's shortcut for such networks.  The errata
that touch p = 2 are applied: T holds the norms of W's rows.  For pairs of classes all is multiplied by
:math:`\sqrt 2`, since :math:`f_i - f_j = (e_i - e_j)^T f`.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.curvature.anchored import anchored_constants
from curvcert.bounds.curvature.block_sdp import block_curvature_sdp
from curvcert.bounds.curvature.block_vectorised import block_curvature_vectorised
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.liplt import loop_transformed
from curvcert.bounds.lipschitz.monotone import monotone_residual_constant
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Anchor
from curvcert.errors import UnsupportedBlock
from curvcert.network import AbstractBlock, Affine, Block, Network
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.weighted import weighted_norm_upper_bound
from curvcert.propagation.slopes import anchored_slopes
from curvcert.rounding import gamma, inflate

SQRT_2_ABOVE = math.nextafter(math.sqrt(2), 2)
_VECTORISED = 4096
"""The most neurons of a residual block whose vectorised Jacobian is bounded."""


@final
@dataclass(frozen=True, eq=False)
class PaperBounds:
    """The paper's bounds of a network that is a chain of blocks, global and anchored.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).eval()
    >>> _ = nn.init.constant_(model[0].weight, 3.0)
    >>> bounds = PaperBounds(trace(model, torch.zeros(1, 1)))
    >>> round(float(bounds.curvature), 9) == round(9 * 4 / 27**0.5, 9)
    True
    """

    network: Network
    norms: NormBounds = field(default_factory=NormBounds)

    @cached_property
    def prefixes(self) -> list[Tensor]:
        """Lipschitz constants of x^0 -> x^k for k = 0, ..., K, by LipLT; no more than the blocks' product."""
        found = [torch.ones((), dtype=torch.float64, device=self.network.device)]
        paths: list[tuple[AbstractLinearMap, Tensor]] = []
        straight: AbstractLinearMap | None = None
        for block, constant in zip(self.network.blocks, self.blocks, strict=True):
            linear, outer, weight = _linearised(block), None, None
            if isinstance(block, Block):
                parts = loop_transformed(block)
                linear, outer = parts.linear, parts.G
                weight = parts.rho * self._norm(parts.W) * found[-1]
            straight = linear if straight is None else linear @ straight
            paths = [(linear @ path, share) for path, share in paths]
            if outer is not None and weight is not None:
                paths.append((outer, weight))
            total = self._norm(straight) + sum(self._norm(path) * share for path, share in paths)
            found.append(inflate(torch.minimum(total, constant * found[-1]), gamma(4 * len(self.blocks) + 8)))
        return found

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Lipschitz constants of the blocks."""
        found = []
        for block in self.network.blocks:
            constant = self._norm(_linearised(block))
            if isinstance(block, Block):
                parts = loop_transformed(block)
                constant = constant + parts.rho * self._norm(parts.G) * self._norm(parts.W)
                contracting = monotone_residual_constant(block, self.norms)
                constant = constant if contracting is None else torch.minimum(constant, contracting)
            found.append(inflate(constant, gamma(8)))
        return found

    @cached_property
    def curvature(self) -> Tensor:
        """The curvature of the vector of outputs."""
        K = torch.zeros((), dtype=torch.float64, device=self.network.device)
        for block, Lh, L in zip(self.network.blocks, self.blocks, self.prefixes, strict=False):
            K = inflate(self._block_curvature(block) * L * L + Lh * K, gamma(8))
        return K

    def anchored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the anchored Lipschitz constants and curvatures of the vector of outputs, one per sample."""
        problem = Problem(self.network, 2, 2, Anchor(x), norms=self.norms)
        points = over_balls(problem)
        L, K = torch.ones_like(points.radius), torch.zeros_like(points.radius)
        for unit, Lh in zip(self.network.units, self.blocks, strict=True):
            jacobian = torch.minimum(L, points.prefix(unit.sources[0]))
            growth, omega = Lh.expand_as(L), torch.zeros_like(L)
            if unit.activated is not None:
                block, z = unit.activated.block, points.evaluation.values[unit.activated.z]
                steepest = anchored_slopes(block.activation, z).steepest
                through = self._norm(block.G) * weighted_norm_upper_bound(block.W, steepest, 2, self.norms)
                naive = inflate(self._norm(block.H) + through, gamma(8))
                contracting = monotone_residual_constant(block, self.norms)
                growth = naive if contracting is None else torch.minimum(naive, contracting)
                omega = self._anchored_block_curvature(block, anchored_constants(block, z))
            K = inflate(Lh * K + jacobian * omega * L, gamma(16))
            L = inflate(growth * L, gamma(8))
        return L, K

    def _block_curvature(self, block: AbstractBlock) -> Tensor:
        if not isinstance(block, Block):
            return torch.zeros((), dtype=torch.float64, device=self.network.device)
        if not block.is_residual:
            return block_curvature_sdp(block, 2, 2, self.norms)
        if block.W.out_size <= _VECTORISED:
            return block_curvature_vectorised(block, 2, 2, self.norms)
        naive = self._norm(block.G) * self._norm(block.W) * self.norms.norm(block.W, 2, math.inf)
        return inflate(block.activation.curvature_c * naive, gamma(8))

    def _anchored_block_curvature(self, block: Block, constants: Tensor) -> Tensor:
        weights = inflate(constants * self.norms.row_norms(block.W, 2), 0.0)
        if block.is_residual:
            return inflate(self._norm(block.G) * self._norm(block.W) * weights.flatten(1).amax(dim=1), gamma(8))
        inner = self._norm(block.G) * weighted_norm_upper_bound(block.W, weights, 2, self.norms)
        # The norm of a large weighed layer is only bounded: the largest constant may give less.
        outer = constants.flatten(1).amax(dim=1) / block.activation.curvature_c * self._block_curvature(block)
        return inflate(torch.minimum(inner, outer), gamma(8))

    def _norm(self, op: AbstractLinearMap) -> Tensor:
        return self.norms.norm(op, 2, 2)


def _linearised(block: AbstractBlock) -> AbstractLinearMap:
    """Return the block about the middle of its slopes: H + (alpha + beta) / 2 G W, or H alone."""
    if isinstance(block, Block):
        return loop_transformed(block).linear
    if isinstance(block, Affine):
        return block.H
    raise UnsupportedBlock(f"{block.name}: the paper has no bound for a {type(block).__name__}.")


def paper_pair_curvature(bounds: PaperBounds, at: Tensor | None = None) -> Tensor:
    r"""Bound the curvature of every pair as the paper does: :math:`\sqrt 2 K`, globally or anchored at each sample."""
    return inflate(SQRT_2_ABOVE * (bounds.curvature if at is None else bounds.anchored(at)[1]), 0.0)


def paper_pair_lipschitz(bounds: PaperBounds, at: Tensor | None = None) -> Tensor:
    r"""Bound the Lipschitz constant of every pair as the paper does: :math:`\sqrt 2 L`, globally or anchored."""
    return inflate(SQRT_2_ABOVE * (bounds.prefixes[-1] if at is None else bounds.anchored(at)[0]), 0.0)
