r"""The LipSDP recursion: a feasible point of LipSDP, layer by layer, in closed form.

A matrix :math:`X_k \succ 0` is kept with :math:`\|\Delta a_k\|_{X_k} \le \|\Delta x\|_2` for the activations
a_k, starting from :math:`X_0 = I`.  For slopes in :math:`[\alpha, \beta]` and
:math:`S = W X_{k-1}^{-1} W^T`, the multiplier :math:`t > 0` makes

.. math:: X_k = t I - t^2 \tfrac{(\alpha + \beta)^2}{4} S (I + t\alpha\beta S)^{-1}

feasible: it is the Schur complement of LipSDP's matrix inequality.  The choice
:math:`t = 2 / (\beta (\beta - \alpha) \lambda_{max}(S))` keeps :math:`X_k` well conditioned (for [0, 1] its
eigenvalues lie between t/2 and t).  Then :math:`L = \sqrt{\lambda_{max}(G X_m^{-1} G^T)}`.

All matrices here have the eigenvectors of S, so one inverse is enough:

.. math:: X_k^{-1} = \tfrac1t I + \tfrac{(\alpha + \beta)^2}{4 c} (Z - I), \qquad Z = (I - c S)^{-1}, \quad
          c = \tfrac{t (\beta - \alpha)^2}{4}.

It rises with S in the Loewner order, so floating point is made safe by using an S that dominates the true one, and by
carrying :math:`Y_k \succeq X_k^{-1}`.  Verified before a matrix is used: :math:`\lambda_{max}(S)`, by a Cholesky
factorisation; with it, that :math:`I + t\alpha\beta S` and :math:`I - c S` are definite; and Z, by its residual.  Where
one of these fails, the multiple :math:`\max(\alpha^2, \beta^2) \lambda_{max}(S)` of the identity serves for
:math:`X_k^{-1}`.

Behind :math:`X_{k-1}^{-1} = s I` a layer with more rows than columns, as a convolution of an image mostly is, needs no
matrix of the size of its rows.  By Woodbury's identity

.. math:: X_k^{-1} = \tfrac1t I + \tfrac{s (\alpha + \beta)^2}{4} W (I - c s W^T W)^{-1} W^T,

kept in this form, d I + A Z A'.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.errors import UnsupportedBlock, UnsupportedNorm
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Identity, NormBounds
from curvcert.operators.chains import tracked_matrix
from curvcert.operators.verified import largest_eigenvalue_upper_bound, symmetrised
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate, least, norm_upper_bound_of_vectors, power_of_two

_WORKABLE = 1e-60
"""Slopes beyond this or its inverse are left to the multiple of the identity: their squares could underflow."""

_NOTHING_TO_GAIN = "the slopes leave nothing to gain"


@dataclass(frozen=True, eq=False)
class Metric:
    r"""Upper bounds on :math:`X^{-1}`: L^2 I by `scale`, and `multiple` I + A Z A', or a note why there is none.

    Z is the `matrix`, A the map `along`; none of these is the identity, with a multiple of 0.
    """

    scale: Tensor
    matrix: Tensor | None = None
    note: str = ""
    along: AbstractLinearMap | None = None
    multiple: Tensor | None = None

    @property
    def norm(self) -> Tensor:
        r"""A bound on the 2-norm of :math:`X^{-1}`."""
        return self.scale


def reason_to_skip_lipsdp(problem: Problem) -> str | None:
    """Say why the recursion does not apply, or None."""
    if problem.p != 2 or (problem.q != 2 and not problem.scalars):
        return "lipsdp-recursion: needs p = q = 2"
    if not problem.network.is_chain:
        return "lipsdp-recursion: needs a chain of blocks"
    for unit in problem.network.units:
        if unit.activated is None:
            return f"lipsdp-recursion: no rule for a {type(unit.block).__name__}"
        if unit.is_residual:
            return "lipsdp-recursion: residual blocks are not covered"
    return None


def _gains(block: Block) -> bool:
    """Whether a matrix says more of the activations than a multiple of the identity does.

    Slopes about a centre near 0, or a single slope, leave nothing to gain.
    """
    alpha, beta = block.activation.slope
    return beta > abs(alpha) * (1 + 1e-6) and beta - alpha > 1e-6 * beta


def lipsdp_recursion_bound(problem: Problem) -> Bound:
    """Bound the l2 Lipschitz constant of a feed-forward network by the LipSDP recursion.

    A layer whose matrices don't fit the memory budget is passed with :math:`X^{-1} = L^2 I` by LipLT,
    and the method's name says so.
    """
    metrics, labels, norms = lipsdp_metrics(problem), [], problem.norms
    blocks = [unit.block for unit in problem.network.activated]
    for block, metric in zip(blocks, metrics[1:], strict=True):
        form = "lipsdp-recursion" if metric.matrix is not None else f"X^-1 = L^2 I ({metric.note})"
        labels.append(LayerTerm(block.name, "activation", Upper(metric.scale).root().bound, form))
    value = problem.shaped(_read_out(blocks[-1].G, metrics[-1], problem))
    coarse = [term.layer for term in labels if term.method != "lipsdp-recursion"]
    method = "lipsdp-recursion" + (f" (X^-1 = L^2 I at {', '.join(coarse)})" if coarse else "")
    return norms.result(value, 2, problem.q, Global(), method, tuple(labels), problem.network.assumes)


def lipsdp_metrics(problem: Problem) -> list[Metric]:
    r"""Return :math:`Y_k \succeq X_k^{-1}` for k = 0 (the input), 1, ..., m (the activations).

    A layer has a matrix only where the next one has room for its congruence: nothing else looks at it.
    """
    return problem.once("lipsdp", lambda: _metrics(problem))


def _metrics(problem: Problem) -> list[Metric]:
    reason = reason_to_skip_lipsdp(problem)
    if reason is not None:
        kind = UnsupportedNorm if "p = q" in reason else UnsupportedBlock
        raise kind(reason)
    one = torch.ones((), dtype=torch.float64, device=problem.network.device)
    blocks = [unit.block for unit in problem.network.activated]
    maps = [blocks[0].W, *(after.W @ before.G for before, after in pairwise(blocks))]
    metrics = [Metric(one)]
    for k, (block, W) in enumerate(zip(blocks, maps, strict=True)):
        wanted = k + 1 == len(maps) or has_room(maps[k + 1], problem.norms)
        metrics.append(_next_metric(block, W, metrics[-1], k, wanted, problem))
    return metrics


def has_room(W: AbstractLinearMap, norms: NormBounds) -> bool:
    """Whether W Y W' fits the memory budget, for a matrix Y: W itself, and what a factorisation takes."""
    return 8 * (8 * W.out_size**2 + 2 * W.out_size * W.in_size) <= norms.memory_budget


