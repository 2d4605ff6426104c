r"""A network as bounds read it: products as differences of squares, and slopes over what can be reached at all.

*Products.*  For any scale t > 0, entry by entry,

.. math:: u v = \tfrac14 (t u + v/t)^2 - \tfrac14 (t u - v/t)^2.

So a product is affine maps and squares, and whatever holds for elementwise functions over ranges holds for it.  Over
ranges of half-widths a of u and b of v nothing is lost: with lines for both squares, at :math:`t^2 = b/a`, the product
is within :math:`\tfrac18 (ta + b/t)^2 \le ab/2` of a plane on either side, which are the planes of McCormick with equal
shares; where u and v move together the ranges of the two sums are smaller, and the planes nearer.  Any t is sound; it
is a power of two, so that it rounds nothing, chosen by how far both factors move about random points.

*Reach.*  Behind a tanh a square has slopes in [-2, 2].  An activation without a largest slope gets the slopes over the
interval that its pre-activation lies in, whatever the input is: a network whose products have bounded factors has
global constants.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.activations import Activation, derivative_range, power, second_derivative_range, value_range
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, MaxPoolNode, ProductNode, Term
from curvcert.network.rewriting.fusion import fused
from curvcert.network.sweeps import AbstractForward
from curvcert.operators import AbstractLinearMap, Diagonal, Identity, Segment, scale
from curvcert.operators.magnitudes import absolute_image, image_error, magnitude
from curvcert.operators.segments import on_top_of_each_other
from curvcert.rounding import Upper, gamma, next_down, next_up

_SQUARE = power(2.0)
_MOST_BITS = 10
"""The most that t is above or below 1, in powers of two: the squares cancel in floats as t grows."""


def is_plain(nodes: Sequence[AbstractNode]) -> bool:
    """Whether bounds can read a network as it is."""
    bounded = (node.activation.is_bounded for node in nodes if isinstance(node, ElementwiseNode))
    return all(bounded) and not any(isinstance(node, ProductNode) for node in nodes)


def as_squares(nodes: Sequence[AbstractNode], moves: Sequence[Tensor | None]) -> tuple[AbstractNode, ...]:
    """Return the same function without products; `moves` says how far the entries of values move, where that is known.

    >>> from curvcert.network.builder import start
    >>> x = start((2,), torch.device("cpu"))
    >>> y = x.cut(0, 0, 1).multiplied(x.cut(0, 1, 1), "u v")
    >>> [type(node).__name__ for node in as_squares(y.builder.nodes, [None] * 4)]
    ['InputNode', 'AffineNode', 'ElementwiseNode', 'AffineNode']
    """
    made: list[AbstractNode] = []
    number: dict[int, int] = {}
    for k, node in enumerate(nodes):
        if not isinstance(node, ProductNode):
            made.append(node.renumbered(number))
        elif node.left == node.right:
            made.append(ElementwiseNode(number[node.left], _SQUARE, node.shape, node.name))
        else:
            sides = (_Side(number[node.left], moves[node.left]), _Side(number[node.right], moves[node.right]))
            made.extend(_written_out(node, sides, len(made), _like(nodes)))
        number[k] = len(made) - 1
    return fused(made, len(made) - 1)


class _Side:
    """A factor of a product: its number, and how far its entries move, if that is known."""

    def __init__(self, source: int, moves: Tensor | None) -> None:
        self.source, self.moves = source, moves


def _written_out(
    node: ProductNode, sides: tuple[_Side, _Side], first: int, like: AbstractLinearMap
) -> tuple[AbstractNode, ...]:
    """Return both sums, one beside the other; their squares; and a quarter of the difference."""
    t = _scales(sides[0].moves, sides[1].moves, node, like)
    weighted = Diagonal(t, node.shape), Diagonal(1 / t, node.shape)
    size = math.prod(node.shape)
    u = Term(sides[0].source, on_top_of_each_other([weighted[0], weighted[0]]))
    v = Term(sides[1].source, on_top_of_each_other([weighted[1], -1.0 * weighted[1]]))
    both = AffineNode((u, v), torch.zeros(2 * size, dtype=torch.float64, device=like.device), node.name)
    squares = ElementwiseNode(first, _SQUARE, both.shape, node.name)
    plus, minus = (Segment(2 * size, start, node.shape, like.dtype, like.device) for start in (0, size))
    quarter = scale(0.25, plus) + scale(-0.25, minus)
    total = AffineNode((Term(first + 1, quarter),), torch.zeros(node.shape, dtype=torch.float64, device=like.device))
    return both, squares, replace(total, name=node.name)


def _scales(left: Tensor | None, right: Tensor | None, node: ProductNode, like: AbstractLinearMap) -> Tensor:
    """Return t, powers of two near the root of how far v moves over how far u does."""
    one = torch.ones(node.shape, dtype=torch.float64, device=like.device)
    if left is None or right is None:
        return one
    bits = ((right / left).log2() / 2).round().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    bits = bits.clamp(-_MOST_BITS, _MOST_BITS)
    return one.ldexp(bits.to(one))


def _like(nodes: Sequence[AbstractNode]) -> AbstractLinearMap:
    maps = (term.map for node in nodes if isinstance(node, AffineNode) for term in node.terms)
    return next(maps, Identity((), torch.float64))


_MOST_COLUMNS = 4096
"""Of more entries without an end, all that they touch counts as without ends."""

Reached = tuple[Tensor, Tensor]
"""The least and the largest that each entry of a value can be, whatever the input is."""


def with_slopes_within_reach(nodes: tuple[AbstractNode, ...]) -> tuple[AbstractNode, ...]:
    """Return the nodes with the slopes of unbounded activations over all that their pre-activations can be.

    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> x = start((1,), torch.device("cpu"))
    >>> nodes = x.activate(TANH, "tanh").activate(power(2.0), "square").builder.nodes
    >>> [round(slope, 9) for slope in with_slopes_within_reach(nodes)[-1].activation.slope]
    [-2.0, 2.0]
    """
    wide = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode) and not node.activation.is_bounded]
    if not wide:
        return nodes
    everything = torch.full(nodes[0].shape, torch.inf, dtype=torch.float64, device=_like(nodes).device)[None]
    reached = _Everywhere().sweep(nodes, (-everything, everything))
    found = list(nodes)
    for k in wide:
        node = nodes[k]
        assert isinstance(node, ElementwiseNode)
        narrow = _over(node.activation, *reached[node.source])
        if (narrow.slope, narrow.curvature) != (node.activation.slope, node.activation.curvature):
            found[k] = replace(node, activation=narrow)
    return nodes if all(one is other for one, other in zip(found, nodes, strict=True)) else tuple(found)


def _over(activation: Activation, lower: Tensor, upper: Tensor) -> Activation:
    """Return an activation with the slopes, and the curvatures, that it has between some ends."""
    slope = _hull(derivative_range(activation, lower, upper))
    curvature = _hull(second_derivative_range(activation, lower, upper))
    return replace(activation, slope=slope, curvature=curvature)


def _hull(ranges: tuple[Tensor, Tensor]) -> tuple[float, float]:
    return float(ranges[0].min()), float(ranges[1].max())


class _Everywhere(AbstractForward[Reached]):
    """What values can be at any input, entry by entry."""

    def affine(self, node: AffineNode, values: Sequence[Reached]) -> Reached:
        lower = upper = node.offset[None]
        for term, reached in zip(node.terms, values, strict=True):
            low, high = _image(term.map, *reached)
            lower, upper = next_down(lower + low), next_up(upper + high)
        if node.offset_error is not None:
            lower, upper = next_down(lower - node.offset_error), next_up(upper + node.offset_error)
        return lower, upper

    def elementwise(self, node: ElementwiseNode, value: Reached) -> Reached:
        low, high = value_range(node.activation, *value)
        return next_down(low - node.activation.deviation), next_up(high + node.activation.deviation)

    def max_pool(self, node: MaxPoolNode, value: Reached) -> Reached:
        low, high = (node.pool.evaluate(side) for side in value)
        return low, high


def _image(A: AbstractLinearMap, low: Tensor, high: Tensor) -> Reached:
    """Enclose the image of an interval, whose ends may be infinite, by its middle and half-width."""
    down, up = low == -torch.inf, high == torch.inf
    # Where one end is infinite, and counts for nothing in an entry of the image, the other stands for both.
    left = torch.where(~down, low, torch.where(~up, high, 0.0))
    right = torch.where(~up, high, left)
    centre, half = (left + right) / 2, (right - left).clamp(min=0.0) / 2
    half = (Upper(half, 2) + gamma(4) * centre.abs()).bound
    middle = A.apply(centre)
    width = (absolute_image(A, half) + image_error(A, centre)).bound
    falls, rises = _endless(A, down, up)
    return (
        torch.where(falls, -torch.inf, next_down(middle - width)),
        torch.where(rises, torch.inf, next_up(middle + width)),
    )


def _endless(A: AbstractLinearMap, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether entries of an image may fall, and rise, without end, as the entries marked down and up do.

    Signs are those of single columns: a sum over columns could cancel in floats where it does not in truth.
    """
    ends = (down | up).flatten().nonzero().flatten()
    if len(ends) > _MOST_COLUMNS:
        touched = magnitude(A).apply((down | up).to(A.dtype)) > 0
        return touched, touched
    units = torch.zeros(len(ends), down.numel(), dtype=A.dtype, device=A.device)
    units = units.scatter(1, ends[:, None], 1.0).reshape(-1, *A.in_shape)
    columns, error = A.apply(units), image_error(A, units)
    positive, negative = columns + error > 0, columns - error < 0
    falling, rising = (mark.flatten()[ends].reshape(-1, *(1 for _ in A.out_shape)) for mark in (down, up))
    falls = ((positive & falling) | (negative & rising)).any(dim=0, keepdim=True)
    return falls, ((positive & rising) | (negative & falling)).any(dim=0, keepdim=True)
