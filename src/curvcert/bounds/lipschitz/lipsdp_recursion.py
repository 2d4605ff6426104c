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

from curvcert.bounds.lipschitz.inverse_metric import Step, gains, inverse_metric, multiple, symmetric_norm
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.lipsdp_on_torus import ImageRecursion, image_recursion
from curvcert.bounds.lipschitz.on_torus import Images, images_of
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.errors import UnsupportedBlock, UnsupportedNorm
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Identity, NormBounds
from curvcert.operators.chains import tracked_matrix
from curvcert.operators.images import EXPLICIT_SIZE
from curvcert.operators.verified import largest_eigenvalue_upper_bound
from curvcert.rounding import Upper, gamma, inflate, least, norm_upper_bound_of_vectors, power_of_two

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


def lipsdp_recursion_bound(problem: Problem) -> Bound:
    """Bound the l2 Lipschitz constant of a feed-forward network by the LipSDP recursion.

    A layer whose matrices don't fit the memory budget is passed with :math:`X^{-1} = L^2 I` by LipLT,
    and the method's name says so.
    """
    metrics, labels, norms = lipsdp_metrics(problem), [], problem.norms
    blocks = [unit.block for unit in problem.network.activated]
    images = recursion_of_images(problem)
    for unit, block, metric in zip(problem.network.activated, blocks, metrics[1:], strict=True):
        form = f"X^-1 = L^2 I ({metric.note})"
        if metric.matrix is not None or (images is not None and unit.hidden in images.scales):
            form = "lipsdp-recursion"
        labels.append(LayerTerm(block.name, "activation", Upper(metric.scale).root().bound, form))
    if images is not None and len(images.scales) == len(blocks):
        value = problem.shaped(images.behind.row_norms if problem.scalars else images.behind.norm)
    else:
        value = problem.shaped(_read_out(blocks[-1].G, metrics[-1], problem))
    coarse = [term.layer for term in labels if term.method.startswith("X^-1")]
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
    metrics, images, large = [Metric(one)], recursion_of_images(problem), images_in(problem)
    within = 0 if images is None else len(images.scales)
    for k, (unit, block, W) in enumerate(zip(problem.network.activated, blocks, maps, strict=True)):
        if images is not None and unit.hidden in images.scales:
            metrics.append(Metric(images.scales[unit.hidden]))
            continue
        if images is None and large is not None and unit.hidden in large.number and _are_large(large, problem):
            constant = liplt_prefixes(problem, problem.norms)[k + 1]
            metrics.append(Metric(Upper(constant).square().bound, note="too many frequencies"))
            continue
        if k == within and images is not None:
            metrics.append(_behind_images(block, k, images.congruence, problem))
            continue
        wanted = k + 1 == len(maps) or has_room(maps[k + 1], problem.norms)
        metrics.append(_next_metric(block, W, metrics[-1], k, wanted, problem))
    return metrics


def _are_large(images: Images, problem: Problem) -> bool:
    """Whether a layer between images takes a larger matrix than is made explicit elsewhere."""
    maps = (unit.block.W for unit in problem.network.activated if unit.hidden in images.number)
    return any(min(W.in_size, W.out_size) > EXPLICIT_SIZE for W in maps)


def images_in(problem: Problem) -> Images | None:
    """Return the large images inside a network."""
    return problem.once("images", lambda: images_of(problem.network.nodes))


def recursion_of_images(problem: Problem) -> ImageRecursion | None:
    """Return the recursion through large images, frequency by frequency; None where a chain has none, or no room.

    So it is where matrices of their own size are a matter of seconds, too: these have no positions beside the image.
    """
    return problem.once("lipsdp, images", lambda: _recursion_of_images(problem))


def _recursion_of_images(problem: Problem) -> ImageRecursion | None:
    images = images_in(problem)
    if images is None or not _are_large(images, problem):
        return None
    exits = images.exits(problem.norms)
    if exits is None:
        return None
    # What reads the last image: the next activation, or the network's end.
    _, door = min(exits, key=lambda found: found[0])
    if len(exits) > 1 and any(gate.source != door.source for _, gate in exits):
        return None
    return image_recursion(images, door)


def has_room(W: AbstractLinearMap, norms: NormBounds) -> bool:
    """Whether W Y W' fits the memory budget, for a matrix Y: W itself, and what a factorisation takes."""
    return 8 * (8 * W.out_size**2 + 2 * W.out_size * W.in_size) <= norms.memory_budget


def _has_room_for_gram(W: AbstractLinearMap, norms: NormBounds) -> bool:
    return 64 * W.out_size**2 <= norms.memory_budget


def _behind_images(block: Block, k: int, congruence: tuple[Tensor, Tensor], problem: Problem) -> Metric:
    """Return the metric behind the first activation that is no image."""
    alpha, beta = block.activation.slope
    S, error = problem.once(f"lipsdp, layer {k}", lambda: congruence)
    largest = largest_eigenvalue_upper_bound(S, error)
    Y = inverse_metric(S, error, largest, alpha, beta) if gains(alpha, beta) else None
    steepest = max(abs(alpha), abs(beta))
    scale = (Upper(largest) * steepest * steepest).bound
    return Metric(scale, Y, _NOTHING_TO_GAIN if Y is None else "")


def _next_metric(block: Block, W: AbstractLinearMap, metric: Metric, k: int, wanted: bool, problem: Problem) -> Metric:
    alpha, beta = block.activation.slope
    steepest = max(abs(alpha), abs(beta))
    fits = _has_room_for_gram(W, problem.norms) if metric.matrix is None else has_room(W, problem.norms)
    note = "the next layer is over the memory budget" if fits else "over the memory budget"
    useful = wanted and gains(alpha, beta)
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
    if not widens:
        Y = inverse_metric(S, error, largest, alpha, beta)
        return Metric(scale, note="not verified") if Y is None else Metric(scale, Y)
    step = Step.of(S, error, largest, alpha, beta)
    if step is None:
        return Metric(scale, note="not verified")
    coefficient = inflate(metric.scale * (alpha + beta) ** 2 / 4, gamma(8))
    return Metric(scale, multiple(coefficient, step.Z), along=W, multiple=step.identity)


def known_congruence(k: int, W: AbstractLinearMap, metric: Metric, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the congruence of the k-th layer's map with the metric before it: formed once, whoever asks."""
    return problem.once(f"lipsdp, layer {k}", lambda: congruence(W, metric, problem.norms))


def congruence(W: AbstractLinearMap, metric: Metric, norms: NormBounds) -> tuple[Tensor, Tensor]:
    """Return W Y W' and a bound on its error in the 2-norm."""
    if metric.matrix is None:
        gram, error = norms.gram(W)
        return metric.scale * gram, ((Upper(_frobenius(gram)) * gamma(4) + error) * metric.scale).bound
    matrix, error = tracked_matrix(W if metric.along is None else W @ metric.along, norms.quick_spectral)
    size, Z = _frobenius(matrix), symmetric_norm(metric.matrix)
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
