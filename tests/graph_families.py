"""Graphs as data: networks that are no chains, of the kinds that people build, and their dense meaning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.activations import RELU, SILU, SIN, TANH, Activation
from curvcert.network import Network
from curvcert.network.builder import Value, start
from curvcert.network.builder import concat as join
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.network.rewriting.fusion import fused
from curvcert.operators import Dense
from curvcert.operators.segments import Segment

F64 = torch.float64


class Draw:
    """Random weights, always the same for a seed; sizes are such that constants are of the order of 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=self._generator)

    def dense(self, value: Value, outputs: int, scale: float = 1.0) -> Value:
        W = self.normal(outputs, value.shape[0]) * scale / value.shape[0] ** 0.5
        return value.linear(Dense(W), 0.3 * self.normal(outputs), "dense")

    def layer(self, value: Value, outputs: int, activation: Activation = TANH, scale: float = 1.5) -> Value:
        return self.dense(value, outputs, scale).activate(activation, activation.name)

    def number(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self._generator))


def concat(values: Sequence[Value]) -> Value:
    """Return vectors joined into one."""
    return join(values, 0, "concat")


def finished(value: Value) -> Network:
    """Return the network with this output."""
    return Network(fused(value.builder.nodes, value.number))


def nested_residual(draw: Draw, x: Value) -> Value:
    """x + f(x + g(x)), twice, with two activations in a branch."""
    for _ in range(2):
        inner = x.plus(draw.dense(draw.layer(x, 5), x.shape[0]), "inner")
        x = x.plus(draw.dense(draw.layer(draw.layer(inner, 4, SILU), 5), x.shape[0]), "outer")
    return draw.dense(x, 3)


def dense_net(draw: Draw, x: Value) -> Value:
    """Every layer reads all that came before."""
    found = x
    for _ in range(4):
        found = concat([found, draw.layer(found, 3)])
    return draw.dense(found, 3)


def u_net(draw: Draw, x: Value) -> Value:
    """Down and up again, with a long skip at each size."""
    first = draw.layer(x, 6)
    second = draw.layer(first, 4)
    up = draw.layer(concat([draw.layer(draw.layer(second, 2), 4), second]), 6)
    return draw.dense(concat([up, first]), 3)


def input_convex(draw: Draw, x: Value) -> Value:
    """Every layer also reads the input."""
    z = draw.layer(x, 5)
    for _ in range(2):
        z = draw.dense(z, 5).plus(draw.dense(x, 5), "passthrough").activate(SILU, "silu")
    return draw.dense(z, 3)


def rk4(draw: Draw, x: Value) -> Value:
    """A Runge-Kutta step with one vector field, whose weights are used four times."""
    n = x.shape[0]
    W, V, b = Dense(draw.normal(5, n) / n**0.5), Dense(draw.normal(n, 5) / 5**0.5), draw.normal(5)

    def field(value: Value) -> Value:
        return value.linear(W, b).activate(TANH, "field").linear(V)

    def after(step: float, slope: Value) -> Value:
        return x.plus(slope.linear(_scaled(step, n)), "stage")

    k1 = field(x)
    k2 = field(after(0.25, k1))
    k3 = field(after(0.25, k2))
    k4 = field(after(0.5, k3))
    total = x
    for weight, k in ((1 / 12, k1), (1 / 6, k2), (1 / 6, k3), (1 / 12, k4)):
        total = total.plus(k.linear(_scaled(weight, n)), "step")
    return total


def _scaled(factor: float, n: int) -> Dense:
    return Dense(factor * torch.eye(n, dtype=F64))


def ensemble(draw: Draw, x: Value) -> Value:
    """Two networks on views of one input, added up."""
    flipped = x.linear(Dense(torch.eye(x.shape[0], dtype=F64).flip(0)), name="view")
    one, other = (draw.dense(draw.layer(draw.layer(view, 5), 4), 3) for view in (x, flipped))
    return one.plus(other, "ensemble")


