r"""The LipSDP recursion: a feasible point of LipSDP, layer by layer, in closed form.

A matrix :math:`X_k \succ 0` is kept with :math:`\|\Delta a_k\|_{X_k} \le \|\Delta x\|_2` for the activations
a_k, starting from :math:`X_0 = I`.  For slopes in :math:`[\alpha, \beta]` and
:math:`S = W X_{k-1}^{-1} W^T`, the multiplier :math:`t > 0` makes

.. math:: X_k = t I - t^2 \tfrac{(\alpha + \beta)^2}{4} S (I + t\alpha\beta S)^{-1}

feasible: it is the Schur complement of LipSDP's matrix inequality.  The choice
:math:`t = 2 / (\beta (\beta - \alpha) \lambda_{max}(S))` keeps :math:`X_k` well conditioned (for [0, 1] its
eigenvalues lie between t/2 and t).  Then :math:`L = \sqrt{\lambda_{max}(G X_m^{-1} G^T)}`.

The right-hand side falls as S grows in the Loewner order, so floating point is made safe by using an
upper bound on S, and by carrying :math:`Y_k \succeq X_k^{-1}` with the error of every inverse added to
its diagonal.  Nothing is used that is not so verified.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.errors import UnsupportedBlock, UnsupportedNorm
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Identity, NormBounds
from curvcert.operators.chains import tracked_matrix
from curvcert.operators.verified import largest_eigenvalue_upper_bound
from curvcert.rounding import gamma, inflate


@dataclass(frozen=True, eq=False)
class Metric:
    r"""An upper bound on :math:`X^{-1}`: a matrix, or a multiple of the identity, L^2 I."""

    scale: Tensor
    matrix: Tensor | None = None

    @property
    def norm(self) -> Tensor:
        """A bound on the 2-norm of the matrix."""
        if self.matrix is None:
            return self.scale
        return inflate(self.matrix.abs().sum(dim=1).amax(), gamma(len(self.matrix) + 1))


def reason_to_skip_lipsdp(problem: Problem) -> str | None:
    """Say why the recursion does not apply, or None."""
    if problem.p != 2 or (problem.q != 2 and not problem.scalars):
        return "lipsdp-recursion: needs p = q = 2"
    for block in problem.network.blocks:
        if not isinstance(block, Block):
            return f"lipsdp-recursion: no rule for a {type(block).__name__}"
        if block.is_residual:
            return "lipsdp-recursion: residual blocks are not covered"
    return None


def lipsdp_recursion_bound(problem: Problem) -> Bound:
    """Bound the l2 Lipschitz constant of a feed-forward network by the LipSDP recursion.

    A layer whose matrices don't fit the memory budget is passed with :math:`X^{-1} = L^2 I` by LipLT,
    and the method's name says so.
    """
    metrics, labels, norms = lipsdp_metrics(problem), [], problem.norms
    blocks = [block for block in problem.network.blocks if isinstance(block, Block)]
    for block, metric in zip(blocks, metrics[1:], strict=True):
        form = "X^-1 = L^2 I (over the memory budget)" if metric.matrix is None else "lipsdp-recursion"
        labels.append(LayerTerm(block.name, "activation", inflate(metric.norm.sqrt(), 0.0), form))
    value = problem.shaped(_read_out(blocks[-1].G, metrics[-1], problem))
    coarse = [term.layer for term in labels if term.method != "lipsdp-recursion"]
    method = "lipsdp-recursion" + (f" (X^-1 = L^2 I at {', '.join(coarse)})" if coarse else "")
    return norms.result(value, 2, problem.q, Global(), method, tuple(labels), problem.network.assumes)


def lipsdp_metrics(problem: Problem) -> list[Metric]:
    r"""Return :math:`Y_k \succeq X_k^{-1}` for k = 0 (the input), 1, ..., m (the activations)."""
    reason = reason_to_skip_lipsdp(problem)
    if reason is not None:
        kind = UnsupportedNorm if "p = q" in reason else UnsupportedBlock
        raise kind(reason)
    one = torch.ones((), dtype=torch.float64, device=problem.network.device)
    metrics, previous = [Metric(one)], None
    for k, block in enumerate(problem.network.blocks):
        assert isinstance(block, Block)
        W = block.W if previous is None else block.W @ previous
        metrics.append(_next_metric(block, W, metrics[-1], k, problem))
        previous = block.G
    return metrics


def _next_metric(block: Block, W: AbstractLinearMap, metric: Metric, k: int, problem: Problem) -> Metric:
    alpha, beta = block.activation.slope
    steepest = max(abs(alpha), abs(beta))
    if not _fits(W, metric, problem.norms):
        constant = steepest**2 * problem.norms.spectral(W) ** 2 * metric.norm
        if isinstance(block.G, Identity):
            constant = torch.minimum(constant, _prefixes(problem)[k + 1] ** 2)
        return Metric(inflate(constant, gamma(8)))
    S, error = _congruence(W, metric, problem.norms)
    largest = largest_eigenvalue_upper_bound(S, error)
    if float(largest) == 0.0:
        return Metric(torch.zeros_like(largest))
    # Slopes about a centre near 0, or a single slope, leave nothing for the matrix to gain.
    if beta < abs(alpha) * (1 + 1e-6) or beta - alpha < 1e-6 * beta:
        return Metric(inflate(steepest**2 * largest, gamma(4)))
    return _schur_step(S, error, largest, alpha, beta)


def _schur_step(S: Tensor, error: Tensor, largest: Tensor, alpha: float, beta: float) -> Metric:
    n = len(S)
    eye = torch.eye(n, dtype=S.dtype, device=S.device)
    t = 2.0 / (beta * (beta - alpha) * float(largest))
    tau, kappa = t * alpha * beta, t * t * (alpha + beta) ** 2 / 4
    S = S.tril() + S.tril(-1).mT + error * eye
    F, F_error = S, 4 * gamma(4) * largest
    if tau != 0.0:
        # S (I + tau S)^-1 = ((I + tau S)^-1 - I) / -tau, without the cancellation.
        inverse, inverse_error = _inverse(eye + tau * S)
        F = S @ inverse
        F = (F + F.mT) / 2
        size = _symmetric_norm(S)
        F_error = size * inverse_error + gamma(n + 8) * torch.linalg.vector_norm(S) * torch.linalg.vector_norm(inverse)
    X = t * eye - kappa * F
    Y, Y_error = _inverse(X)
    # X is off by kappa F_error and the rounding of its own sum: ||A^-1 - B^-1|| <= ||A^-1|| ||B^-1|| ||A - B||.
    gap = inflate(kappa * F_error + gamma(8) * (t + kappa * _symmetric_norm(F)), gamma(8))
    reach = _symmetric_norm(Y) + Y_error
    if not float(gap * reach) < 0.5:
        return Metric(inflate(max(abs(alpha), abs(beta)) ** 2 * largest, gamma(4)))
    margin = inflate(Y_error + 2 * reach * reach * gap, gamma(16))
    return Metric(margin.new_ones(()), (Y + Y.mT) / 2 + (margin + gamma(4) * reach) * eye)


def _inverse(A: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a computed inverse B and a bound on its error, from the residual :math:`R = I - AB`.

    :math:`\|A^{-1} - B\| \le \|B\| \|R\| / (1 - \|R\|)`.
    """
    n = len(A)
    B = torch.linalg.inv(A)
    residual = torch.eye(n, dtype=A.dtype, device=A.device) - A @ B
    forming = gamma(n + 2) * (torch.linalg.vector_norm(A) * torch.linalg.vector_norm(B) + n**0.5)
    r = inflate(torch.linalg.vector_norm(residual) + forming, gamma(n * n + 8))
    size = inflate(torch.linalg.vector_norm(B), gamma(n * n + 8))
    if not float(r) < 0.5:
        return B, torch.full_like(r, torch.inf)
    return B, inflate(size * r / (1 - r), gamma(8))


