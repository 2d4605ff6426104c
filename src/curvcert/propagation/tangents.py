r"""Sweeps along the tangent of a network at a point: what values do to first order, and what rounding does to it.

With one slope for each neuron, any floats, :math:`da = S dz + \rho` at every activation; affine nodes are what they
are.  Two sweeps follow the linear part:

- *forward*, the columns of the Jacobians: floats :math:`T_v` for every value v, a row for each coordinate of the input.
  What is left, :math:`R_v = dv - T_v^T d`, obeys the same equations with :math:`\rho` for a source, and the *defects*
  :math:`E_v` of the floats: :math:`R_v = \sum A R + E_v d`, :math:`R_a = S R_z + \rho + E_a d`.
- *backward*, covectors: floats :math:`B_v`, to which a value may add of its own.  For whatever obeys the equations
  with sources :math:`\xi_v` the sum of what was added, times the field, is :math:`\sum_v B_v \cdot \xi_v` but for what
  is *lost* at each value.

Defects and losses are bounded in the Frobenius norm: they are of the size of a rounding, and nothing is gained by
knowing them better.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from curvcert import rounding
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.network.sweeps import AbstractBackward, AbstractForward
from curvcert.propagation.reach import NetworkFacts
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, total

Slopes = Mapping[int, Tensor]
"""The slopes of every activation, of its value's shape, by the number of its node."""


def lengths(x: Tensor) -> Tensor:
    """Bound the 2-norm of each row, (rows, ...)."""
    return _sizes(x).bound


def _sizes(x: Tensor) -> Upper:
    return rounding.lengths(x.flatten(1), 1) + TINY


class Forward(AbstractForward[Tensor]):
    """Tangents of some directions, (rows, *shape), and the squared defects of every value, added up."""

    def __init__(self, facts: NetworkFacts, slopes: Slopes) -> None:
        """Start with the network's maps and slopes."""
        self._facts, self._slopes = facts, slopes
        self._number = {id(node): k for k, node in enumerate(facts.network.nodes)}

    def affine(self, node: AffineNode, values: Sequence[Tensor]) -> Tensor:
        """Return what the maps make of tangents."""
        return reduce(torch.add, (term.map.apply(T) for term, T in zip(node.terms, values, strict=True)))

    def elementwise(self, node: ElementwiseNode, value: Tensor) -> Tensor:
        """Return tangents times slopes."""
        return self._slopes[self._number[id(node)]] * value


def defects(facts: NetworkFacts, slopes: Slopes, sizes: Sequence[Tensor]) -> list[Tensor]:
    """Bound the Frobenius norms of the defects of all values, given those of the tangents."""
    found = []
    for k, node in enumerate(facts.network.nodes[: len(sizes)]):
        lost = Upper(torch.zeros_like(sizes[0]))
        if isinstance(node, AffineNode):
            for term, each in zip(node.terms, facts.maps[node], strict=True):
                size = Upper(sizes[term.source]) * facts.norms.absolute(term.map, 2)
                lost += size * gamma(each.roundings + len(node.terms) + 1)
        elif isinstance(node, ElementwiseNode):
            lost = Upper(2 * UNIT_ROUNDOFF * sizes[k])
        found.append((lost + TINY).bound)
    return found


@dataclass(frozen=True, eq=False)
class Swept:
    """Covectors, (rows, *shape), of the input and of the values to keep, and what is lost at each value.

    `sizes` are the norms of the covectors of every value, and `lost` of what rounding took, (rows,) each.
    """

    kept: dict[int, Tensor]
    start: Tensor
    sizes: dict[int, Tensor]
    lost: dict[int, Tensor]

    @cached_property
    def row_norms(self) -> dict[int, Tensor]:
        """The norms of the covectors that were kept."""
        return {k: lengths(rows) for k, rows in self.kept.items()}


Added = Callable[[int], Tensor | None]
"""What a value adds to the covectors on it, (rows, *shape)."""


class _Backward(AbstractBackward[Tensor | None]):
    def __init__(self, facts: NetworkFacts, slopes: Slopes, added: Added, like: Tensor, keep: Collection[int]) -> None:
        self._facts, self._slopes, self._added, self._keep = facts, slopes, added, keep
        self.kept: dict[int, Tensor] = {}
        self.sizes: dict[int, Tensor] = {}
        self.lost: dict[int, Upper] = {}
        self._none = Upper(like.new_zeros(len(like)))

    def joined(self, k: int, arriving: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in arriving if value is not None]
        own = self._added(k)
        if own is not None:
            # Forming it rounds once.
            self._lose(k, _sizes(own) * (2 * UNIT_ROUNDOFF))
            known.append(own)
        if not known:
            return None
        if len(known) > 1:
            self._lose(k, total(map(_sizes, known)) * gamma(len(known)))
        whole = reduce(torch.add, known)
        self.take(k, whole)
        return whole

    def take(self, k: int, value: Tensor) -> None:
        """Note the covectors of a value."""
        self.sizes[k] = lengths(value)
        if k in self._keep:
            self.kept[k] = value

    def affine(self, k: int, node: AffineNode, value: Tensor | None) -> Sequence[Tensor | None]:
        if value is None:
            return [None] * len(node.terms)
        size = _sizes(value)
        for term, each in zip(node.terms, self._facts.maps[node], strict=True):
            self._lose(term.source, size * self._facts.norms.absolute(term.map, 2) * gamma(each.roundings + 1))
        return [term.map.adjoint(value) for term in node.terms]

    def elementwise(self, k: int, node: ElementwiseNode, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        sent = self._slopes[k] * value
        self._lose(node.source, _sizes(sent) * (2 * UNIT_ROUNDOFF))
        return sent

    def _lose(self, k: int, more: Upper) -> None:
        self.lost[k] = self.lost.get(k, self._none) + more


def swept_back(
    facts: NetworkFacts, slopes: Slopes, end: int, rows: Tensor, keep: Collection[int], added: Added = lambda k: None
) -> Swept:
    """Carry covectors on a value, (rows, *shape), back to the input; what `added` says of that value is in the rows."""
    sweep = _Backward(facts, slopes, added, rows, keep)
    sweep.take(end, rows)
    start = sweep.sweep(facts.network.nodes[: end + 1], rows)[0]
    assert start is not None  # every value depends on the input
    return Swept(sweep.kept, start, sweep.sizes, {k: lost.bound for k, lost in sweep.lost.items()})
