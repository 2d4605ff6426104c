r"""All neurons at once: pre-activations and outputs as matrices over the input and all activations.

The affine nodes of a network leave

.. math:: z = Z_x x + Z_a a + \text{const}, \qquad f = C_x x + C_a a + \text{const}, \qquad a = \Phi(z),

with :math:`Z_a` strictly lower triangular in blocks.  Neurons stand level by level, so that each reads earlier ones
alone.  Products of maps round; every entry has a bound on its error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode
from curvcert.network.rewriting.levels import levels_of
from curvcert.network.sweeps import AbstractForward
from curvcert.operators import AbstractLinearMap, Identity
from curvcert.operators.magnitudes import image_error
from curvcert.operators.rows import basis_vectors
from curvcert.rounding import TINY, UNIT_ROUNDOFF, inflate


@dataclass(frozen=True, eq=False)
class Enclosed:
    """A matrix known entry by entry: no entry is off by more than its error."""

    value: Tensor
    error: Tensor


@dataclass(frozen=True, eq=False)
class NeuronMaps:
    """A network over all its neurons; columns belong to the input, then to the activations in the neurons' order.

    Attributes:
        levels: the numbers of the elementwise nodes, level by level.
        sizes: the number of neurons of each of these nodes.
        z: what the neurons are applied to, a row for each.
        output: the outputs, a row for each.
        inputs: the number of columns that belong to the input.
        values: the same rows for other values, by their numbers, as far as they were asked for.
    """

    levels: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    z: Enclosed
    output: Enclosed
    inputs: int
    values: Mapping[int, Enclosed]


_Blocks = dict[AbstractNode, Enclosed | None]
"""A value by the nodes that it is linear in, the input and activations; None for the identity."""


def neuron_maps(nodes: Sequence[AbstractNode], values: Sequence[int] = ()) -> NeuronMaps:
    """Return the matrices of a network of affine maps and activations, and of `values`; max-pooling is refused.

    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> x, W = start((1,), torch.device("cpu")), Dense(torch.full((1, 1), 2.0, dtype=torch.float64))
    >>> maps = neuron_maps(x.linear(W).activate(TANH, "a").plus(x, "skip").activate(TANH, "b").builder.nodes)
    >>> maps.z.value.tolist(), maps.output.value.tolist()
    ([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]])
    """
    found = _Linear().sweep(nodes, {nodes[0]: None})
    levels = tuple(levels_of(nodes))
    columns = [nodes[k] for k in (0, *(k for level in levels for k in level))]
    like = next((term.map for node in nodes if isinstance(node, AffineNode) for term in node.terms), Identity(()))
    rows = [_row(found[node.sources[0]], node, columns, like.device) for node in columns[1:]]
    z = Enclosed(*(torch.cat(parts) for parts in zip(*((row.value, row.error) for row in rows), strict=True)))
    output = _row(found[-1], nodes[-1], columns, like.device)
    others = {k: _row(found[k], nodes[k], columns, like.device) for k in values}
    return NeuronMaps(levels, tuple(_size(node) for node in columns[1:]), z, output, _size(nodes[0]), others)


def _size(node: AbstractNode) -> int:
    return torch.Size(node.shape).numel()


def _row(blocks: _Blocks, target: AbstractNode, columns: Sequence[AbstractNode], device: torch.device) -> Enclosed:
    """Return the rows of one value, of the shape of a node, over all columns."""
    value = torch.zeros(_size(target), sum(map(_size, columns)), dtype=torch.float64, device=device)
    error, start = torch.zeros_like(value), 0
    for source in columns:
        place = slice(start, start + _size(source))
        block = blocks.get(source, Enclosed(value[:, place], error[:, place]))
        if block is None:
            value[:, place].fill_diagonal_(1.0)
        else:
            value[:, place], error[:, place] = block.value, block.error
        start = place.stop
    return Enclosed(value, error)


class _Linear(AbstractForward[_Blocks]):
    """Values as linear functions of the input and of the activations before them."""

    def affine(self, node: AffineNode, values: Sequence[_Blocks]) -> _Blocks:
        total: _Blocks = {}
        for term, blocks in zip(node.terms, values, strict=True):
            for source, block in blocks.items():
                image = _image(term.map, block)
                known = total.get(source)
                total[source] = image if known is None else _sum(known, image)
        return total

    def elementwise(self, node: ElementwiseNode, value: _Blocks) -> _Blocks:
        return {node: None}


def _image(op: AbstractLinearMap, block: Enclosed | None) -> Enclosed:
    """Return the matrix behind a map; of the map itself where it is the identity."""
    if block is None:
        rows = basis_vectors(op.out_shape, 0, op.out_size, op)
        return Enclosed(op.adjoint(rows).flatten(1), image_error(op.T, rows).flatten(1))
    columns, off = (part.mT.reshape(-1, *op.in_shape) for part in (block.value, block.error))
    value, error = op.apply(columns).flatten(1).mT, image_error(op, columns, off).flatten(1).mT
    return Enclosed(value, error + TINY)


def _sum(left: Enclosed, right: Enclosed) -> Enclosed:
    value = left.value + right.value
    return Enclosed(value, inflate(left.error + right.error + UNIT_ROUNDOFF * value.abs(), 0.0))
