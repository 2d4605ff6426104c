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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvcert import rounding
from curvcert.activations import derivative_range, second_derivative_range
from curvcert.memory import spare_elements
from curvcert.network.evaluation import Evaluation
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.operators.gram import gram_norm_upper_bound
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


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of one activation: where they are, the slopes used, and how far those may be off the true ones."""

    node: ElementwiseNode
    lower: Tensor
    upper: Tensor
    slope: Tensor
    slope_error: Tensor


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
