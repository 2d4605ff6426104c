"""How far the images inside a network move, by one torus for all of them (`operators/torus.py`).

Between large images the norm of every path map on its own is dear, and loose where convolutions pad what is no
activation's value: each such place takes a crop.  The network as a whole takes none there, since its activations clean
what is beside an image; path maps are then exact products at each frequency, all of them from one value in one pass.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from curvcert.activations import Activation
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.operators.images import EXPLICIT_SIZE
from curvcert.operators.planes import Planes, Slopes, Unplanar, Use, Value
from curvcert.operators.torus import growth_on_torus


def image_constants(nodes: Sequence[AbstractNode]) -> dict[int, Tensor]:
    """Return 2-norm Lipschitz constants of x -> v for every sum v of images under stencils; none if all are small."""
    try:
        planes = Planes(nodes[0].shape)
    except Unplanar:
        return {}
    number = {0: 0}
    for k, node in enumerate(nodes[1:], start=1):
        if all(source in number for source in node.sources):
            known = len(planes.values)
            try:
                number[k] = _added(planes, node, number)
            except Unplanar:
                del planes.values[known:]
    targets = {k: place for k, place in number.items() if isinstance(nodes[k], AffineNode)}
    if max((_size(nodes[k]) for k in targets), default=0) <= EXPLICIT_SIZE:
        return {}
    try:
        found = growth_on_torus(planes.values, {*targets.values()})
    except Unplanar:  # the strides of two terms of a sum differ
        return {}
    return {k: found.of[place] for k, place in targets.items()}


def _added(planes: Planes, node: AbstractNode, number: dict[int, int]) -> int:
    """Append what a node makes of images, and return its number among them."""
    if len(node.shape) != 3:
        raise Unplanar
    match node:
        case AffineNode():
            return planes.total([planes.image(term.map, number[term.source]) for term in node.terms])
        case ElementwiseNode():
            return planes.add(Value(node.shape, (Use(number[node.source]),), _slopes(node.activation)))
        case _:
            raise Unplanar


def _slopes(activation: Activation) -> Slopes:
    """Return the slopes of an activation, and of 0: on the torus what becomes of a position beside the image."""
    alpha, beta = min(activation.slope[0], 0.0), max(activation.slope[1], 0.0)
    mu = (alpha + beta) / 2
    return Slopes(mu, math.nextafter(max(beta - mu, mu - alpha), math.inf))


def _size(node: AbstractNode) -> int:
    return math.prod(node.shape)
