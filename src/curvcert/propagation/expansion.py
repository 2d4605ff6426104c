r"""A network about one point to second order, in l2, where its layers are too wide for matrices of their own neurons.

With the slopes S at x, :math:`da = S dz + \rho` at every activation, and so for every value v, and a function F of the
outputs whose covectors on the activations are u,

.. math:: dv = T_v d + R_v, \qquad R_z = \sum_i P_{zi} \rho_i, \qquad
          F(x + d) = F(x) + g \cdot d + \sum_l u_l \rho_l.

Over a ball of radius t neuron l moves by no more than :math:`d_l = \|T_l\| t + r_l`, r a bound on R.  On that range
:math:`|\rho_l| \le c_l\, dz_l^2 / 2` and :math:`u_l \rho_l \le w_l\, dz_l^2 / 2`, where w may be negative
(`activations/quotients.py`).  So, for any weights :math:`D > 0` of the neurons, with :math:`q = c \circ d` and
:math:`v = w + q^2 / 4 D`,

.. math:: \sum_l u_l \rho_l \le \tfrac12 \sum_l v_l (T_l d + R_l)^2 - \sum_l \frac{\rho_l^2}{2 D_l}
          = \tfrac12 d^T M d + \sum_i (C_i d) \cdot \rho_i - \sum_l \frac{\rho_l^2}{2 D_l} + \tfrac12 \sum_l v_l R_l^2,

with :math:`M = \sum_k T_k^T v_k T_k` and :math:`C_i = \sum_k P_{ki}^T v_k T_k`.  One sweep of covectors back from all
the :math:`v_k T_k` gives M at the input and every :math:`C_i` on the way.  The cross terms are at most
:math:`\tfrac12 \sum D (C d)^2 + \tfrac12 \sum \rho^2 / D`, and so

.. math:: F(x + d) \le F(x) + g \cdot d + \tfrac12 d^T \Big( M + \sum_i C_i^T D_i C_i \Big) d
          + \tfrac12 \sum_l v_l^+ R_l^2,

a trust-region problem (`operators/trust_region.py`), and a constant of fourth order.  All of it is one quadratic form:
what it loses is lost along the gradient alone, not in the worst direction of each layer.

The form serves every function whose weights are no larger, and every smaller ball.  Rounding is accounted for as
`tangents.py` says: no floats here need to be what they stand for.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from curvcert import rounding
from curvcert.activations import derivative_range, second_derivative_range
from curvcert.activations.quotients import second_quotient_range
from curvcert.memory import spare_elements
from curvcert.network.evaluation import Evaluation
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.operators import AbstractLinearMap
from curvcert.operators.gram import gram_norm_upper_bound
from curvcert.operators.magnitudes import rounding_length
from curvcert.operators.trust_region import QuadraticForm
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.tangents import Forward, Swept, defects, lengths, swept_back
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, least, total

_EXPLICIT = 1100
"""Widest value whose path maps are made row by row."""

_CORRELATED = 4200
"""Widest activation whose neurons' tangents are compared with each other."""

_POWERS = 8
"""Steps towards the vector that bounds an eigenvalue of a nonnegative matrix."""

_CHUNK_ELEMENTS = 2**24
"""Numbers of one value's tangents that are in hand at a time, on a processor."""

_CHUNK_AT_MOST = 2**28
"""The same on an accelerator, so that several processes can share it: larger ones are no faster."""

_SQUARINGS = 3
"""Of Gram matrices, where their norms are bounded: what is left is a few percent."""

_PROBES = 8
"""Random directions beside the gradient, by which neurons are weighed against each other."""

_SPARE = 1.2
"""How much more of the remainders a form takes in than its first weights need."""

_YOUNG = 2.0**-20
"""What squares give up, relatively, so that what rounding adds to their roots stands apart; exact beside 1."""

