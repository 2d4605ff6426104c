r"""Path maps of a network of stencils at the frequencies of a torus, with what bounds their rounding.

Glossary:

- *symbol*: the small matrix :math:`\hat K(f) = \sum_u K[u] e^{2 \pi i f t_u / N}` of a stencil at a frequency f.
- *end*, *start*: the later and the earlier value that a path map leads between.
- *joined*: the frequencies of the start that strides make one frequency of the end.
- *blocks*: a path map through depthwise stencils alone is block-diagonal; it is kept so until channels are mixed.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.operators.conv import Pair
from curvcert.operators.hermitian import largest_singular_value_upper_bound
from curvcert.operators.planes import Circles, Use, Value, total_strides
from curvcert.operators.stencils import Stencil
from curvcert.operators.verified import largest_eigenvalue_upper_bound
from curvcert.rounding import (
    TINY,
    UNIT_ROUNDOFF,
    Upper,
    gamma,
    norm_upper_bound_of_vectors,
    root_above,
    root_below,
)

Span = tuple[int, int]
"""The least and the largest offset that a path map reads along an axis, in positions of its start."""


_WORTH_COMPRESSING = 1.5
"""Columns for each row from which on a path map is replaced by a square one."""


@final
@dataclass(frozen=True, eq=False)
class State:
    """A path map at every frequency of its end: (h, rows, w, columns, blocks, outputs, joined h, joined w, inputs).

    `error` bounds, in the 2-norm, how far the matrices are from those that are meant.
    """

    matrices: Tensor
    error: Tensor
    spans: tuple[Span, Span]
    identity: bool = False


@final
@dataclass(frozen=True, eq=False)
class Exit:
    """A map from an image to a vector, (rows, *shape), known to within `error` in the Frobenius norm."""

    source: int
    rows: Tensor
    error: Tensor


@final
@dataclass(frozen=True, eq=False)
class Through:
    r"""The map P from a value to a vector behind an exit V, by its Gram matrix :math:`N^{-2} \sum_f \hat V \hat P
    \hat P^* \hat V^*`, known to within `error`, and a bound on how far P itself is from the one that is meant.
    """

    gram: Tensor
    length: int
    error: Tensor

    def plus(self, other: "Through") -> "Through":
        """Add other frequencies."""
        return Through(self.gram + other.gram, self.length + other.length, self.error.maximum(other.error))

    @property
    def norm(self) -> Tensor:
        """A bound on the 2-norm."""
        rounding = Upper(self.gram.diagonal(), self.length).sum() * gamma(self.length + 8)
        return (Upper(largest_eigenvalue_upper_bound(self.gram, rounding.bound)).root() + self.error).bound

    @property
    def row_norms(self) -> Tensor:
        """Bounds on the 2-norms of the rows."""
        squares = Upper(self.gram.diagonal().clamp(min=0.0), 2 * (self.length + 8)) + TINY
        return (squares.root() + self.error).bound


class Frequencies:
    """Some rows of the frequencies of a torus, with the symbols of the stencils there.

    Along an axis that is `coarse` they are a grid among all there are, and norms are raised to cover the others.
    """

    def __init__(self, values: Sequence[Value], circles: Circles, rows: Tensor, coarse: tuple[bool, bool]) -> None:
        """Take rows up to the frequencies that strides join; symbols are computed when they are first needed."""
        self._values, self._circles, self._rows, self._coarse = values, circles, rows, coarse
        self._columns = torch.arange(circles.length[1] // circles.period[1], device=rows.device)
        self._strides = total_strides(values)
        self._last_reader = {use.source: k for k, value in enumerate(values) for use in value.uses}
        self._symbols: dict[tuple[int, int], Tensor] = {}
        self._norms: dict[tuple[int, int], Tensor] = {}
        self._spectra: dict[int, Tensor] = {}

    def path_norms(self, start: int, ends: Collection[int]) -> dict[int, Tensor]:
        """Bound the norms of the path maps from one value to some of those after it."""
        return {k: self.norm(state, start, k) for k, state in self.states(start) if k in ends and k != start}

    def exits(self, start: int, exits: Sequence[Exit]) -> dict[int, Through]:
        """Return the maps from one value to what is behind some exits, by their numbers, as far as these rows go."""
        found: dict[int, Through] = {}
        for k, state in self.states(start):
            found |= {number: self.behind(each, state, start) for number, each in enumerate(exits) if each.source == k}
        return found

    def states(self, start: int, first: State | None = None) -> Iterator[tuple[int, State]]:
        """Yield the path maps from one value to itself and to those after it, behind `first` or the identity."""
        states = {start: first or self._identity(self._values[start].shape[0])}
        yield start, states[start]
        for k in range(start + 1, len(self._values)):
            checkpoint()
            value = self._values[k]
            slope = 1.0 if value.slopes is None else value.slopes.mu
            images = [self._image(states[use.source], use, slope, start) for use in value.uses if use.source in states]
            if not images or slope == 0.0:
                continue
            states[k] = _sum(images)
            yield k, states[k]
            states = {number: state for number, state in states.items() if self._last_reader.get(number, -1) > k}
            if len(states) == 1:  # whatever comes later leads through it
                ((number, state),) = states.items()
                states = {number: _compressed(state)}

    def multiple(self, value: int, factor: Tensor) -> State:
        """Return a multiple of the identity on a value."""
        shape = [len(self._waves(axis, low, value, (0,))) for axis, low in ((0, self._rows), (1, self._columns))]
        channels = self._values[value].shape[0]
        ones = self._identity(channels).matrices * factor
        matrices = ones.expand(shape[0], len(self._rows), shape[1], len(self._columns), *ones.shape[4:])
        return State(matrices, torch.zeros_like(factor), ((0, 0), (0, 0)))

    def root(self, Y: Tensor) -> State:
        """Return R with R R* at least Y, Hermitian matrices of the frequencies of a value."""
        n = Y.shape[-1]
        g = gamma(4 * (n + 4))
        shift = Upper(Y.diagonal(dim1=-2, dim2=-1).real.abs()).sum(-1).amax() * (4 * g) + TINY
        shifted = (Y + Y.mH) / 2
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift.bound)
        none = torch.zeros_like(shift.value)
        return State(torch.linalg.cholesky(shifted).unflatten(-1, (1, 1, n)), none, ((0, 0), (0, 0)))

    def gram(self, state: State, start: int, end: int, norm: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return :math:`\hat P \hat P^* / A` and a bound on its error, given the norm of the path map."""
        P, area = state.matrices.flatten(6), self._area(start, end)
        forming = _frobenius(state.matrices).square() * gamma(4 * (P.shape[-1] + 8))
        moved = (Upper(2 * norm) * root_above(area) + state.error) * state.error
        return P @ P.mH / area, ((moved + forming) / area).bound

    def at_lags(self, S: Tensor, value: int, height: int, width: int) -> Tensor:
        r"""Return :math:`N^{-2} \sum_f S(f) e^{2 \pi i f \tau / N}` for the lags 0, 1, ..., -2, -1 within an image."""
        h, w = (
            self._waves(axis, low, value, (*range(n), *range(1 - n, 0)))
            for axis, low, n in ((0, self._rows, height), (1, self._columns, width))
        )
        half = torch.einsum("rsuvab,uvw->rsabw", S * self.multiplicity()[:, None, None, None, None], w)
        return torch.einsum("rsabw,rsh->abhw", half, h).real / self.count(value)

    def count(self, value: int) -> int:
        """Return how many frequencies a value has."""
        return math.prod(n // s for n, s in zip(self._circles.length, self._strides[value], strict=True))

    def _area(self, start: int, end: int) -> int:
        return math.prod(a // b for a, b in zip(self._strides[end], self._strides[start], strict=True))

    def behind(self, gate: Exit, state: State, start: int) -> Through:
        r"""Return the part of a map behind an exit that these frequencies see.

        With :math:`\hat V(f) = \sum_i V_i e^{2 \pi i f i / N}` and the stride A from the start to the exit, it is
        :math:`\hat V(f) \hat P(f) / (N \sqrt A)` for each f, side by side.
        """
        V, blocks = self._spectrum(gate), state.matrices.shape[4]
        P = state.matrices.flatten(6)
        split = V.unflatten(-1, (blocks, -1)).movedim(-2, 4)
        product = split @ P.expand(*split.shape[:4], *P.shape[4:])
        # Conjugate frequencies, which are left out, see the conjugate.
        weight = self.multiplicity().sqrt()[:, None, None, None, None, None]
        area = self._area(start, gate.source)
        flat = torch.view_as_real(product * (weight / math.sqrt(self.count(gate.source)))).movedim(-3, 0).flatten(1)
        size, taps = Upper(_length(gate.rows)), math.prod(gate.rows.shape[2:])
        # The taps of each entry of V add up, and V is as long on the torus as it is.
        symbol = 4 * (taps + 16) * UNIT_ROUNDOFF * math.sqrt(taps)
        local = symbol + gamma(4 * (gate.rows.shape[1] + 8))
        error = (size + gate.error) * state.error + (size * (2 * local) + gate.error) * _frobenius(state.matrices)
        return Through(flat @ flat.mT / area, flat.shape[1], (error / root_below(area)).bound)

    def _spectrum(self, gate: Exit) -> Tensor:
        """Return the rows of an exit at the frequencies of its value: (h, rows, w, columns, rows of it, channels)."""
        if id(gate) not in self._spectra:
            height, width = gate.rows.shape[2:]
            h = self._waves(0, self._rows, gate.source, tuple(range(height)))
            w = self._waves(1, self._columns, gate.source, tuple(range(width)))
            half = torch.einsum("nchw,rsh->rsncw", gate.rows.to(h.dtype), h)
            self._spectra[id(gate)] = torch.einsum("rsncw,uvw->rsuvnc", half, w)
        return self._spectra[id(gate)]

    def multiplicity(self) -> Tensor:
        """Return how many rows of frequencies each of these stands for: itself, and its conjugate if left out."""
        rows = self._circles.length[0] // self._circles.period[0]
        alone = (2 * self._rows) % rows == 0
        return torch.where(alone, 1.0, 2.0).to(torch.float64)

    def _identity(self, channels: int) -> State:
        ones = torch.ones(1, 1, 1, 1, channels, 1, 1, 1, 1, dtype=torch.complex128, device=self._rows.device)
        return State(ones, torch.zeros((), dtype=torch.float64, device=ones.device), ((0, 0), (0, 0)), identity=True)

    def norm(self, state: State, start: int, end: int) -> Tensor:
        stride = [a // b for a, b in zip(self._strides[end], self._strides[start], strict=True)]
        blocks = state.matrices.flatten(6).flatten(0, 4)
        norm = (Upper(largest_singular_value_upper_bound(blocks)) + state.error) / root_below(math.prod(stride))
        return (norm * self._off_the_grid(state, stride, end)).bound

    def _off_the_grid(self, state: State, stride: Sequence[int], end: int) -> float:
        r"""Return how much larger a norm may be between the points of a coarse grid: :math:`1 / \cos(\pi R / M)`."""
        factor = 1.0
        for axis in (0, 1):
            if self._coarse[axis]:
                low, high = state.spans[axis]
                points = self._circles.length[axis] // self._strides[end][axis]
                share = ((high - low) // stride[axis]) / points
                factor /= math.cos(math.pi / 2 * share) * (1 - 1e-12)
        return factor

    def _image(self, state: State, use: Use, slope: float, start: int) -> State:
        if use.stencil is not None:
            state = self._through(state, use.stencil, use.source, start)
        factor = use.factor * slope
        if factor == 1.0:
            return state
        matrices = state.matrices * factor
        error = Upper(state.error) * abs(factor) + _frobenius(matrices) * (8 * UNIT_ROUNDOFF)
        return State(matrices, error.bound, state.spans)

    def _through(self, state: State, stencil: Stencil, source: int, start: int) -> State:
        r"""Return the state behind a stencil.

        With :math:`\delta` the error of the symbol, :math:`e' = (\|\hat K\| + \delta) e + (\delta + \gamma s) \|P\|_F`,
        s the size of the kernel of absolute values.
        """
        symbol = self._symbol(stencil, source)
        taps = stencil.kernel.shape[-1] * stencil.kernel.shape[-2]
        delta = Upper(stencil.size) * (4 * (taps + 16) * UNIT_ROUNDOFF + stencil.error)
        if state.identity:
            made, error = symbol[..., None, None, :], delta
        else:
            made = _product(symbol, state.matrices)
            local = delta + Upper(stencil.size) * gamma(4 * (symbol.shape[-1] + 4))
            error = (delta + self._symbol_norm(stencil, source)) * state.error + local * _frobenius(state.matrices)
        steps = (after // before for after, before in zip(self._strides[source], self._strides[start], strict=True))
        h, w = (
            (low + step * min(axis.offsets), high + step * max(axis.offsets))
            for (low, high), step, axis in zip(state.spans, steps, stencil.reach, strict=True)
        )
        return State(_joined(made, stencil.stride), (error * root_above(math.prod(stencil.stride))).bound, (h, w))

    def _symbol(self, stencil: Stencil, source: int) -> Tensor:
        """Return the matrices of a stencil at the frequencies of a value: (h, rows, w, columns, groups, out, in)."""
        key = id(stencil), source
        if key not in self._symbols:
            h, w = (
                self._waves(axis, low, source, stencil.reach[axis].offsets)
                for axis, low in ((0, self._rows), (1, self._columns))
            )
            half = torch.einsum("goihw,rsh->rsgoiw", stencil.kernel.to(h.dtype), h)
            self._symbols[key] = torch.einsum("rsgoiw,uvw->rsuvgoi", half, w)
        return self._symbols[key]

    def _symbol_norm(self, stencil: Stencil, source: int) -> Tensor:
        key = id(stencil), source
        if key not in self._norms:
            self._norms[key] = torch.minimum(stencil.size, _quartic_norm(self._symbol(stencil, source), stencil))
        return self._norms[key]

    def _waves(self, axis: int, low: Tensor, source: int, offsets: tuple[int, ...]) -> Tensor:
        """Return exp(2 pi i f t / N) for the frequencies of a value and each offset t, the argument reduced exactly."""
        stride, period, length = self._strides[source][axis], self._circles.period[axis], self._circles.length[axis]
        N, M, R = length // stride, length // period, period // stride
        f = low + M * torch.arange(R, device=low.device)[:, None]
        turns = (f[..., None] * torch.tensor(offsets, device=low.device)) % N
        turns = torch.where(turns > N // 2, turns - N, turns).double()
        angle = turns * (2 * math.pi / N)
        return torch.complex(angle.cos(), angle.sin())


def _compressed(state: State) -> State:
    r"""Return a state with no more columns than rows that is as long as P, in front of whatever comes later.

    With L the computed factor of :math:`PP^* + \varepsilon I`, :math:`LL^* \succeq PP^*` and so
    :math:`\|QP\| \le \|QL\|` for every Q.  For r rows and c columns :math:`\varepsilon = 90 u (r + c) \|P\|_F^2` covers
    the roundings :math:`\gamma_{4(c+4)} \|P\|_F^2` of the product and
    :math:`\gamma_{4(r+4)} / (1 - \gamma) \operatorname{tr}(PP^* + \varepsilon I)` of the factorisation.
    """
    flat = state.matrices.flatten(6)
    rows, columns = flat.shape[-2:]
    if state.identity or columns < _WORTH_COMPRESSING * rows:
        return state
    gram = flat @ flat.mH
    trace = torch.view_as_real(flat).square().sum(dim=(-3, -2, -1))
    gram.diagonal(dim1=-2, dim2=-1).add_(((rows + columns) * (90 * UNIT_ROUNDOFF * trace + 4 * TINY))[..., None])
    factor, info = torch.linalg.cholesky_ex(gram)
    if bool((info != 0).any()) or not bool(torch.view_as_real(factor).isfinite().all()):
        return state
    return replace(state, matrices=factor.unflatten(-1, (1, 1, rows)))


def _sum(states: Sequence[State]) -> State:
    if len(states) == 1:
        return states[0]
    blocks = math.gcd(*(state.matrices.shape[4] for state in states))
    total, error = _with_blocks(states[0].matrices, blocks), Upper(states[0].error)
    for state in states[1:]:
        total = total + _with_blocks(state.matrices, blocks)
        error = error + state.error + _frobenius(total) * (2 * UNIT_ROUNDOFF)
    h, w = (
        (min(state.spans[axis][0] for state in states), max(state.spans[axis][1] for state in states))
        for axis in (0, 1)
    )
    return State(total, error.bound, (h, w))


def _with_blocks(matrices: Tensor, blocks: int) -> Tensor:
    """Return block-diagonal matrices with fewer, larger blocks."""
    merged = matrices.shape[4] // blocks
    if merged == 1:
        return matrices
    split = matrices.unflatten(4, (blocks, merged))
    eye = torch.eye(merged, dtype=matrices.dtype, device=matrices.device)
    # (h, rows, w, columns, blocks, merged, outputs, joined h, joined w, merged, inputs)
    spread = split.unsqueeze(9) * eye.reshape(merged, 1, 1, 1, merged, 1)
    larger: Tensor = spread.flatten(9, 10).flatten(5, 6)
    return larger


def _product(symbol: Tensor, matrices: Tensor) -> Tensor:
    """Return the products of the matrices of a stencil with those of a state."""
    groups, _, inputs = symbol.shape[-3:]
    blocks = math.gcd(groups, matrices.shape[4])
    matrices = _with_blocks(matrices, blocks)
    within = groups // blocks
    if inputs == symbol.shape[-2] == 1:
        scaled: Tensor = symbol[..., 0, 0].unflatten(4, (blocks, within))[..., None, None, None] * matrices
        return scaled
    lead, tail = symbol.shape[:4], matrices.shape[6:]
    columns = matrices.expand(*lead, *matrices.shape[4:]).flatten(6)
    images = symbol.unflatten(4, (blocks, within)) @ columns.unflatten(5, (within, inputs))
    product: Tensor = images.flatten(5, 6).unflatten(6, tail)
    return product


def _joined(matrices: Tensor, stride: Pair) -> Tensor:
    """Put the frequencies that a stride joins beside each other."""
    if stride == (1, 1):
        return matrices
    split = matrices.unflatten(2, (stride[1], -1)).unflatten(0, (stride[0], -1))
    # (s, h, rows, s', w, columns, blocks, outputs, joined h, joined w, inputs)
    moved = split.permute(1, 2, 4, 5, 6, 7, 8, 0, 9, 3, 10)
    joined: Tensor = moved.flatten(9, 10).flatten(7, 8)
    return joined


def _length(x: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(x.flatten(), 2, 0)


def _frobenius(matrices: Tensor) -> Upper:
    """Return the largest Frobenius norm of a batch."""
    return (Upper(torch.view_as_real(matrices)).square().sum(-6, -5, -4, -3, -2, -1).amax() + TINY).root()


def _quartic_norm(symbol: Tensor, stencil: Stencil) -> Tensor:
    r"""Bound the norm of the matrices of a stencil by :math:`\|(KK^*)^2\|_F^{1/4}`, rounding included."""
    outputs, inputs = symbol.shape[-2:]
    scale = float(stencil.size) or 1.0
    K = symbol / scale if outputs <= inputs else symbol.mH / scale
    gram = K @ K.mH
    square = gram @ gram
    frobenius = (square.real.square() + square.imag.square()).sum(dim=(-2, -1)).sqrt().amax()
    # Everything is at most 1 in size: the roundings of two products, and of the symbol itself.
    rounding = 16 * gamma(4 * (outputs + inputs + stencil.kernel[0, 0, 0].numel() + 32)) + 8 * stencil.error
    return ((Upper(frobenius) * (1 + 1e-9) + rounding).root().root() * scale).bound