def shared_weights(draw: Draw, x: Value) -> Value:
    """A recurrent layer that reads the input again at each of three steps, with the same weights."""
    n = x.shape[0]
    W, U, b = Dense(draw.normal(5, 5) / 5**0.5), Dense(1.2 * draw.normal(5, n) / n**0.5), 0.3 * draw.normal(5)
    state = x.linear(U, b).activate(TANH, "first")
    for k in range(2):
        state = state.linear(W).plus(x.linear(U, b), f"step{k}").activate(TANH, f"step{k}")
    return draw.dense(state, 3)


def slices(draw: Draw, x: Value) -> Value:
    """Halves that cross over: each is changed by what the other becomes, then joined again."""
    for _ in range(2):
        half = x.shape[0] // 2
        left, right = (x.linear(Segment(2 * half, k * half, (half,)), name="slice") for k in range(2))
        left = left.plus(draw.dense(draw.layer(right, 3), half), "left")
        right = right.plus(draw.dense(draw.layer(left, 3, SILU), half), "right")
        x = concat([right, left])
    return draw.dense(x, 3)


def sines(draw: Draw, x: Value) -> Value:
    """Slopes about 0: no path map leads through an activation."""
    first = draw.layer(x, 4, SIN)
    return draw.dense(concat([first, draw.layer(first, 4, SIN)]), 3)


def two_activations(draw: Draw, x: Value) -> Value:
    """Values with two activations each, one of them slow."""
    for _ in range(2):
        z = draw.dense(x, 3, 1.5)
        x = concat([z.activate(TANH, "tanh"), z.activate(SILU, "silu")])
    return draw.dense(x, 3)


def joined_outputs(draw: Draw, x: Value) -> Value:
    """Outputs that are put together from two values: no map behind them but embeddings."""
    first = draw.layer(x, 4)
    return concat([draw.layer(first, 2), draw.dense(draw.layer(first, 3), 1)])


def kinks(draw: Draw, x: Value) -> Value:
    """A residual block of two rectifiers."""
    return draw.dense(x.plus(draw.dense(draw.layer(draw.layer(x, 5, RELU), 5, RELU), x.shape[0]), "skip"), 3)


def tangled(draw: Draw, x: Value) -> Value:
    """Every value reads two random earlier ones: no value that all paths lead through."""
    values = [x]
    for k in range(9):
        one, other = (values[draw.number(len(values))] for _ in range(2))
        total = draw.dense(one, 4).plus(draw.dense(other, 4), f"sum{k}")
        values.append(total.activate((TANH, SILU, SIN)[draw.number(3)], f"a{k}") if draw.number(2) else total)
    total = draw.dense(x, 3)
    for value in values[1:]:
        total = total.plus(draw.dense(value, 3, 0.5), "out")
    return total


@dataclass(frozen=True)
class Graph:
    """A kind of network; every seed gives another."""

    name: str
    make: Callable[[Draw, Value], Value]

    def network(self, seed: int = 0, inputs: int = 4) -> Network:
        """Return the network of a seed."""
        return finished(self.make(Draw(seed), start((inputs,), torch.device("cpu"))))


GRAPHS = [
    Graph(make.__name__.replace("_", " "), make)
    for make in (
        nested_residual,
        dense_net,
        u_net,
        input_convex,
        rk4,
        ensemble,
        shared_weights,
        slices,
        sines,
        two_activations,
        joined_outputs,
        kinks,
        tangled,
    )
]
IDS = [graph.name for graph in GRAPHS]
SMOOTH = [graph for graph in GRAPHS if graph.name != "kinks"]
"""Those that have a curvature."""


def dense_path_maps(network: Network, target: int) -> dict[int, Tensor]:
    """Return the matrices of all path maps to a value, by the definition: sums over readers, expanded."""
    nodes = network.nodes
    sizes = [int(torch.Size(node.shape).numel()) for node in nodes]
    found = {target: torch.eye(sizes[target], dtype=F64)}
    for value in range(target - 1, -1, -1):
        total = torch.zeros(sizes[target], sizes[value], dtype=F64)
        for reader in range(value + 1, target + 1):
            node = nodes[reader]
            if reader in found and isinstance(node, AffineNode):
                for term in node.terms:
                    if term.source == value:
                        total = total + found[reader] @ term.map.as_matrix()
            elif reader in found and isinstance(node, ElementwiseNode) and node.source == value:
                total = total + sum(node.activation.slope) / 2 * found[reader]
        found[value] = total
    return found
