r"""How far everything can move while the input stays within t of a sample: the forward half of a shell.

For :math:`\|x' - x\|_p \le t`, block by block, :math:`\rho` bounds the distance of :math:`x_k`, :math:`\zeta` that of
z and d each neuron's; R bounds the remainder of :math:`x_k` beside its linear part at x, r each entry's; E bounds
the change of its Jacobian.  With :math:`\phi'` in [a, b] and :math:`|\phi''| \le c` over the interval that d allows,

.. math::
    \zeta &= \min(\|W\| \rho, \|J\| t + R_z), \qquad d = \min(\|W_l\| \rho, \|J_l\| t + r_z, \zeta), \\
    R_z &= \min(\|W\| R, \|r_z\|), \qquad r_z = \min(\|W_l\| R, |W| r), \\
    R' &= \min(\|A\| R + \|G\| \nu, \|H\| R + \|G\| (\||S| \circ r_z\| + \nu)), \qquad
    r' = |H| r + |G| (|S| \circ r_z + e), \\
    E' &= \Lambda E + \|G\| \|\mathrm{diag}(\Delta) J\|, \qquad
    e = c \circ d^2 / 2, \quad \nu = \min(\|e\|, \max(c \circ d) \zeta / 2),

:math:`A = H + G\, \mathrm{diag}(S) W` at x, :math:`\Lambda` a bound on the same at every point of the ball, and
:math:`\Delta` the change of a slope: :math:`c \circ d` ("linear") or the range's own width if that is less
("saturated").  Quotients by t of what is linear do not decrease in t; those of what is saturated may.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.certificates.shell.centre import AtAffine, AtBent, AtCentre, Jacobian
from curvcert.certificates.shell.layers import Layer
from curvcert.certificates.shell.norms import stepped, vector_norms
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import absolute_image, magnitude
from curvcert.propagation.relaxation import Reach
from curvcert.propagation.slopes import Slopes, curvatures_within, slopes_within, stacked_size


@final
@dataclass(frozen=True, eq=False)
class AffineBall:
    """A block without an activation over the ball; `growth` is :math:`\\Lambda`."""

    at: AtAffine
    growth: Tensor


@final
@dataclass(frozen=True, eq=False)
class BentBall:
    """A block with an activation over the ball.

    `saturated` and `linear` bound the change of each slope, `curvatures` :math:`|\\phi''|`, `growth` is
    :math:`\\Lambda`; `beside` is there where the block's Jacobian is formed.
    """

    at: AtBent
    growth: Tensor
    zeta: Tensor
    curvatures: Tensor
    saturated: Tensor
    linear: Tensor
    beside: "BesideJacobian | None"


@final
@dataclass(frozen=True, eq=False)
class BesideJacobian:
    """What a formed Jacobian J of z leaves: the remainder of z, and the change of J, saturated and linear."""

    J: Jacobian
    Rz: Tensor
    Ez: tuple[Tensor, Tensor]


OverBall = AffineBall | BentBall
"""One block over the ball."""


@dataclass(frozen=True, eq=False)
class _State:
    """What is carried forward: rho, R, r and both E; the last three only beside Jacobians, r only from the first on."""

    rho: Tensor
    R: Tensor
    r: Tensor | None
    E: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Moved:
    """How far z moves: as a whole, each neuron, and both remainders (meant only beside Jacobians)."""

    zeta: Tensor
    d: Tensor
    Rz: Tensor
    rz: Tensor


def over_balls(centres: list[AtCentre], t: Tensor, inputs: int) -> list[OverBall]:
    """Carry balls of radius t (batch,) forward."""
    zero = torch.zeros_like(t)
    first = next((at for at in centres if isinstance(at, AtBent)), None)
    formed = first is not None and first.jacobian is not None
    fronts = {0: _State(t, zero, t.new_zeros(len(t), inputs) if formed else None, (zero, zero))}
    found = list[OverBall]()
    for at in centres:
        unit = at.layer.unit
        read = [fronts[source] for source in unit.sources]
        last = at is centres[-1]
        part, front = _affine_step(at, read, t) if isinstance(at, AtAffine) else _bent_step(at, read, t, last)
        fronts[unit.output] = front
        found.append(part)
    return found


def _stacked(fronts: list[_State], p: float) -> _State:
    """Return what is carried of several values, stacked; what Jacobians have is meant in l2 only."""
    if len(fronts) == 1:
        return fronts[0]
    rho, R = (stepped(stacked_size(sizes, p)) for sizes in ([f.rho for f in fronts], [f.R for f in fronts]))
    E = (stepped(stacked_size([f.E[0] for f in fronts], 2)), stepped(stacked_size([f.E[1] for f in fronts], 2)))
    remainders = [f.r for f in fronts if f.r is not None]
    r = torch.cat(remainders, dim=1) if len(remainders) == len(fronts) else None
    return _State(rho, R, r, E)


def _bent_step(at: AtBent, fronts: list[_State], t: Tensor, last: bool) -> tuple[BentBall, _State]:
    checkpoint()
    layer, front, J, activation = at.layer, _stacked(fronts, at.layer.p), at.jacobian, at.block.activation
    moved = _moved(at, fronts, front, t)
    z = Reach(at.z, moved.d, moved.d)
    slopes, c = slopes_within(activation, z), curvatures_within(activation, z)
    linear = stepped(c * moved.d)
    saturated = torch.minimum(_farthest(slopes, at.slopes), linear)
    growth = torch.zeros_like(t) if last else _growth(at, slopes)  # behind the last block nothing grows
    Ez = (stepped(layer.W * front.E[0]), stepped(layer.W * front.E[1]))
    beside = None if J is None else BesideJacobian(J, moved.Rz, Ez)
    part = BentBall(at, growth, moved.zeta, c, saturated, linear, beside)
    if last:
        return part, front
    s = slopes.steepest
    inner = torch.minimum(vector_norms(s * moved.d, layer.p), s.amax(dim=1) * moved.zeta)
    rho = torch.minimum(growth * front.rho, layer.H * front.rho + layer.G * inner)
    rho = stepped(torch.minimum(rho, layer.reach * t))
    front = replace(front, rho=rho)
    return part, _unformed(part, front, t) if J is None else _carried(part, J, moved, front, t)


def _moved(at: AtBent, fronts: list[_State], front: _State, t: Tensor) -> _Moved:
    """Bound how far z moves, as a whole and neuron by neuron."""
    layer = at.layer
    zeta, d = layer.W * front.rho, layer.rows * front.rho[:, None]
    if layer.parts:  # by what each value adds to z
        zeta = torch.minimum(zeta, sum_of_parts(layer, [f.rho for f in fronts]))
        d = torch.minimum(d, _rows_of_parts(layer, [f.rho for f in fronts]))
    Rz, rz = zeta, d
    if at.jacobian is not None:
        rz, Rz = layer.rows * front.R[:, None], layer.W * front.R
        if layer.parts:
            rz = torch.minimum(rz, _rows_of_parts(layer, [f.R for f in fronts]))
            Rz = torch.minimum(Rz, sum_of_parts(layer, [f.R for f in fronts]))
        if front.r is not None:
            rz = torch.minimum(rz, _image(magnitude(at.block.W), front.r))
        Rz = torch.minimum(Rz, vector_norms(rz, 2))
        zeta = torch.minimum(zeta, at.jacobian.norm * t + Rz)
        d = torch.minimum(d, at.jacobian.rows * t[:, None] + rz)
    zeta = stepped(zeta)
    return _Moved(zeta, stepped(torch.minimum(d, zeta[:, None])), stepped(Rz), stepped(rz))


def sum_of_parts(layer: Layer, sizes: list[Tensor]) -> Tensor:
    """Bound a sum of images by the norms of the maps."""
    return stepped(torch.stack([norm * size for (norm, _), size in zip(layer.parts, sizes, strict=True)]).sum(dim=0))


def _rows_of_parts(layer: Layer, sizes: list[Tensor]) -> Tensor:
    """Bound the same neuron by neuron."""
    terms = [rows * size[:, None] for (_, rows), size in zip(layer.parts, sizes, strict=True)]
    return stepped(torch.stack(terms).sum(dim=0))


def _unformed(part: BentBall, front: _State, t: Tensor) -> _State:
    r"""Carry on, behind rho, what Jacobians of later blocks need.

    Here :math:`\|\mathrm{diag}(\Delta) J\| \le \max \Delta\, \|J\|`.  The linear E at st is at most s times that at t,
    so that the remainder, its integral, is at most half of E t.
    """
    layer, steepness = part.at.layer, part.at.steepness
    if steepness is None:
        return front
    changes = [layer.G * change.amax(dim=1) * steepness for change in (part.saturated, part.linear)]
    E = (stepped(part.growth * front.E[0] + changes[0]), stepped(part.growth * front.E[1] + changes[1]))
    return replace(front, E=E, R=stepped(E[1] * t / 2))


def _carried(part: BentBall, jacobian: Jacobian, moved: _Moved, front: _State, t: Tensor) -> _State:
    """Carry remainders and the Jacobian's change on, behind rho."""
    at, layer, block = part.at, part.at.layer, part.at.block
    S = at.slopes.steepest
    e = stepped(part.linear * moved.d / 2)
    nu = torch.minimum(vector_norms(e, 2), part.linear.amax(dim=1) * moved.zeta / 2)
    bent = stepped(S * moved.rz)
    inner = torch.minimum(vector_norms(bent, 2), S.amax(dim=1) * moved.Rz) + nu
    r = _image(magnitude(block.G), stepped(bent + e))
    if block.is_residual:
        # No entry of a remainder is larger than the whole.
        r = stepped(r + (layer.H * front.R[:, None] if front.r is None else _image(magnitude(block.H), front.r)))
    R = torch.minimum(at.growth * front.R + layer.G * nu, layer.H * front.R + layer.G * inner)
    R = stepped(torch.minimum(R, vector_norms(r, 2)))
    changes = layer.G * jacobian.weighted(stepped(torch.stack([part.saturated, part.linear], dim=1).square()))
    E = (stepped(part.growth * front.E[0] + changes[:, 0]), stepped(part.growth * front.E[1] + changes[:, 1]))
    return _State(stepped(torch.minimum(front.rho, jacobian.output * t + R)), R, r, E)


