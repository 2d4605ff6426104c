r"""How far a pair's gradient can move while the input stays within t of a sample: the backward half of a shell.

With :math:`u = |G^T g|` at x, :math:`h = u \circ c`, and a change :math:`\Delta` of the slopes over the ball,

.. math::
    v_k = \min(\|\Delta_k \circ u_k\|, \|\mathrm{diag}(h_k) J_k\| t + \max h_k R_k, \max h_k \zeta_k)

bounds what block k does to the gradient in front of :math:`W_k^T`.  Two bounds follow, and the lesser counts:

.. math::
    (A) \quad \eta_{k-1} &= \Lambda_k \eta_k + \|W_k\| v_k, \qquad \|\nabla f(x') - \nabla f(x)\| \le \eta_0, \\
    (B) \quad \|\nabla f(x') - \nabla f(x)\| &\le \sum_k \min(\|J_k^T \mathrm{diag}(h_k) J_k\| t + \|J_k\| \max h_k R_k,
        \|J_k\| v_k) + E_k v_k.

(B) writes the difference as a sum over blocks, the Jacobian in front of each one at x', the gradient behind it at x.
Where a block's Jacobian is not formed but those of later ones are, its term is :math:`\|J_k\| v_k` with a bound on
:math:`\|J_k\|` everywhere.
(A) needs no Jacobians, and holds in the dual of every p-norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.certificates.shell.ball import BentBall, OverBall
from curvcert.certificates.shell.norms import paired_norms, stepped
from curvcert.norms import conjugate
from curvcert.rounding import Upper

Both = tuple[Tensor, Tensor]
"""A saturated bound and a linear one."""


@dataclass(frozen=True, eq=False)
class GradientChange:
    """Bounds on ||grad f(x') - grad f(x)||, (batch, pairs): a constant, and one that grows at least linearly in t."""

    saturated: Tensor
    linear: Tensor


def gradient_change(ball: list[OverBall], t: Tensor, pairs: int) -> GradientChange:
    """Bound the change of every pair's gradient over balls of radius t, (batch,)."""
    zero = t.new_zeros(len(t), pairs)
    etas: dict[int, Both] = {ball[-1].at.layer.unit.output: (zero, zero)}
    total: Both | None = (zero, zero)
    for part in reversed(ball):
        layer, growth = part.at.layer, part.growth[:, None]
        eta = etas.pop(layer.unit.output)
        sent: list[Both] = [(stepped(growth * eta[0]), stepped(growth * eta[1]))] * len(layer.unit.sources)
        if isinstance(part, BentBall):
            v, terms = _effects(part, t)
            whole = (stepped(growth * eta[0] + layer.W * v[0]), stepped(growth * eta[1] + layer.W * v[1]))
            sent = [whole] * len(layer.unit.sources)
            if total is not None:
                total = None if terms is None else (stepped(total[0] + terms[0]), stepped(total[1] + terms[1]))
        elif layer.parts:
            sent = [(stepped(norm * eta[0]), stepped(norm * eta[1])) for norm, _ in layer.parts]
        for source, each in zip(layer.unit.sources, sent, strict=True):
            known = etas.get(source)
            etas[source] = each if known is None else (stepped(known[0] + each[0]), stepped(known[1] + each[1]))
    eta = etas[0]
    if total is not None:
        eta = (torch.minimum(eta[0], total[0]), torch.minimum(eta[1], total[1]))
    return GradientChange(*eta)


def _effects(part: BentBall, t: Tensor) -> tuple[Both, Both | None]:
    """Return v of one block, saturated and linear, and its terms of (B) where Jacobians are formed."""
    at, beside = part.at, part.beside
    u, p = at.sizes, at.layer.p
    changes = torch.stack([part.saturated, part.linear], dim=2)
    if beside is None:
        peak = (Upper(u) * part.curvatures[:, None]).amax(2).bound
        v = paired_norms(at.powers, changes, conjugate(p))
        if p <= 2:
            # ||h o dz||_{p*} <= max h ||dz||_{p*} <= max h ||dz||_p.
            v = torch.minimum(v, (peak * part.zeta[:, None])[:, :, None])
        effects = (stepped(v[:, :, 0]), stepped(v[:, :, 1]))
        if at.steepness is None:
            return effects, None
        return effects, (stepped(at.steepness * effects[0]), stepped(at.steepness * effects[1]))
    J, norm, t = beside.J, beside.J.norm[:, None], t[:, None]
    h = (Upper(u) * part.curvatures[:, None]).bound
    peak, pairs = h.amax(dim=2), h.shape[1]
    sizes = paired_norms(at.powers, changes, 2)
    # ||diag(h) J|| and ||diag(h)^(1/2) J||, whose square is ||J' diag(h) J||.
    weighted = J.weighted(torch.cat([stepped(h.square()), h], dim=1))
    remainder = peak * beside.Rz[:, None]
    shared = torch.minimum(weighted[:, :pairs] * t + remainder, peak * part.zeta[:, None])
    v0, v1 = (stepped(torch.minimum(sizes[:, :, kind], shared)) for kind in (0, 1))
    core = weighted[:, pairs:]
    core = J.sharpened(core[:, 0], h[:, 0])[:, None] if pairs == 1 else core
    core = core.square() * t + norm * remainder
    terms = [stepped(torch.minimum(core, norm * v) + E[:, None] * v) for v, E in zip((v0, v1), beside.Ez, strict=True)]
    return (v0, v1), (terms[0], terms[1])
