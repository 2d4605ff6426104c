r"""What an expansion about a point (`expansion.py`) leaves out over a ball: remainders of activations, and R."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations.quotients import second_quotient_range
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.propagation.expansion import Expansion
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, inflate, least, lengths, root_above, total


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
            rounded = self.small[z] = (lengths(total(small)) + rounded).bound
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
        off = 2 * node.activation.deviation * root_above(remainder.numel())
        if k in expansion.correlated:
            by_norm = self._by_squares(k, c.flatten()) + off
            h = expansion.bends[k].reshape(c.shape)
            apart = inflate(torch.maximum(high - h, h - low).clamp(min=0.0), 4 * UNIT_ROUNDOFF)
            self.third[k] = (self._by_squares(k, apart.flatten(), expansion.bends[k].abs()) + off).bound
        else:
            missed = least(Upper(flat.amax()) * R, lengths(Upper(flat) * flat_r))
            # The last term is a float's product, which rounds.
            by_norm = Upper(self._norm_of(k, node.source, flat), 1) * t / 2.0 + missed / 2.0 + off
        length = least(lengths(remainder), by_norm).bound
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
        missed = least(reach.amax() * steps.rest_norm, lengths(reach * steps.rest.flatten()))
        slopes = lengths(Upper(expansion.neurons[k].slope_error) * steps.far)
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
    norm = least(norm, lengths(entries) + TINY).bound
    return torch.minimum(entries, norm), norm