_SHARE = 0.1
"""How much of a neuron's weight is decided by all directions rather than by the gradient's."""


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of one activation: where they are, the slopes used, and how far those may be off the true ones."""

    node: ElementwiseNode
    lower: Tensor
    upper: Tensor
    slope: Tensor
    slope_error: Tensor


@dataclass(frozen=True, eq=False)
class Steps:
    """What holds over a ball of radius t for the neurons of one activation.

    `low` and `high` enclose the second-order quotients, `q` bounds :math:`2 |\\rho| / |dz|`, `far` how far the neurons
    move, `rest` the R of each, and `rest_norm` that of all.
    """

    low: Tensor
    high: Tensor
    q: Tensor
    far: Tensor
    rest: Tensor
    rest_norm: Tensor


class Expansion:
    """A network about the point of an evaluation of a single sample; `facts` are those of its maps in l2."""

    def __init__(self, facts: NetworkFacts, evaluation: Evaluation) -> None:
        """Find the slopes, and the tangents of all pre-activations."""
        self.facts, self.evaluation = facts, evaluation
        nodes = facts.network.nodes
        self.inputs = math.prod(facts.network.in_shape)
        self.neurons = {k: self._neurons(node) for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode)}
        self.slopes = {k: each.slope for k, each in self.neurons.items()}
        self.last = max(each.node.source for each in self.neurons.values())
        self.bent = {each.node.source for each in self.neurons.values()}
        self._find_tangents()

    def _neurons(self, node: ElementwiseNode) -> Neurons:
        z = self.evaluation.values[node.source]
        lower, upper = z.value[0] - z.error[0], z.value[0] + z.error[0]
        lower, upper = (
            torch.nextafter(end, side * torch.ones_like(end) * torch.inf) for end, side in ((lower, -1), (upper, 1))
        )
        slope = node.activation.derivative(z.value[0])
        least, greatest = derivative_range(node.activation, lower, upper)
        error = inflate(torch.maximum(greatest - slope, slope - least).clamp(min=0.0), 4 * UNIT_ROUNDOFF)
        return Neurons(node, lower, upper, slope, error + 4 * UNIT_ROUNDOFF * slope.abs())

    # Tangents

    def _reads_input(self, z: int) -> bool:
        """Whether a value is an affine function of the input: its tangents are cheaper to make than to keep."""
        node = self.facts.network.nodes[z]
        return isinstance(node, AffineNode) and all(source == 0 for source in node.sources)

    @cached_property
    def parts(self) -> Sequence[slice]:
        """Return ranges of input coordinates whose tangents fit into memory."""
        widest = max(math.prod(node.shape) for node in self.facts.network.nodes)
        spare = min(spare_elements(self.device, _CHUNK_ELEMENTS), _CHUNK_AT_MOST)
        step = max(1, min(self.inputs, spare // (4 * widest)))
        return [slice(start, min(start + step, self.inputs)) for start in range(0, self.inputs, step)]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.facts.network.device

    def _basis(self, part: slice) -> Tensor:
        rows = torch.zeros(part.stop - part.start, self.inputs, dtype=torch.float64, device=self.device)
        rows.diagonal(part.start).fill_(1.0)
        return rows.reshape(-1, *self.facts.network.in_shape)

    def _find_tangents(self) -> None:
        nodes = self.facts.network.nodes
        squares = {
            z: torch.zeros(math.prod(nodes[z].shape), dtype=torch.float64, device=self.device) for z in self.bent
        }
        totals = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in nodes]
        self._kept: dict[int, Tensor] = {}
        for part in self.parts:
            values = Forward(self.facts, self.slopes).sweep(nodes, self._basis(part))
            for k, value in enumerate(values):
                flat = value.flatten(1)
                totals[k] = totals[k] + torch.linalg.vector_norm(flat).square()
                if k in self.bent:
                    squares[k] += torch.linalg.vector_norm(flat, dim=0).square()
                    if not self._reads_input(k):
                        if k not in self._kept:
                            self._kept[k] = flat.new_empty(self.inputs, flat.shape[1])
                        self._kept[k][part] = flat
        # A root, its square and the sum over the parts for each piece; a sum over all entries for both kinds.
        self.rows = {z: (Upper(total, 3 * self.inputs).root() + TINY).bound for z, total in squares.items()}
        """Norms of the rows of J, by the numbers of pre-activations."""
        self.sizes = [(Upper(total, 1 << 31).root() + TINY).bound for total in totals]
        """Frobenius norms of all tangents."""
        self.defects = defects(self.facts, self.slopes, self.sizes)

    def tangents(self, z: int, part: slice) -> Tensor:
        """Return some of the tangents of a pre-activation, (rows, neurons)."""
        if z in self._kept:
            return self._kept[z][part]
        node = self.facts.network.nodes[z]
        assert isinstance(node, AffineNode)
        basis = self._basis(part)
        return sum((term.map.apply(basis) for term in node.terms[1:]), node.terms[0].map.apply(basis)).flatten(1)

    def weighted_norm(self, z: int, q: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(q) T_z\|` for q >= 0, (neurons,): by powers of the smaller Gram matrix."""
        by_rows = rounding.lengths(Upper(q) * self.rows[z])
        if z in self._kept:
            T = self._kept[z]
            if T.shape[1] <= self.inputs:
                gram = q[:, None] * self._small_gram(z) * q
            else:
                weighted = T * q
                gram = weighted @ weighted.mT
        else:
            gram = self._gram_of_first(z, q)
        n = self.inputs + len(q)
        forming = by_rows.square() * gamma(n + 32) + Upper(2 * q.amax()).square() * self.sizes[z] * self.defects[z]
        square = forming + gram_norm_upper_bound((gram + gram.mT) / 2, _SQUARINGS)
        return (least(by_rows, square.root()) + TINY).bound

    def _small_gram(self, z: int) -> Tensor:
        if z not in self._grams:
            self._grams[z] = self._kept[z].mT @ self._kept[z]
        return self._grams[z]

    @cached_property
    def _grams(self) -> dict[int, Tensor]:
        return {}

    def _gram_of_first(self, z: int, q: Tensor) -> Tensor:
        """Return T' diag(q^2) T of a value that reads the input alone, whose maps are applied there and back."""
        node, shape = self.facts.network.nodes[z], self.facts.network.nodes[z].shape
        assert isinstance(node, AffineNode)
        pieces = []
        for part in self.parts:
            bent = (q.square() * self.tangents(z, part)).reshape(-1, *shape)
            pieces.append(
                sum((term.map.adjoint(bent) for term in node.terms[1:]), node.terms[0].map.adjoint(bent)).flatten(1)
            )
        return torch.cat(pieces)

    # Path maps

    @cached_property
    def paths(self) -> Mapping[int, Swept]:
        """Unit rows of narrow pre-activations, carried back to all activations before them."""
        found = {}
        for z in sorted(self.bent):
            shape = self.facts.network.nodes[z].shape
            size = math.prod(shape)
            if size <= _EXPLICIT and not self._reads_input(z):
                unit = torch.eye(size, dtype=torch.float64, device=self.device).reshape(size, *shape)
                found[z] = swept_back(self.facts, self.slopes, z, unit, self.slopes)
        return found

    @cached_property
    def _path_grams(self) -> Mapping[tuple[int, int], tuple[Tensor, float]]:
        """P P' of every path map that is made row by row, and a bound on its error over the rows' squared norms."""
        found = {}
        for z, swept in self.paths.items():
            for k, P in swept.kept.items():
                flat = P.flatten(1)
                found[z, k] = flat @ flat.mT, gamma(flat.shape[1] + 8)
        return found

    def weighted_path_norm(self, z: int, k: int, weights: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(v)^{1/2} P_{zk}\|`, v >= 0: from an activation to a later pre-activation."""
        if (z, k) not in self._path_grams:
            return (Upper(weights.amax()).root() * self.path_norms[z, k]).bound
        gram, relative = self._path_grams[z, k]
        root = weights.flatten().sqrt()
        trace = (Upper(weights.flatten()) * gram.diagonal()).sum()
        square = gram_norm_upper_bound(root[:, None] * gram * root, _SQUARINGS)
        return ((trace * (relative + 16 * UNIT_ROUNDOFF) + square).root() + TINY).bound

    @cached_property
    def path_norms(self) -> Mapping[tuple[int, int], Tensor]:
        """Bounds on the norms of the path maps from activations to all later values."""
        found: dict[tuple[int, int], Tensor] = {}
        one = torch.ones((), dtype=torch.float64, device=self.device)
        for value, node in enumerate(self.facts.network.nodes):
            for k in self.slopes:
                if k == value:
                    found[value, k] = one
                    continue
                if isinstance(node, AffineNode):
                    pairs = zip(node.terms, self.facts.maps[node], strict=True)
                    known = [(each.norm, found[term.source, k]) for term, each in pairs if (term.source, k) in found]
                    if known:
                        found[value, k] = total(Upper(norm) * before for norm, before in known).bound
                elif isinstance(node, ElementwiseNode) and (node.source, k) in found:
                    found[value, k] = (Upper(self.slopes[value].abs().amax()) * found[node.source, k]).bound
                if (value, k) in found and (value, k) in self._path_grams:
                    shape = self.facts.network.nodes[value].shape
                    exact = self.weighted_path_norm(
                        value, k, torch.ones(shape, dtype=torch.float64, device=self.device)
                    )
                    found[value, k] = torch.minimum(found[value, k], exact)
        return found

    # Second-order parts of the remainders

    @cached_property
    def bends(self) -> Mapping[int, Tensor]:
        """About the second derivative of every neuron at x, flat: any floats are sound."""
        found = {}
        for k, own in self.neurons.items():
            low, high = second_derivative_range(own.node.activation, own.lower, own.upper)
            found[k] = ((low + high) / 2).flatten()
        return found

    @property
    def correlated(self) -> Collection[int]:
        """The activations whose squares are known together."""
        return self._correlations.keys()

    @cached_property
    def _correlations(self) -> Mapping[int, Tensor]:
        """The squared entries of T T' for activations that are narrow enough, and keep their tangents."""
        found = {}
        for k, own in self.neurons.items():
            z = own.node.source
            if z in self._kept and self._kept[z].shape[1] <= _CORRELATED:
                found[k] = self._small_gram(z).square()
        return found

    def squares_norm(self, k: int, c: Tensor) -> Tensor | None:
        r"""Bound :math:`\sup_{|d| \le 1} \| c \circ (T d)^2 \|`, c >= 0 flat, by a vector that shows an eigenvalue.

        The root of the largest eigenvalue of :math:`c_i c_j (T T')_{ij}^2`; None where an activation is too wide.
        """
        if k not in self._correlations:
            return None
        M, v = self._correlations[k], torch.ones_like(c)
        for _ in range(_POWERS):
            v = c * (M @ (c * v))
            v = v / v.amax().clamp(min=1e-300) + 1e-9
        image = (Upper(M, 1) @ (Upper(c) * v)) * c
        return (((image / v).amax() + self._correlation_error(k, c)).root() + TINY).bound

    def _correlation_error(self, k: int, c: Tensor) -> Upper:
        """Bound what rounding did to a matrix of weighted squared entries: no entry is off by more than a_i a_j."""
        a = Upper(self.rows[self.neurons[k].node.source]).square() * c
        return a.square().sum() * gamma(4 * self.inputs + 32)

    @cached_property
    def bent_paths(self) -> Mapping[tuple[int, int], tuple[Tensor, Tensor]]:
        r"""Bounds on :math:`P_{zk} (h \circ (T d)^2)` over the unit ball: on each entry, and on its norm.

        A row p weighs the neurons: :math:`\sum_l p_l h_l (T_l d)^2` is at most the Frobenius norm of its matrix.
        """
        found = {}
        for z in self.bent:
            for k in self._correlations:
                P = self._rows_to(z, k)
                if P is None:
                    continue
                h = self.bends[k]
                weighted = P * h
                product = weighted @ self._correlations[k]
                top = self.squares_norm(k, h.abs())
                assert top is not None
                squares = Upper(lengths(P)).square()
                off = Upper(top).square() * gamma(4 * len(h) + 32) + self._correlation_error(k, h.abs())
                entries = off * squares + (product * weighted).sum(dim=1).clamp(min=0.0)
                gram = product @ weighted.mT
                whole = off * squares.sum() + gram_norm_upper_bound((gram + gram.mT) / 2, _SQUARINGS)
                found[z, k] = (entries.root() + TINY).bound, (whole.root() + TINY).bound
        return found

    def _rows_to(self, z: int, k: int) -> Tensor | None:
        """Return the path map from an activation to a pre-activation as a matrix, where it is at hand or one layer."""
        if z in self.paths:
            return self.paths[z].kept[k].flatten(1) if k in self.paths[z].kept else None
        node = self.facts.network.nodes[z]
        if not isinstance(node, AffineNode) or len(node.terms) > 1 or node.terms[0].source != k:
            return None
        if math.prod(node.shape) > _CORRELATED:
            return None
        unit = torch.eye(math.prod(node.shape), dtype=torch.float64, device=self.device)
        return node.terms[0].map.adjoint(unit.reshape(-1, *node.shape)).flatten(1)


class Ball:
    """What an expansion leaves out over the ball of radius t; a `larger` ball serves for norms that grow with it."""

    def __init__(self, expansion: Expansion, t: float, larger: "Ball | None" = None) -> None:
        """Go through the values, from the input on."""
        self.expansion, self.t, self._larger = expansion, t, larger
        self.steps: dict[int, Steps] = {}
        """By the numbers of the activations."""
        self.remainders: dict[int, tuple[Tensor, Tensor]] = {}
        """Bounds on the remainders of the activations: on each coordinate, and on the norm."""
        self.third: dict[int, Tensor] = {}
        """Bounds on the norm of what the remainders are beside their second-order parts, where those are known."""
        self._weighted: dict[int, tuple[Tensor, Tensor]] = {}
        facts, zero = expansion.facts, torch.zeros((), dtype=torch.float64, device=expansion.device)
        self.small: list[Tensor] = []
        """What rounding alone puts into the norm of R of every value."""
        self.rest: list[tuple[Tensor, Tensor]] = []
        """Bounds on R of every value: on each coordinate, and on its norm."""
        for k, node in enumerate(facts.network.nodes):
            self.small.append(self._rounded(k, node))
            if isinstance(node, AffineNode):
                found = self._affine(k, node)
            elif isinstance(node, ElementwiseNode):
                found = self._elementwise(k, node)
            else:
                found = torch.zeros(node.shape, dtype=torch.float64, device=expansion.device), zero
            self.rest.append(found)

    def _affine(self, k: int, node: AffineNode) -> tuple[Tensor, Tensor]:
        own = Upper(self.expansion.defects[k]) * self.t
        off, size = own + torch.zeros_like(node.offset), own
        for term, each in zip(node.terms, self.expansion.facts.maps[node], strict=True):
            r, R = self.rest[term.source]
            off += least(each.spread(r), Upper(each.rows) * R)
            size += Upper(each.norm) * R
        entries, norm = off.bound, size.bound
        if k in self.expansion.bent:
            r, R = self._by_sources(k)
            entries, norm = torch.minimum(entries, r.reshape(entries.shape)), torch.minimum(norm, R)
        return _cut(entries, norm)

    def _by_sources(self, z: int) -> tuple[Tensor, Tensor]:
        """Bound R of a pre-activation by the remainders of all activations before it, each the best way."""
        expansion, swept = self.expansion, self.expansion.paths.get(z)
        entries = Upper(torch.zeros_like(expansion.rows[z]))
        norm = Upper(torch.zeros_like(expansion.sizes[0]))
        for k in self.steps:
            if (z, k) not in expansion.path_norms:
                continue
            (remainder, length), whole = self.remainders[k], expansion.path_norms[z, k]
            size = Upper(whole) * length
            each = size
            if swept is not None:
                by_entries = Upper(swept.kept[k].flatten(1).abs()) @ remainder.flatten()
                each = least(each, Upper(swept.row_norms[k]) * length, by_entries)
            if (z, k) in expansion.bent_paths:
                by_rows, by_norm = expansion.bent_paths[z, k]
                third = Upper(whole) * self.third[k]
                rows = third if swept is None else Upper(swept.row_norms[k]) * self.third[k]
                each = least(each, Upper(by_rows) * self.t * self.t / 2.0 + rows)
                size = least(size, Upper(by_norm) * self.t * self.t / 2.0 + third)
            entries += least(each, size)
            norm += size
        # What rounding left: in the defects of the tangents, and in the path maps.
        rounded = self.small[z]
        if swept is not None:
            small = [Upper(size) * expansion.defects[value] * self.t for value, size in swept.sizes.items()]
            small += [Upper(lost) * self.rest[value][1] for value, lost in swept.lost.items()]
            rounded = self.small[z] = (rounding.lengths(total(small)) + rounded).bound
        return (entries + rounded).bound, (norm + rounded).bound

    def _rounded(self, k: int, node: AbstractNode) -> Tensor:
        """Bound what the defects of all tangents before a value do to it."""
        found = Upper(self.expansion.defects[k]) * self.t
        if isinstance(node, AffineNode):
            for term, each in zip(node.terms, self.expansion.facts.maps[node], strict=True):
                found += Upper(self.small[term.source]) * each.norm
        elif isinstance(node, ElementwiseNode):
            found += Upper(self.small[node.source]) * self.expansion.neurons[k].slope.abs().amax()
        return found.bound

    def _elementwise(self, k: int, node: ElementwiseNode) -> tuple[Tensor, Tensor]:
        expansion, t = self.expansion, self.t
        own, (r, R) = expansion.neurons[k], self.rest[node.source]
        far = (Upper(expansion.rows[node.source].reshape(r.shape)) * t + r).bound
        low, high = second_quotient_range(node.activation, own.lower, own.upper, far)
        c = torch.maximum(low.abs(), high.abs())
        q = (Upper(c) * far + 2 * own.slope_error).bound
        self.steps[k] = Steps(low, high, q, far, r, R)
        remainder = (Upper(q) * far / 2.0 + 2 * node.activation.deviation).bound
        flat, flat_r = q.flatten(), r.flatten()
        off = 2 * node.activation.deviation * rounding.root_above(remainder.numel())
        if k in expansion.correlated:
            by_norm = self._by_squares(k, c.flatten()) + off
            h = expansion.bends[k].reshape(c.shape)
            apart = inflate(torch.maximum(high - h, h - low).clamp(min=0.0), 4 * UNIT_ROUNDOFF)
            self.third[k] = (self._by_squares(k, apart.flatten(), expansion.bends[k].abs()) + off).bound
        else:
            missed = least(Upper(flat.amax()) * R, rounding.lengths(Upper(flat) * flat_r))
            # The last term is a float's product, which rounds.
            by_norm = Upper(self._norm_of(k, node.source, flat), 1) * t / 2.0 + missed / 2.0 + off
        length = least(rounding.lengths(remainder), by_norm).bound
        self.remainders[k] = remainder, length
        steep, own_defect = own.slope.abs(), Upper(expansion.defects[k]) * t
        entries = Upper(steep) * r + remainder + own_defect
        return _cut(entries.bound, (Upper(steep.amax()) * R + length + own_defect).bound)

    def _by_squares(self, k: int, c: Tensor, more: Tensor | float = 0.0) -> Upper:
        r"""Bound the norm of what is at most :math:`c\, dz^2 / 2`, beside more times the same less :math:`(T d)^2 / 2`.

        :math:`|dz^2 - (T d)^2| \le |R| (|dz| + |T d|)`, and slopes are off by a little.
        """
        expansion, steps, t = self.expansion, self.steps[k], self.t
        z = expansion.neurons[k].node.source
        top = expansion.squares_norm(k, c)
        assert top is not None
        reach = (Upper(expansion.rows[z]) * t + steps.far.flatten()) * (Upper(c) + more)
        missed = least(reach.amax() * steps.rest_norm, rounding.lengths(reach * steps.rest.flatten()))
        slopes = rounding.lengths(Upper(expansion.neurons[k].slope_error) * steps.far)
        return (Upper(top) * t * t + missed) / 2.0 + slopes

    def _norm_of(self, k: int, z: int, q: Tensor) -> Tensor:
        """Bound ||diag(q) T||: by matrices, or as a multiple of what a larger ball knows."""
        if self._larger is None:
            self._weighted[k] = q, self.expansion.weighted_norm(z, q)
        else:
            self._weighted[k] = known, norm = self._larger._weighted[k]
            return ((Upper(q) / known.clamp(min=1e-300)).amax() * norm).bound
        return self._weighted[k][1]


def _cut(entries: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds on coordinates and on the norm, each cut by the other."""
    norm = least(norm, rounding.lengths(entries) + TINY).bound
    return torch.minimum(entries, norm), norm


class Functions:
    """Linear functions of the outputs, rows (functions, outputs): their gradients, and covectors on the activations."""

    def __init__(self, expansion: Expansion, rows: Tensor) -> None:
        """Carry the rows back."""
        facts = expansion.facts
        self.expansion = expansion
        shaped = rows.reshape(len(rows), *facts.network.out_shape)
        self._swept = swept_back(facts, expansion.slopes, len(facts.network.nodes) - 1, shaped, expansion.slopes)
        self.gradient, self.u = self._swept.start.flatten(1), self._swept.kept

    def rounding(self, ball: Ball) -> Tensor:
        """Bound what rounding, and what is not known of slopes, adds over a ball: (functions,)."""
        expansion = self.expansion
        found = Upper(torch.zeros_like(self.gradient[:, 0]))
        for value, size in self._swept.sizes.items():
            found += Upper(size) * expansion.defects[value] * ball.t
        for value, lost in self._swept.lost.items():
            found += (Upper(expansion.sizes[value]) * ball.t + ball.rest[value][1]) * lost
        for k, u in self.u.items():
            own = expansion.neurons[k]
            off = Upper(own.slope_error) * ball.steps[k].far + 2 * own.node.activation.deviation
            found += Upper(u.flatten(1).abs()) @ off.flatten(0)
        return found.bound


class Form:
    """One quadratic form for some functions over a ball, and all smaller ones about the same point."""

    def __init__(self, functions: Functions, some: Sequence[int], ball: Ball) -> None:
        """Make the matrix; the first function is the one that the neurons' weights are chosen for."""
        self.functions, self.expansion, self._ball = functions, functions.expansion, ball
        self._some = list(some)
        self._quotients = {k: self._worst_quotients(k) for k in functions.u}
        self.coupling, sizes = self._balanced()
        none = dict.fromkeys(functions.u, torch.zeros_like(self.expansion.sizes[0]))
        first = self._by_value({k: self._with_coupling(k, none[k]) for k in functions.u})
        self.shares = {k: _SPARE * share for k, share in self._needed(first, sizes).items()}
        self._weights = self._by_value({k: self._with_coupling(k, self.shares[k]) for k in functions.u})
        needed = self._needed(self._weights, sizes)
        self._missing = {k: inflate((needed[k] - self.shares[k]).clamp(min=0.0), 4 * UNIT_ROUNDOFF) for k in needed}
        self.form = self._matrix()

    def rises(self, some: Sequence[int], balls: Sequence[Ball]) -> Tensor:
        """Bound how far some of the functions rise over balls that are no larger: (functions, balls)."""
        index = list(some)
        t = torch.tensor([ball.t for ball in balls], dtype=torch.float64, device=self.expansion.device)
        main = self.form.largest(self.functions.gradient[index], t)
        rest = torch.stack([self.fixed(ball)[index] for ball in balls], dim=1)
        return main + rest + 4 * UNIT_ROUNDOFF * (main.abs() + rest)

    def fixed(self, ball: Ball) -> Tensor:
        """Bound what the functions rise by over a ball beside their gradients and the form: (functions,)."""
        return (Upper(self.residual(ball)) + self._crossed(ball) + self.functions.rounding(ball)).bound

    def residual(self, ball: Ball) -> Tensor:
        """Bound half the weighted squares of R, less what the form has of the remainders for them."""
        squares = beyond = Upper(torch.zeros_like(self.expansion.sizes[0]))
        for z, weight in self._weights.items():
            r, R = ball.rest[z]
            v = weight.clamp(min=0.0)
            squares += least(Upper(R).square() * v.amax(), (Upper(r).square() * v).sum()) / 2.0
            beyond += Upper(ball.small[z]).square() * v.amax() * ((1 + 1 / _YOUNG) / 2)
        for k, missing in self._missing.items():
            beyond += Upper(ball.remainders[k][1]).square() * missing / 2.0
        return least(squares, beyond).bound

    def _needed(self, weights: Mapping[int, Tensor], sizes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        r"""Return :math:`\kappa` with :math:`\sum_l v_l^+ R_l^2 \le \sum_i \kappa_i |\rho_i|^2`, but for rounding.

        For each pre-activation :math:`(\sum_i p_i s_i)^2 \le (\sum_i p_i \hat s_i) \sum_i p_i s_i^2 / \hat s_i`, with
        any positive :math:`\hat s`: those that are expected along the gradient.
        """
        expansion, none = self.expansion, Upper(torch.zeros_like(self.expansion.sizes[0]))
        found = dict.fromkeys(self.functions.u, none)
        for z, weight in weights.items():
            v = weight.clamp(min=0.0)
            norms = {k: Upper(expansion.weighted_path_norm(z, k, v)) for k in found if (z, k) in expansion.path_norms}
            whole = total([none, *(norm * sizes[k] for k, norm in norms.items())]) * (1 + _YOUNG)
            for k, norm in norms.items():
                found[k] += whole * norm / sizes[k]
        return {k: share.bound for k, share in found.items()}

    def _crossed(self, ball: Ball) -> Tensor:
        """Bound what rounding, and a module's own deviation, add to the products of the form and of R."""
        expansion, found = self.expansion, Upper(torch.zeros_like(self.expansion.sizes[0]))
        for value, size in self._sizes.items():
            found += Upper(size) * expansion.defects[value] * ball.t * ball.t
        for value, lost in self._lost.items():
            found += Upper(lost) * ball.t * ball.rest[value][1]
        for k, own in expansion.neurons.items():
            if k in self._sizes:
                # The float in front rounds as well.
                off = 2 * own.node.activation.deviation * rounding.root_above(own.slope.numel())
                found += Upper(self._sizes[k], 1) * off * ball.t
        return found.bound

    def _worst_quotients(self, k: int) -> Tensor:
        """Return w: the largest weight of each neuron over the functions."""
        u, steps = self.functions.u[k][self._some], self._ball.steps[k]
        both = torch.maximum(u * steps.low, u * steps.high).amax(dim=0)
        return both + 4 * UNIT_ROUNDOFF * both.abs() + TINY

    def _with_coupling(self, k: int, share: Tensor) -> Tensor:
        inverse = 1 / self.coupling[k] if k in self.coupling else 0.0
        # The inverse rounds, and its sum with the share.
        crossed = (Upper(self._ball.steps[k].q, 2).square() * (inverse + share) / 4.0).bound
        whole = self._quotients[k] + crossed
        return whole + 4 * UNIT_ROUNDOFF * (whole.abs() + crossed)

    def _by_value(self, weights: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Add up the weights of all activations of a pre-activation."""
        found: dict[int, Tensor] = {}
        for k, weight in weights.items():
            z = self.expansion.neurons[k].node.source
            whole = found[z] + weight if z in found else weight
            found[z] = whole + 4 * UNIT_ROUNDOFF * whole.abs()
        return found

    def _swept(self, weights: Mapping[int, Tensor], tangents: Callable[[int], Tensor], keep: Collection[int]) -> Swept:
        """Carry weights times tangents back from all pre-activations."""
        expansion, last = self.expansion, self.expansion.last

        def added(z: int) -> Tensor | None:
            return weights[z] * tangents(z).reshape(-1, *weights[z].shape) if z in weights and z != last else None

        start = weights[last] * tangents(last).reshape(-1, *weights[last].shape)
        return swept_back(expansion.facts, expansion.slopes, last, start, keep, added)

    def _balanced(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Choose D where it costs about the least along the gradient, and guess how long the remainders are there.

        Any positive weights are sound.
        """
        expansion, nodes = self.expansion, self.expansion.facts.network.nodes
        g = self.functions.gradient[self._some[0]]
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(_PROBES, len(g), generator=generator, dtype=torch.float64).to(g)
        d = torch.cat([(g / torch.linalg.vector_norm(g).clamp(min=1e-300))[None], probes])
        values = Forward(expansion.facts, expansion.slopes).sweep(
            nodes[: expansion.last + 1], d.reshape(-1, *nodes[0].shape)
        )
        swept = self._swept(self._by_value(self._quotients), lambda z: values[z], expansion.slopes)
        chosen, sizes = {}, {}
        for k, own in expansion.neurons.items():
            q, moved = self._ball.steps[k].q, _mixed(values[own.node.source])
            sizes[k] = (torch.linalg.vector_norm(q * moved) * self._ball.t / 2).clamp(min=1e-100)
            if k in swept.kept:
                weight = q * moved / (2 * _mixed(swept.kept[k])).clamp(min=1e-200)
            else:
                continue
            typical = weight.median().clamp(min=1e-200)
            chosen[k] = weight.clamp(min=1e-4 * typical, max=1e4 * typical)
        return chosen, sizes

    def _narrower(self) -> dict[int, tuple[int, AbstractLinearMap]]:
        """Return, for activations that one narrower affine value alone reads, that value and the map to it."""
        found: dict[int, tuple[int, AbstractLinearMap]] = {}
        nodes = self.expansion.facts.network.nodes[: self.expansion.last + 1]
        for k in self.expansion.slopes:
            uses = [
                (value, term.map)
                for value, node in enumerate(nodes)
                if isinstance(node, AffineNode)
                for term in node.terms
                if term.source == k
            ]
            alone = sum(k in node.sources for node in nodes) == len(uses) == 1
            if alone and uses[0][1].out_size < uses[0][1].in_size:
                found[k] = uses[0]
        return found

    def _matrix(self) -> QuadraticForm:
        r"""Return M + sum C' D C, and a bound on what rounding did to it.

        :math:`C = A^T B` behind a map A to a narrower value with covectors B alone, so :math:`C^T D C = B^T A (D C)`.
        """
        expansion, narrower = self.expansion, self._narrower()
        matrix = torch.empty(expansion.inputs, expansion.inputs, dtype=torch.float64, device=expansion.device)
        factors, sums = _Factors(expansion.inputs), _Sums()
        keep = {*self.coupling, *(value for value, _ in narrower.values())}
        for part in expansion.parts:
            swept = self._swept(self._weights, partial(expansion.tangents, part=part), keep)
            matrix[part] = swept.start.flatten(1)
            sums.add("size", swept.sizes)
            sums.add("lost", swept.lost)
            for k in self.coupling:
                weighted = self.coupling[k] * swept.kept[k]
                if k in narrower:
                    value, A = narrower[k]
                    factors.put(k, part, swept.kept[value], A.apply(weighted))
                    sums.add("weighted", {k: weighted})
                else:
                    factors.put(k, part, swept.kept[k], weighted)
        self._sizes, self._lost = sums.roots("size"), sums.roots("lost")
        # Forming what is added to the last value rounds once, as `swept_back` has it for all others.
        last = expansion.last
        forming = Upper(2 * UNIT_ROUNDOFF * self._sizes[last])
        self._lost[last] = (forming + self._lost.get(last, 0.0)).bound
        error = self._swept_error()
        matrix = (matrix + matrix.mT) / 2
        for k in list(factors.left):
            product, off = factors.product(k)
            matrix, error = matrix + (product + product.mT) / 2, error + off
            if k in narrower:
                value, A = narrower[k]
                image = Upper(self._sizes[value]) * expansion.facts.norms.absolute(A, 2) * gamma(rounding_length(A) + 2)
                error += (image + self._lost[k]) * sums.roots("weighted")[k]
        error += rounding.lengths(matrix) * gamma(4 * len(expansion.slopes) + 16)
        return QuadraticForm((matrix + matrix.mT) / 2, error.bound)

    def _swept_error(self) -> Upper:
        """Return what the defects of the tangents, and the losses of the sweep back, do to M."""
        error = Upper(torch.zeros_like(self.expansion.sizes[0]))
        for value, size in self._sizes.items():
            error += Upper(2 * size) * self.expansion.defects[value]
        for value, lost in self._lost.items():
            error += Upper(2 * lost) * self.expansion.sizes[value]
        return error


class _Factors:
    """Pairs of matrices whose products are wanted, filled in a few rows at a time."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.left: dict[int, Tensor] = {}
        self._right: dict[int, Tensor] = {}

    def put(self, k: int, part: slice, left: Tensor, right: Tensor) -> None:
        """Note some rows of both."""
        for store, rows in ((self.left, left), (self._right, right)):
            if k not in store:
                store[k] = rows.new_empty(self._rows, rows[0].numel())
            store[k][part] = rows.flatten(1)

    def product(self, k: int) -> tuple[Tensor, Upper]:
        """Return the product of a pair, which is let go, and what rounding did to it."""
        left, right = self.left.pop(k), self._right.pop(k)
        return left @ right.mT, rounding.lengths(left) * rounding.lengths(right) * gamma(left.shape[1] + 8)


class _Sums:
    """Sums of squares by name and value."""

    def __init__(self) -> None:
        self._squares: dict[str, dict[int, Upper]] = {}

    def add(self, name: str, rows: Mapping[int, Tensor]) -> None:
        """Add the squares of some numbers of each value."""
        known = self._squares.setdefault(name, {})
        for k, more in rows.items():
            square = rounding.lengths(more).square()
            known[k] = known[k] + square if k in known else square

    def roots(self, name: str) -> dict[int, Tensor]:
        """Return bounds on the roots of the sums."""
        return {k: (square.root() + TINY).bound for k, square in self._squares.get(name, {}).items()}


def _mixed(x: Tensor) -> Tensor:
    """Return the root of the square along the gradient and a share of that in all directions."""
    return (x[0].square() + _SHARE * x[1:].square().mean(dim=0)).sqrt()
