r"""The unrolled bound: one term a layer, each weighed by the gradient that reaches it.

For a scalar f, :math:`\nabla^2 f = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k` with
:math:`J_k = W_k Dx_k` and
:math:`u_k = \partial f/\partial a_k`.  With :math:`|u_k| \le \bar u_k`, :math:`\|u_k\|_{p^*} \le \gamma_k` and
a prefix constant
:math:`L_k`, a term is at most the least of

.. math::
    c\, \gamma_k L_k^2 \sup_{a, b} \|Wa \circ Wb\|_p, \qquad c L_k^2 \sup_{a, b} \sum_l \bar u_{kl} |W_l a| |W_l b|,

and at p = 2, with the LipSDP recursion's :math:`S_k = W_k X_k^{-1} W_k^T`,
:math:`c\,\gamma_k \sqrt{\lambda_{max}(S_k^{\circ 2})}` and
:math:`c\,\lambda_{max}(\bar U^{1/2} S_k \bar U^{1/2})`.  A block A (x - W' D phi(Wx + b)) of a network with skips has
its own form (`block_contraction.py`), which the gradient behind the block weighs instead of u.  For feed-forward
networks with G = I inside, never above the compositional bound with the read-out folded.  Where :math:`\phi''` does
not exist everywhere the same holds for differences of gradients, since :math:`\phi'` is Lipschitz.
"""

import torch
from torch import Tensor

from curvcert.bounds.curvature.block_contraction import contraction_form
from curvcert.bounds.curvature.compositional import last_block_forms
from curvcert.bounds.curvature.gradients import GradientBound, gradient_bounds
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.lipsdp_recursion import (
    Metric,
    congruence,
    has_room,
    lipsdp_metrics,
    reason_to_skip_lipsdp,
)
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Bound, Global, LayerTerm
from curvcert.network import Block
from curvcert.operators import AbstractLinearMap, Identity
from curvcert.operators.khatri_rao import root_of_product
from curvcert.operators.weighted import GRAM_SIZE, congruent_eigenvalues
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate

CANDIDATES = (
    "gradient norm",
    "gradient entries",
    "gradient norm, lipsdp",
    "gradient entries, lipsdp",
    "gradient behind the block",
)
"""The bounds on a term, of which the least counts."""


def unrolled_bound(problem: Problem) -> Bound:
    """Bound the curvature of scalar outputs by a sum over layers."""
    problem.network.require_smooth()
    per_layer = tuple(term for term in unrolled_terms(problem) if term is not None)
    total = torch.zeros(problem.network.outputs, dtype=torch.float64, device=problem.network.device)
    for term in per_layer:
        total = total + term.value
    total = inflate(total, gamma(2 * len(problem.network.blocks) + 8))
    return problem.norms.result(
        problem.shaped(total), problem.p, problem.q, Global(), "unrolled", per_layer, problem.network.assumes
    )


def unrolled_terms(problem: Problem) -> list[LayerTerm | None]:
    """Return every block's term, one value an output, and the bound that won most; None for an affine block.

    Each bounds what one layer adds, at every input: so it may be replaced by any other bound on the same.
    """
    found = iter(problem.once("unrolled", lambda: _terms(problem)))
    return [
        LayerTerm(block.name, "term", next(found), CANDIDATES[int(next(found))]) if isinstance(block, Block) else None
        for block in problem.network.blocks
    ]


def _terms(problem: Problem) -> list[Tensor]:
    """Return, for every block with an activation, its term and the number of the candidate that won."""
    norms, prefixes = problem.norms, liplt_prefixes(problem, problem.norms)
    metrics = lipsdp_metrics(problem) if reason_to_skip_lipsdp(problem) is None else None
    found: list[Tensor] = []
    before = None
    for k, (block, gradient) in enumerate(zip(problem.network.blocks, gradient_bounds(problem, norms), strict=True)):
        if not isinstance(block, Block) or gradient is None:
            continue
        L = prefixes[k]
        if metrics is not None and isinstance(before, Identity | None):
            L = torch.minimum(L, inflate(metrics[k].norm.sqrt(), 0.0))
        candidates = _plain_terms(block, gradient, L, problem, k == len(problem.network.blocks) - 1)
        if metrics is not None:
            W = block.W if before is None else block.W @ before
            candidates |= _metric_terms(W, gradient, metrics[k], problem)
        candidates |= _contraction_terms(block, gradient, L, problem)
        values = torch.stack([candidates[name] for name in CANDIDATES if name in candidates])
        names = [k for k, name in enumerate(CANDIDATES) if name in candidates]
        found.append(inflate(block.activation.curvature_c * values.amin(dim=0), 0.0))
        found.append(torch.tensor(names[int(values.detach().mean(dim=1).argmin())]))
        before = block.G
    return found


def _plain_terms(block: Block, gradient: GradientBound, L: Tensor, problem: Problem, last: bool) -> dict[str, Tensor]:
    """Return the terms by the gradient's size and by its entries, which for the last block are those of G itself."""
    norms, p, W = problem.norms, problem.p, block.W
    omega = norms.norm(W, p, p) * norms.norm(W, p, torch.inf)
    if p == 2:
        omega = torch.minimum(omega, norms.hadamard(W))
    form = last_block_forms(block, problem, norms) if last else norms.bilinear(W, gradient.entries, p)
    return {
        "gradient norm": inflate(gradient.size * omega * L * L, gamma(8)),
        "gradient entries": inflate(form * L * L, gamma(8)),
    }


def _contraction_terms(block: Block, gradient: GradientBound, L: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Return the block's own form times the gradient behind it, where that is known and the block contracts."""
    if gradient.behind is None or problem.p != 2:
        return {}
    form = contraction_form(block, problem.norms)
    return {} if form is None else {CANDIDATES[-1]: inflate(gradient.behind * form * L * L, gamma(8))}


def _metric_terms(W: AbstractLinearMap, gradient: GradientBound, metric: Metric, problem: Problem) -> dict[str, Tensor]:
    """Return the terms with the LipSDP recursion's prefix; at the input it is the plain one.

    None where the matrices would not fit the memory budget: W itself, S, and what a Cholesky factorisation takes.
    """
    if metric.matrix is None or not has_room(W, problem.norms):
        return {}
    S, error = congruence(W, metric, problem.norms)
    terms = {"gradient norm, lipsdp": inflate(gradient.size * root_of_product(S, error, S, error), gamma(8))}
    if W.out_size <= GRAM_SIZE:
        roots = inflate(gradient.entries.flatten(1).sqrt(), 4 * UNIT_ROUNDOFF)
        terms["gradient entries, lipsdp"] = congruent_eigenvalues(S, error, roots)
    return terms
