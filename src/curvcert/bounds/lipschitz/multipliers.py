r"""LipSDP's matrix over all neurons, and a search for its best multipliers, which proves nothing.

With :math:`y = (\Delta x, \Delta a)`, :math:`\Delta a = Ey`, :math:`\Delta z = Zy` and slopes in
:math:`[\alpha, \beta]`, neuron by neuron, :math:`U = E - \alpha Z` and :math:`V = \beta Z - E` have
:math:`(Uy)_l (Vy)_l \ge 0`.  So for any diagonal :math:`T \ge 0` with

.. math:: M(T) = E_0 - U^T T V - V^T T U \succ 0,

:math:`E_0` the identity on dx, :math:`\|\Delta x\|^2 = y^T M y + 2 \sum_l T_l (Uy)_l (Vy)_l \ge y^T M y`, and
outputs :math:`\Delta f = Cy` have :math:`\|\Delta f\|^2 \le \lambda_{max}(C M^{-1} C^T) \|\Delta x\|^2`.

The least :math:`\rho` with :math:`F = [[M, C^T], [C, \rho I]] \succ 0` is a convex problem in T.  Newton's method
follows the minima of :math:`\rho/\mu - \log\det F` as :math:`\mu` falls.  F's derivatives have rank 2, so that a step
costs a few products of matrices of M's size: what is factorised is :math:`S = M - C^T C / \rho`, and
:math:`\det F = \rho^q \det S` with q outputs.

Reference: Fazlyab et al. (NeurIPS 2019), whose multipliers are diagonal (LipSDP-neuron).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.operators.verified import inverse_form_estimate
from curvcert.propagation.neuron_maps import Enclosed
from curvcert.rounding import TINY, UNIT_ROUNDOFF, gamma, inflate

_FIRST_MU, _CUT = 0.02, 0.2
"""The first mu, relative to rho, and by how much it falls from one minimum to the next."""

_CENTRED = 0.7
"""Newton's decrement below which a minimum counts as reached."""

_LAST_MU = 0.001
"""The last mu, relative to rho over the number of neurons: it leaves a tenth of a percent of L at most."""

_MOST_STEPS, _SHORTEST = 300, 1e-9

_LEAST_SQUARE = 1e-12
"""Below this, relative to 1, a level's rows hardly move: its first multipliers stay finite."""

_NARROWEST = 1e-4
"""Slopes are taken no nearer to each other than this, relative to the largest: their multipliers stay finite."""


@dataclass(frozen=True, eq=False)
class QuadraticForm:
    """What makes up M(T): Z, C, the slopes of every neuron, and how many columns belong to the input.

    The first columns are the input's, the others the neurons'; `levels` holds how many neurons there are in each level.
    """

    Z: Enclosed
    C: Enclosed
    alpha: Tensor
    beta: Tensor
    inputs: int
    levels: tuple[int, ...]

    @cached_property
    def U(self) -> Tensor:
        """da - alpha dz as a function of y."""
        U = -self.alpha[:, None] * self.Z.value
        U[:, self.inputs :].diagonal().add_(1.0)
        return U

    @cached_property
    def V(self) -> Tensor:
        """Beta dz - da as a function of y."""
        V = self.beta[:, None] * self.Z.value
        V[:, self.inputs :].diagonal().sub_(1.0)
        return V

    def with_slopes(self, alpha: Tensor, beta: Tensor) -> "QuadraticForm":
        """Return the form with other slopes, apart enough for finite multipliers."""
        widest = torch.maximum(alpha.abs(), beta.abs()).amax().clamp(min=TINY)
        return QuadraticForm(
            self.Z, self.C, alpha, torch.maximum(beta, alpha + _NARROWEST * widest), self.inputs, self.levels
        )

    def with_output(self, C: Enclosed) -> "QuadraticForm":
        """Return the form with other outputs."""
        return QuadraticForm(self.Z, C, self.alpha, self.beta, self.inputs, self.levels)

    def before_level(self, place: int, neurons: int) -> "QuadraticForm":
        """Return the form over the levels before one, which are so many neurons."""
        return QuadraticForm(
            self.rows(slice(0, neurons), neurons),
            self.rows(slice(0, 0), neurons),
            self.alpha[:neurons],
            self.beta[:neurons],
            self.inputs,
            self.levels[:place],
        )

    def rows(self, rows: slice, neurons: int) -> Enclosed:
        """Return rows of Z over the input and the first neurons."""
        columns = self.inputs + neurons
        return Enclosed(self.Z.value[rows, :columns], self.Z.error[rows, :columns])

    def weighed(self, T: Tensor) -> Tensor:
        """Return -U'TV - V'TU, exactly symmetric."""
        product = self.U.mT @ (T[:, None] * self.V)
        return -(product + product.mT)

    def matrix(self, T: Tensor) -> Tensor:
        """Return M(T) as computed."""
        M = self.weighed(T)
        M.diagonal()[: self.inputs].add_(1.0)
        return M

    def matrix_error(self, T: Tensor, D: Tensor) -> Tensor:
        """Bound the 2-norm of the error of D M(T) D for a diagonal D > 0, by the largest sum along a row."""
        steepest = torch.maximum(self.alpha.abs(), self.beta.abs())[:, None]
        size = steepest * self.Z.value.abs()
        size[:, self.inputs :].diagonal().add_(1.0)
        # U and V are off by what Z is, a product and a sum; so is the product of both, with a sum over the neurons.
        error = steepest * self.Z.error + gamma(3) * size
        size = size + error
        wanted = T * (size @ D)
        rows = 2 * (error.mT @ wanted + size.mT @ (T * (error @ D))) + 2 * gamma(len(T) + 4) * (size.mT @ wanted)
        rows[: self.inputs] += UNIT_ROUNDOFF * D[: self.inputs]
        return inflate((D * rows).amax() + TINY, gamma(2 * len(D) + 32))


