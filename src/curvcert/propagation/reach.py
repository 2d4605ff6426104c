r"""How far every value can move from where it is at the centre, by intervals and by norms: one forward pass.

Coordinates go through absolute values, or through the rows' dual norms times how far the whole moves; the whole
through operator norms, or as the norm of what the coordinates do.  Each is the least of both ways.  This is cheap, and
it is what layers too wide for anything better have; linear relaxation cuts the ranges down from here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import Activation, derivative_range, value_range
from curvcert.network import Network
from curvcert.network.block import MaxPool
from curvcert.network.evaluation import Computed
from curvcert.network.nodes import AffineNode
from curvcert.norms import conjugate
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import magnitude, rounding_length
from curvcert.propagation.relaxation import Reach
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate, norm_upper_bound_of_vectors, total


@dataclass(frozen=True, eq=False)
class Moved:
    """How far each coordinate falls and rises, (batch, *shape) each, and the whole moves in the p-norm, (batch,)."""

    fall: Tensor
    rise: Tensor
    length: Tensor

    @property
    def farthest(self) -> Tensor:
        """How far each coordinate moves in either direction."""
        return torch.maximum(self.fall, self.rise)


@dataclass(frozen=True, eq=False)
class MapFacts:
    """What bounds need of a map inside a network: |A|, its norm, those of its rows, its roundings."""

    map: AbstractLinearMap
    absolute: AbstractLinearMap
    norm: Tensor
    rows: Tensor
    roundings: int

    def spread(self, x: Upper | Tensor) -> Upper:
        """Return the image of x >= 0 under |A|."""
        value, before = (x.value, x.roundings) if isinstance(x, Upper) else (x, 0)
        return Upper(self.absolute.apply(value), before + self.roundings + 1)


class NetworkFacts:
    """A network with what intervals and norms need of its maps, computed once."""

    def __init__(self, network: Network, p: float, norms: NormBounds) -> None:
        """Measure every map; `norms` remembers what is shared with other bounds."""
        self.network, self.p, self.norms = network, p, norms
        self.maps: dict[AffineNode, list[MapFacts]] = {
            node: [self._facts(term.map) for term in node.terms]
            for node in network.nodes
            if isinstance(node, AffineNode)
        }
        self.uses = [0] * len(network.nodes)
        """For every value, the roundings of the sum of covectors that its readers send back."""
        for node in network.nodes:
            lengths = [facts.roundings for facts in self.maps[node]] if isinstance(node, AffineNode) else [0]
            for source, length in zip(node.sources, lengths, strict=False):
                self.uses[source] += length + 1

    def numbers_behind(self, value: int) -> int:
        """Return how many numbers a row on a value becomes on its way to the input."""
        nodes, needed = self.network.nodes, {value}
        for k in range(value, 0, -1):
            if k in needed:
                needed.update(nodes[k].sources)
        return sum(math.prod(nodes[k].shape) for k in needed)

    def _facts(self, op: AbstractLinearMap) -> MapFacts:
        rows = self.norms.row_norms(op, conjugate(self.p)).reshape(op.out_shape)
        return MapFacts(op, magnitude(op), self.norms.norm(op, self.p, self.p), rows, rounding_length(op))


def moved_sum(facts: Sequence[MapFacts], values: Sequence[Moved], p: float) -> Moved:
    """Return how far a sum of linear images moves."""
    parts = [_image(each, value) for each, value in zip(facts, values, strict=True)]
    fall, rise, length = (_total([getattr(part, name) for part in parts]) for name in ("fall", "rise", "length"))
    return cut(fall, rise, length, p)


def _image(facts: MapFacts, value: Moved) -> Moved:
    """Return how far an image moves: by mid-points and half-widths, or by norms."""
    middle, half = (value.rise - value.fall) / 2, inflate((value.rise + value.fall) / 2, 4 * UNIT_ROUNDOFF)
    centre, spread = facts.map.apply(middle), facts.spread(half)
    error = (facts.spread(middle.abs()) + spread) * gamma(facts.roundings + 1)
    off = (spread + error).bound + 2 * UNIT_ROUNDOFF * centre.abs()
    by_norm = (Upper(_per_sample(value.length, facts.rows)) * facts.rows).bound
    fall, rise = _least_known(off - centre, by_norm), _least_known(off + centre, by_norm)
    return Moved(fall, rise, (Upper(value.length) * facts.norm).bound)


def moved_activation(activation: Activation, z: Reach, length: Tensor, a: Computed, p: float) -> Moved:
    """Return how far an activation moves, by its own range and by that of its slopes; `length` is how far z moves."""
    low, high = value_range(activation, *z.ends)
    least, greatest = derivative_range(activation, *z.ends)
    up, down = greatest.clamp(min=0), -least.clamp(max=0)
    fall = torch.maximum(_product(up, z.fall), _product(down, z.rise))
    rise = torch.maximum(_product(up, z.rise), _product(down, z.fall))
    slack = a.error + 4 * UNIT_ROUNDOFF * (a.value.abs() + low.abs() + high.abs())
    fall, rise = _least_known(fall, a.value - low + slack), _least_known(rise, high - a.value + slack)
    most = torch.maximum(up, down).flatten(1).amax(dim=1)
    off = activation.deviation
    # A power of a float, and a product with it, round three times at most.
    whole = Upper(_product(most, length), 3) + off * a.value[0].numel() ** (1 / p)
    return cut((Upper(fall) + off).bound, (Upper(rise) + off).bound, whole.bound, p)


def moved_pool(pool: MaxPool, z: Moved, p: float) -> Moved:
    """Return how far the largest entries of windows move: no further than their entries."""
    length = Upper(z.length, 2) * pool.multiplicity ** (1 / p)
    return cut(pool.evaluate(z.fall), pool.evaluate(z.rise), length.bound, p)


def cut(fall: Tensor, rise: Tensor, length: Tensor, p: float) -> Moved:
    """Return the same, each cut by the others: no coordinate moves further than all, nor all than the coordinates."""
    across = norm_upper_bound_of_vectors(torch.maximum(fall, rise).flatten(1), p, 1)
    length = _least_known(length, across)
    whole = _per_sample(length, fall[0])
    return Moved(torch.minimum(fall, whole), torch.minimum(rise, whole), length)


def _least_known(one: Tensor, other: Tensor) -> Tensor:
    """Return the smaller of two bounds on what is at least 0; one that is not a number bounds nothing."""
    known = torch.minimum(*(torch.where(bound.isnan(), torch.inf, bound) for bound in (one, other)))
    return known.clamp(min=0.0)


def _product(slope: Tensor, size: Tensor) -> Tensor:
    """Return slope x size rounded up, where 0 x inf is 0."""
    return torch.where(slope == 0, 0.0, (Upper(slope) * size).bound)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return one number per sample with the dimensions of a value behind it."""
    return values.reshape(-1, *(1,) * like.dim())


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else total(parts).bound