def _has_room_for_gram(W: AbstractLinearMap, norms: NormBounds) -> bool:
    return 64 * W.out_size**2 <= norms.memory_budget


def _next_metric(block: Block, W: AbstractLinearMap, metric: Metric, k: int, wanted: bool, problem: Problem) -> Metric:
    alpha, beta = block.activation.slope
    steepest = max(abs(alpha), abs(beta))
    fits = _has_room_for_gram(W, problem.norms) if metric.matrix is None else has_room(W, problem.norms)
    note = "the next layer is over the memory budget" if fits else "over the memory budget"
    useful = wanted and _gains(block)
    if fits and wanted and not useful:
        note = _NOTHING_TO_GAIN
    if not fits or (metric.matrix is None and not useful):
        constant = (Upper(problem.norms.spectral(W)) * steepest).square() * metric.scale
        if isinstance(block.G, Identity):
            constant = least(constant, Upper(liplt_prefixes(problem, problem.norms)[k + 1]).square())
        return Metric(constant.bound, note=note)
    widens = metric.matrix is None and W.in_size < W.out_size
    S, error = congruence(W.T, metric, problem.norms) if widens else known_congruence(k, W, metric, problem)
    largest = largest_eigenvalue_upper_bound(S, error)
    scale = (Upper(largest) * steepest * steepest).bound
    if not useful:
        return Metric(scale, note=note)
    if not _WORKABLE < beta < 1 / _WORKABLE:
        return Metric(scale, note=_NOTHING_TO_GAIN)
    form = _Dominating.of(S, error, largest, alpha, beta)
    Z = _inverse_beside(form, alpha, beta)
    if Z is None:
        return Metric(scale, note="not verified")
    # X scales like 1/S.
    identity = (Upper(form.scale) / form.t).bound
    if widens:
        coefficient = inflate(metric.scale * (alpha + beta) ** 2 / 4, gamma(8))
        return Metric(scale, _multiple(coefficient, Z), along=W, multiple=identity)
    coefficient = inflate(form.scale * (alpha + beta) ** 2 / (form.t * (beta - alpha) ** 2), gamma(8))
    matrix = _multiple(coefficient, _raised(Z, -1.0))
    rounding = (Upper(_symmetric_norm(matrix)) + identity) * (4 * UNIT_ROUNDOFF)
    return Metric(scale, _raised(matrix, (rounding + identity).bound))


@dataclass(frozen=True, eq=False)
class _Dominating:
    r"""A matrix that dominates :math:`S / scale`, a bound `top` on its largest eigenvalue, and the multiplier t."""

    matrix: Tensor
    top: float
    scale: Tensor
    t: float

    @classmethod
    def of(cls, S: Tensor, error: Tensor, largest: Tensor, alpha: float, beta: float) -> "_Dominating":
        """Shift S up by its error; X scales like 1/S, and a power of two does not round."""
        scale = power_of_two(largest)
        mean, averaging = symmetrised(S / scale)
        # The shift covers the error of S and its own rounding.
        shift = (Upper(error) / scale + averaging + Upper(largest) / scale * (4 * UNIT_ROUNDOFF)).bound
        top = float((Upper(largest) / scale + 2 * shift).bound)
        return cls(_raised(mean, shift), top, scale, 2.0 / (beta * (beta - alpha) * top))


