r"""The checker's own way from a network file to a function: a graph of nodes with explicit matrices.

Node 0 is the input.  Every other is a sum :math:`\sum_j A_j v_j + b` of images of earlier values, or an activation
applied to one.  Values are flat vectors.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from curvcert.checker.activations import Activation, activation
from curvcert.checker.files import Content, read
from curvcert.checker.limits import require_room
from curvcert.checker.maps import MOST_MAPS, Reading, linear_map, shape_of, stored
from curvcert.checker.outward import Array, Factor
from curvcert.errors import UnsupportedModule

KIND, VERSION = "curvcert-network", 2

_MOST_NODES = 512
_LONGEST = 2**16
"""Nodes that the checker covers, and nodes that a file may describe."""


@dataclass(frozen=True, eq=False)
class Input:
    """The input x."""

    size: int


@dataclass(frozen=True, eq=False)
class Term:
    """The image of an earlier value; no matrix stands for the identity."""

    source: int
    map: Factor


@dataclass(frozen=True, eq=False)
class Affine:
    """A sum of images of earlier values and an offset, which is known to within an error."""

    terms: tuple[Term, ...]
    offset: Array
    error: Array

    @property
    def size(self) -> int:
        """How many numbers the value has."""
        return len(self.offset)


@dataclass(frozen=True, eq=False)
class Activated:
    """An activation of an earlier value; `deviation` is what the module may be off by."""

    source: int
    act: Activation
    deviation: float
    size: int


Node = Input | Affine | Activated


@dataclass(frozen=True, eq=False)
class Model:
    """A network as the checker sees it: its digest, its shape and its nodes."""

    digest: str
    in_shape: tuple[int, ...]
    nodes: tuple[Node, ...]

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.nodes[-1].size

    @cached_property
    def activated(self) -> dict[int, Activated]:
        """The activations, by their numbers."""
        return {k: node for k, node in enumerate(self.nodes) if isinstance(node, Activated)}


def read_model(path: Path | str) -> Model:
    """Read a network file.

    Raises:
        InvalidFile: if the file is cut short, altered, or does not describe a network.
        UnsupportedModule: if it describes one with parts that the checker does not cover.
    """
    content = read(path, KIND, VERSION)
    digest = network_digest(content)
    if set(content.header) != {"in_shape", "nodes"}:
        content.refuse("the header is not that of a network")
    reading, entries = Reading(content), content.header["nodes"]
    in_shape = shape_of(reading, content.header["in_shape"])
    if not isinstance(entries, list) or not 0 < len(entries) <= _LONGEST:
        content.refuse("the header is not that of a network")
    nodes: list[Node] = [Input(math.prod(in_shape))]
    _require_graph(content, entries)
    if len(entries) > _MOST_NODES:
        raise UnsupportedModule(f"a network of {len(entries)} nodes, over {_MOST_NODES}")
    if json.dumps(entries).count('"map"') > 2 * MOST_MAPS:
        raise UnsupportedModule(f"more than {MOST_MAPS} linear maps")
    _require_room(reading, entries, nodes[0].size)
    for entry in entries:
        nodes.append(_node(reading, entry, nodes))
    return Model(digest, in_shape, tuple(nodes))


def network_digest(content: Content) -> str:
    """Return the SHA-256 over the description and the arrays in the order in which it names them."""
    try:
        description = json.dumps(content.header, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        content.refuse("the description is too deeply nested")
    digest = hashlib.sha256(description.encode())
    for k in range(len(content.arrays)):
        value = content.array(f"t{k}", "<f8")
        digest.update(f"{list(value.shape)}".encode())
        digest.update(value.data)
    return digest.hexdigest()


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
    act, deviation = _activation(content, entry.get("activation"))
    return Activated(entry["source"], act, deviation, nodes[entry["source"]].size)


def _affine(content: Reading, entry: dict[str, Any], nodes: list[Node]) -> Affine:
    terms: list[Term] = []
    offset = stored(content, entry.get("offset")).reshape(-1)
    for term in entry["terms"]:
        A, rows, columns = linear_map(content, term.get("map"))
        if columns != nodes[term["source"]].size or rows != len(offset):
            content.refuse(f"a map of {rows} x {columns} in a node of {len(offset)} numbers does not fit")
        terms.append(Term(term["source"], A))
    given = entry.get("offset_error")
    error = np.zeros(len(offset)) if given is None else stored(content, given).reshape(-1)
    if error.shape != offset.shape or bool((error < 0).any()):
        content.refuse("the error of an offset has the wrong size, or is negative")
    return Affine(tuple(terms), offset, error)


def _activation(content: Reading, entry: Any) -> tuple[Activation, float]:
    if not isinstance(entry, dict) or set(entry) != {"name", "deviation", "declared"}:
        content.refuse("an activation without a name")
    name, deviation = entry["name"], entry["deviation"]
    if not isinstance(name, str) or not isinstance(deviation, int | float) or not 0 <= deviation < 1:
        content.refuse("an activation with an improper name or deviation")
    act = None if entry["declared"] else activation(name)
    if act is None:
        raise UnsupportedModule(f"the activation {name[:40]!r} is not in the checker's table")
    return act, float(deviation)


def pair_rows(classes: int, label: int | None) -> Array:
    """Return the rows of f_i - f_label for all i, or of f_i - f_j for all i < j."""
    eye = np.eye(classes)
    if label is None:
        return np.array([eye[i] - eye[j] for i in range(classes) for j in range(i + 1, classes)])
    rows: Array = eye - eye[label]
    return rows
