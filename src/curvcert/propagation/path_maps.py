r"""Path maps: what is left of a network, from one value to a later one, when activations are their middle slopes.

With :math:`\phi_j(z) = \mu_j z + \psi_j(z)`, :math:`\mu_j` the middle of the slopes,

.. math:: P_{ki} = A_{ki} + \sum_{i < j < k} \mu_j A_{kj} P_{ji}

takes the value of node i to the pre-activation of node k.  The maps are never expanded into paths: a value that several
others read is passed through once.  Where all ways on from it meet again, as at the end of a residual block, what lies
between is one factor, the same for every path map that leads through; a network that is a chain gives products of its
layers.  Ways that meet again so late that writing them out would explode become a `Circuit`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from curvcert.activations import Activation
from curvcert.network.nodes import AbstractNode, AffineNode, ElementwiseNode, NonlinearNode
from curvcert.operators import AbstractLinearMap, Composition, Identity, Scaled, Sum, Transposed
from curvcert.operators.circuit import Circuit, Step

_MOST_MAPS = 32
"""Elementary maps up to which parallel ways are written out as a sum of products."""


@dataclass(frozen=True, eq=False)
class _Way:
    """A map from a value to a later one, `end`, which every path to the target leads through."""

    end: int
    map: AbstractLinearMap


def middle_slope(node: NonlinearNode) -> float:
    """Return mu: the middle of an activation's slopes, and 0 for what no one linear map approximates."""
    if not isinstance(node, ElementwiseNode) or not node.activation.is_bounded:
        return 0.0
    alpha, beta = node.activation.slope
    return (alpha + beta) / 2


def rest_slope(activation: Activation) -> float:
    r"""Return rho, a Lipschitz constant of :math:`\psi`, rounded up so that it covers both ends of the slopes."""
    alpha, beta = activation.slope
    if not activation.is_bounded:
        return math.inf
    mu = (alpha + beta) / 2
    return math.nextafter(max(beta - mu, mu - alpha), math.inf)


class PathMaps:
    """The path maps of a network; those to one value are made together, when they are first asked for.

    >>> import torch
    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> from curvcert.operators import Dense
    >>> x = start((1,), torch.device("cpu"))
    >>> W = Dense(torch.full((1, 1), 6.0, dtype=torch.float64))
    >>> y = x.linear(W).activate(TANH, "tanh").linear(W)  # the slopes of tanh are about 1/2
    >>> {value: op.as_matrix().tolist() for value, op in PathMaps(y.builder.nodes).to(y.number).items()}
    {3: [[1.0]], 2: [[6.0]], 1: [[3.0]], 0: [[18.0]]}
    """

    def __init__(self, nodes: Sequence[AbstractNode]) -> None:
        """Read a network; nothing is computed yet."""
        self._nodes = nodes
        self._readers: list[list[int]] = [[] for _ in nodes]
        for k, node in enumerate(nodes):
            for source in set(node.sources):
                self._readers[source].append(k)
        like = next((term.map for node in nodes if isinstance(node, AffineNode) for term in node.terms), Identity(()))
        self._identities = [Identity(node.shape, like.dtype, like.device) for node in nodes]
        self._known: dict[int, dict[int, AbstractLinearMap]] = {}

    def to(self, target: int) -> dict[int, AbstractLinearMap]:
        """Return the map to a value from every earlier one that a linear path leads from, the latest first."""
        if target not in self._known:
            self._known[target] = self._maps_to(target)
        return self._known[target]

    def _maps_to(self, target: int) -> dict[int, AbstractLinearMap]:
        ways = {target: _Way(target, self._identities[target])}
        beyond: dict[int, _Way] = {}
        for value in range(target - 1, -1, -1):
            found = [way for reader in self._readers[value] for way in self._through(value, reader, ways)]
            if len(found) == 1:
                ways[value] = found[0]
            elif found:
                # From here on, whoever leads to this value leads through it.
                beyond[value] = self._joined(found, beyond, ways, value)
                ways[value] = _Way(value, self._identities[value])
        return {value: _to_the_end(way, beyond) for value, way in ways.items()}

    def _through(self, value: int, reader: int, ways: dict[int, _Way]) -> Iterator[_Way]:
        """Yield the ways from a value on that begin with one of its readers."""
        node = self._nodes[reader]
        if reader not in ways:
            return
        way = ways[reader]
        if isinstance(node, AffineNode):
            for term in node.terms:
                if term.source == value:
                    yield _Way(way.end, way.map @ term.map)
        elif isinstance(node, ElementwiseNode) and middle_slope(node) != 0.0:
            yield _Way(way.end, middle_slope(node) * way.map)

    def _joined(self, found: list[_Way], beyond: dict[int, _Way], ways: dict[int, _Way], value: int) -> _Way:
        """Return all ways from a value as one, up to the first value that all of them lead through."""
        parts = list(found)
        while len({way.end for way in parts}) > 1:
            nearest = min(way.end for way in parts)
            parts = [_further(way, beyond) if way.end == nearest else way for way in parts]
        total, end = reduce(lambda left, right: left + right, (way.map for way in parts)), parts[0].end
        return _Way(end, total if _count(total) <= _MOST_MAPS else self._circuit(value, end, ways))

    def _circuit(self, start: int, end: int, ways: dict[int, _Way]) -> Circuit:
        """Return the map from one value to a later one, computed step by step along the nodes between them."""
        number, steps = {start: 0}, list[Step]()
        for k in range(start + 1, end + 1):
            node = self._nodes[k]
            step: Step = ()
            if k not in ways:
                continue
            if isinstance(node, AffineNode):
                step = tuple((number[term.source], term.map) for term in node.terms if term.source in number)
            elif isinstance(node, ElementwiseNode) and node.source in number and middle_slope(node) != 0.0:
                step = ((number[node.source], middle_slope(node) * self._identities[k]),)
            if step:
                steps.append(step)
                number[k] = len(steps)
        return Circuit(tuple(steps))


def _further(way: _Way, beyond: dict[int, _Way]) -> _Way:
    after = beyond[way.end]
    return _Way(after.end, after.map @ way.map)


def _to_the_end(way: _Way, beyond: dict[int, _Way]) -> AbstractLinearMap:
    while way.end in beyond:
        way = _further(way, beyond)
    return way.map


def _count(op: AbstractLinearMap) -> int:
    """Count the elementary maps in an expression, repetitions included."""
    match op:
        case Sum():
            return sum(map(_count, op.terms))
        case Composition():
            return sum(map(_count, op.factors))
        case Scaled() | Transposed():
            return _count(op.map)
        case _:
            return 1