def first_multipliers(form: QuadraticForm) -> Tensor | None:
    r"""Return the multipliers of the LipSDP recursion, for any graph: one for each level; None if rounding spoils them.

    With M over the earlier levels, :math:`t < 2 / \lambda_{max}(B Z M^{-1} Z^T B)`, :math:`B = \beta - \alpha`, keeps
    M definite: half of that is taken.
    """
    T, done = torch.zeros_like(form.alpha), 0
    for size in form.levels:
        rows, columns = slice(done, done + size), form.inputs + done
        U, V = form.U[:done, :columns], form.V[:done, :columns]
        product = U.mT @ (T[:done, None] * V)
        M = -(product + product.mT)
        M.diagonal()[: form.inputs].add_(1.0)
        Z = (form.beta - form.alpha)[rows, None] * form.Z.value[rows, :columns]
        R, info = torch.linalg.cholesky_ex(M)
        if int(info) != 0:
            return None
        X = torch.linalg.solve_triangular(R, Z.mT, upper=False)
        T[rows] = 1.0 / torch.linalg.eigvalsh(X.mT @ X)[-1].clamp(min=_LEAST_SQUARE)
        done += size
    return T


def value_estimate(form: QuadraticForm, T: Tensor) -> float:
    """Return the largest eigenvalue of C M^-1 C' as computed; inf where M is not definite."""
    return float(inverse_form_estimate(form.matrix(T), form.C.value))


def best_multipliers(form: QuadraticForm, T: Tensor, first_mu: float = _FIRST_MU, last_mu: float = _LAST_MU) -> Tensor:
    """Return multipliers near the best for all outputs as one vector, given feasible ones; never worse than those."""
    before = value_estimate(form, T)
    if not 0 < before < math.inf:
        return T
    mu, last = first_mu * before, last_mu / len(T)
    C = form.C.value
    point = _at(form, C.mT @ C, T, before + len(C) * mu, form.matrix(T))
    for _ in range(_MOST_STEPS):
        newton = None if point is None else _newton(point)
        if point is None or newton is None:
            break
        while newton.decrement(mu) < _CENTRED and mu > last * point.rho:
            mu *= _CUT
        if newton.decrement(mu) < _CENTRED:
            break
        found = _searched(point, newton, mu)
        if found is None:
            break
        point = found
    return T if point is None or value_estimate(form, point.T) > before else point.T


@dataclass(frozen=True, eq=False)
class _Point:
    """Multipliers and rho, with M there, C'C, and the Cholesky factor of S."""

    form: QuadraticForm
    gram: Tensor
    T: Tensor
    rho: float
    M: Tensor
    R: Tensor

    @cached_property
    def kept_positive(self) -> Tensor:
        """1 where F's definiteness does not keep a multiplier positive, so that it has a barrier of its own; else 0."""
        return (self.form.alpha * self.form.beta > 0).to(self.T)

    @cached_property
    def barrier(self) -> float:
        """The barrier's value."""
        of_S = 2 * float(self.R.diagonal().log().sum())
        return -of_S - len(self.form.C.value) * math.log(self.rho) - float((self.kept_positive * self.T.log()).sum())


