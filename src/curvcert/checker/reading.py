"""From a network file to nodes: with a matrix for every map, or with kernels where matrices are too large."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from curvcert.checker.activations import Declared
from curvcert.checker.files import Content, read
from curvcert.checker.limits import TooLarge, require_room
from curvcert.checker.maps import MOST_MAPS, Reading, linear_map, shape_of, stored
from curvcert.checker.model import (
    Affine,
    Input,
    Model,
    Node,
    Term,
    activated,
    network_digest,
    offset_of,
)
from curvcert.checker.wide import MOST_IN_KERNELS, wide_nodes
from curvcert.errors import UnsupportedModule

KIND, VERSION = "curvcert-network", 2

_MOST_NODES = 512
_LONGEST = 2**16
"""Nodes that the checker covers, and nodes that a file may describe."""


def read_model(path: Path | str, declared: Mapping[str, Declared] = MappingProxyType({})) -> Model:
    """Read a network file; `declared` has the formulas of activations of the user's own, by their names.

    Raises:
        InvalidFile: if the file is cut short, altered, or does not describe a network.
        UnsupportedModule: if it describes one with parts that the checker does not cover.
    """
    content = read(path, KIND, VERSION)
    digest = network_digest(content)
    if set(content.header) != {"in_shape", "nodes"}:
        content.refuse("the header is not that of a network")
    entries = content.header["nodes"]
    in_shape = shape_of(Reading(content), content.header["in_shape"])
    if not isinstance(entries, list) or not 0 < len(entries) <= _LONGEST:
        content.refuse("the header is not that of a network")
    _require_graph(content, entries)
    if len(entries) > _MOST_NODES:
        raise UnsupportedModule(f"a network of {len(entries)} nodes, over {_MOST_NODES}")
    if json.dumps(entries).count('"map"') > 2 * MOST_MAPS:
        raise UnsupportedModule(f"more than {MOST_MAPS} linear maps")
    with suppress(TooLarge):
        return Model(
            digest, in_shape, _explicit_nodes(Reading(content, declared=declared), entries, math.prod(in_shape))
        )
    return Model(
        digest, in_shape, wide_nodes(Reading(content, MOST_IN_KERNELS, declared), entries, in_shape), wide=True
    )


def _explicit_nodes(content: Reading, entries: list[Any], inputs: int) -> tuple[Node, ...]:
    """Return the nodes with a matrix for every map."""
    nodes: list[Node] = [Input(inputs)]
    _require_room(content, entries, inputs)
    for entry in entries:
        nodes.append(_node(content, entry, nodes))
    return tuple(nodes)


def _require_graph(content: Content, entries: list[Any]) -> None:
    """Refuse nodes that read anything but earlier ones, and those that nothing reads; no matrix is made for it."""
    read_by: set[int] = set()
    for k, entry in enumerate(entries, 1):
        sources = _sources(entry)
        if not sources:
            content.refuse(f"node {k} is of an unknown kind, or reads nothing")
        for source in sources:
            if type(source) is not int or not 0 <= source < k:
                content.refuse(f"node {k} reads {str(source)[:20]}, which is not an earlier node")
        read_by.update(sources)
    dead = set(range(1, len(entries))) - read_by
    if dead:
        content.refuse(f"nothing reads node {min(dead)}, which is not the output")


def _sources(entry: Any) -> list[Any]:
    if not isinstance(entry, dict):
        return []
    match entry.get("kind"):
        case "affine":
            terms = entry.get("terms")
            if not isinstance(terms, list) or not all(isinstance(term, dict) for term in terms):
                return []
            return [term.get("source") for term in terms]
        case "elementwise" | "max_pool":
            return [entry.get("source")]
        case "product":
            return [entry.get("left"), entry.get("right")]
    return []


def _require_room(content: Reading, entries: list[Any], inputs: int) -> None:
    """Refuse a network that would take too much memory or time, by the sizes of its offsets."""
    sizes, sources = [inputs], [list[int]()]
    for entry in entries:
        if entry["kind"] == "max_pool":
            raise UnsupportedModule("max-pooling is not covered")
        if entry["kind"] == "product":
            raise UnsupportedModule("products of values are not covered")
        affine = entry["kind"] == "affine"
        sizes.append(stored(content, entry.get("offset")).size if affine else sizes[entry["source"]])
        sources.append(_sources(entry))
    activated = [k for k, entry in enumerate(entries, 1) if entry["kind"] == "elementwise"]
    readers = Counter(source for read in sources for source in read)
    # The sum in front of an activation is part of its block, unless others read it too.
    for k in activated:
        inner = sources[k][0]
        if inner and entries[inner - 1]["kind"] == "affine" and readers[inner] == 1:
            sources[k] = []
    require_room(sizes, sources, activated, content.most)


def _node(content: Reading, entry: dict[str, Any], nodes: list[Node]) -> Node:
    if entry["kind"] == "affine":
        return _affine(content, entry, nodes)
    return activated(content, entry, entry["source"], nodes[entry["source"]].size)


def _affine(content: Reading, entry: dict[str, Any], nodes: list[Node]) -> Affine:
    terms: list[Term] = []
    offset, error = offset_of(content, entry)
    for term in entry["terms"]:
        A, rows, columns = linear_map(content, term.get("map"))
        if columns != nodes[term["source"]].size or rows != len(offset):
            content.refuse(f"a map of {rows} x {columns} in a node of {len(offset)} numbers does not fit")
        terms.append(Term(term["source"], A))
    return Affine(tuple(terms), offset, error)
