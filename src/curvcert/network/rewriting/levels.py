"""Levels: nonlinear nodes of equal depth, which a layer written as several nodes has in common.

Bounds node by node depend on how a network is written: a layer in four parts has four small norms whose sum is more
than that of the whole.  Bounded level by level, with the parts on top of each other, nothing is lost.
"""

from collections.abc import Sequence

from curvcert.network.nodes import AbstractNode, ElementwiseNode, MaxPoolNode

Level = tuple[int, ...]
"""The numbers of the nonlinear nodes of one depth."""


def levels_of(nodes: Sequence[AbstractNode]) -> list[Level]:
    """Return the nonlinear nodes by the most of them that a path from the input to them has, themselves included.

    >>> import torch
    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> x = start((2,), torch.device("cpu"))
    >>> y = x.activate(TANH, "a").plus(x.activate(TANH, "b"), "sum").activate(TANH, "c")
    >>> levels_of(y.builder.nodes)
    [(1, 2), (4,)]
    """
    depth: list[int] = []
    for node in nodes:
        below = max((depth[source] for source in node.sources), default=0)
        depth.append(below + isinstance(node, ElementwiseNode | MaxPoolNode))
    nonlinear = [k for k, node in enumerate(nodes) if isinstance(node, ElementwiseNode | MaxPoolNode)]
    return [tuple(k for k in nonlinear if depth[k] == level) for level in range(1, max(depth) + 1)]
