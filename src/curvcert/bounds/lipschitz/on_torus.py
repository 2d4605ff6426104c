r"""The images inside a network, by one torus for all of them (`operators/torus.py`).

Between large images the norm of every path map on its own is dear, and loose where convolutions pad what is no
activation's value: each such place takes a crop.  The network as a whole takes none there, since its activations clean
what is beside an image; path maps are then exact products at each frequency, all of them from one value in one pass.

Forward that bounds how far every image moves.  Backward, with crops among the activations j, rows V of the maps to what
reads images but is none itself, such as dense layers t, and the path maps P of the torus, the gradient with respect to
an image is at most

.. math:: U_k = \|V_f P_k\| + \sum_j \rho_j \|P_{jk}\| U_j + \sum_t \rho_t \|V_t P_k\| U_t .
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.activations import Activation
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.operators import AbstractLinearMap, Identity, NormBounds
from curvcert.operators.chains import MATRIX_ELEMENTS, tracked_matrix
from curvcert.operators.frequencies import Exit
from curvcert.operators.images import EXPLICIT_SIZE
from curvcert.operators.planes import Planes, Slopes, Unplanar, Use, Value
from curvcert.operators.torus import Link, Torus, tori_of
from curvcert.propagation.path_maps import PathMaps, rest_slope
from curvcert.rounding import Upper, total


def images_of(nodes: Sequence[AbstractNode]) -> "Images | None":
    """Return the images of a network on a torus; none if all are small, or no torus serves them."""
    try:
        planes = Planes(nodes[0].shape)
    except Unplanar:
        return None
    number = {0: 0}
    for k, node in enumerate(nodes[1:], start=1):
        if all(source in number for source in node.sources):
            known = len(planes.values)
            try:
                number[k] = _added(planes, node, number)
            except Unplanar:
                del planes.values[known:]
    sums = [k for k in number if isinstance(nodes[k], AffineNode)]
    if max((_size(nodes[k]) for k in sums), default=0) <= EXPLICIT_SIZE:
        return None
    try:
        torus, *_ = tori_of(planes.values, {*number.values()})
    except Unplanar:  # the strides of two terms of a sum differ
        return None
    return Images(nodes, number, torus)


@final
@dataclass(frozen=True, eq=False)
class Images:
    """The nodes of a network that are images under stencils, and where each stands among the values of a torus."""

    nodes: Sequence[AbstractNode]
    number: Mapping[int, int]
    torus: Torus

    def place(self, node: int) -> int:
        """Return the number of a node on the torus."""
        return self.torus.place[self.number[node]]

    @cached_property
    def constants(self) -> dict[int, Tensor]:
        """2-norm Lipschitz constants of x -> v for every sum v of images under stencils."""
        sums = [k for k in self.number if isinstance(self.nodes[k], AffineNode)]
        growth = self.torus.growth([self.number[k] for k in sums])
        return {k: growth[self.number[k]] for k in sums}

    def exits(self, norms: NormBounds) -> tuple[tuple[int, Exit], ...] | None:
        """Return the maps from images to what is bent behind them but no image, and to the output, by their targets.

        None where something else than affine maps reads an image, or too many numbers do.
        """
        heads = [k for k in range(len(self.nodes)) if k not in self.number]
        if not all(isinstance(self.nodes[k], AffineNode | ElementwiseNode) for k in heads):
            return None
        doors = [k for k in heads if any(source in self.number for source in self.nodes[k].sources)]
        if not all(isinstance(self.nodes[k], AffineNode) for k in doors):
            return None
        bent = {self.nodes[k].sources[0] for k in heads if isinstance(self.nodes[k], ElementwiseNode)}
        paths, found = PathMaps(self.nodes), list[tuple[int, Exit]]()
        for target in sorted(bent | {len(self.nodes) - 1}):
            for source, V in self._maps_to(target, doors, paths).items():
                if V.out_size * max(V.in_size, EXPLICIT_SIZE) > MATRIX_ELEMENTS:
                    return None
                matrix, error = tracked_matrix(V.T, norms.quick_spectral)
                found.append((target, Exit(self.place(source), matrix.mT.reshape(-1, *V.in_shape), error)))
        return tuple(found)

    def _maps_to(self, target: int, doors: Sequence[int], paths: PathMaps) -> dict[int, AbstractLinearMap]:
        """Return the map from every image to a value behind, through whatever is no image."""
        like = next(iter(paths.to(len(self.nodes) - 1).values()))
        if target in self.number:
            return {target: Identity(self.nodes[target].shape, like.dtype, like.device)}
        found: dict[int, AbstractLinearMap] = {}
        for door in doors:
            node = self.nodes[door]
            assert isinstance(node, AffineNode)
            onward = paths.to(target).get(door)
            if onward is None:
                continue
            for term in node.terms:
                if term.source in self.number:
                    V = onward @ term.map
                    found[term.source] = found[term.source] + V if term.source in found else V
        return found


def image_gradients(images: Images, norms: NormBounds, scalars: bool) -> "ImageGradients | None":
    """Return what bounds the gradients with respect to images; None where the maps behind them are not known.

    Those of every output as a scalar, or the 2-norm of those of all of them.
    """
    exits = images.exits(norms)
    return None if exits is None else ImageGradients(images, exits, scalars)


@final
@dataclass(frozen=True, eq=False)
class ImageGradients:
    """Bounds on gradients of the outputs with respect to images; `exits` are the targets of the maps behind."""

    images: Images
    exits: tuple[tuple[int, Exit], ...]
    scalars: bool
    _known: dict[int, Tensor] = field(default_factory=dict, init=False)

    def of(self, node: int, size: Callable[[int], Tensor]) -> Tensor:
        """Bound the 2-norm of the gradient with respect to an image, given those of the activations that are none.

        `size` returns the latter, (outputs,), by the number of what reads them.
        """
        return self._of_place(self.images.place(node), size)

    def _of_place(self, start: int, size: Callable[[int], Tensor]) -> Tensor:
        wanted, found = [start], {start}
        while wanted:
            readers = {link.reader for link in self._links[wanted.pop()]} - found
            wanted += readers
            found |= readers
        for k in sorted(found - self._known.keys(), reverse=True):
            self._known[k] = self._bounded(k, size)
        return self._known[start]

    def _bounded(self, start: int, size: Callable[[int], Tensor]) -> Tensor:
        terms = [Upper(self._known[link.reader]) * link.share for link in self._links[start]]
        for key, (target, _) in enumerate(self.exits):
            if (key, start) not in self._behind:
                continue
            norm, rows = self._behind[key, start]
            if target == len(self.images.nodes) - 1:
                terms.append(Upper(rows if self.scalars else norm))
            terms += [Upper(norm) * size(k) * rest_slope(activation) for k, activation in self._bent_by(target)]
        outputs = (_size(self.images.nodes[-1]),) if self.scalars else ()
        none = torch.zeros(outputs, dtype=torch.float64, device=self.exits[0][1].error.device)
        return total([none, *terms]).bound

    def _bent_by(self, target: int) -> list[tuple[int, Activation]]:
        """Return the activations of a value that is no image."""
        nodes = self.images.nodes
        return [
            (k, node.activation)
            for k, node in enumerate(nodes)
            if isinstance(node, ElementwiseNode) and node.source == target and k not in self.images.number
        ]

    @cached_property
    def _starts(self) -> list[int]:
        images = self.images
        return sorted({*images.torus.bent, *(images.place(k) for k in images.number if k > 0)})

    @cached_property
    def _links(self) -> dict[int, list[Link]]:
        return self.images.torus.links(self._starts)

    @cached_property
    def _behind(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        return self.images.torus.behind(self._starts, [gate for _, gate in self.exits])


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
