"""Zeros around an image join the window that slides over them: a convolution or mean behind them pads by itself.

The map is the same, entry by entry, but its norms are found as those of one convolution.
"""

from collections.abc import Sequence
from dataclasses import replace

from curvcert.network.nodes import AbstractNode, AffineNode, Term
from curvcert.operators import AbstractLinearMap, AveragePool2d, Composition, Conv2d, Scaled, Transposed, compose, scale
from curvcert.operators.conv import Padding
from curvcert.operators.slices import Slice


def with_padding_joined(nodes: Sequence[AbstractNode]) -> tuple[AbstractNode, ...]:
    """Return the nodes with every window behind zeros as a window with padding.

    >>> import torch
    >>> from curvcert.network.builder import start
    >>> from curvcert.network.rewriting.fusion import fused
    >>> ring = start((1, 2, 2), torch.device("cpu")).padded({1: (1, 1), 2: (1, 1)})
    >>> means = ring.linear(AveragePool2d((1, 4, 4), (2, 2), (2, 2)))
    >>> with_padding_joined(fused(means.builder.nodes, means.number))[1].terms[0].map.padding
    (1, 1)
    """
    return tuple(_rewritten(node) if isinstance(node, AffineNode) else node for node in nodes)


def _rewritten(node: AffineNode) -> AffineNode:
    terms = tuple(Term(term.source, _joined(term.map)) for term in node.terms)
    changed = any(new.map is not old.map for new, old in zip(terms, node.terms, strict=True))
    return replace(node, terms=terms) if changed else node


def _joined(op: AbstractLinearMap) -> AbstractLinearMap:
    if isinstance(op, Scaled):
        inner = _joined(op.map)
        return op if inner is op.map else scale(op.factor, inner)
    factors = list(op.factors) if isinstance(op, Composition) else []
    for k in range(len(factors) - 2, -1, -1):
        window = _padded(factors[k], factors[k + 1])
        if window is not None:
            factors[k : k + 2] = [window]
    return op if not factors or len(factors) == len(op.factors) else compose(*factors)  # type: ignore[attr-defined]


def _padded(window: AbstractLinearMap, zeros: AbstractLinearMap) -> AbstractLinearMap | None:
    """Return the window with zeros around what it reads, or None where that is not what these maps are."""
    if (
        not isinstance(zeros, Transposed)
        or not isinstance(zeros.map, Slice)
        or not isinstance(window, Conv2d | AveragePool2d)
    ):
        return None
    part, conv = zeros.map, window.as_conv if isinstance(window, AveragePool2d) else window
    if part.target[0] != part.source[0] or set(part.steps) != {1} or conv.padding_mode != "zeros":
        return None
    padding: Padding = (_side(part, 1, conv.padding), _side(part, 2, conv.padding))
    (top, bottom), (left, right) = padding
    if isinstance(window, AveragePool2d) and (top, left) == (bottom, right) and _is_narrow(window, top, left):
        return replace(window, image_shape=part.target, padding=(top, left))
    return replace(conv, image_shape=part.target, padding=padding)


def _side(part: Slice, axis: int, padding: Padding) -> tuple[int, int]:
    before, after = padding[axis - 1]
    return before + part.starts[axis], after + part.source[axis] - part.starts[axis] - part.target[axis]


def _is_narrow(pool: AveragePool2d, top: int, left: int) -> bool:
    """Whether torch pools with this padding: at most half a window."""
    return 2 * top <= pool.kernel_size[0] and 2 * left <= pool.kernel_size[1]