def _symmetric_norm(A: Tensor) -> Tensor:
    return inflate(A.abs().sum(dim=1).amax(), gamma(len(A) + 1))


def _congruence(W: AbstractLinearMap, metric: Metric, norms: NormBounds) -> tuple[Tensor, Tensor]:
    """Return W Y W' and a bound on its error in the 2-norm."""
    if metric.matrix is None:
        gram, error = tracked_matrix(W @ W.T, norms.quick_spectral)
        return metric.scale * gram, inflate(metric.scale * (error + gamma(4) * _frobenius(gram)), gamma(4))
    matrix, error = tracked_matrix(W, norms.quick_spectral)
    size, Y = _frobenius(matrix), metric.norm
    S = matrix @ metric.matrix @ matrix.mT
    forming = gamma(2 * len(metric.matrix) + 4) * size * size * _frobenius(metric.matrix)
    return S, inflate(forming + error * (2 * size + error) * Y, gamma(8))


def _frobenius(A: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(A)
    return inflate(size, gamma(A.numel() + 4))


def _fits(W: AbstractLinearMap, metric: Metric, norms: NormBounds) -> bool:
    squares = 6 * W.out_size**2
    explicit = 2 * W.out_size * W.in_size if metric.matrix is not None else 0
    return 8 * (squares + explicit) <= norms.memory_budget


def _read_out(G: AbstractLinearMap, metric: Metric, problem: Problem) -> Tensor:
    if metric.matrix is None:
        return inflate(problem.final_norm(G, problem.norms) * metric.scale.sqrt(), gamma(4))
    S, error = _congruence(G, metric, problem.norms)
    if problem.scalars:
        return inflate((S.diagonal().clamp(min=0.0) + error).sqrt(), gamma(4))
    return inflate(largest_eigenvalue_upper_bound(S, error).sqrt(), 0.0)


def _prefixes(problem: Problem) -> list[Tensor]:
    return liplt_prefixes(problem, problem.norms)
