r"""The checker's own view of a network: a graph of nodes.

Node 0 is the input.  Every other is a sum :math:`\sum_j A_j v_j + b` of images of earlier values, or an activation
applied to one.  Values are flat vectors.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from curvcert.checker.activations import Activation, activation
from curvcert.checker.files import Content
from curvcert.checker.maps import Reading, stored
from curvcert.checker.outward import Array, Enclosed, Factor
from curvcert.checker.windows import Window
from curvcert.errors import UnsupportedModule


@dataclass(frozen=True, eq=False)
class Input:
    """The input x."""

    size: int


Map = Enclosed | Window | None


@dataclass(frozen=True, eq=False)
class Term:
    """The image of an earlier value; no map stands for the identity."""

    source: int
    map: Map

    @property
    def matrix(self) -> Factor:
        """The map of a network that is not wide."""
        assert not isinstance(self.map, Window)
        return self.map


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
    """An activation of an earlier value.

    `deviation` is what the module may be off by, `assumes` what a user stated about it, and nobody proves.
    """

    source: int
    act: Activation
    deviation: float
    size: int
    assumes: tuple[str, ...] = ()


Node = Input | Affine | Activated


def sources_of(node: Node) -> list[int]:
    """Return the values that a node reads, once for each time."""
    match node:
        case Affine():
            return [term.source for term in node.terms]
        case Activated():
            return [node.source]
        case Input():
            return []


@dataclass(frozen=True, eq=False)
class Model:
    """A network as the checker sees it: its digest, its shape and its nodes.

    A `wide` one has kernels for its convolutions; elsewhere every map is a matrix.
    """

    digest: str
    in_shape: tuple[int, ...]
    nodes: tuple[Node, ...]
    wide: bool = False

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.nodes[-1].size

    @property
    def assumes(self) -> tuple[str, ...]:
        """What users stated about activations, each once."""
        return tuple(dict.fromkeys(line for node in self.activated.values() for line in node.assumes))

    @cached_property
    def activated(self) -> dict[int, Activated]:
        """The activations, by their numbers."""
        return {k: node for k, node in enumerate(self.nodes) if isinstance(node, Activated)}


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


def offset_of(content: Reading, entry: dict[str, Any]) -> tuple[Array, Array]:
    """Return the offset of an affine node, and how far it is off."""
    offset = stored(content, entry.get("offset")).reshape(-1)
    given = entry.get("offset_error")
    error = np.zeros(len(offset)) if given is None else stored(content, given).reshape(-1)
    if error.shape != offset.shape or bool((error < 0).any()):
        content.refuse("the error of an offset has the wrong size, or is negative")
    return offset, error


_REGISTERED = re.compile(r"module [^\n]{1,200}: computes activation '(.{1,100})' as registered, sampled only")


def activated(content: Reading, entry: dict[str, Any], source: int, size: int) -> Activated:
    """Return the node of an activation: a row of the table, or what a user declared and `content` has a formula for."""
    described = entry.get("activation")
    if not isinstance(described, dict) or set(described) != {"name", "deviation", "declared"}:
        content.refuse("an activation without a name")
    name, deviation, stated = described["name"], described["deviation"], described["declared"]
    if not isinstance(name, str) or not isinstance(deviation, int | float) or not 0 <= deviation < 1:
        content.refuse("an activation with an improper name or deviation")
    if not isinstance(stated, list) or not all(isinstance(line, str) for line in stated):
        content.refuse("an activation whose declarations are no list of strings")
    # That a module of the user's computes a row of the table is a statement; the row's formula is the checker's own.
    registered = all((found := _REGISTERED.fullmatch(line)) is not None and found[1] == name for line in stated)
    given = content.declared.get(name)
    act = activation(name) if registered else None if given is None else given.activation(name)
    if act is None and not registered:
        raise UnsupportedModule(
            f"the formula of the declared activation {name[:40]!r} is not in the file: give it, or the model itself"
        )
    if act is None:
        raise UnsupportedModule(f"the activation {name[:40]!r} is not in the checker's table")
    return Activated(source, act, float(deviation), size, tuple(stated))


def pair_rows(classes: int, label: int | None) -> Array:
    """Return the rows of f_i - f_label for all i, or of f_i - f_j for all i < j."""
    eye = np.eye(classes)
    if label is None:
        return np.array([eye[i] - eye[j] for i in range(classes) for j in range(i + 1, classes)])
    rows: Array = eye - eye[label]
    return rows