def _at(form: QuadraticForm, gram: Tensor, T: Tensor, rho: float, M: Tensor) -> _Point | None:
    if not rho > 0:
        return None
    R, info = torch.linalg.cholesky_ex(M - gram / rho)
    return None if int(info) != 0 or not bool((T > 0).all()) else _Point(form, gram, T, rho, M, R)


@dataclass(frozen=True, eq=False)
class _Newton:
    """The gradient of the barrier and Newton's directions against it and against rho, relative to T and rho.

    The last coordinate is rho's.
    """

    gradient: Tensor
    against_barrier: Tensor
    against_rho: Tensor
    rho: float

    def step(self, mu: float) -> Tensor:
        """Return Newton's step for rho / mu plus the barrier."""
        return self.against_barrier + self.rho / mu * self.against_rho

    def decrement(self, mu: float) -> float:
        """Return the length of that step in the norm of the second derivative."""
        step = self.step(mu)
        return math.sqrt(max(0.0, -float(self.gradient @ step) - self.rho / mu * float(step[-1])))


def _newton(point: _Point) -> _Newton | None:
    r"""Return Newton's directions at a point, or None where rounding spoils them.

    With :math:`G = F^{-1}`, the derivative of F in :math:`T_l` is :math:`-(u v^T + v u^T)` for the rows u of U and v of
    V, and so the second derivatives of :math:`-\log\det F` are
    :math:`2 (UGU^T \circ VGV^T + UGV^T \circ VGU^T)`.  On F's last rows U and V are 0, and G is
    :math:`-C S^{-1} / \rho` and :math:`I / \rho + C S^{-1} C^T / \rho^2`.
    """
    checkpoint()
    form, C, T, rho = point.form, point.form.C.value, point.T, point.rho
    G = torch.cholesky_inverse(point.R)
    U_is_E = not bool(form.alpha.any())
    UG = G[form.inputs :] if U_is_E else form.U @ G
    VG = form.V @ G
    UGV = UG @ form.V.mT
    UGU = UG[:, form.inputs :] if U_is_E else UG @ form.U.mT
    CGC = C @ G @ C.mT / rho
    trace = CGC.diagonal().sum()
    H = torch.empty(len(T) + 1, len(T) + 1, dtype=T.dtype, device=T.device)
    H[:-1, :-1] = 2 * T[:, None] * (UGU * (VG @ form.V.mT) + UGV * UGV.mT) * T
    H[:-1, :-1].diagonal().add_(point.kept_positive)
    H[-1, :-1] = H[:-1, -1] = -2 / rho * T * ((UG @ C.mT) * (VG @ C.mT)).sum(dim=1)
    H[-1, -1] = len(C) + 2 * trace + CGC.square().sum()
    gradient = torch.cat([2 * T * UGV.diagonal() - point.kept_positive, (-len(C) - trace)[None]])
    R, info = torch.linalg.cholesky_ex(H)
    if int(info) != 0:
        return None
    along_rho = torch.zeros_like(gradient)
    along_rho[-1] = 1.0
    directions = -torch.cholesky_solve(torch.stack([gradient, along_rho], dim=1), R)
    if not bool(torch.isfinite(directions).all()):
        return None
    return _Newton(gradient, directions[:, 0], directions[:, 1], rho)


def _searched(point: _Point, newton: _Newton, mu: float) -> _Point | None:
    """Return a point along a step where rho / mu plus the barrier is less, or None where rounding hides it."""
    step = newton.step(mu)
    change = point.form.weighed(point.T * step[:-1])

    def tried(length: float) -> tuple[float, _Point | None]:
        T, rho = point.T * (1 + length * step[:-1]), point.rho * (1 + length * float(step[-1]))
        found = _at(point.form, point.gram, T, rho, point.M + length * change)
        return (math.inf, None) if found is None else (found.rho / mu + found.barrier, found)

    here = point.rho / mu + point.barrier
    length = min(1.0, 4 / (1 + newton.decrement(mu)))
    value, found = tried(length)
    while not value < here and length > _SHORTEST:
        length /= 2
        value, found = tried(length)
    while found is not None:
        longer = tried(1.8 * length)
        if not longer[0] < value:
            break
        length, (value, found) = 1.8 * length, longer
    return found if value < here else None