def _inverse_beside(form: _Dominating, alpha: float, beta: float) -> Tensor | None:
    r"""Return :math:`(I - c S)^{-1}` or more, or None where it cannot be verified that the step is feasible."""
    tau, c = form.t * alpha * beta, form.t * (beta - alpha) ** 2 / 4 * (1 + gamma(8))
    if not 1 + min(tau, 0.0) * form.top * (1 + gamma(8)) > gamma(8):
        return None
    A = _raised(-c * form.matrix, 1.0)
    error = ((Upper(_symmetric_norm(form.matrix)) * c + 1.0) * gamma(4)).bound
    if not 1 - c * form.top * (1 + gamma(8)) > float(error):
        return None
    Z, Z_error = _inverse(A, error)
    Z = _raised(Z, (Upper(_symmetric_norm(Z)) * (4 * UNIT_ROUNDOFF) + Z_error).bound)
    return Z if bool(torch.isfinite(Z).all()) else None


def _multiple(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return a nonnegative multiple of a symmetric matrix, or more."""
    return _raised(factor * matrix, (Upper(_symmetric_norm(matrix)) * factor * (4 * UNIT_ROUNDOFF)).bound)


def _raised(matrix: Tensor, by: Tensor | float) -> Tensor:
    """Return the matrix and a multiple of the identity; `by` has room for the rounding of the sum."""
    raised = matrix.clone()
    raised.diagonal().add_(by)
    return raised


def _inverse(A: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a symmetric B and a bound on its distance from the inverse of any matrix within `error` of A.

    From the residual :math:`R = I - AB`: :math:`\|A^{-1} - B\| = \|BR(I - R)^{-1}\| \le \|B\| \|R\| / (1 - \|R\|)`.
    """
    n = len(A)
    R, info = torch.linalg.cholesky_ex(A)
    if int(info) != 0:
        return A, torch.full_like(error, torch.inf)
    B = torch.cholesky_inverse(R)
    B = (B + B.mT) / 2
    size = _frobenius(B)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    forming = (Upper(_frobenius(A)) * size + _frobenius(eye)) * gamma(n + 2)
    r = (forming + _frobenius(eye - A @ B) + Upper(error) * size).bound
    if not float(r) < 0.5:
        return B, torch.full_like(r, torch.inf)
    return B, (Upper(size) * r / ((1 - r) * (1 - 2 * UNIT_ROUNDOFF))).bound


def _symmetric_norm(A: Tensor) -> Tensor:
    """Bound the 2-norm of |A|, and so that of A, by the largest sum of a row."""
    return Upper(A.abs()).sum(1).amax(0).bound


def known_congruence(k: int, W: AbstractLinearMap, metric: Metric, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the congruence of the k-th layer's map with the metric before it: formed once, whoever asks."""
    return problem.once(f"lipsdp, layer {k}", lambda: congruence(W, metric, problem.norms))


def congruence(W: AbstractLinearMap, metric: Metric, norms: NormBounds) -> tuple[Tensor, Tensor]:
    """Return W Y W' and a bound on its error in the 2-norm."""
    if metric.matrix is None:
        gram, error = norms.gram(W)
        return metric.scale * gram, ((Upper(_frobenius(gram)) * gamma(4) + error) * metric.scale).bound
    matrix, error = tracked_matrix(W if metric.along is None else W @ metric.along, norms.quick_spectral)
    size, Z = _frobenius(matrix), _symmetric_norm(metric.matrix)
    S = matrix @ metric.matrix @ matrix.mT
    forming = Upper(size) * size * _frobenius(metric.matrix) * gamma(2 * len(metric.matrix) + 4)
    error = (forming + (Upper(2 * size) + error) * error * Z).bound
    if metric.multiple is None:
        return S, error
    gram, gram_error = norms.gram(W)
    added = metric.multiple * gram
    rounding = (Upper(_frobenius(S)) + _frobenius(added)) * gamma(4)
    return S + added, (rounding + error + Upper(gram_error) * metric.multiple).bound


def _frobenius(A: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(A.flatten(), 2, 0)


def _read_out(G: AbstractLinearMap, metric: Metric, problem: Problem) -> Tensor:
    if metric.matrix is None:
        return (Upper(metric.scale).root() * problem.final_norm(G, problem.norms)).bound
    # The constant is squared on the way: a power of two keeps that within the range of floats.
    scale = float(power_of_two(problem.norms.quick_spectral(G)))
    S, error = congruence((1 / scale) * G, metric, problem.norms)
    if problem.scalars:
        return ((Upper(S.diagonal().clamp(min=0.0)) + error).root() * scale).bound
    return (Upper(largest_eigenvalue_upper_bound(S, error)).root() * scale).bound