def _affine_step(at: AtAffine, fronts: list[_State], t: Tensor) -> tuple[AffineBall, _State]:
    layer, H, front = at.layer, at.layer.H, _stacked(fronts, at.layer.p)

    def moved(whole: Tensor, parts: list[Tensor]) -> Tensor:
        return torch.minimum(H * whole, sum_of_parts(layer, parts)) if layer.parts else H * whole

    rho = stepped(torch.minimum(moved(front.rho, [f.rho for f in fronts]), layer.reach * t))
    r = None if front.r is None else _image(magnitude(layer.unit.H), front.r)
    R = stepped(moved(front.R, [f.R for f in fronts]))
    if r is not None and layer.parts:
        R = torch.minimum(R, stepped(vector_norms(r, 2)))
    E = (
        stepped(moved(front.E[0], [f.E[0] for f in fronts])),
        stepped(moved(front.E[1], [f.E[1] for f in fronts])),
    )
    return AffineBall(at, H.expand_as(t)), _State(rho, R, r, E)


def _growth(at: AtBent, slopes: Slopes) -> Tensor:
    r"""Bound :math:`\|H + G\, \mathrm{diag}(s) W\|` for all slopes s over the ball.

    The least of :math:`\|H\| + \|G\| \|\mathrm{diag}(s) W\|`, the norm at x plus
    :math:`\|G\| \|\mathrm{diag}(|s - S|) W\|`, the same about the middle slope, and the block's global constant.
    """
    layer = at.layer
    s, low, high = slopes.steepest, at.slopes.lower, at.slopes.upper
    floor = torch.where(low * high > 0, torch.minimum(low.abs(), high.abs()), 0.0)
    weighted = at.sloped + layer.weighted_by_gram(stepped((s - floor).clamp(min=0.0)))
    # Where the norm at x is the very one, sums along lines have nothing to add.
    weighted = torch.minimum(weighted, s.amax(dim=1) * layer.W if layer.factor is not None else layer.weighted(s))
    growth = torch.minimum(weighted if layer.plain else layer.H + layer.G * weighted, layer.constant)
    if not layer.plain:
        growth = torch.minimum(growth, at.growth + layer.G * layer.weighted_by_gram(_farthest(slopes, at.slopes)))
        mu, linear = layer.about_centre
        growth = torch.minimum(growth, linear + layer.G * layer.weighted_by_gram(slopes.about(mu)))
    return stepped(growth)


def _farthest(slopes: Slopes, at: Slopes) -> Tensor:
    """Bound the distance of a slope over the ball from the true one at x, which lies somewhere in its interval."""
    return stepped(torch.maximum(slopes.upper - at.lower, at.upper - slopes.lower))


def _image(A: AbstractLinearMap, x: Tensor) -> Tensor:
    """Bound A x for A, x >= 0; both flat."""
    return stepped(absolute_image(A, x.reshape(len(x), *A.in_shape)).flatten(1).bound)
