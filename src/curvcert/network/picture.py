"""A network as a notebook shows it: what it takes and gives, and its graph from left to right."""

from collections import Counter
from collections.abc import Sequence

from curvcert import html
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, InputNode, MaxPoolNode

MOST_NODES = 60
"""Of a larger graph nobody would see anything."""


def network_html(nodes: Sequence[AbstractNode], assumes: Sequence[str]) -> str:
    """Return a table of what the network is, and a picture of its graph where that is small enough."""
    rows: list[tuple[str, object]] = [
        ("input", nodes[0].shape),
        ("output", nodes[-1].shape),
        ("nodes", f"{len(nodes)}: {_counted(nodes)}"),
    ]
    rows += [("assumes", line) for line in assumes]
    if len(nodes) > MOST_NODES:
        return html.table([*rows, ("picture", f"left out: more than {MOST_NODES} nodes")])
    edges = [(source, k) for k, node in enumerate(nodes) for source in dict.fromkeys(node.sources)]
    return html.table(rows) + html.graph(_places(nodes), [_name(node) for node in nodes], edges)


def _counted(nodes: Sequence[AbstractNode]) -> str:
    kinds = Counter(_kind(node) for node in nodes)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _kind(node: AbstractNode) -> str:
    if isinstance(node, ElementwiseNode):
        return node.activation.name
    return {InputNode: "input", AffineNode: "affine", MaxPoolNode: "max-pooling"}.get(type(node), "product")


def _name(node: AbstractNode) -> str:
    """Return a node's own name, with its activation's, cut to what a box holds."""
    kind = _kind(node)
    name = kind if not node.name or node.name == kind else f"{node.name}: {kind}"
    return name if len(name) <= 24 else f"{name[:23]}…"


def _places(nodes: Sequence[AbstractNode]) -> list[tuple[int, int]]:
    """Return the column of every node, the length of the longest path to it, and its place within that column."""
    columns: list[int] = []
    for node in nodes:
        columns.append(1 + max((columns[source] for source in node.sources), default=-1))
    taken: Counter[int] = Counter()
    places = []
    for column in columns:
        places.append((column, taken[column]))
        taken[column] += 1
    return places
